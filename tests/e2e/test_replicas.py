"""Two engine replicas in a real run: one is killed or stopped, and the run does what its recipe says of that."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time

import pytest

from homes import Home, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO = ("policy.generation.replicas=2", "sft_warmup.steps=0")
MANY_ROLLOUTS = ("grpo.num_prompts_per_step=40", "grpo.num_generations_per_prompt=8", "data.train.num_tasks=80")
GO_ON = (*TWO, *MANY_ROLLOUTS, "policy.generation.on_replica_death=continue", "grpo.max_num_steps=2")
SAID_WITHIN_S = 240.0


@pytest.fixture
def home(tmp_path, toy):
    made = Home(tmp_path, toy("q"))
    yield made
    made.kill_all()


def said(home, process, pattern):
    """Wait until the run's log says it."""
    log = home.run_dir / "logs" / "run.log"
    deadline = time.monotonic() + SAID_WITHIN_S
    while True:
        text = log.read_text() if log.exists() else ""
        if found := re.search(pattern, text):
            return found
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{pattern!r} did not come within {SAID_WITHIN_S:.0f} s:\n{text}"
        time.sleep(0.005)


def pid_of(home, name):
    """The actor's: its log file is its standard output."""
    log = os.path.realpath(home.run_dir / "logs" / f"{name}.log")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for pid in home.processes():
            with contextlib.suppress(OSError):
                if os.path.realpath(f"/proc/{pid}/fd/1") == log:
                    return pid
        time.sleep(0.01)
    raise AssertionError(f"no process writes to {log}: {home.processes()}")


def rollouts(home, step):
    lines = (home.run_dir / "trajectories" / f"step_{step:05d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a13_a_replica_that_dies_in_the_rollouts_is_named_and_its_rollouts_are_repeated_on_the_other(home):
    process = home.start(*GO_ON)
    said(home, process, "weights: done")
    victim = pid_of(home, "engine-1")
    said(home, process, "step 1: rollouts")
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.search(r"engine-1 died during .*(?s:.)*the run goes on with 1 of 2 engine replicas", output), output
    for step in (1, 2):
        ids = [(one["group_id"], one["sample_id"]) for one in rollouts(home, step)]
        assert len(ids) == len(set(ids)) == 320, "no rollout is lost or doubled"
    steps = home.metrics()
    assert [entry["rollouts/finished"] for entry in steps if entry["step"]] == [320, 320]
    assert [entry["weights/engines"] for entry in steps if entry["step"]] == [1, 1]
    assert {one["attempt"] for one in rollouts(home, 1)} > {0}, "what was under way there was tried once more"
    assert gone(home, 10), home.processes()


def test_a_replica_that_is_stopped_in_the_weight_sync_is_left_behind_and_the_version_reaches_the_other(home):
    process = home.start(*GO_ON, "health.check_period_s=0.5", "health.unresponsive_after_s=15.0")
    said(home, process, "weights: done")
    victim = pid_of(home, "engine-0")
    said(home, process, "step 1: update")
    os.kill(victim, signal.SIGSTOP)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "engine-0 does not respond" in output
    assert "the run goes on with 1 of 2 engine replicas" in output
    steps = home.metrics()
    assert [entry["weights/version"] for entry in steps if entry["step"]] == [1, 2]
    assert [entry["weights/engines"] for entry in steps if entry["step"]] == [1, 1]
    assert steps[-1]["mismatch/max_abs_logprob_diff"] < 1e-4, "the engine that is left has the new weights"
    assert gone(home, 10), home.processes()


def test_a_run_that_asks_to_stop_ends_within_seconds_under_the_name_of_the_replica_that_died(home):
    process = home.start(*TWO, *MANY_ROLLOUTS)
    said(home, process, "weights: done")
    victim = pid_of(home, "engine-1")
    said(home, process, "step 1: rollouts")
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    said(home, process, r"failed in step 1: rollouts.*: engine-1 died during ")
    assert time.monotonic() - began < 10
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert gone(home, 10), home.processes()


def test_a_replica_that_dies_while_it_loads_ends_the_startup_under_its_name_whatever_the_recipe_says(home):
    process = home.start(*GO_ON)
    said(home, process, "engine: waits for the engine-1: torch")
    os.kill(pid_of(home, "engine-1"), signal.SIGKILL)
    began = time.monotonic()
    said(home, process, r"failed in startup .*: .*engine-1 died during ")
    assert time.monotonic() - began < 10
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert gone(home, 10), home.processes()


def test_replicas_that_do_not_fit_into_the_port_range_end_the_startup_with_the_range(home):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ports = (f"policy.generation.port_range_low={port}", f"policy.generation.port_range_high={port}")
    code, output = home.train(*TWO, *ports)
    assert code == 2, output
    assert "startup task 'server' failed after" in output
    assert re.search(rf"no free port between {port} and {port} on 127\.0\.0\.1: all 1 are taken, by ", output), output
    assert gone(home, 10), home.processes()


def test_when_the_last_replica_dies_the_run_ends_and_says_that_it_was_the_last(home):
    process = home.start(*GO_ON)
    said(home, process, "weights: done")
    victims = [pid_of(home, name) for name in ("engine-0", "engine-1")]
    said(home, process, "step 1: rollouts")
    os.kill(victims[0], signal.SIGKILL)
    said(home, process, "the run goes on with 1 of 2")
    os.kill(victims[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    last = output[output.rindex("\ngymloop: ") :]
    assert "engine-1 died during" in last
    assert "it was the last of 2 engine replicas" in last
    assert gone(home, 10), home.processes()
