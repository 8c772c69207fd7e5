"""How long a run takes until its model says something: what somebody who starts a run waits for, told once.

Measured where a reply arrives, so the transport and the rest of the first reply are in it. Rollouts that an agent
elsewhere plays with clients of its own are not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class FirstTokens:
    """The moment of a run's first sampled tokens.

    Args:
        began: when the run was asked for, ``time.monotonic`` seconds.
        say: told the time, as a sentence.
    """

    def __init__(self, began: float, say: Callable[[str], object]) -> None:
        self._began = began
        self._say = say
        self._told = False
        self._news: dict[str, float] = {}

    def seen(self) -> None:
        """A reply with sampled tokens has come; only the first one counts."""
        if self._told:
            return
        self._told = True
        seconds = time.monotonic() - self._began
        self._news = {"startup/first_tokens_s": seconds}
        self._say(f"first sampled tokens after {seconds:.1f} s")

    def take_news(self) -> dict[str, float]:
        """The metric, for the first step that is recorded after it."""
        news, self._news = self._news, {}
        return news
