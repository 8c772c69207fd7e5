"""Whole runs on a real vLLM in which something goes wrong: each ends within seconds under its name, or goes on.

What a phase needs is stopped in the phase before (SIGSTOP), so that the kill comes in the midst of it, however fast the
machine is. Nothing is left running, stopped processes among it.
"""

from __future__ import annotations

import contextlib
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

import toys
from calculator_server import write_rows
from homes import ON_VLLM, Home, gone

from ..gym.nemo.stand_in import OWN_ROW, make, make_own_agent

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VLLM = (
    *ON_VLLM,
    "sft_warmup.steps=0",
    "grpo.val_period=0",
    "grpo.max_num_steps=1000",
    "grpo.max_num_epochs=1000",
)
MANY_ROLLOUTS = ("grpo.num_prompts_per_step=200", "grpo.num_generations_per_prompt=8", "data.train.num_tasks=400")
SAID_WITHIN_S = 500.0
NAMED_WITHIN_S = 15.0
ENDED_WITHIN_S = 60.0
"""The name is said at once; what is torn down then takes its time on a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toys.build_toy(tmp_path_factory.mktemp("model"), "q", **toys.FOR_VLLM)


@pytest.fixture
def home(tmp_path, model):
    made = Home(tmp_path, model)
    yield made
    made.kill_all()


def log_of(home, name):
    path = home.run_dir / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def until(process, condition, what):
    """Wait for what ``condition`` finds, while the run lives."""
    deadline = time.monotonic() + SAID_WITHIN_S
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{what} did not come within {SAID_WITHIN_S:.0f} s"
        time.sleep(0.005)
    return found


def said(home, process, pattern):
    return until(process, lambda: re.search(pattern, log_of(home, "run")), pattern)


def actor(home, name):
    """Pid of a worker of the run's: its log file is its standard output, as it is of its children's."""
    log = os.path.realpath(home.run_dir / "logs" / f"{name}.log")
    writers = set()
    for pid in home.processes():
        with contextlib.suppress(OSError):
            if os.path.realpath(f"/proc/{pid}/fd/1") == log:
                writers.add(pid)
    return next((pid for pid in writers if parent(pid) not in writers), None)


def core(home):
    """Pid of vLLM's engine core, also before it has given itself a name: a fork of the engine's fork server."""
    engine, found = actor(home, "engine"), home.processes()
    servers = (pid for pid, command in found.items() if "multiprocessing.forkserver" in command)
    server = next((pid for pid in servers if engine is not None and parent(pid) == engine), None)
    return next((pid for pid in found if server is not None and parent(pid) == server), None)


def worker(home):
    """Pid of the process that holds vLLM's model."""
    return next((pid for pid, command in home.processes().items() if command.startswith("VLLM::Worker")), None)


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def ends_by_name(home, process, phase, name):
    """What the run says when it fails, within seconds, and that nothing is left of it."""
    began = time.monotonic()
    failed = said(home, process, r"failed in (?s:.*)")[0]
    seconds = time.monotonic() - began
    output, _ = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 1, output
    assert seconds < NAMED_WITHIN_S, output
    assert re.match(rf"failed in {phase}.*: .*{name}", failed), failed
    assert re.search(name, output[output.rindex("\ngymloop: ") :]), output
    assert gone(home, NAMED_WITHIN_S), home.processes()


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
