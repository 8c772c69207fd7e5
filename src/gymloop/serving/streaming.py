"""Text that grows: what is certain of a sample's text while it is being sampled, and a reply that is sent in events.

A character made of several tokens is shown whole or not at all, and text that may be the beginning of a stop string
waits until it is none. The pieces, joined, are exactly the text of the finished sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

log = logging.getLogger(__name__)

_HALF = "\ufffd"
"""How a decoder shows bytes that are no whole character; perhaps not yet."""


class Detokenizer:
    """Ids in, certain text out.

    Decodes a window that begins one piece before the text not yet shown, so that decoders that look at the neighbour
    (a space that only stands between words) see it.

    Args:
        decode: ids to text; local, as all tokenizers' decoders are: an id changes the text of its neighbours at most.
        held: ids whose text is not certain before another one follows: end tokens, which are no text at a sample's end,
            and the bytes of tokenizers that decode a run of them as one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], held: Collection[int]):
        self._decode = decode
        self._held = held
        self._window: list[int] = []
        self._shown_ids = 0  # of the window, whose text has been shown
        self._shown_text = ""
        self._length = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Take the next ids; the text that is now certain."""
        self._window += ids
        if not ids or self._window[-1] in self._held:
            return ""
        text = self._decode(self._window)
        if len(text) <= len(self._shown_text) or text.endswith(_HALF):
            return ""
        new = text[len(self._shown_text) :]
        self._window = self._window[self._shown_ids :]
        self._shown_ids = len(self._window)
        self._shown_text = self._decode(self._window)
        self._length += len(new)
        return new

    def end(self, text: str) -> str:
        """The rest, given the text of the whole sample."""
        return text[self._length :]


class StopSearch:
    """Looks for stop strings in text that comes in pieces.

    Attributes:
        found: a stop string has come; what follows is not part of the sample.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._kept = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """Take the next piece; the text before any stop string that is now certain."""
        if self.found:
            return ""
        text = self._kept + piece
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.found = True
            self._kept = ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was kept back and is no stop string."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that may begin ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
