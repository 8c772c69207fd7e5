"""Everything an engine replica needs to know, in plain values: it pickles into an actor and loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gymloop.generation.vllm.settings import VllmSettings
from gymloop.serving.guard import SamplingProfiles


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine replica needs to know, in plain values.

    Attributes:
        model_name: the name clients send.
        profiles: what sampling the server accepts; None accepts any.
        port_range: first and last port its socket may take.
        max_model_len: prompt and sample together, tokens; None takes the model's own.
        max_batch_size: requests decoded together; None takes as many as the free memory holds, at most 64.
        precision: ``auto``, ``float32`` or ``bfloat16``; auto as the policy settles it.
        device: as torch names it; ``auto`` is a GPU where torch sees one.
        threads: torch threads.
        tool_parser, tool_parser_plugin, reasoning_parser, reasoning_parser_plugin: see ``tokens.reply``.
        deterministic: see ``TorchEngine``.
        template_required: False serves a model without a chat template, for completions only.
        api_key: what clients must send as ``Authorization: Bearer``; None asks for nothing.
        loop_lag_s: see ``GenerationServer``.
        vllm: runs vLLM, like this; None runs the embedded engine.
    """

    model_name: str
    profiles: SamplingProfiles | None
    port_range: tuple[int, int]
    max_model_len: int | None
    max_batch_size: int | None
    request_timeout_s: float
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    seed: int = 0
    threads: int | None = None
    host: str = "127.0.0.1"
    stop_token_ids: tuple[int, ...] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = "hermes"
    tool_parser_plugin: str | None = None
    reasoning_parser: str | None = None
    reasoning_parser_plugin: str | None = None
    deterministic: bool = False
    template_required: bool = True
    api_key: str | None = field(default=None, repr=False)
    loop_lag_s: float = 5.0
    vllm: VllmSettings | None = None
