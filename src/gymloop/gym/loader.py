"""The loader says which prompts a step takes, in which order, under which ids; all of it follows from seed and epoch.

A group id names epoch and row (``e0-r00017``), so it is unique over the run and the same after a resume. Each epoch
takes whole steps only: its last ``len(rows) % prompts_per_step`` rows are left out, others each epoch when shuffled.

Prompts taken besides, in place of short groups, move everything behind them on by one: the run has as many steps as
before, and its last ones reach into one more epoch.
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
        self._step = self._extra = 0
        self._first_epoch = self._first_step = 0
        self._order_of: tuple[int, list[int]] | None = None
        self._identity: dict[str, Any] = {
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
        return self._first_step + self.steps_per_epoch * max(0, self._epochs - self._first_epoch)

    def __iter__(self) -> Iterator[list[tuple[str, Row]]]:
        return self

    def __next__(self) -> list[tuple[str, Row]]:
        if self._step >= self.num_steps:
            raise StopIteration
        first = self._prompts_taken
        self._step += 1
        return self._prompts(first, self._prompts_per_step)

    def take(self, count: int) -> list[tuple[str, Row]]:
        """The next prompts, besides those of the steps."""
        first = self._prompts_taken
        self._extra += count
        return self._prompts(first, count)

    @property
    def _prompts_taken(self) -> int:
        """Since the present rows came in."""
        return (self._step - self._first_step) * self._prompts_per_step + self._extra

    def _prompts(self, first: int, count: int) -> list[tuple[str, Row]]:
        return [
            self._prompt(*divmod(place, self.steps_per_epoch * self._prompts_per_step))
            for place in range(first, first + count)
        ]

    def _prompt(self, epochs_done: int, place: int) -> tuple[str, Row]:
        epoch = self._first_epoch + epochs_done
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = epoch, order(len(self._rows), self._seed, epoch, self._shuffle)
        index = self._order_of[1][place]
        return f"e{epoch}-r{index:05d}", self._rows[index]

    def state_dict(self) -> dict[str, Any]:
        """Position and what it is a position in; plain JSON.

        ``first_epoch`` and ``first_step`` say where the present rows came in; both are 0 unless they were changed.
        ``extra`` counts the prompts taken since then besides those of the steps.
        """
        position = {
            "step": self._step,
            "extra": self._extra,
            "first_epoch": self._first_epoch,
            "first_step": self._first_step,
        }
        return position | self._identity

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed_data: bool = False) -> None:
        """Continue with the step after the last one yielded before ``state_dict``.

        Args:
            state: from ``state_dict``.
            accept_changed_data: where the rows are others, begin the next epoch with them instead of refusing.

        Raises:
            ConfigError: dataset, seed, order or step size are not those of the state, so the position means nothing.
        """
        changed = [key for key, value in self._identity.items() if state.get(key) != value]
        for key in changed:
            if key in ("fingerprint", "rows"):
                if accept_changed_data:
                    continue
                raise ConfigError(
                    f"cannot resume: the content of the training data changed, {state.get('rows')} rows with "
                    f"fingerprint {str(state.get('fingerprint'))[:12]} in the checkpoint, {len(self._rows)} with "
                    f"{self._identity['fingerprint'][:12]} now; put the data back, or set "
                    "checkpointing.accept_changed_data=true to begin a new epoch with the present rows"
                )
            raise ConfigError(
                f"cannot resume: the loader's {key} changed, {state.get(key)} in the checkpoint, "
                f"{self._identity[key]} now"
            )
        self._step, self._extra = state["step"], state["extra"]
        self._first_epoch, self._first_step = state["first_epoch"], state["first_step"]
        if changed:
            size = state["prompts_per_step"]
            self._first_epoch += -(-self._prompts_taken // (state["rows"] // size * size))  # a begun epoch is over
            self._first_step, self._extra = self._step, 0


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
