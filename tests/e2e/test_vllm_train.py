"""A whole run with a real vLLM: Ray's workers, tool calls, weight syncs, and both engines measured alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import toys
from homes import ON_VLLM, Home, engine_and_trainer_agree, gone

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VLLM = (*ON_VLLM, "grpo.max_num_steps=2")


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path, toys.build_toy(tmp_path, "q", **toys.FOR_VLLM))
    yield made
    made.kill_all()


def test_a_run_on_vllm_trains_on_what_was_sampled_and_leaves_nothing_behind(home):
    process = home.start(*VLLM)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    steps = [entry for entry in home.metrics() if entry["step"]]
    assert len(steps) == 2
    for entry in steps:
        assert entry["mismatch/max_abs_logprob_diff"] < 1e-3, "engine and trainer have the same weights"
    lines = (home.run_dir / "trajectories" / "step_00002.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 6
    assert all(one["sampled_tokens"] and one["weight_versions"] == [2, 2] for one in rollouts), "warm-up, then step 1"
    assert gone(home, 15), home.processes()


@pytest.mark.timeout(1200)
def test_the_quickstarts_first_steps_call_tools_on_vllm(tmp_path):
    """The real model and its tools: parser, template, tied head and weight syncs as a user has them."""
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
    vllm = "+policy.generation.vllm_cfg={load_format: dummy, max_num_seqs: 24, kv_cache_memory_bytes: 268435456}"
    overrides = ("policy.generation.backend=vllm", vllm, "grpo.max_num_steps=2", "startup.deadline_s=600")
    done = subprocess.run(
        [sys.executable, "-m", "gymloop.cli.main", "train", str(recipe), "--run", "r", *overrides],
        cwd=tmp_path, capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = (tmp_path / "results" / "quickstart" / "r" / "metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, metrics) if entry["step"]]
    assert len(steps) == 2
    for entry in steps:
        assert entry["tools/rollouts_with_calls"] > 0.2, entry
        assert entry["reward/mean"] > 0, entry
        assert engine_and_trainer_agree(entry, most=1e-2), entry
