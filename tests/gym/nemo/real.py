"""The NeMo Gym that tests run against."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gymloop.gym.nemo.install import Installation, Wanted, install, run_ray

from .contract import EXTRAS


def real_gym() -> Installation:
    """The cached environment of ``GYM_PYTHON``; made if there is none. ``GYMLOOP_TEST_GYM`` names another."""
    if own := os.environ.get("GYMLOOP_TEST_GYM"):
        return Installation.at(Path(own))
    python = os.environ.get("GYM_PYTHON", sys.executable)
    return install(Wanted(ray=run_ray(), extras=EXTRAS, python=python), print)
