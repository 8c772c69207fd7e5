"""Sampled ids are continued by what follows them, never rendered again.

What a template writes after an assistant turn (the closing token, the new messages, the generation prompt) is taken
from a fixed base conversation: one user message and one assistant turn whose text is a single slot character. The text
behind the slot is the bridge. A template that writes a tool's result only after a call is given a base that makes as
many calls as there are results; what follows it is the bridge, whatever those calls look like. A template whose earlier
output changes when messages are added cannot be bridged, and the caller begins a new segment instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from gymloop.errors import DataError

_USER_TEXT = "x"


class BridgeError(DataError):
    """This template cannot continue sampled ids with these messages; render everything and begin a new segment."""


def base(slot: str) -> list[dict[str, Any]]:
    """The fixed base conversation; ``slot`` stands for what the assistant says."""
    return [{"role": "user", "content": _USER_TEXT}, {"role": "assistant", "content": slot}]


def calling_base(slot: str, new_messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The base whose assistant makes the calls that ``new_messages`` begin by answering; None if they answer none."""
    results = list(takewhile(lambda message: message["role"] == "tool", new_messages))
    if not results:
        return None
    calls = [
        {
            "id": message.get("tool_call_id", f"call{index:05d}"),
            "type": "function",
            "function": {"name": message.get("name", "f"), "arguments": {}},
        }
        for index, message in enumerate(results)
    ]
    user, said = base(slot)
    return [user, said | {"content": "", "tool_calls": calls}]


def tail_after_calls(rendered: str, before: str, closing: str) -> str:
    """The bridge behind a base that makes calls.

    Args:
        rendered: that base and the new messages.
        before: that base alone.
        closing: what closes an assistant turn of plain text.

    Raises:
        BridgeError: turns that make calls are closed otherwise, or their text depends on what follows.
    """
    if not before.endswith(closing):
        raise BridgeError("the chat template closes a turn that makes calls unlike one that makes none")
    if not rendered.startswith(before):
        raise BridgeError("the chat template renders earlier messages differently once others follow")
    return closing + rendered[len(before) :]


def tail(rendered: str, before: str, slot: str) -> str:
    """The text behind the slot.

    Args:
        rendered: base conversation with the assistant slot and the new messages.
        before: rendering of the base conversation's user message alone.
        slot: the character that stands for the assistant's text.

    Raises:
        BridgeError: the slot does not appear exactly once, or the text before it depends on what follows.
    """
    if rendered.count(slot) != 1:
        raise BridgeError(f"the chat template writes an assistant's text {rendered.count(slot)} times, not once")
    if not rendered.startswith(before):
        raise BridgeError("the chat template renders earlier messages differently once others follow")
    return rendered.partition(slot)[2]


def join(
    prefix_ids: Sequence[int], tail_ids: Sequence[int], closing_ids: Sequence[int], end_ids: Collection[int]
) -> tuple[int, ...]:
    """Prefix and tail with exactly one end of turn between them.

    If the prefix ends with an end token, the template's own closing is left out, whichever of the two end tokens it is.
    If it does not (the turn was cut), the closing stays: those tokens were not sampled and are never trained.

    Args:
        prefix_ids: prompt and sampled ids of the last turn.
        tail_ids: the bridge, beginning with what closes the assistant turn.
        closing_ids: what closes an assistant turn, through its end token; empty if the template writes no end token.
        end_ids: every token that ends a turn.

    Raises:
        BridgeError: the tail does not begin with the closing.
    """
    if tuple(tail_ids[: len(closing_ids)]) != tuple(closing_ids):
        raise BridgeError("the chat template closes an assistant turn differently once other messages follow")
    ended = bool(prefix_ids) and prefix_ids[-1] in end_ids
    return (*prefix_ids, *tail_ids[len(closing_ids) if ended else 0 :])
