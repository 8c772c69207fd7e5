"""Each signal is more urgent than the one before; the second and third also work while the event loop is blocked."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest
import uvloop

from gymloop.training.stop import Stopped, StopSignal

PROGRAM = """
import asyncio, sys, time
from gymloop.training.stop import Stopped, StopSignal

def block():
    print("ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass

async def main():
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
    for signals, limit_s in ((2, 15), (3, 5.5)):
        child = start("blocked")
        began = time.monotonic()
        for _ in range(signals):
            child.send_signal(signal.SIGINT)
            time.sleep(0.6)
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
