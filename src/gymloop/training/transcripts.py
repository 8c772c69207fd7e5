"""``trajectories/``: what was said in each step, one rollout a line, ordered by id, without token ids.

A file is there whole or not at all. A run that is resumed removes those of the steps that it makes again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import orjson

from gymloop.errors import InfraError
from gymloop.files import replace_text
from gymloop.rollouts.trajectory import Group, Rollout, as_record

_NAME = re.compile(r"\.?(?:step|validation)_(\d+)\.jsonl(?:\.tmp)?")


class Transcripts:
    """The folder.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, step: int, groups: Sequence[Group]) -> None:
        """Write the rollouts of one step.

        Args:
            name: ``step`` or ``validation``.
            step: the training step; of a validation the last one before it.
            groups: in any order that is the same each time, e.g. by id.

        Raises:
            InfraError: the file cannot be written.
        """
        rollouts: list[Rollout] = []
        for group in groups:
            rollouts += group.trajectories + group.failures
        lines = [orjson.dumps(as_record(rollout)).decode() for rollout in rollouts]
        path = self.folder / f"{name}_{step:05d}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(path, "".join(line + "\n" for line in lines))
        except OSError as error:
            raise InfraError(f"cannot write {path}: {error.strerror or error}") from error

    def drop_after(self, step: int | None) -> None:
        """Remove the files of later steps, and whatever a killed process left half written.

        Args:
            step: the last one to keep; None keeps none, for a run that begins anew.

        Raises:
            InfraError: a file cannot be removed.
        """
        try:
            for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
                match = _NAME.fullmatch(path.name)
                if match and (step is None or int(match[1]) > step or path.suffix == ".tmp"):
                    path.unlink()
        except OSError as error:
            raise InfraError(f"cannot clear {self.folder} of later steps: {error.strerror or error}") from error
