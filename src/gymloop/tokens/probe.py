"""Does this tokenizer, template and parser belong together? Asked at start, before a token is sampled.

What is found is said in one sentence each. An ``error`` is a run that would learn from something else than it shows:
calls that are never read, or a bridge that writes what the template does not. A ``warning`` is a property of the model
that costs something and loses nothing. Without the run's tools, what only matters with tools is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymloop.errors import DataError
from gymloop.tokens.bridge import BridgeError
from gymloop.tokens.conversation import ConversationError, Message, Tool
from gymloop.tokens.divergence import diverge, first_difference
from gymloop.tokens.renderer import Renderer

Severity = Literal["error", "warning"]

_USER: Message = {"role": "user", "content": "Which tools do you have?"}
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Repeat a text.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "nested": {"type": "object", "properties": {}},
            },
            "required": ["text"],
        },
    },
}
_PLAIN = {"text": "Oslo"}
_HARD = {
    "text": 'Zürich, 東京 \U0001f469\u200d\U0001f52c "quoted" \'single\' back\\slash\nline two\n{"a": [1, 2]}',
    "count": 3,
    "nested": {"list": [1, None, True, "x\ty"], "empty": {}},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not fit.

    Attributes:
        severity: ``error`` stops a run before it starts.
        what: one sentence.
    """

    severity: Severity
    what: str


def probe(
    renderer: Renderer, generation_end_ids: tuple[int, ...], tools_sample: Sequence[Tool] | None = None
) -> tuple[Finding, ...]:
    """Every misfit of a renderer's tokenizer, template and reader; empty when there is none.

    Args:
        renderer: as the server uses it.
        generation_end_ids: end tokens of the model's generation config, or those that the recipe gives instead.
        tools_sample: tools that the run will show, in chat form; None when it is not known whether there are any.
    """
    try:
        renderer.render([_USER])
    except DataError as error:
        return (Finding("error", f"a conversation of one user message cannot be rendered: {error}"),)
    findings = [*_end_tokens(renderer, generation_end_ids), *_generation_prompt(renderer)]
    with_tools: Severity = "error" if tools_sample else "warning"
    findings += _shown_tools(renderer, with_tools, tools_sample or (_TOOL,))
    findings += _calls(renderer, with_tools)
    findings += _bridges(renderer, with_tools)
    return tuple(findings)


def _end_tokens(renderer: Renderer, given: tuple[int, ...]) -> list[Finding]:
    findings = []
    wrong = [token for token in given if not 0 <= token < renderer.vocab_size]
    if wrong:
        what = f"the generation config's end token {wrong[0]} is no token of this model ({renderer.vocab_size} tokens)"
        findings.append(Finding("error", what))
    closing = _closing_end(renderer)
    named = ", ".join(_name(renderer, token) for token in given) or "none"
    if closing is None:
        what = "the chat template closes an assistant turn with no end token, so a turn's end is not seen in history"
        findings.append(Finding("warning", what))
    elif closing not in given:
        what = (
            f"the chat template closes an assistant turn with {_name(renderer, closing)}, which is not among the end "
            f"tokens of the generation config ({named}); it ends turns here all the same"
        )
        findings.append(Finding("warning", what))
    eos = renderer.tokenizer_end_id
    if eos is not None and given and eos not in given:
        what = (
            f"the tokenizer's end token {_name(renderer, eos)} is not among those of the generation config ({named}); "
            "it ends turns here all the same"
        )
        findings.append(Finding("warning", what))
    return findings


def _closing_end(renderer: Renderer) -> int | None:
    said = _turn(renderer, {"role": "assistant", "content": "x"}, None)
    return said[-1] if said and said[-1] in renderer.end_token_ids else None


def _generation_prompt(renderer: Renderer) -> list[Finding]:
    prompted = renderer.render([_USER])
    if prompted == renderer.render([_USER], add_generation_prompt=False):
        what = "the chat template writes no generation prompt, so the model itself must begin the assistant's turn"
        return [Finding("warning", what)]
    if renderer.reader.reasoning_parser is None and renderer.decode(prompted).rstrip().endswith("<think>"):
        what = (
            "the generation prompt opens <think> and no policy.tokenizer.reasoning_parser is set, so replies show "
            "reasoning as content; 'think' reads it"
        )
        return [Finding("warning", what)]
    return []


def _shown_tools(renderer: Renderer, severity: Severity, tools: Sequence[Tool]) -> list[Finding]:
    try:
        text = renderer.decode(renderer.render([_USER], tools))
    except DataError as error:
        return [Finding(severity, f"a conversation with tools cannot be rendered: {error}")]
    if text == renderer.decode(renderer.render([_USER])):
        what = "the chat template ignores tools: the model is never told of them; give one in "
        return [Finding(severity, f"{what}policy.tokenizer.chat_template that shows them")]
    hidden = [name for tool in tools if (name := _function(tool)["name"]) not in text]
    if hidden:
        return [Finding(severity, f"the chat template does not show the tool {hidden[0]!r}")]
    return []


def _calls(renderer: Renderer, severity: Severity) -> list[Finding]:
    """Does the reader read back the calls that the template writes?"""
    try:
        plain = _turn(renderer, _calling(_PLAIN), [_TOOL])
    except DataError as error:
        return [Finding(severity, f"an assistant message with a tool call cannot be rendered: {error}")]
    text = renderer.said(plain)
    if _function(_TOOL)["name"] not in text:
        what = "the chat template does not show the calls of earlier assistant turns; only exact ids keep them"
        return [Finding("warning", what)]
    if (read := _read(renderer, text)) != [_PLAIN]:
        shown = f"the chat template writes a call as {text!r}"
        said = f"reads {_shown_calls(read)} in it" if read else "reads no call in it"
        return [Finding(severity, f"{shown}, and the tool parser {said}; set policy.tokenizer.tool_parser")]
    findings = []
    for what, calls in (("hard arguments", [_HARD]), ("two calls", [_PLAIN, _HARD])):
        try:
            text = renderer.said(_turn(renderer, _calling(*calls), [_TOOL]))
        except DataError as error:
            findings.append(Finding("warning", f"a call with {what} cannot be rendered: {error}"))
            continue
        if (read := _read(renderer, text)) != calls:
            shown = f"of {what}, written by the chat template as {text!r}"
            findings.append(Finding("warning", f"{shown}, the tool parser reads {_shown_calls(read)}"))
    return findings


def _read(renderer: Renderer, text: str) -> list[Any]:
    """Arguments of the probe tool's calls in ``text``; the whole call where it is another's."""
    reply = renderer.reader.read(text, tools=[_TOOL])
    result: list[Any] = []
    for call in reply.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments
        result.append(arguments if call.name == _function(_TOOL)["name"] else (call.name, arguments))
    return result


def _bridges(renderer: Renderer, severity: Severity) -> list[Finding]:
    """Is what ``extend`` writes what the template writes?"""
    said: Message = {"role": "assistant", "content": "It rains."}
    result = {"role": "tool", "tool_call_id": "call00000", "name": "probe_tool", "content": "4C, rain"}
    other = result | {"tool_call_id": "call00001", "content": "19C"}
    cases: tuple[tuple[str, Severity, Message, list[Message]], ...] = (
        ("a user message", "error", said, [_USER]),
        ("a tool result", severity, _calling(_PLAIN), [result]),
        ("the results of parallel calls", severity, _calling(_PLAIN, _PLAIN), [result, other]),
    )
    findings: list[Finding] = []
    for name, worst, turn, new in cases:
        finding = _bridge(renderer, name, worst, turn, new)
        if finding is not None:
            findings.append(finding)
            if new[0]["role"] == "tool":
                break  # parallel results fail as one does
    return findings


def _bridge(renderer: Renderer, name: str, worst: Severity, turn: Message, new: Sequence[Message]) -> Finding | None:
    tools = None if turn.get("tool_calls") is None else [_TOOL]
    try:
        whole = renderer.render([_USER, turn, *new], tools)
        before = renderer.render([_USER, turn], tools, add_generation_prompt=False)
        said = _turn(renderer, turn, tools)
    except ConversationError as error:
        return Finding(worst, f"the chat template cannot render {name} after an assistant turn: {error}")
    except DataError as error:
        return Finding(worst, f"{name} cannot be rendered: {error}")
    if not said or said[-1] not in renderer.end_token_ids:
        said = (*said, renderer.end_token_ids[0])
    try:
        new_ids = renderer.extend(said, new, tools)[len(said) :]
    except BridgeError as error:
        what = f"{name} cannot be bridged, so each begins a new segment rendered from the messages: {error}"
        return Finding("warning", what)
    # Behind the end token of the turn, the template and the bridge must write the same.
    start = len(before)
    while start and before[start - 1] not in renderer.end_token_ids:
        start -= 1
    if start == 0:
        return None  # no end token to compare from; ``_end_tokens`` says so
    if whole[:start] != before[:start]:
        what = f"the chat template rewrites an assistant turn once {name} follows; exact ids are kept as sampled"
        return Finding("warning", what)
    if whole[start:] == new_ids:
        return None
    if first_difference(whole[start:], new_ids) is None:
        return Finding("error", f"the bridge writes more after an assistant turn before {name} than the template does")
    found = diverge("", whole[start:], new_ids, renderer.decode)
    texts = (found.carried and found.carried.text, found.rendered and found.rendered.text)
    what = (
        f"behind the turn before {name} the template writes {texts[0]!r} where the bridge writes {texts[1]!r} "
        f"(first difference at token {found.index})"
    )
    return Finding("error", what)


def _turn(renderer: Renderer, message: Message, tools: Sequence[Tool] | None) -> tuple[int, ...]:
    """What the template writes for an assistant turn: behind the generation prompt, through the first end token.

    Raises:
        DataError: the template cannot render it.
    """
    prompt = renderer.render([_USER], tools)
    whole = renderer.render([_USER, message], tools, add_generation_prompt=False)
    start = first_difference(prompt, whole)
    said = whole[len(prompt) if start is None else start :]
    end = next((i for i, token in enumerate(said) if token in renderer.end_token_ids), len(said) - 1)
    return said[: end + 1]


def _calling(*arguments: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call{index:05d}", "type": "function", "function": {"name": "probe_tool", "arguments": json.dumps(one)}}
        for index, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _function(tool: Tool) -> Any:
    return tool.get("function", tool)


def _name(renderer: Renderer, token: int) -> str:
    return f"{renderer.decode((token,))!r} ({token})" if 0 <= token < renderer.vocab_size else str(token)


def _shown_calls(read: list[Any]) -> str:
    return ", ".join(json.dumps(one, ensure_ascii=False) for one in read) or "none"
