"""What every test may use: the toy model folders, built once a session."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes depends on who else uses the machine; hypothesis here searches for wrong results.
settings.register_profile("gymloop", deadline=None)
settings.load_profile("gymloop")

# As in the actors of a run: threads that spin while they wait would starve the processes that some tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that runs tests in the background has them ignore SIGINT, and so would all processes that they start, until
# these have handlers of their own.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests are imported by path (importmode=importlib); this makes ``import toys`` work in all of them.
sys.path.insert(0, str(Path(__file__).parent))

import toys  # noqa: E402


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``toy(family)`` is the folder of a toy model with random weights; see ``toys.FAMILIES``."""
    root = tmp_path_factory.mktemp("toys")
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = toys.build_toy(root, family)
        return built[family]

    return get
