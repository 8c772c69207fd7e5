"""What the README promises of ``make quickstart``, on the real model: reward rises, and only because weights move."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from homes import engine_and_trainer_agree

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def rewards(tmp_path: Path, *overrides: str) -> tuple[list[float], list[dict[str, float]]]:
    done = subprocess.run(
        [sys.executable, "-m", "gymloop.cli.main", "train", str(RECIPE), "--run", "r", *overrides],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "results" / "quickstart" / "r" / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry["reward/mean"] for entry in steps if entry["step"] > 0], steps


def rise(values: list[float]) -> float:
    return statistics.mean(values[-3:]) - statistics.mean(values[:3])


def test_the_quickstart_learns_to_use_its_tool(tmp_path):
    values, steps = rewards(tmp_path)
    assert rise(values) >= 0.25, values
    assert all(entry["tools/rollouts_with_calls"] > 0 for entry in steps[1:])
    assert all(engine_and_trainer_agree(entry, most=1e-3) for entry in steps[1:])


def test_without_a_learning_rate_the_reward_does_not_rise(tmp_path):
    values, _ = rewards(tmp_path, "policy.optimizer.kwargs.lr=0.0", "grpo.max_num_steps=6")
    # Three steps are 72 rollouts, whose mean reward moves by about 0.05 from one sampling to the next.
    assert rise(values) < 0.2, values
