"""Where two id lists that should begin alike part, told so that a person can see why.

A prompt that does not begin with the exact ids of the turn before it begins a new segment. That is a defined outcome,
and never a silent one: its record holds the first differing index and, for both sides, the ids and the text around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

AROUND = 8
"""Tokens shown on each side of the first difference."""


@dataclass(frozen=True, slots=True)
class Window:
    """One side's tokens around the first difference.

    Attributes:
        start: index of the first of them.
        ids: at most ``2 * AROUND`` tokens.
        text: as they decode; None where there is no tokenizer to decode them.
    """

    start: int
    ids: tuple[int, ...]
    text: str | None = None

    def as_record(self) -> dict[str, Any]:
        """As JSON values."""
        return {"start": self.start, "ids": list(self.ids), "text": self.text}


@dataclass(frozen=True, slots=True)
class Divergence:
    """Why a turn's prompt does not continue the turn before it.

    Attributes:
        reason: one sentence.
        index: first token at which the two sides differ; None where there is nothing exact to compare with.
        carried: the ids that the turn before left, around that index.
        rendered: the ids of the new prompt, around that index.
    """

    reason: str
    index: int | None = None
    carried: Window | None = None
    rendered: Window | None = None

    def as_record(self) -> dict[str, Any]:
        """As JSON values, as in trajectory files and replies of the server."""
        return {
            "reason": self.reason,
            "index": self.index,
            "carried": self.carried and self.carried.as_record(),
            "rendered": self.rendered and self.rendered.as_record(),
        }

    def __str__(self) -> str:
        if self.index is None or self.carried is None or self.rendered is None:
            return self.reason
        sides = [
            f"{name} ids {list(side.ids)}" + ("" if side.text is None else f" {side.text!r}")
            for name, side in (("carried", self.carried), ("rendered", self.rendered))
        ]
        return f"{self.reason}; first difference at token {self.index}: {sides[0]}, {sides[1]}"


def first_difference(carried: Sequence[int], rendered: Sequence[int]) -> int | None:
    """The first index at which ``rendered`` stops being ``carried``; None where it begins with all of it."""
    if tuple(rendered[: len(carried)]) == tuple(carried):
        return None
    pairs = zip(carried, rendered, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(carried), len(rendered)))


def diverge(
    reason: str,
    carried: Sequence[int],
    rendered: Sequence[int],
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Divergence:
    """Compare the ids that should have been continued with those of the new prompt.

    Args:
        reason: why they differ.
        carried: prompt and sampled ids of the last exact turn; empty if there is none.
        rendered: the new prompt.
        decode: ids to text; None leaves texts out.
    """
    index = first_difference(carried, rendered)
    if index is None:
        return Divergence(reason)

    def window(ids: Sequence[int]) -> Window:
        start = max(0, index - AROUND)
        shown = tuple(ids[start : index + AROUND])
        return Window(start, shown, None if decode is None else decode(shown))

    return Divergence(reason, index, window(carried), window(rendered))


def read_divergence(value: Any) -> Divergence | None:
    """The counterpart of ``as_record``; None where ``value`` is not such a record."""
    if not isinstance(value, dict) or not isinstance(value.get("reason"), str):
        return None
    index = value.get("index")
    return Divergence(
        value["reason"],
        index if type(index) is int else None,
        _read_window(value.get("carried")),
        _read_window(value.get("rendered")),
    )


def _read_window(value: Any) -> Window | None:
    ids = value.get("ids") if isinstance(value, dict) else None
    if not isinstance(ids, list) or not all(type(item) is int for item in ids) or type(value.get("start")) is not int:
        return None
    text = value.get("text")
    return Window(value["start"], tuple(ids), text if isinstance(text, str) else None)
