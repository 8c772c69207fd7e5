"""A tiny environment with a learning signal for models with random weights: write letters of the asked half.

Which half counts is drawn per rollout, from the rollout's own random numbers.
"""

from __future__ import annotations

from gymloop.gym import Environment
from gymloop.gym.items import final_text


class Letters(Environment):
    """Reward: the share of characters that lie in the wanted half of the byte table."""

    def tasks(self, rng):
        while True:
            yield {"prompt": f"Write {rng.randint(0, 999)}"}

    def seed(self, row):
        self.low = self.rng.random() < 0.8

    def verify(self, response):
        text = final_text(response)
        hits = sum((ord(character) < 80) == self.low for character in text)
        return hits / max(1, len(text))

    def solve(self, row):
        return "0123" if self.low else "wxyz"
        yield
