"""Fixtures that every test may use: the toy model folders, built once a session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests are imported by path (importmode=importlib), so the builder is made importable as ``toys`` here.
_spec = importlib.util.spec_from_file_location("toys", Path(__file__).with_name("toys.py"))
assert _spec is not None
assert _spec.loader is not None
toys = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("toys", toys)
_spec.loader.exec_module(toys)


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
