"""Two vLLM replicas in a real run: one dies or hangs, is named, and the run does what its recipe says of that.

The replica that is to die is stopped first (SIGSTOP), so that its part in the phase is still to be done when it is
killed, however fast the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from gymloop.generation.vllm.control import LOCAL_STALL_S, STALLS
from gymloop.serving.worker import PAUSE_TIMEOUT_S
from homes import ON_VLLM, gone

from . import watched
from .watched import NAMED_WITHIN_S, SAID_WITHIN_S, actor, core, ends_by_name, said, worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

model, home = watched.model, watched.home

TWO = (
    *ON_VLLM,
    "policy.generation.replicas=2",
    "sft_warmup.steps=0",
    "grpo.val_period=0",
    "grpo.num_prompts_per_step=12",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=2",
    "data.train.num_tasks=24",
    "checkpointing.enabled=false",
)
GO_ON = (*TWO, "policy.generation.on_replica_death=continue")
ROLLOUTS = 48
IN_FLIGHT_S = 5.0
"""By then a stopped replica has requests, and a sync waits for it."""
VICTIM = "engine-1"
KILLED = rf"{VICTIM}: the engine is dead: vLLM's process EngineCore \(pid \d+\) was killed by SIGKILL"
DIED = rf"{VICTIM} died during "


def replica(home, name):
    """Pids of its own process, of vLLM's core and of the one that holds vLLM's model."""
    found = actor(home, name), core(home, name), worker(home, name)
    assert all(found), (found, home.processes())
    return found


def rollouts(home, step):
    lines = (home.run_dir / "trajectories" / f"step_{step:05d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def goes_on_without_it(home, process, victim, name):
    """The loss is told with its cause, nothing of the replica is left, and both steps are whole."""
    said(home, process, rf"{name}(?s:.*)the run goes on with 1 of 2 engine replicas", NAMED_WITHIN_S)
    deadline = time.monotonic() + NAMED_WITHIN_S
    while left := set(victim) & set(home.processes()):
        assert time.monotonic() < deadline, f"{left} of the replica's processes are still there"
        time.sleep(0.05)
    output, _ = process.communicate(timeout=SAID_WITHIN_S)
    assert process.returncode == 0, output
    for step in (1, 2):
        ids = {(one["group_id"], one["sample_id"]) for one in rollouts(home, step)}
        assert len(rollouts(home, step)) == len(ids) == ROLLOUTS, "no rollout is lost or doubled"
    steps = [entry for entry in home.metrics() if entry["step"]]
    assert [entry["rollouts/finished"] for entry in steps] == [ROLLOUTS, ROLLOUTS]
    assert [entry["weights/version"] for entry in steps] == [1, 2]
    assert [entry["weights/engines"] for entry in steps] == [1, 1]
    assert all(entry["mismatch/max_abs_logprob_diff"] < 1e-3 for entry in steps), "the other has the new weights"
    assert gone(home, NAMED_WITHIN_S), home.processes()


def stopped_while_it_generates(home, process, pid):
    said(home, process, "step 1: rollouts")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(IN_FLIGHT_S)


@pytest.mark.parametrize(
    ("dies", "cause"), [(1, KILLED), pytest.param(0, DIED, marks=pytest.mark.slow)], ids=["vllm", "the_actor_with_vllm"]
)
def test_a13_a_replica_whose_process_is_killed_is_named_and_its_rollouts_are_repeated_on_the_other(home, dies, cause):
    process = home.start(*GO_ON)
    said(home, process, "weights: done")
    victim = replica(home, VICTIM)
    stopped_while_it_generates(home, process, victim[1])
    os.kill(victim[dies], signal.SIGKILL)
    goes_on_without_it(home, process, victim, cause)
    assert {one["attempt"] for one in rollouts(home, 1)} > {0}, "what was under way there was tried once more"


@pytest.mark.slow
def test_a_run_that_asks_to_stop_ends_within_seconds_under_the_name_of_the_replica_whose_vllm_was_killed(home):
    process = home.start(*TWO)
    said(home, process, "weights: done")
    victim = replica(home, VICTIM)
    stopped_while_it_generates(home, process, victim[1])
    os.kill(victim[1], signal.SIGKILL)
    ends_by_name(home, process, "step 1: ", KILLED)  # in the rollouts, or in the sync if all are repeated before


def stopped_in_the_weight_sync(home, process, holder):
    """The sync is under way and waits for the process that holds the replica's model."""
    policy = actor(home, "policy")
    said(home, process, "step 1: rollouts")
    os.kill(policy, signal.SIGSTOP)
    said(home, process, "step 1: update")
    os.kill(holder, signal.SIGSTOP)
    os.kill(policy, signal.SIGCONT)
    said(home, process, "step 1: weight sync")
    time.sleep(IN_FLIGHT_S)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_a_replica_whose_vllm_is_killed_in_the_weight_sync_is_left_behind_and_the_version_reaches_the_other(
    home, transport
):
    process = home.start(*GO_ON, f"policy.generation.refit_transport={transport}")
    said(home, process, "weights: done")
    victim = replica(home, VICTIM)
    stopped_in_the_weight_sync(home, process, victim[2])
    os.kill(victim[1], signal.SIGKILL)
    goes_on_without_it(home, process, victim, KILLED)


@pytest.mark.slow
def test_a_replica_whose_vllm_does_not_answer_in_the_weight_sync_is_left_behind_under_its_name(home):
    """vLLM 0.32 asks its worker when it is paused, so already that ends; an earlier one is found in the update."""
    process = home.start(*GO_ON)
    said(home, process, "weights: done")
    victim = replica(home, VICTIM)
    stopped_in_the_weight_sync(home, process, victim[2])
    late = r"(the engine's pause|the engine is dead: its update to weight version 1) took longer than \d+ s"
    said(home, process, late, max(PAUSE_TIMEOUT_S, STALLS * LOCAL_STALL_S) + NAMED_WITHIN_S)
    goes_on_without_it(home, process, victim, rf"{VICTIM}: {late}")
