"""A tied process ends with the one that started it, also when that one is killed and also when it is itself stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymloop.lifeline import LOOK_S, MARK, reaped, tied

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


WIPED = """
import ctypes, os, subprocess, sys, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[47]), int(fields[48])
if sys.argv[1] == "child":
    ctypes.memset(begin, 0, end - begin)
    print(os.getpid(), b"GYMLOOP" in open("/proc/self/environ", "rb").read(), flush=True)
else:
    subprocess.Popen([sys.executable, __file__, "child"])
time.sleep(60)
"""

RUN_WIPED = """
import subprocess, sys, time
from gymloop.lifeline import tied, reaped
with reaped():
    middle = subprocess.Popen(tied([sys.executable, sys.argv[1], "parent"]))
    time.sleep(60)
"""


def test_a_process_that_wrote_its_title_over_its_environment_ends_with_the_run_although_its_parent_ended(tmp_path):
    script = tmp_path / "wiped.py"
    script.write_text(WIPED)
    run = subprocess.Popen([sys.executable, "-c", RUN_WIPED, str(script)], stdout=subprocess.PIPE, text=True)
    pid, marked = run.stdout.readline().split()
    try:
        assert marked == "False", "the environment of the process no longer shows the mark"
        time.sleep(2 * LOOK_S)
        run.kill()  # the kernel kills the middle one with it, so that nothing leads to the last one any more
        run.communicate(timeout=30)
        deadline = time.monotonic() + 10
        while alive(int(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        run.kill()
        if alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def test_a_reaper_that_a_process_of_a_run_starts_is_not_of_that_run_and_ends_by_itself():
    """The outer one would take it for a child without a mark, and kill it before it has cleaned up."""
    script = """
import os, subprocess, sys, time
from gymloop.lifeline import MARK, Reaper, reaped
if len(sys.argv) > 1:
    inner = Reaper()
    print(inner._process.pid, flush=True)
    time.sleep(60)
with reaped():
    subprocess.Popen([sys.executable, "-c", os.environ["SCRIPT"], "inner"])
    time.sleep(60)
"""
    run = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "SCRIPT": script}, stdout=subprocess.PIPE, text=True
    )
    pid = int(run.stdout.readline())
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    try:
        assert b"GYMLOOP_RUN=" in environment
    finally:
        run.kill()
        run.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "it ends once the process that it waits for has"
        time.sleep(0.02)
