"""What Python has compiled of the libraries is kept from one process to the next, wherever they are installed.

Images often set ``PYTHONDONTWRITEBYTECODE``, installers such as uv leave no bytecode, and a folder of another user can
take none: then every process of a run compiles torch, transformers and vLLM from source again, which takes longer than
all else that an import does. Where that is so, bytecode is kept in gymloop's cache folder.
"""

from __future__ import annotations

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
    """Keep the bytecode of this process and those it starts in a folder, and look for it there alone."""
    os.environ.pop(FORBIDDEN, None)
    os.environ[PREFIX] = str(folder)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(folder)
