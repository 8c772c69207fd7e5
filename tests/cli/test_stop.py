"""A command that serves hears every signal at once, whatever its main thread is doing."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from gymloop.cli.stop import Stop
from gymloop.wakeup import SIGNALS

AT_ANY_MOMENT = """
import faulthandler, random, signal
from gymloop import wakeup
from gymloop.cli import stop
wakeup.SIGNALS = (signal.SIGALRM,)  # one that a timer sends between any two instructions
for round in range(3000):
    faulthandler.dump_traceback_later(20, exit=True)
    with stop.Stop() as asked:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.001))
        while not asked.wait(0.0003):
            pass
print("heard", asked.number == signal.SIGALRM)
"""
TWICE = """
import time
from gymloop.cli.stop import Stop
with Stop() as asked:
    print("ready", flush=True)
    assert asked.wait(60)
    print("asked", asked.exit_code, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_wait_ends_with_a_signal_that_another_thread_received(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.wait(0)
        elsewhere = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), number))
        elsewhere.start()
        began = time.monotonic()
        assert stop.wait(60)
        assert time.monotonic() - began < 20
        elsewhere.join()
        assert stop.wait(0), "it stays asked"
        assert stop.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_signal_between_any_two_instructions_of_a_wait_is_heard():
    done = subprocess.run([sys.executable, "-c", AT_ANY_MOMENT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "heard True\n"), done.stderr


def test_a_second_signal_ends_the_process_at_once():
    child = subprocess.Popen([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "asked 143\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=30) == 130
    child.stdout.close()
