"""The file of a collection: lines are only ever appended, a torn one is cut off, and it is one collection's alone.

    FILE                       a line a rollout; see ``rollouts.collection``
    FILE.run/collection.json   what the lines are of; a file that has none was not written by a collection
    FILE.run/logs/             what engine and servers said

A line is written when its rollout ends and handed to the disk within a second, so a killed process loses none, and a
machine that loses power those of the last second.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gymloop.errors import ConfigError
from gymloop.files import UnwritableError, fsync, replace_text
from gymloop.rollouts.collection import Found, differences, read_lines, without_failures

SYNC_S = 1.0


class Output:
    """One file and the folder beside it. The folder must be held (``files.held``) by the caller.

    Args:
        path: absolute; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = folder_of(path)
        self._identity = self.folder / "collection.json"
        self._file: IO[bytes] | None = None
        self._synced = time.monotonic()

    def read(self) -> Found:
        """What the file holds already.

        Raises:
            ConfigError: it was not written by a collection, or is damaged other than at its end.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return Found()
        if not self._identity.exists():
            raise ConfigError(
                f"{self.path} exists and is no collection's, since {self._identity} is missing; choose another --output"
            )
        with self.path.open("rb") as lines:
            return read_lines(lines, str(self.path))

    def refuse_others(self, identity: Mapping[str, Any]) -> None:
        """Make sure that the lines are of this collection; fields that were not known at the time are not compared.

        Raises:
            ConfigError: they are of another one, or nobody can tell.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return
        try:
            theirs = json.loads(self._identity.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._identity}: cannot be read: {error}; choose another --output") from error
        if other := differences(identity, theirs):
            raise ConfigError(
                f"{self.path} is of another collection: {'; '.join(other)}; put it back, or choose another --output"
            )

    def open(self, identity: Mapping[str, Any], found: Found) -> int:
        """Open for appending, behind the last whole line.

        Args:
            identity: what the lines are of.
            found: from ``read``.

        Returns:
            Bytes of a torn line that were cut off.

        Raises:
            UnwritableError: the disk refuses.
        """
        try:
            replace_text(self._identity, json.dumps(identity, indent=1) + "\n")
            fsync(self._identity)
            fsync(self.folder)
            self._file = self.path.open("ab", buffering=0)
            torn = self._file.tell() - found.size
            self._file.truncate(found.size)
            os.fsync(self._file.fileno())
            fsync(self.path.parent)
        except OSError as error:
            raise self._refused(error) from error
        return torn

    def append(self, line: bytes) -> None:
        """Write a line.

        Raises:
            UnwritableError: it could not be written whole; what was written of it is cut off by the next ``open``.
        """
        if self._file is None:
            raise RuntimeError("the output is not open")
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            raise self._refused(error) from error

    def due(self) -> bool:
        """Whether ``sync`` is to be called."""
        return time.monotonic() - self._synced > SYNC_S

    def sync(self) -> None:
        """Hand the lines to the disk; may be called from another thread.

        Raises:
            UnwritableError: the disk refuses.
        """
        self._synced = time.monotonic()
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._refused(error) from error

    def close(self) -> None:
        """Sync and close; safe to call twice."""
        try:
            self.sync()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def drop_failures(self) -> None:
        """Take out the lines of failed rollouts, in one move.

        Raises:
            UnwritableError: the disk refuses; the file is as it was.
        """
        aside = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with self.path.open("rb") as lines, aside.open("wb") as kept:
                kept.writelines(without_failures(lines))
                kept.flush()
                os.fsync(kept.fileno())
            os.replace(aside, self.path)
            fsync(self.path.parent)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UnwritableError:
        return UnwritableError(f"cannot write {self.path}: {error.strerror or error}")


def folder_of(path: Path) -> Path:
    """The folder beside an output file."""
    return path.with_name(f"{path.name}.run")
