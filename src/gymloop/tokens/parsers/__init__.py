"""Built-in parsers by name, and what a plug-in needs to define others."""

from __future__ import annotations

from gymloop.tokens.parsers.harmony import HarmonyCalls, HarmonyReasoning
from gymloop.tokens.parsers.llama3_json import Llama3Json
from gymloop.tokens.parsers.mistral import Mistral
from gymloop.tokens.parsers.pythonic import Pythonic
from gymloop.tokens.parsers.qwen3_coder import Qwen3Coder
from gymloop.tokens.parsers.reasoning import ReasoningParser, Split, Splitter, TaggedReasoning
from gymloop.tokens.parsers.tagged_json import TaggedJson
from gymloop.tokens.tool_calls import Envelope, ToolCall, ToolParser, Tools, json_value, tool_call

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Envelope",
    "ReasoningParser",
    "Split",
    "Splitter",
    "TaggedReasoning",
    "ToolCall",
    "ToolParser",
    "Tools",
    "json_value",
    "tool_call",
]

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": TaggedJson("<tool_call>", "</tool_call>"),
    "qwen3_coder": Qwen3Coder(),
    "nemotron_json": TaggedJson("<TOOLCALL>", "</TOOLCALL>", lists=True),
    "llama3_json": Llama3Json(),
    "pythonic": Pythonic(),
    "mistral": Mistral(),
    "openai": HarmonyCalls(),
}

REASONING_PARSERS: dict[str, ReasoningParser] = {
    "think": TaggedReasoning("<think>", "</think>"),
    "deepseek_r1": TaggedReasoning("<think>", "</think>", implicit=True),
    "openai": HarmonyReasoning(),
}
