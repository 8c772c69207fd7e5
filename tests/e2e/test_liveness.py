"""However a run on Ray ends, nothing of it stays, and the same command works one second later (F15).

The cases share one folder and follow each other: each starts the command that the one before it ended, so each also
proves that what was left does not matter. Every process that descends from a run is found by its environment. The
deaths of workers are in ``test_liveness_deaths``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymloop.errors import ConfigError
from gymloop.startup import hold_socket
from homes import Home, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AFTER_SIGKILL_S = 10
AFTER_A_SIGNAL_S = 30
NAMED_WITHIN_S = 60
PORTS = range(23100, 23200)
"""Of the generation servers here; nobody else's."""
ENDLESS = (
    "grpo.max_num_steps=100000",
    "grpo.max_num_epochs=100000",
    "health.unresponsive_after_s=8",
    f"policy.generation.port_range_low={PORTS[0]}",
    f"policy.generation.port_range_high={PORTS[-1]}",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory, toy):
    made = Home(tmp_path_factory.mktemp("liveness"), toy("q"))
    yield made
    made.kill_all()


def listening(home):
    """Ports of ``PORTS`` that processes of the tree listen on."""
    inodes = set()
    for pid in home.processes():
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports & set(PORTS)


def free(port, within_s):
    """Whether the port can be listened on; the kernel closes a dead process's sockets a moment after its memory."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            hold_socket(port, port).close()
            return True
        except ConfigError:
            time.sleep(0.05)
    return False


def aside(home):
    """Checkpoints that were never finished."""
    return (home.run_dir / "checkpoints").glob("tmp_*")


def actor(home, name):
    """Pid of an actor: its log file is its standard output."""
    log = str(home.run_dir / "logs" / f"{name}.log")
    (pid,) = [pid for pid in home.processes() if os.path.realpath(f"/proc/{pid}/fd/1") == log]
    return pid


def until_said(home, process, pattern, count=1):
    """Wait until this start of the run has written so many lines like that to its log."""
    log = home.run_dir / "logs" / "run.log"
    begin = log.stat().st_size if log.exists() else 0
    deadline = time.monotonic() + 240
    while True:
        text = log.read_text()[begin:] if log.exists() else ""
        if len(re.findall(pattern, text)) >= count:
            return
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def in_step_2(home, process):
    until_said(home, process, "update on", 2)


def in_validation(home, process):
    until_said(home, process, "validation on")


def a_second_after_launch(home, process):
    time.sleep(1.0)


def while_models_load(home, process):
    until_said(home, process, "engine: started")


def signals(*numbers):
    def act(home, process):
        for index, number in enumerate(numbers):
            if index:
                time.sleep(1.0)
            if process.poll() is None:
                process.send_signal(number)

    return act


def to_actor(name, number):
    def act(home, process):
        os.kill(actor(home, name), number)

    return act


CASES = {
    # when, what is done, exit codes, seconds until the end, what is said
    "sigint_1_s_after_launch": (a_second_after_launch, signals(signal.SIGINT), (130,), AFTER_A_SIGNAL_S, ""),
    "sigkill_in_step_2": (in_step_2, signals(signal.SIGKILL), (-9,), AFTER_SIGKILL_S, ""),
    "sigterm_while_models_load": (
        while_models_load,
        signals(signal.SIGTERM),
        (143,),
        AFTER_A_SIGNAL_S,
        "stopped while",
    ),
    "sigint_in_step_2": (in_step_2, signals(signal.SIGINT), (130,), AFTER_A_SIGNAL_S, "saving step"),
    "sigterm_in_step_2": (in_step_2, signals(signal.SIGTERM), (143,), AFTER_A_SIGNAL_S, "saving step"),
    "sigterm_in_validation": (in_validation, signals(signal.SIGTERM), (143,), AFTER_A_SIGNAL_S, "saving step"),
    "sigint_twice": (in_step_2, signals(signal.SIGINT, signal.SIGINT), (130,), AFTER_A_SIGNAL_S, ""),
    "policy_stopped": (
        in_step_2,
        to_actor("policy", signal.SIGSTOP),
        (1,),
        NAMED_WITHIN_S,
        "policy does not respond",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_f15_however_a_run_ends_nothing_of_it_stays_and_the_same_command_works_a_second_later(home, case):
    when, act, codes, limit_s, said = CASES[case]
    process = home.start("--resume", *ENDLESS)
    try:
        when(home, process)
        ports = listening(home)
        half_saved = set(aside(home))
        act(home, process)
        began = time.monotonic()
        output, _ = process.communicate(timeout=limit_s + 30)
        seconds = time.monotonic() - began
        assert gone(home, max(0.0, limit_s - seconds)), home.processes()
        assert seconds < limit_s, output
        assert process.returncode in codes, output
        assert said in output
        assert ports or when in (a_second_after_launch, while_models_load)
        for port in ports:
            assert free(port, 5), f"port {port} is still held"
        if "saving" in said:
            last = home.metrics()[-1]["step"]
            assert (home.run_dir / "checkpoints" / f"step_{last}" / "manifest.json").exists()
        if case != "sigkill_in_step_2":
            assert set(aside(home)) <= half_saved, "a run that ends by itself leaves no half checkpoint"
    finally:
        home.kill_all()
    time.sleep(1.0)


def test_the_run_that_was_ended_so_often_still_finishes(home):
    last = home.metrics()[-1]["step"]
    code, output = home.train("--resume", f"grpo.max_num_steps={last + 1}", "grpo.max_num_epochs=100000")
    assert code == 0, output
    assert [entry["step"] for entry in home.metrics()] == list(range(last + 2)), "each step is there exactly once"
    assert gone(home, 10), home.processes()


def test_two_runs_on_one_machine_do_not_meet(tmp_path, toy):
    homes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        homes.append(Home(tmp_path / name, toy("q")))
    processes = [home.start(*ENDLESS) for home in homes]
    try:
        for home, process in zip(homes, processes, strict=True):
            home.wait_for_step(1, process)
        ports = [listening(home) for home in homes]
        assert all(ports)
        assert not ports[0] & ports[1]
        sessions = [set(re.findall(r"session_[\d_-]+", " ".join(home.processes().values()))) for home in homes]
        assert [len(found) for found in sessions] == [1, 1]
        assert sessions[0] != sessions[1]
        processes[0].send_signal(signal.SIGKILL)
        processes[0].communicate(timeout=30)
        assert gone(homes[0], AFTER_SIGKILL_S), homes[0].processes()
        step = homes[1].metrics()[-1]["step"]
        homes[1].wait_for_step(step + 2, processes[1])
        processes[1].send_signal(signal.SIGINT)
        output, _ = processes[1].communicate(timeout=60)
        assert processes[1].returncode == 130, output
        assert gone(homes[1], 10), homes[1].processes()
    finally:
        for home in homes:
            home.kill_all()


def test_a_port_range_that_is_taken_ends_the_start_with_one_sentence(tmp_path, toy):
    home = Home(tmp_path, toy("q"))
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        code, output = home.train(
            f"policy.generation.port_range_low={port}", f"policy.generation.port_range_high={port}"
        )
    home.kill_all()
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if line.startswith("gymloop: ")]
    assert f"no free port between {port} and {port}" in line
    assert f"(pid {os.getpid()})" in line
    assert "startup task 'server' failed" in line


def test_a_model_fetch_ends_with_the_run_that_was_killed(tmp_path, toy):
    """The fetch hangs, as one whose hub does not answer; it and what it started are tied to the run."""
    home = Home(tmp_path, toy("q"))
    hang = tmp_path / "site"
    hang.mkdir()
    (hang / "sitecustomize.py").write_text(
        "import sys, time\nif sys.argv[1:2] == ['models'] or 'models' in sys.orig_argv: time.sleep(300)\n"
    )
    command = [sys.executable, "-m", "gymloop.cli.main", "train", str(home.recipe), "--run", "r"]
    environment = {**os.environ, "GYMLOOP_TEST_TREE": str(home.folder), "PYTHONPATH": str(hang)}
    process = subprocess.Popen(
        [*command, "policy.model_name=nobody/nothing"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 120
        while not any("models fetch" in command for command in home.processes().values()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
        process.communicate(timeout=10)
        assert gone(home, AFTER_SIGKILL_S), home.processes()
    finally:
        home.kill_all()
