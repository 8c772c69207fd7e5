"""Real vLLM that says what it is told, where it is told something: in its core only the dictated token is possible.

Logprobs are those of the model without the dictation, so a trainer agrees with them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from gymloop.generation.engine import Sample, Sampling
from gymloop.generation.vllm_engine import VllmEngine

SCRIPT = "GYMLOOP_TEST_DICTATION"
"""The file with the ids of the next request, if it is dictated."""


class Dictation(AdapterLogitsProcessor):
    """In vLLM's core: what is in the file when a request comes is what the request says."""

    def is_argmax_invariant(self) -> bool:
        """It decides the token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """See vLLM."""
        script = Path(os.environ[SCRIPT])
        if not script.exists():
            return None
        ids = json.loads(script.read_text())
        script.unlink()

        def only(said: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            logits.fill_(-torch.inf)
            logits[ids[min(len(said), len(ids) - 1)]] = 0.0  # one step may be computed beyond the last
            return logits

        return only


class DictatedEngine:
    """Says its script, one entry a call, then whatever the model would. Calls come one after the other."""

    def __init__(self, folder: Path, script_file: Path) -> None:
        self.script: list[Sequence[int]] = []
        self.prompts: list[tuple[int, ...]] = []
        self.folder = folder
        self._file = script_file
        self._engine = VllmEngine(
            folder,
            dtype="float32",
            max_batch_size=2,
            max_model_len=2000,
            seed=3,
            arguments={
                "enforce_eager": True,
                "kv_cache_memory_bytes": 64 << 20,
                "logits_processors": [f"{__name__}:{Dictation.__name__}"],
                "logprobs_mode": "raw_logprobs",
            },
            environment={"OMP_NUM_THREADS": "1", SCRIPT: str(script_file)},
        )
        self.max_model_len = self._engine.max_model_len
        self.weight_version = self._engine.weight_version
        self.abort = self._engine.abort
        self.close = self._engine.close

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: Any = None
    ) -> Sample:
        """See ``Engine.generate``."""
        self.prompts.append(tuple(prompt_ids))
        if self.script:
            self._file.write_text(json.dumps([int(token) for token in self.script.pop(0)]))
        return await self._engine.generate(prompt_ids, sampling, request_id, on_tokens)
