"""The product as a user runs it: ``gymloop train`` in a process of its own, on a tiny model with random weights.

Everything is real but the size of the model: Ray, both actors, HTTP, environment, GRPO, sync, checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest

from homes import Home, gone


@pytest.fixture
def home(tmp_path, toy):
    made = Home(tmp_path, toy("q"))
    yield made
    made.kill_all()


def test_a_run_trains_validates_saves_and_leaves_nothing_behind_then_resumes(home):
    code, output = home.train("grpo.max_num_steps=2")
    assert code == 0, output
    assert gone(home, 10), home.processes()

    steps = home.metrics()
    assert [entry["step"] for entry in steps] == [0, 1, 2]
    assert steps[0]["sft/loss"] > 0
    assert steps[0]["startup/total_s"] >= max(steps[0]["startup/engine_s"], steps[0]["startup/policy_s"])
    told = [entry["startup/first_tokens_s"] for entry in steps if "startup/first_tokens_s" in entry]
    assert len(told) == 1, "of the first reply and of no other"
    assert told[0] > steps[0]["startup/total_s"]
    assert f"first sampled tokens after {told[0]:.1f} s" in output
    for entry in steps[1:]:
        assert entry["rollouts/finished"] == 6
        assert entry["tokens/trained"] == entry["tokens/sampled"] > 0
        assert entry["mismatch/max_abs_logprob_diff"] < 1e-4
        assert {"tools/rollouts_with_calls", "time/rollouts", "time/update", "time/weight_sync"} <= entry.keys()
    assert steps[2]["validation/rollouts/finished"] == 2
    assert steps[2]["weights/version"] == 3, "warm-up and two updates"

    for name in ("recipe.yaml", "startup.json", "reward.png", "tensorboard", "trajectories/step_00001.jsonl"):
        assert (home.run_dir / name).exists(), name
    rollouts = [json.loads(line) for line in (home.run_dir / "trajectories/step_00002.jsonl").open()]
    assert len(rollouts) == 6
    assert all(rollout["weight_versions"] == [2, 2] for rollout in rollouts)
    assert "results:" in output

    # A finished run resumed says so.
    code, output = home.train("grpo.max_num_steps=2", "--resume")
    assert (code, [entry["step"] for entry in home.metrics()]) == (0, [0, 1, 2])
    assert "finished its 2 steps" in output

    # With more steps to go it continues after the last one, without a second warm-up.
    code, output = home.train("--resume")
    assert code == 0, output
    assert [entry["step"] for entry in home.metrics()] == [0, 1, 2, 3]
    assert home.metrics()[3]["weights/version"] == 4
    assert home.metrics()[3]["mismatch/max_abs_logprob_diff"] < 1e-4, "the engine has the restored weights"

    # The same name without --resume is refused rather than overwritten.
    code, output = home.train()
    assert code == 2
    assert "holds a run already" in output


def test_lr_0_leaves_the_weights_and_the_greedy_answers_unchanged_after_sync(home):
    code, output = home.train(
        "policy.optimizer.kwargs.lr=0.0",
        "sft_warmup.steps=0",
        "grpo.val_period=1",
        "policy.generation.val_temperature=0.0",
    )
    assert code == 0, output
    before, after = home.weights(2), home.weights(3)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)

    def greedy(step: int) -> list[object]:
        lines = (home.run_dir / f"trajectories/validation_{step:05d}.jsonl").read_text().splitlines()
        texts = []
        for line in lines:
            for item in json.loads(line)["output"]:
                texts.append(item.get("content") or item.get("arguments") or item.get("output"))
        return texts

    assert greedy(1) == greedy(2) == greedy(3)
    assert greedy(1)
    for entry in home.metrics()[1:]:
        assert entry["policy/grad_norm"] >= 0
        assert entry["mismatch/max_abs_logprob_diff"] < 1e-4
        assert entry["mismatch/kl"] < 1e-6


def test_an_interrupt_saves_the_last_finished_step_and_leaves_nothing(home):
    process = home.start("grpo.max_num_steps=1000", "grpo.max_num_epochs=1000", "checkpointing.save_period=1000")
    home.wait_for_step(2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "saving step" in output
    assert gone(home, 10), home.processes()
    last = home.metrics()[-1]["step"]
    assert (home.run_dir / "checkpoints" / f"step_{last}" / "manifest.json").exists()
    assert not list((home.run_dir / "checkpoints").glob("tmp_*"))

    code, output = home.train(f"grpo.max_num_steps={last + 1}", "grpo.max_num_epochs=1000", "--resume")
    assert code == 0, output
    assert [entry["step"] for entry in home.metrics()] == list(range(last + 2))


@pytest.mark.parametrize("victim", ["engine", "policy"])
def test_a_worker_that_dies_ends_the_run_under_its_name(home, victim):
    process = home.start("grpo.max_num_steps=1000", "grpo.max_num_epochs=1000")
    home.wait_for_step(1, process)
    # The actor's log file is its standard output.
    log = home.run_dir / "logs" / f"{victim}.log"
    pids = [pid for pid in home.processes() if os.path.realpath(f"/proc/{pid}/fd/1") == str(log)]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - begin < 40
    assert process.returncode == 1, output
    assert f"{victim} died" in output
    assert gone(home, 10), home.processes()


def test_a_model_that_cannot_be_loaded_fails_the_startup_by_name(home, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    code, output = home.train(f"policy.model_name={broken}")
    assert code != 0
    assert "startup task" in output
    assert str(broken) in output
    assert gone(home, 10), home.processes()
