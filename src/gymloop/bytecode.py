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
import sys
from importlib.util import cache_from_source
from pathlib import Path

LARGEST = "torch"
"""Whatever installed it installed the others."""
FORBIDDEN = "PYTHONDONTWRITEBYTECODE"
PREFIX = "PYTHONPYCACHEPREFIX"


def is_lost() -> bool:
    """Whether every process compiles the largest library again: it has no bytecode, and nothing will give it any."""
    if sys.pycache_prefix is not None:  # a folder that somebody chose
        return False
    found = importlib.util.find_spec(LARGEST)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return False
    compiled = Path(cache_from_source(found.origin))
    if compiled.is_file():
        return False
    folder = compiled.parent
    return sys.dont_write_bytecode or not os.access(folder if folder.exists() else folder.parent, os.W_OK)


def keep(folder: Path) -> None:
    """Keep the bytecode of this process and those it starts in a folder, and look for it there alone.

    Nothing changes where the folder cannot be written.

    Args:
        folder: what several installations keep there does not mix.
    """
    own = folder / _installation()
    with contextlib.suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
    if not os.access(own, os.W_OK):
        return
    os.environ.pop(FORBIDDEN, None)
    os.environ[PREFIX] = str(own)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(own)


def _installation() -> str:
    """Other for another environment, and after an installation: files of images can share both time and size."""
    found = importlib.util.find_spec(LARGEST)
    beside = Path(found.origin).parent.parent if found is not None and found.origin is not None else Path(sys.prefix)
    parts = (sys.prefix, *sorted(path.name for path in beside.glob("*.dist-info")))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
