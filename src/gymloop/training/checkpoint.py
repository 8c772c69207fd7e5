"""A checkpoint is whole or it is not there.

Every file is written aside in ``tmp_step_N`` and handed to the disk; a manifest then names each with its size and
hash; only then is the folder renamed to ``step_N``, and only after that are older checkpoints removed. The newest
checkpoint is found by looking, never through a pointer file, so nothing can name one that is not complete. Reading
verifies every hash: what was damaged later is named and passed over, never loaded. Nothing is pickled.

    begin(N) ── tmp_step_N ── parts written, by any process ── commit ── step_N ── retention

A process killed at any point leaves at most a ``tmp_`` folder, which the next ``begin`` removes. A step saved for the
second time replaces the first: the old folder moves to ``replaced_step_N``, which still counts until the new one is in
place.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError, InfraError
from gymloop.files import UnwritableError, fsync, remove
from gymloop.training import manifest
from gymloop.training.manifest import DamageError
from gymloop.training.retention import Retention, Saved

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<replaced>replaced_)?step_(?P<step>\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint.

    Attributes:
        step: the training step after which it was written.
        folder: where its parts lie.
        state: what the run needs besides the parts.
        model: what its weights belong to; see ``gymloop.models.identity``.
    """

    step: int
    folder: Path
    state: Mapping[str, Any]
    model: Mapping[str, Any]

    def part(self, name: str) -> Path:
        """The file or folder of one part.

        Raises:
            ConfigError: the checkpoint has no such part.
        """
        path = self.folder / name
        if not path.exists():
            raise ConfigError(f"checkpoint {self.folder} has no part {name!r}")
        return path


class CheckpointStore:
    """The checkpoints of one run. One process commits at a time; others may write into the folder ``begin`` returns.

    Args:
        folder: made when the first checkpoint begins.
        retention: which checkpoints stay when a new one is complete.
    """

    def __init__(self, folder: Path, retention: Retention) -> None:
        self.folder = Path(folder)
        self._retention = retention
        self._committing = threading.Lock()
        self._damaged: set[Path] = set()
        self._said_unranked = False

    def begin(self, step: int) -> Path:
        """An empty folder for the parts of this step; end it with ``commit`` or ``discard``.

        Raises:
            UnwritableError: it cannot be made.
        """
        aside = self.folder / f"tmp_step_{step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob("tmp_step_*"):
                remove(unfinished)
            aside.mkdir()
        except OSError as error:
            raise self._unwritable(step, error) from error
        return aside

    def discard(self, aside: Path) -> None:
        """Give up a checkpoint that was begun; one that is being committed in another thread is let through first."""
        with self._committing:
            shutil.rmtree(aside, ignore_errors=True)

    def commit(
        self,
        aside: Path,
        state: Mapping[str, Any],
        *,
        model: Mapping[str, Any],
        metrics: Mapping[str, float | None],
    ) -> Checkpoint:
        """Make what lies in the folder from ``begin`` the checkpoint of its step.

        Args:
            aside: the folder; every file in it becomes part of the checkpoint.
            state: JSON values, small: counters, loader position.
            model: what the weights belong to, as JSON values.
            metrics: of the step, by which checkpoints are ranked.

        Raises:
            UnwritableError: the disk refused; the folder is gone and earlier checkpoints are untouched.
            ValueError: a value is not JSON, a file is a link or is called ``manifest.json``; likewise.
        """
        step = int(aside.name.removeprefix("tmp_step_"))
        with self._committing:
            try:
                manifest.seal(aside, step, {"model": model, "metrics": metrics, "state": state})
                final = self._rename(aside, step)
            except OSError as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise self._unwritable(step, error) from error
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            self._retain(step)
        return Checkpoint(step, final, dict(state), dict(model))

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose every file is there and has its hash; None where none was ever completed.

        Each unfinished or damaged one that was passed over is named in a warning. Folders without content are ignored.

        Raises:
            ConfigError: the newest complete one has a format that this version does not read, or there are only
                damaged ones: beginning anew would be a decision of the user.
            InfraError: the folder cannot be listed.
        """
        for unfinished in sorted(self.folder.glob("tmp_step_*")):
            logger.warning("checkpoint %s was never finished and is ignored", unfinished)
        for step, folder in self._folders():
            try:
                if not any(folder.iterdir()):
                    continue
                found = manifest.read(folder, step)
                manifest.verify(folder, found)
            except DamageError as damage:
                logger.warning("checkpoint %s is damaged and is ignored: %s", folder, damage)
                self._damaged.add(folder)
            except OSError as error:
                logger.warning("checkpoint %s cannot be read and is ignored: %s", folder, error)
                self._damaged.add(folder)
            else:
                return Checkpoint(step, folder, found["state"], found["model"])
        if self._damaged:
            raise ConfigError(
                f"no checkpoint in {self.folder} is whole ({len(self._damaged)} damaged, the newest "
                f"{max(self._damaged).name}); restore one, or remove the folder to begin anew"
            )
        return None

    def _folders(self) -> list[tuple[int, Path]]:
        """Everything named like a checkpoint, newest step first, of one step the replaced one last."""
        if not self.folder.exists():
            return []
        found = []
        try:
            for path in self.folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match and path.is_dir():
                    found.append((int(match["step"]), match["replaced"] is None, path))
        except OSError as error:
            raise InfraError(f"cannot look for checkpoints in {self.folder}: {error.strerror}") from error
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _rename(self, aside: Path, step: int) -> Path:
        final = self.folder / f"step_{step}"
        replaced = self.folder / f"replaced_step_{step}"
        if final.exists():
            if replaced.exists():
                remove(replaced)
            final.rename(replaced)
        aside.rename(final)
        self._damaged.discard(final)
        fsync(self.folder)
        if replaced.exists():
            self._drop(replaced)
        return final

    def _retain(self, newest: int) -> None:
        """Remove complete checkpoints that nothing keeps; damaged and foreign folders are not counted and stay."""
        found = self._complete_ones()
        kept = self._retention.kept([Saved(step, value) for step, _, value in found], newest)
        seen: set[int] = set()
        for step, folder, _ in found:
            if step in kept and step not in seen:
                seen.add(step)
                continue
            self._drop(folder)

    def _drop(self, folder: Path) -> None:
        """Remove an old checkpoint; that it cannot be done costs space and nothing else."""
        try:
            # A folder half removed must not look like a checkpoint.
            remove(folder.rename(self.folder / f"tmp_{folder.name.removeprefix('replaced_')}"))
        except OSError as error:
            logger.warning("old checkpoint %s cannot be removed: %s", folder, error)

    def _complete_ones(self) -> list[tuple[int, Path, float | None]]:
        """(step, folder, value of the metric), newest first; whether the files are whole was seen when writing them."""
        name = self._retention.metric_name
        result = []
        for step, folder in self._folders():
            if folder in self._damaged:
                continue
            try:
                metrics = manifest.read(folder, step)["metrics"]
            except (DamageError, ConfigError, OSError):
                continue  # not one of ours to remove; ``latest`` says what is wrong with it
            value = None if name is None else metrics.get(name)
            if name is not None and value is None and not self._said_unranked:
                self._said_unranked = True
                logger.warning(
                    "checkpoint %s has no value of checkpointing.metric_name %r, so it ranks below those that have "
                    "one; save at steps that measure it",
                    folder,
                    name,
                )
            result.append((step, folder, value))
        return result

    def _unwritable(self, step: int, error: OSError) -> UnwritableError:
        where = error.filename or self.folder
        return UnwritableError(
            f"checkpoint of step {step} was not written: {error.strerror or error} ({where}); "
            f"earlier checkpoints in {self.folder} are untouched"
        )
