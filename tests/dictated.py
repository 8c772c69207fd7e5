"""A toy model with random weights calls no tool: here the first turn of every rollout is dictated to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 * 34"}}\n</tool_call>'


def install(folder: str, text: str = CALL) -> None:
    """Let engines of this process, whose workers are inline (see ``forked``), say ``text`` first.

    Args:
        folder: of the model, for its tokenizer.
        text: of the assistant's message.
    """
    from tokenizers import Tokenizer

    from gymloop.generation.engine import Sample
    from gymloop.generation.torch_engine import TorchEngine

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids = (*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>"))
    generate = TorchEngine.generate

    async def dictated(self: Any, prompt: Any, sampling: Any, request_id: str, on_tokens: Any = None) -> Any:
        if not (sampling.noise_key or "").endswith("/0"):
            return await generate(self, prompt, sampling, request_id, on_tokens)
        logprobs = (-1.0,) * len(ids)
        if on_tokens is not None:
            on_tokens(ids, logprobs)
        return Sample(ids, logprobs, "stop", self.weight_version, self.weight_version)

    TorchEngine.generate = dictated
