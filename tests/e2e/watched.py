"""A run on vLLM seen from outside: its folder, what its log says, the pids of its engines' processes, how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pytest

import toys
from homes import Home, gone

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


def until(process, condition, what, within_s=SAID_WITHIN_S):
    """Wait for what ``condition`` finds, while the run lives."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{what} did not come within {within_s:.0f} s"
        time.sleep(0.005)
    return found


def said(home, process, pattern, within_s=SAID_WITHIN_S):
    return until(process, lambda: re.search(pattern, log_of(home, "run")), pattern, within_s)


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def actor(home, name):
    """Pid of a worker of the run's: its log file is its standard output, as it is of its children's."""
    log = os.path.realpath(home.run_dir / "logs" / f"{name}.log")
    writers = set()
    for pid in home.processes():
        with contextlib.suppress(OSError):
            if os.path.realpath(f"/proc/{pid}/fd/1") == log:
                writers.add(pid)
    return next((pid for pid in writers if parent(pid) not in writers), None)


def core(home, name="engine"):
    """Pid of vLLM's engine core, also before it has given itself a name: a fork of the engine's fork server."""
    engine, found = actor(home, name), home.processes()
    servers = (pid for pid, command in found.items() if "multiprocessing.forkserver" in command)
    server = next((pid for pid in servers if engine is not None and parent(pid) == engine), None)
    return next((pid for pid in found if server is not None and parent(pid) == server), None)


def worker(home, name="engine"):
    """Pid of the process that holds vLLM's model."""
    of = core(home, name)
    workers = (pid for pid, command in home.processes().items() if command.startswith("VLLM::Worker"))
    return next((pid for pid in workers if of is not None and parent(pid) == of), None)


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
