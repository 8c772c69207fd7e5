"""The loader says which prompts a step takes, in which order, under which ids; all of it follows from seed and epoch.

A group id names epoch and row (``e0-r00017``), so it is unique over the run and the same after a resume. Each epoch
takes whole steps only: its last ``len(rows) % prompts_per_step`` rows are left out, others each epoch when shuffled.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymloop.errors import ConfigError
from gymloop.gym.contract import Row


class GroupLoader:
    """Yields, for each step, a list of (group id, row).

    Args:
        rows: the dataset, in file order.
        prompts_per_step: groups per step.
        seed: of the order.
        shuffle: new order each epoch; false keeps file order.
        epochs: passes over the rows.

    Raises:
        ConfigError: there are fewer rows than one step takes.
    """

    def __init__(self, rows: Sequence[Row], *, prompts_per_step: int, seed: int, shuffle: bool, epochs: int) -> None:
        if len(rows) < prompts_per_step:
            raise ConfigError(f"data has {len(rows)} rows, fewer than grpo.num_prompts_per_step = {prompts_per_step}")
        self._rows = rows
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._step = 0
        self._order_of: tuple[int, list[int]] | None = None
        self._identity = {
            "fingerprint": fingerprint(rows),
            "rows": len(rows),
            "prompts_per_step": prompts_per_step,
            "seed": seed,
            "shuffle": shuffle,
        }

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in one pass."""
        return len(self._rows) // self._prompts_per_step

    @property
    def num_steps(self) -> int:
        """Steps in all epochs."""
        return self.steps_per_epoch * self._epochs

    def __iter__(self) -> Iterator[list[tuple[str, Row]]]:
        return self

    def __next__(self) -> list[tuple[str, Row]]:
        if self._step >= self.num_steps:
            raise StopIteration
        epoch, step = divmod(self._step, self.steps_per_epoch)
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = epoch, order(len(self._rows), self._seed, epoch, self._shuffle)
        start = step * self._prompts_per_step
        taken = self._order_of[1][start : start + self._prompts_per_step]
        self._step += 1
        return [(f"e{epoch}-r{index:05d}", self._rows[index]) for index in taken]

    def state_dict(self) -> dict[str, Any]:
        """Position and what it is a position in; plain JSON."""
        return {"step": self._step, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the step after the last one yielded before ``state_dict``.

        Raises:
            ConfigError: dataset, seed, order or step size are not those of the state, so the position means nothing.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                what = "content of the training data" if key == "fingerprint" else f"loader's {key}"
                raise ConfigError(f"cannot resume: the {what} changed, {state.get(key)} in the checkpoint, {value} now")
        self._step = state["step"]


def order(count: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Row indices of an epoch."""
    indices = list(range(count))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices


def fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over the rows in order; the order of keys in a row has no effect."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode())
        digest.update(b"\n")
    return digest.hexdigest()
