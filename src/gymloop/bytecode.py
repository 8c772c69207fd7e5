"""What Python has compiled of the libraries is kept from one process of this machine to the next.

Images often set ``PYTHONDONTWRITEBYTECODE``, installers such as uv leave no bytecode, and a folder of another user can
take none: then every process of a run compiles torch, transformers and vLLM from source again, which takes longer than
all else that an import does. Where that is so, bytecode is kept in gymloop's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import time
from importlib.util import cache_from_source
from pathlib import Path

LARGEST = "torch"
"""Whatever installed it installed the others."""
FORBIDDEN = "PYTHONDONTWRITEBYTECODE"
PREFIX = "PYTHONPYCACHEPREFIX"
UNUSED_S = 30 * 86400.0
"""What no command has used for so long is removed: each installation keeps some hundred megabytes."""


def lost() -> Path | None:
    """The folder of installed libraries that every process compiles again: they have no bytecode, and get none.

    Returns:
        None where they have it, or get it, or where somebody chose a folder for it.
    """
    if sys.pycache_prefix is not None:
        return None
    found = importlib.util.find_spec(LARGEST)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    package = Path(found.origin).parent
    compiled = Path(cache_from_source(found.origin))
    if compiled.is_file():
        return None
    nearest = compiled.parent if compiled.parent.exists() else package
    return package.parent if sys.dont_write_bytecode or not os.access(nearest, os.W_OK) else None


def keep(folder: Path, libraries: Path) -> None:
    """Keep the bytecode of this process and those it starts in a folder, and look for it there alone.

    Nothing changes where the folder cannot be written.

    Args:
        folder: what several installations keep there does not mix; it holds nothing else.
        libraries: as ``lost`` tells.
    """
    own = folder / _named(libraries)
    with contextlib.suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
        os.utime(own)
    if not os.access(own, os.W_OK):
        return
    _prune(folder)
    os.environ.pop(FORBIDDEN, None)
    os.environ[PREFIX] = str(own)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(own)


def _named(libraries: Path) -> str:
    """Other for another environment, and after an installation: files of images can share both time and size."""
    parts = (sys.prefix, *sorted(path.name for path in libraries.glob("*.dist-info")))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _prune(folder: Path) -> None:
    """Remove what installations that are no longer used have left."""
    oldest = time.time() - UNUSED_S
    with contextlib.suppress(OSError):  # another process may be removing the same; the next command removes the rest
        for path in folder.iterdir():
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)
