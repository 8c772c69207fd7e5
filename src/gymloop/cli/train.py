"""``gymloop train``: load the recipe, compile its plan, run it."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gymloop.config.load import load_recipe
from gymloop.config.plan import Plan, compile_plan
from gymloop.errors import ConfigError
from gymloop.loops import fast_loop


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until the run has handlers of its own
        signal.signal(number, _end)
    recipe = load_recipe(args.recipe, args.overrides)
    name = args.run
    plan = compile_plan(recipe, args.recipe, name)
    if args.resume and name is None:
        plan = compile_plan(recipe, args.recipe, latest_run(plan))
    from gymloop.training.train import train

    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        return runner.run(train(plan, resume=args.resume, sequential=args.sequential))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # Not KeyboardInterrupt: raised while a dataclass is being made, that ends Python by the signal, whoever catches it.
    raise SystemExit(128 + number)


def latest_run(plan: Plan) -> str:
    """Name of the recipe's run that was written to last.

    Raises:
        ConfigError: the recipe has no run.
    """
    folder = plan.run_dir.parent
    runs = [path for path in folder.iterdir() if (path / "metrics.jsonl").is_file()] if folder.is_dir() else []
    if not runs:
        raise ConfigError(f"--resume: there is no run in {folder}")

    def written(path: Path) -> float:
        return (path / "metrics.jsonl").stat().st_mtime

    return max(runs, key=written).name
