"""Whole runs on a real vLLM in which something goes wrong: each ends within seconds under its name, or goes on.

What a phase needs is stopped in the phase before (SIGSTOP), so that the kill comes in the midst of it, however fast the
machine is. Nothing is left running, stopped processes among it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import yaml

from calculator_server import write_rows
from homes import ON_VLLM, gone

from ..gym.nemo.stand_in import OWN_ROW, make, make_own_agent
from . import watched
from .watched import (
    ENDED_WITHIN_S,
    NAMED_WITHIN_S,
    SAID_WITHIN_S,
    actor,
    core,
    ends_by_name,
    log_of,
    said,
    until,
    worker,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

model, home = watched.model, watched.home

VLLM = (
    *ON_VLLM,
    "sft_warmup.steps=0",
    "grpo.val_period=0",
    "grpo.max_num_steps=1000",
    "grpo.max_num_epochs=1000",
)
MANY_ROLLOUTS = ("grpo.num_prompts_per_step=200", "grpo.num_generations_per_prompt=8", "data.train.num_tasks=400")


KILLED = r"(the engine is dead|did not start on .*): vLLM's process EngineCore \(pid \d+\) was killed by SIGKILL"


@pytest.mark.slow
def test_a_core_that_is_killed_while_it_loads_ends_the_startup_under_its_name(home):
    process = home.start(*VLLM)
    said(home, process, r"the model in vLLM's processes, \d{3,} MiB")
    os.kill(core(home), signal.SIGKILL)
    ends_by_name(home, process, r"startup \(.*engine", KILLED)


@pytest.mark.slow
def test_a_core_that_is_killed_while_it_generates_ends_the_run_under_its_name_before_rollouts_are_given_up(home):
    process = home.start(*VLLM, *MANY_ROLLOUTS)
    said(home, process, "weights: done")
    victim = core(home)
    said(home, process, "step 1: rollouts")
    os.kill(victim, signal.SIGKILL)
    ends_by_name(home, process, "step 1: rollouts", KILLED)


@pytest.mark.slow
def test_a_core_that_is_killed_in_the_midst_of_a_weight_sync_ends_the_run_under_its_name(home):
    process = home.start(*VLLM)
    said(home, process, "weights: done")
    policy, holder, victim = actor(home, "policy"), worker(home), core(home)
    said(home, process, "step 1: rollouts")
    os.kill(policy, signal.SIGSTOP)
    said(home, process, "step 1: update")
    os.kill(holder, signal.SIGSTOP)
    os.kill(policy, signal.SIGCONT)
    said(home, process, "step 1: weight sync")
    time.sleep(1.0)  # the sync cannot end without the process that was stopped
    os.kill(victim, signal.SIGKILL)
    ends_by_name(home, process, "step 1: weight sync", KILLED)


@pytest.mark.slow
def test_a_load_that_stands_still_ends_at_the_startups_deadline_under_the_engines_name(home):
    deadline_s = 25  # longer than any part of a load that shows no progress takes on a busy machine
    process = home.start(*VLLM, f"startup.deadline_s={deadline_s}")
    said(home, process, r"the model in vLLM's processes, \d{3,} MiB")
    os.kill(core(home), signal.SIGSTOP)
    output, _ = process.communicate(timeout=deadline_s + ENDED_WITHIN_S)
    assert process.returncode == 1, output
    stuck = (
        rf"startup task 'engine' made no progress for {deadline_s} s; it was waiting for the engine: the model in vLLM"
    )
    assert stuck in output, output
    assert gone(home, NAMED_WITHIN_S), home.processes()


@pytest.mark.slow
def test_a_load_slower_than_the_gyms_own_limit_holds_up_the_rollouts_and_fails_no_server(home):
    """An agent of NeMo Gym's kind that calls the run's model has the model's address long before the model is there."""
    limit_s = 8
    make(home.folder / "gym")
    config = make_own_agent(home.folder)
    write_rows(home.folder / "rows.jsonl", [OWN_ROW] * 2)
    recipe = yaml.safe_load(home.recipe.read_text())
    del recipe["grpo"]["max_val_samples"]
    recipe["data"] = {"train": {"data_path": "rows.jsonl"}}
    recipe["env"] = {
        "should_use_nemo_gym": True,
        "nemo_gym_installation": "gym",
        "nemo_gym": {
            "config_paths": [config],
            "is_trajectory_collection": False,
            "server_spinup_timeout_seconds": limit_s,
        },
    }
    home.recipe.write_text(yaml.safe_dump(recipe))
    process = home.start(*VLLM, "grpo.max_num_steps=1")
    said(home, process, r"gym\.own: done")
    loading = until(process, lambda: core(home), "vLLM's process")
    os.kill(loading, signal.SIGSTOP)
    time.sleep(limit_s + 2)
    os.kill(loading, signal.SIGCONT)
    output, _ = process.communicate(timeout=SAID_WITHIN_S)
    assert process.returncode == 0, output
    tasks = {one["task"]: one for one in json.loads((home.run_dir / "startup.json").read_text())["records"]}
    assert tasks["gym.own"]["needs"] == ["gym", "server"]
    (step,) = [entry for entry in home.metrics() if entry["step"]]
    assert (step["rollouts/finished"], step["rollouts/failed"], step["failures/attempts"]) == (6, 0, 0)
    assert step["health/server_restarts"] == 0
    assert gone(home, NAMED_WITHIN_S), home.processes()


def spoilt(folder, model, spoil):
    copy = folder / "spoilt"
    shutil.copytree(model, copy)
    spoil(copy / "model.safetensors")
    return copy


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


BAD_MODELS = {
    "no_such_folder": (lambda folder, _: folder / "nowhere", "nowhere"),
    "no_weights": (lambda folder, model: spoilt(folder, model, Path.unlink), "spoilt.* has no weights"),
    "no_safetensors": (
        lambda folder, model: spoilt(folder, model, lambda path: path.write_bytes(bytes(4096))),
        "the model in .*spoilt cannot be read",
    ),
    "cut_off": (
        lambda folder, model: spoilt(folder, model, halve),
        r"the model in .*spoilt cannot be read: model\.safetensors is cut off",
    ),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_weights_that_are_not_there_or_not_whole_are_one_sentence_with_their_path_before_vllm_starts(home, model, case):
    make_bad, sentence = BAD_MODELS[case]
    code, output = home.train(*VLLM, f"policy.model_name={make_bad(home.folder, model)}")
    assert code == 2, output
    last = output[output.rindex("gymloop: ") :].strip()
    assert re.search(sentence, last), output
    assert len(last.splitlines()) == 1, last
    assert "vLLM" not in log_of(home, "run")
    assert gone(home, NAMED_WITHIN_S), home.processes()


def test_a_port_range_that_is_taken_ends_the_startup_with_the_range_and_its_keys(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = (f"policy.generation.port_range_low={port}", f"policy.generation.port_range_high={port}")
        code, output = home.train(*VLLM, *ports)
    assert code == 2, output
    last = output[output.rindex("\ngymloop: ") :]
    assert "startup task 'server' failed after" in last
    assert re.search(rf"no free port between {port} and {port} on 127\.0\.0\.1: all 1 are taken, by ", last), output
    assert "port_range_low, port_range_high" in last
    assert gone(home, NAMED_WITHIN_S), home.processes()
