"""Writing so that a file is there whole or not at all, also after the power failed: the few calls everything builds on.

A name becomes visible only through a rename, and only after the bytes behind it were handed to the disk; the rename
itself lasts once the folder was handed to the disk as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gymloop.errors import ConfigError, InfraError


class UnwritableError(InfraError):
    """Something could not be written (disk full, read-only folder, size limit); what was there before still is."""


def sha256(path: Path) -> str:
    """Hex digest of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Hand a file's bytes, or a folder's names, to the disk.

    Raises:
        OSError: the disk refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Write a text file and hand it to the disk; its folder's entry is the caller's to sync.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a folder with all that is in it; of a link only the link.

    Raises:
        OSError: it cannot be removed, or not all of it.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made; the kernel lets go of it when this process ends, however.

    Raises:
        ConfigError: another process holds it.
        OSError: its lock cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(f"{folder} is in use by process {file.read().strip() or 'unknown'}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def replace_text(path: Path, text: str) -> None:
    """Put a text file in place in one move: a reader, or the next process, sees the old content or the new.

    Raises:
        OSError: it cannot be written; the old content is untouched.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
