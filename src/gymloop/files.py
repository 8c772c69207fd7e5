"""Writing so that a file is there whole or not at all, also after the power failed: the few calls everything builds on.

A name becomes visible only through a rename, and only after the bytes behind it were handed to the disk; the rename
itself lasts once the folder was handed to the disk as well.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gymloop.errors import InfraError


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
