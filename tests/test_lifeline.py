"""A tied process ends with the one that started it, also when that one is killed and also when it is itself stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymloop.lifeline import MARK, reaped, tied

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")

PARENT = """
import subprocess, sys
from gymloop.lifeline import tied
child = subprocess.Popen(tied([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]),
                         stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("stopped", [False, True])
def test_a_tied_process_ends_when_its_parent_is_killed(stopped):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        assert alive(child)
        if stopped:
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait(10)
        deadline = time.monotonic() + 10
        while alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.communicate(timeout=10)
        if alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_tied_command_is_the_command_otherwise():
    done = subprocess.run(
        tied([sys.executable, "-c", "import sys; print(sys.stdin.read(), sys.argv[1]); sys.exit(7)", "two words"]),
        input="in", capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "in two words\n")


def test_a_process_whose_parent_is_gone_already_does_not_begin():
    command = [sys.executable, "-m", "gymloop.lifeline", "1", sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")


RUN = """
import subprocess, sys, time
from gymloop.lifeline import reaped
child = [sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True);"
         "sys.stdin.read()"]
with reaped():
    middle = subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    print(middle.pid, int(middle.stdout.readline()), flush=True)
    if sys.argv[1] == "stay":
        time.sleep(60)
print("left", flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "left"])
def test_what_a_reaped_run_started_ends_with_it_also_what_others_started_for_it(how):
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, "stay" if how == "killed" else "go"], stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in run.stdout.readline().split()]
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        if how == "killed":
            run.kill()
        else:
            assert run.stdout.readline() == "left\n"
            assert not any(map(alive, pids)), "the block ends once everything has ended"
        run.communicate(timeout=30)
        deadline = time.monotonic() + 10
        while any(map(alive, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(10)
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_within_a_marked_block_setproctitle_leaves_the_environment_alone_and_behind_it_all_is_as_before(monkeypatch):
    monkeypatch.setenv("SPT_NOENV", "mine")
    monkeypatch.delenv(MARK, raising=False)
    with reaped():
        assert (os.environ["SPT_NOENV"], len(os.environ[MARK])) == ("1", 32)
    assert (os.environ["SPT_NOENV"], MARK in os.environ) == ("mine", False)


ON_RAY = """
import os, time
from pathlib import Path
import ray
from gymloop.lifeline import MARK, reaped

def titles():
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    for pid, parent in parents.items():
        title = Path(f"/proc/{pid}/cmdline").read_bytes() if parents.get(parent) == os.getpid() else b""
        if title.startswith(b"ray::"):
            found[title.split(b"\\0")[0].decode()] = pid
    return found

with reaped():
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    until = time.monotonic() + 90
    while not {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= titles().keys() and time.monotonic() < until:
        time.sleep(0.1)
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    for title, pid in titles().items():
        print(title, wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\\0"), flush=True)
    ray.shutdown()
"""


@pytest.mark.timeout(180)
def test_rays_processes_carry_the_mark_also_those_that_have_given_themselves_a_title():
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY], capture_output=True, text=True, timeout=150, check=False, env=variables
    )
    titles = [line.rsplit(maxsplit=1) for line in done.stdout.splitlines()]
    assert {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= {title for title, _ in titles}, done.stderr
    assert [title for title, marked in titles if marked == "False"] == []
