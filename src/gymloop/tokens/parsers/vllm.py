"""vLLM's tool and reasoning parsers, used where gymloop's are: a plug-in that registers one, or one that vLLM ships.

vLLM's parsers say what a reply holds and not where. So a reply with calls is one envelope that leaves the content vLLM
gives; a call that one of them cannot read is content to it, and is not counted as malformed. Nothing of such a reply is
streamed before its end. Each reply gets a parser of its own, since vLLM's hold state.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from gymloop.errors import ConfigError
from gymloop.tokens.parsers.reasoning import ReasoningParser, Split
from gymloop.tokens.tool_calls import Envelope, ToolParser, Tools, tool_call

log = logging.getLogger(__name__)

Table = Literal["TOOL_PARSERS", "REASONING_PARSERS"]
_REGISTRIES: dict[str, tuple[tuple[str, str], ...]] = {
    "TOOL_PARSERS": (
        ("vllm.tool_parsers", "ToolParserManager"),
        ("vllm.entrypoints.openai.tool_parsers", "ToolParserManager"),
    ),
    "REASONING_PARSERS": (("vllm.reasoning", "ReasoningParserManager"),),
}
"""Where releases of vLLM keep them, the newest first."""
_REQUESTS = (
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.openai.protocol", "ChatCompletionRequest"),
)


_told: set[tuple[type, type]] = set()
"""Parsers and the kinds of errors of theirs that were logged."""


def is_installed() -> bool:
    """Whether this Python has vLLM, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def registered(table: Table) -> frozenset[str]:
    """Names that plug-ins have put into vLLM's registry; none where nobody has imported vLLM yet."""
    if "vllm" not in sys.modules:
        return frozenset()
    manager = _first(_REGISTRIES[table])
    known: Mapping[str, type] = getattr(manager, "tool_parsers", None) or getattr(manager, "reasoning_parsers", {})
    later: Mapping[str, tuple[str, str]] = getattr(manager, "lazy_parsers", {})  # name to (module, class)
    modules = {name: kind.__module__ for name, kind in known.items()} | {name: at[0] for name, at in later.items()}
    return frozenset(name for name, module in modules.items() if module.partition(".")[0] != "vllm")


def vllm_parser(table: Table, name: str, tokenizer: Callable[[], Any], key: str) -> ToolParser | ReasoningParser:
    """vLLM's parser of that name.

    Args:
        table: tool or reasoning parsers.
        name: in vLLM's registry.
        tokenizer: gives the model's; vLLM's parsers look ids up in it.
        key: of the recipe, for messages.

    Raises:
        ConfigError: vLLM has none of that name, or it does not take this tokenizer.
    """
    manager = _first(_REGISTRIES[table])
    get = manager.get_tool_parser if table == "TOOL_PARSERS" else manager.get_reasoning_parser
    try:
        kind = get(name)
    except KeyError as error:
        raise ConfigError(
            f"{key} is {name!r}; neither gymloop nor the installed vLLM has a parser of that name"
        ) from error
    loaded = tokenizer()
    try:
        kind(loaded)
    except Exception as error:
        raise ConfigError(f"{key}: vLLM's parser {name!r} cannot be used with this tokenizer: {error}") from error
    return VllmToolParser(kind, loaded) if table == "TOOL_PARSERS" else VllmReasoning(kind, loaded)


def folder_tokenizer(folder: Path) -> Callable[[], Any]:
    """Loads the tokenizer of a folder when it is asked for."""

    def load() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    return load


class VllmToolParser(ToolParser):
    """A ``vllm`` ToolParser class as a parser of gymloop's."""

    openers = ("",)  # an envelope may begin anywhere, so a stream holds everything back

    def __init__(self, kind: type, tokenizer: Any) -> None:
        self._kind = kind
        self._tokenizer = tokenizer
        self._request = _first(_REQUESTS)

    def envelopes(self, text: str, tools: Tools) -> Iterable[Envelope]:
        """See ``ToolParser``. What the parser raises on a reply means that it found no call."""
        request = _request(self._request, tools)
        try:
            found = self._kind(self._tokenizer).extract_tool_calls(text, request)
        except Exception as error:  # noqa: BLE001  (a model may write anything, and a reading never raises)
            _tell(self._kind, error, "without tool calls")
            return ()
        if not found.tools_called or not found.tool_calls:
            return ()
        calls = tuple(tool_call(call.function.name, call.function.arguments) for call in found.tool_calls)
        return (Envelope(0, len(text), calls, found.content or ""),)


class VllmReasoning(ReasoningParser):
    """A ``vllm`` ReasoningParser class as a parser of gymloop's."""

    def __init__(self, kind: type, tokenizer: Any) -> None:
        self._kind = kind
        self._tokenizer = tokenizer
        self._request = _first(_REQUESTS)

    def split(self, text: str, opened: bool) -> Split:
        """See ``ReasoningParser``. vLLM's parsers take a block that the prompt has opened for granted, or do not."""
        parser = self._kind(self._tokenizer)
        extract = getattr(parser, "extract_reasoning", None) or parser.extract_reasoning_content
        try:
            reasoning, rest = extract(text, _request(self._request, ()))
        except Exception as error:  # noqa: BLE001  (a model may write anything, and a reading never raises)
            _tell(self._kind, error, "without reasoning")
            return Split(None, text)
        return Split(reasoning, rest or "")


def _tell(kind: type, error: Exception, taken: str) -> None:
    """Once for each parser and kind of error: it may be the reply's fault, or the parser's with every reply."""
    if (kind, type(error)) not in _told:
        _told.add((kind, type(error)))
        log.warning(
            "vLLM's parser %s failed on a reply (%s: %s), which is taken as one %s; later ones are not told",
            kind.__qualname__,
            type(error).__name__,
            error,
            taken,
        )


def _request(kind: Any, tools: Tools) -> Any:
    message = {"role": "user", "content": ""}
    return kind(model="policy", messages=[message], **({"tools": [dict(tool) for tool in tools]} if tools else {}))


def _first(places: Iterable[tuple[str, str]]) -> Any:
    for module, name in places:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ConfigError("the installed vLLM keeps its parsers where gymloop does not know them, or there is no vLLM")
