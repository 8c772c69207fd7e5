"""Read what a model said: reasoning, content, tool calls.

Reasoning is split off first, so a call spelled inside it is none. Of the rest, content is everything outside calls:
exactly the text if there are none, else without the white space around each call; text between two calls is joined by
one newline. A turn that was cut shows no call at all, and its text stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from gymloop.config.nearest import did_you_mean
from gymloop.errors import ConfigError
from gymloop.tokens.parsers import REASONING_PARSERS, TOOL_PARSERS, ReasoningParser, Split, ToolParser, Tools, vllm
from gymloop.tokens.parsers.gate import Gate
from gymloop.tokens.parsers.plugin import plugin_parsers
from gymloop.tokens.tool_calls import Envelope, ToolCall

Parser = TypeVar("Parser")


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply.

    Attributes:
        content: the text outside reasoning and well-formed calls.
        reasoning: None where there was none; a block that says nothing is ``""``.
        tool_calls: in the order written.
        malformed: how many envelopes in the content are no call.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    malformed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply that is certain before the reply has ended."""

    kind: Literal["reasoning", "content"]
    text: str


class ReplyReader:
    """Reads the replies of one family of models. Holds no state, so one object serves all requests.

    Attributes:
        tool_parser: finds calls.
        reasoning_parser: None leaves reasoning in the content.
    """

    def __init__(self, tool_parser: ToolParser, reasoning_parser: ReasoningParser | None = None):
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser

    def read(
        self, text: str, *, tools: Tools | None = None, opened_reasoning: bool = False, whole: bool = True
    ) -> Reply:
        """Read a reply.

        Args:
            text: as decoded, control tokens included, the end token removed.
            tools: those the model was offered.
            opened_reasoning: the prompt ended inside reasoning, see ``opened_by``.
            whole: False for a turn that was cut: no call is returned, text stays text.
        """
        split = self.reasoning_parser.split(text, opened_reasoning) if self.reasoning_parser else Split(None, text)
        content, calls, malformed = _take_out(split.rest, self._envelopes(split.rest, tools or ()), whole)
        return Reply(content, split.reasoning, calls, malformed)

    def _envelopes(self, text: str, tools: Tools) -> Iterator[Envelope]:
        """Those of the parser, which keeps its promise: what a stream has given is never taken back."""
        parser = self.tool_parser
        end = 0
        for envelope in parser.envelopes(text, tools):
            opened = text.startswith(parser.openers, envelope.start) or (
                text.startswith(parser.start_openers, envelope.start) and not text[: envelope.start].strip()
            )
            if not opened or not end <= envelope.start < envelope.end <= len(text):
                raise ConfigError(
                    f"tool parser {type(parser).__name__} names an envelope at {envelope.start}:{envelope.end} that "
                    "begins with none of its openers, or overlaps another"
                )
            end = envelope.end
            yield envelope

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt that ends with this text leaves the model inside reasoning."""
        return self.reasoning_parser is not None and self.reasoning_parser.opened_by(prompt)

    def stream(self, tools: Tools | None = None, opened_reasoning: bool = False) -> ReplyStream:
        """Read a reply that arrives in pieces."""
        return ReplyStream(self, tools, opened_reasoning)


class ReplyStream:
    """A reply that arrives in pieces of any size. All deltas and the end, joined, are what ``read`` gives.

    Calls are known only at the end, for a cut turn has none; content is held back from the first opener on.
    """

    def __init__(self, reader: ReplyReader, tools: Tools | None, opened_reasoning: bool):
        self._reader = reader
        self._tools = tools
        self._opened = opened_reasoning
        self._splitter = reader.reasoning_parser.splitter(opened_reasoning) if reader.reasoning_parser else None
        self._gate = Gate(reader.tool_parser.openers, reader.tool_parser.start_openers)
        self._pieces: list[str] = []
        self._sent = {"reasoning": 0, "content": 0}  # characters

    def feed(self, piece: str) -> list[Delta]:
        """Take the next piece; what is certain now, reasoning first."""
        self._pieces.append(piece)
        split = self._splitter.feed(piece) if self._splitter else Split(None, piece)
        passed = self._gate.feed(split.rest)[0] if split.rest else ""
        deltas = []
        if split.reasoning:
            deltas.append(Delta("reasoning", split.reasoning))
        if passed:
            deltas.append(Delta("content", passed))
        for delta in deltas:
            self._sent[delta.kind] += len(delta.text)
        return deltas

    def end(self, whole: bool = True) -> Reply:
        """The rest of the reply: content and reasoning that no delta has given, all calls."""
        reply = self._reader.read("".join(self._pieces), tools=self._tools, opened_reasoning=self._opened, whole=whole)
        reasoning = None if reply.reasoning is None else reply.reasoning[self._sent["reasoning"] :]
        return Reply(reply.content[self._sent["content"] :], reasoning, reply.tool_calls, reply.malformed)


def _take_out(text: str, envelopes: Iterable[Envelope], whole: bool) -> tuple[str, tuple[ToolCall, ...], int]:
    """Content, calls and the number of malformed envelopes."""
    calls: list[ToolCall] = []
    pieces: list[str] = []
    malformed = 0
    kept = 0  # text before this offset is in pieces or in calls
    for envelope in envelopes:
        malformed += envelope.malformed and whole
        if envelope.malformed or (envelope.calls and not whole):
            continue
        pieces += [text[kept : envelope.start], envelope.text or ""]
        calls += envelope.calls
        kept = envelope.end
    if not pieces:
        return text, (), malformed
    first, *middle, last = [*pieces, text[kept:]]
    shown = [first.rstrip(), *(piece.strip() for piece in middle), last.lstrip()]
    return "\n".join(piece for piece in shown if piece), tuple(calls), malformed


def reply_reader(
    tool_parser: str = "hermes",
    tool_parser_plugin: str | Path | None = None,
    reasoning_parser: str | None = None,
    reasoning_parser_plugin: str | Path | None = None,
    tokenizer_folder: Path | None = None,
) -> ReplyReader:
    """The reader that the keys of ``policy.tokenizer`` name.

    Args:
        tool_parser: a built-in name or one that the plug-in defines.
        tool_parser_plugin: Python file, see ``parsers.plugin``.
        reasoning_parser: as ``tool_parser``; None leaves reasoning in the content.
        reasoning_parser_plugin: as ``tool_parser_plugin``.
        tokenizer_folder: the model's; where it is given and vLLM is installed, its parsers can be used too.

    Raises:
        ConfigError: a name is unknown, or a plug-in cannot be used.
    """
    tools = _chosen(
        "policy.tokenizer.tool_parser",
        tool_parser,
        TOOL_PARSERS,
        tool_parser_plugin,
        "TOOL_PARSERS",
        ToolParser,  # type: ignore[type-abstract]
        tokenizer_folder,
    )
    if reasoning_parser is None:
        return ReplyReader(tools)
    reasoning = _chosen(
        "policy.tokenizer.reasoning_parser",
        reasoning_parser,
        REASONING_PARSERS,
        reasoning_parser_plugin,
        "REASONING_PARSERS",
        ReasoningParser,  # type: ignore[type-abstract]
        tokenizer_folder,
    )
    return ReplyReader(tools, reasoning)


def _chosen(
    key: str,
    name: str,
    built_in: Mapping[str, Parser],
    plugin: str | Path | None,
    table: vllm.Table,
    kind: type[Parser],
    folder: Path | None,
) -> Parser:
    """The parser of that name: built in, in the plug-in's ``table``, or vLLM's, where the plug-in may have put it."""
    parsers = dict(built_in)
    if plugin is not None:
        parsers |= plugin_parsers(plugin, table, kind, built_in, f"{key}_plugin", lambda: vllm.registered(table))
    ours = name in parsers and name not in vllm.registered(table)
    if not ours and folder is not None and vllm.is_installed():
        found = vllm.vllm_parser(table, name, vllm.folder_tokenizer(folder), key)
        if isinstance(found, kind):
            return found
    if name not in parsers:
        known = ", ".join(parsers)
        raise ConfigError(f"{key} is {name!r}; expected one of {known}{did_you_mean(name, parsers)}")
    return parsers[name]
