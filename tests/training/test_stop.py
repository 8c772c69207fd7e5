"""Each signal is more urgent than the one before; the second and third also work while the event loop is blocked."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from gymloop.training.stop import Stopped, StopSignal
from gymloop.training.tasks import engine

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")

PROGRAM = """
import asyncio, sys, time
from gymloop.training.stop import Stopped, StopSignal

def block():
    print("ready", flush=True)
    end, said = time.monotonic() + 60, (0, False)
    while time.monotonic() < end:
        if said != (stop.exit_code, stop.insisted):
            said = (stop.exit_code, stop.insisted)
            print("blocked", *said, flush=True)

stop = None

async def main():
    global stop
    stop = StopSignal()
    with stop.installed(asyncio.current_task()):
        if sys.argv[1] == "blocked":
            block()
        print("ready", flush=True)
        try:
            await stop.watch()
        except Stopped as stopped:
            print("asked", stopped.exit_code, flush=True)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            print("cancelled", stop.insisted, flush=True)
            if sys.argv[1] == "stubborn":
                block()
            return stop.exit_code

sys.exit(asyncio.run(main()))
"""


def start(how):
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_cancels_under_the_code_of_the_first(number):
    child = start("listening")
    child.send_signal(number)
    assert child.stdout.readline() == f"asked {128 + number}\n"
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=30)
    assert (child.returncode, output) == (128 + number, "cancelled True\n")


def test_a_second_signal_ends_a_process_whose_loop_is_blocked_and_a_third_does_so_at_once():
    for signals, limit_s in ((2, 15), (3, 4.5)):
        child = start("blocked")
        began = time.monotonic()
        for heard in ("False", "True", None)[:signals]:  # two at once would be one to the kernel
            child.send_signal(signal.SIGINT)
            if heard is not None:
                assert child.stdout.readline() == f"blocked 130 {heard}\n"
        child.wait(timeout=30)
        assert child.returncode == 130
        assert time.monotonic() - began < limit_s
        child.stdout.close()


def test_a_teardown_that_blocks_after_the_second_signal_is_cut_short():
    child = start("stubborn")
    child.send_signal(signal.SIGTERM)
    child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_waits_wakes_for_a_signal_that_does_not_interrupt_its_wait(number, new_loop):
    """As one that comes a moment before the wait begins: here it comes to another thread."""

    async def wait():
        stop = StopSignal()
        before = signal.getsignal(number)
        with stop.installed(asyncio.current_task()):
            elsewhere = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), number))
            elsewhere.start()
            began = time.monotonic()
            with pytest.raises(Stopped):
                await asyncio.wait_for(stop.watch(), 60)
            waited = time.monotonic() - began
            elsewhere.join()
        assert (stop.exit_code, signal.getsignal(number)) == (128 + number, before)
        return waited

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(wait()) < 20


def test_blocking_work_is_not_waited_for_once_the_run_is_asked_to_stop():
    async def wait():
        stop, release = StopSignal(), threading.Event()
        with stop.installed(asyncio.current_task()):
            assert await stop.unless_asked(lambda: 7, "quick") == 7
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(Stopped):
                await stop.unless_asked(lambda: release.wait(60), "blocked")
        release.set()

    began = time.monotonic()
    asyncio.run(wait())
    assert time.monotonic() - began < 20


RESUME = """
import sys, threading
from gymloop.training.checkpoint import CheckpointStore

def latest(store):
    print("hashing", flush=True)
    threading.Event().wait(60)

CheckpointStore.latest = latest
from gymloop.cli.main import main
sys.exit(main(["train", sys.argv[1], "logger.log_dir=" + sys.argv[2], "--run", "r", "--resume"]))
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_that_is_asked_while_it_reads_its_checkpoint_ends_at_once_with_the_documented_code(signals, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", RESUME, QUICKSTART, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while child.stdout.readline() != "hashing\n":
        assert child.poll() is None
    for _ in range(signals):
        child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=30)
    assert child.returncode == 130, output
    assert "Traceback" not in output
    assert "stopped while starting; nothing was trained" in output


LEAVE = """
import asyncio, os, signal, sys
from gymloop.cluster.local import RayCluster
from gymloop.training.stop import StopSignal
from gymloop.training.tasks.engine import _leave

def caught():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

async def main():
    stop = StopSignal()
    with stop.installed(asyncio.current_task()):
        cluster = RayCluster(num_cpus=1)
        await asyncio.to_thread(cluster.connect)
        stop.claim()
        await _leave(cluster, stop)
        assert caught(), "Ray has left the system's handler, and Python knows nothing of it"
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        print(stop.requested)
        sys.stdout.flush()

asyncio.run(main())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux what a signal does")
def test_a_signal_is_the_runs_again_once_ray_was_left():
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


def test_what_takes_the_signals_while_they_are_kept_has_them_for_a_moment():
    async def wait():
        stop = StopSignal()
        with stop.installed(asyncio.current_task()):
            ours = signal.getsignal(signal.SIGTERM)
            keeping = asyncio.ensure_future(stop.keep())
            for _ in range(3):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                until = time.monotonic() + 20
                while signal.getsignal(signal.SIGTERM) != ours and time.monotonic() < until:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert signal.getsignal(signal.SIGTERM) == ours
            keeping.cancel()

    asyncio.run(wait())


async def test_while_ray_is_left_the_signals_are_kept(monkeypatch):
    stop, seen = StopSignal(), threading.Event()

    class Cluster:
        def disconnect(self):
            assert seen.wait(20)

    with stop.installed(asyncio.current_task()):
        ours = signal.getsignal(signal.SIGTERM)
        leaving = asyncio.ensure_future(engine._leave(Cluster(), stop))
        await asyncio.sleep(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        until = time.monotonic() + 20
        while signal.getsignal(signal.SIGTERM) != ours and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert signal.getsignal(signal.SIGTERM) == ours, "while it is still being left"
        seen.set()
        await leaving
