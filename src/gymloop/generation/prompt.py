"""Which ids a request's prompt has: the exact continuation of the last turn, or a new segment with a reason.

A client continues a turn by naming its exact ids (``required_prefix_token_ids``) or by echoing the token fields on its
assistant messages. Echoed ids are taken only where they say what the messages say: each turn's ids must parse to its
message, and its prompt must be the one that the messages before it give. Anything else was edited, and a prompt is
then rendered from the messages alone. Nothing is kept between requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymloop.generation.refusal import ApiError, token_ids
from gymloop.tokens.bridge import BridgeError
from gymloop.tokens.conversation import Message, Tool, last_assistant, normalise
from gymloop.tokens.tool_calls import parse

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

_AROUND = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids for the engine.

    Attributes:
        ids: all of them.
        new_segment: why the ids do not continue the last assistant turn; None where they do, or where there is none.
    """

    ids: tuple[int, ...]
    new_segment: str | None = None


def build_prompt(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool], prefix_ids: Sequence[int] | None = None
) -> Prompt:
    """The prompt of a request.

    Args:
        renderer: of the served model.
        messages: the conversation.
        tools: its tools.
        prefix_ids: prompt and sampled ids of the last assistant turn, exact. Messages without any assistant message
            are then all new.

    Raises:
        ApiError: token fields are malformed, or exact ids cannot be continued and there is no history to render.
        DataError: the conversation cannot be rendered.
    """
    if prefix_ids is None:
        return _from_messages(renderer, messages, tools)
    last = last_assistant(messages)
    try:
        return Prompt(renderer.extend(prefix_ids, messages[0 if last is None else last + 1 :], tools))
    except BridgeError as error:
        if last is None:
            message = f"the required prefix cannot be continued and no history was sent to render instead: {error}"
            raise ApiError(400, "cannot_continue", message, "required_prefix_token_ids") from error
        return Prompt(renderer.render(messages, tools), str(error))


def _from_messages(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
    """Walk the assistant turns in order, and know after each whether its exact ids stand."""
    exact: tuple[int, ...] | None = None
    reason: str | None = None
    start = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        carried = _bundle(message, index, renderer.vocab_size)
        if carried is None:
            exact, reason = None, f"messages[{index}], an assistant message, carries no token ids"
        elif index == 0:
            exact, reason = None, "messages[0] is an assistant message, with no prompt before it"
        else:
            prompt = _continue(renderer, exact, messages[:index], start, tools).ids
            reason = _disagreement(renderer, message, index, prompt, *carried)
            exact = None if reason else (*carried[0], *carried[1])
        start = index + 1
    result = _continue(renderer, exact, messages, start, tools)
    return Prompt(result.ids, reason or result.new_segment)


def _continue(
    renderer: Renderer, exact: tuple[int, ...] | None, messages: Sequence[Message], start: int, tools: Sequence[Tool]
) -> Prompt:
    if exact is None:
        return Prompt(renderer.render(messages, tools))
    try:
        return Prompt(renderer.extend(exact, messages[start:], tools))
    except BridgeError as error:
        return Prompt(renderer.render(messages, tools), str(error))


def _bundle(message: Message, index: int, vocab_size: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    where = f"messages[{index}]."
    prompt = token_ids(message, "prompt_token_ids", vocab_size, where)
    sampled = token_ids(message, "generation_token_ids", vocab_size, where)
    if prompt is None and sampled is None:
        return None
    if not prompt or sampled is None:
        missing = "generation_token_ids" if sampled is None else "prompt_token_ids"
        raise ApiError(
            400, "partial_token_fields", f"{where}{missing} is missing beside the other", f"{where}{missing}"
        )
    return prompt, sampled


def _disagreement(
    renderer: Renderer,
    message: Message,
    index: int,
    expected: tuple[int, ...],
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
) -> str | None:
    """Why carried ids are not those of the messages, or None."""
    if not _says(renderer.said(sampled), message):
        return f"messages[{index}] was edited: its text is not what its generation_token_ids say"
    if prompt == expected:
        return None
    pairs = zip(prompt, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(expected)))
    window = slice(max(0, at - _AROUND), at + _AROUND)
    return (
        f"the history before messages[{index}] was edited: at token {at} its prompt_token_ids say "
        f"{renderer.decode(prompt[window])!r}, the messages {renderer.decode(expected[window])!r}"
    )


def _says(text: str, message: Message) -> bool:
    """Whether a turn's text and a message are the same, whichever way a client split it into fields.

    Reasoning is compared only where the message has some: many clients drop it, and the ids still hold what was said.
    White space at the borders of fields is lost by parsers and does not count.
    """
    shown = normalise([message])[0]
    reasoning, answer = _split_reasoning(text)
    told_reasoning, told_answer = _split_reasoning(shown["content"])
    told_reasoning = shown.get("reasoning_content", told_reasoning)
    if told_reasoning.strip() and told_reasoning.strip() != reasoning.strip():
        return False
    if calls := [_call(call["function"]) for call in shown.get("tool_calls", ())]:
        parsed = parse(answer)
        found = [_call({"name": call.name, "arguments": call.arguments}) for call in parsed.tool_calls]
        return calls == found and told_answer.strip() == parsed.content.strip()
    return told_answer.strip() == answer.strip()


def _split_reasoning(text: str) -> tuple[str, str]:
    reasoning, mark, answer = text.partition("</think>")
    return (reasoning.strip().removeprefix("<think>"), answer) if mark else ("", text)


def _call(function: Mapping[str, Any]) -> tuple[str, str]:
    """Name and canonical arguments, so that key order and spacing do not count."""
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return function["name"], arguments
    return function["name"], json.dumps(arguments, sort_keys=True)
