"""A gate lets arriving text pass until one of its markers begins.

What it has let pass stays right whatever comes: white space is held, for a marker behind it would swallow it, and so is
the beginning of a marker. Time is linear in the text, however small the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class Gate:
    """Holds text from the first marker on, for good."""

    def __init__(self, markers: Sequence[str], at_start: Sequence[str] = ()):
        """Watch for ``markers`` anywhere, and for those ``at_start`` before any text that is not white space."""
        self._markers = tuple(markers)
        self._at_start = tuple(at_start)
        self._pattern = re.compile("|".join(map(re.escape, markers))) if markers else None
        self._held: list[str] = []
        self._only_space = True  # what is held
        self._started = False
        self._shut = False

    def feed(self, piece: str) -> tuple[str, bool]:
        """What passes now, and whether a marker was found, now or before."""
        if self._shut or (self._only_space and (not piece or piece.isspace())):
            self._held.append(piece)
            return "", self._shut
        text = self.held() + piece
        cut = self._cut(text)
        passed = text[:cut].rstrip()
        self._held = [text[len(passed) :]]
        self._started = self._started or bool(passed)
        self._only_space = self._held[0] == "" or self._held[0].isspace()
        return passed, self._shut

    def held(self) -> str:
        """What has not passed."""
        return "".join(self._held)

    def _cut(self, text: str) -> int:
        """Where a marker, or what may become one, begins; the length if nowhere. Shuts the gate at a whole one."""
        markers = self._markers
        if not self._started:
            said = text.lstrip()
            if said.startswith(self._at_start) and self._at_start:
                self._shut = True
                return len(text) - len(said)
            if any(marker.startswith(said) for marker in self._at_start):
                return len(text) - len(said)
        if self._pattern is not None and (match := self._pattern.search(text)):
            self._shut = True
            return match.start()
        longest = max(map(len, markers), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(marker.startswith(text[start:]) for marker in markers):
                return start
        return len(text)
