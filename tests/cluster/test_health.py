"""A part that dies is told at once, one that hangs after a while; one that starts, or our own pause, is no alarm."""

import asyncio
import contextlib
import signal
import subprocess
import sys

import aiohttp
import pytest

import virtual_time
from gymloop.cluster.health import Health, first_failure
from gymloop.errors import InfraError


class Part:
    """Answers ``answers`` checks, each after ``delay`` seconds, then hangs, or raises ``error``."""

    name = "environment calculator"

    def __init__(self, answers, delay=0.0, error=None):
        self.answers = answers
        self.delay = delay
        self.error = error

    async def check(self):
        if self.answers == 0:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        self.answers -= 1
        await asyncio.sleep(self.delay)

    def symptoms(self):
        return "; it is stopped"


async def until_failure(*parts, period_s=2.0, unresponsive_after_s=60.0, limit_s=100_000):
    """Virtual seconds until the first failure, and what it says."""
    health = Health(period_s, unresponsive_after_s)
    for part in parts:
        health.watch(part)
    try:
        await first_failure(asyncio.sleep(limit_s), health.failed())
    except InfraError as error:
        return asyncio.get_running_loop().time(), str(error)
    finally:
        for part in parts:
            health.forget(part)
    return None


def test_a_death_is_told_at_the_next_look():
    dead = Part(3, error=InfraError("engine died\\n  engine.log: Killed"))
    seconds, message = virtual_time.run(until_failure(Part(10**6), dead))
    assert seconds == pytest.approx(6)
    assert message == "engine died\\n  engine.log: Killed"


def test_a_part_that_hangs_is_named_after_its_patience_with_its_symptoms():
    seconds, message = virtual_time.run(until_failure(Part(1)))
    assert seconds == pytest.approx(62)
    assert message == ("environment calculator does not respond: no answer to a heartbeat for 60 s; it is stopped")


def test_a_slow_answer_within_the_patience_is_no_alarm():
    assert virtual_time.run(until_failure(Part(20, delay=50), limit_s=1000)) is None


def test_a_part_that_has_never_answered_is_still_starting():
    assert virtual_time.run(until_failure(Part(0), limit_s=1000)) is None


def test_time_in_which_this_process_stood_still_does_not_count():
    async def work():
        loop = asyncio.get_running_loop()
        part = Part(1, delay=0.1)
        health = Health(1.0, 60.0)
        health.watch(part)
        await asyncio.sleep(5)
        loop._virtual.now += 300  # the whole process was suspended while a check was out
        part.answers = 10**6
        await asyncio.sleep(10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(health.failed(), 30)
        health.forget(part)

    virtual_time.run(work())


def test_a_failure_is_kept_for_whoever_asks_later_and_the_first_one_counts():
    async def work():
        health = Health(1.0, 60.0)
        health.watch(Part(1, error=InfraError("the first")))
        health.watch(Part(5, error=InfraError("the second")))
        await asyncio.sleep(20)
        for _ in range(2):
            with pytest.raises(InfraError, match="the first"):
                await first_failure(asyncio.sleep(60), health.failed())

    virtual_time.run(work())


def test_the_first_failure_alone_is_told_the_moment_it_is_found():
    async def work():
        told = []
        health = Health(1.0, 60.0, told.append)
        health.watch(Part(1, error=InfraError("the first")))
        health.watch(Part(5, error=InfraError("the second")))
        await asyncio.sleep(20)
        assert [str(error) for error in told] == ["the first"]

    virtual_time.run(work())


def test_a_check_that_slips_is_a_failure_under_the_name_of_its_part():
    _, message = virtual_time.run(until_failure(Part(0, error=ValueError("no JSON"))))
    assert message == "environment calculator could not be checked: ValueError: no JSON"


def test_what_is_forgotten_is_not_asked_again():
    async def work():
        part = Part(0, error=InfraError("ended on purpose"))
        health = Health(1.0, 60.0)
        health.watch(part)
        health.forget(part)
        health.forget(part)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(health.failed(), 100)

    virtual_time.run(work())


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): ...
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class ServerPart:
    """An environment's server in a process of its own, as whoever hosts one will watch it."""

    name = "environment calculator"

    def __init__(self, process, url):
        self.process = process
        self.url = url
        self.answered = asyncio.Event()

    async def check(self):
        if self.process.poll() is not None:
            raise InfraError(f"{self.name} ended with {self.process.returncode}")
        timeout = aiohttp.ClientTimeout(total=60)
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self.url):
                self.answered.set()

    def symptoms(self):
        return f"; process {self.process.pid}"


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "calculator ended with -9"), (signal.SIGSTOP, "calculator does not respond: no answer")],
)
def test_a16_the_death_or_hang_of_an_environments_process_is_reported_by_name(number, message):
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    part = ServerPart(process, f"http://127.0.0.1:{int(process.stdout.readline())}/healthz")

    async def work():
        health = Health(period_s=0.1, unresponsive_after_s=2.0)
        health.watch(part)
        await asyncio.wait_for(part.answered.wait(), 30)
        process.send_signal(number)
        with pytest.raises(InfraError, match=message):
            await first_failure(asyncio.sleep(30), health.failed())
        health.forget(part)

    try:
        asyncio.run(work())
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


async def revived(revive, *, answers=1, checks_after=3):
    """What ``revive`` was told, and the failure that came after all, if one did."""
    told = []
    part = Part(answers, error=InfraError("server died"))

    async def bring_back(error):
        told.append(str(error))
        await revive(part, len(told))

    health = Health(2.0, 60.0)
    health.watch(part, bring_back)
    try:
        await first_failure(asyncio.sleep(20), health.failed())
    except InfraError as error:
        return told, str(error), health.take_revived()
    finally:
        health.forget(part)
    return told, None, health.take_revived()


def test_a_part_that_is_revived_is_no_failure_and_is_counted_and_watched_on():
    async def comes_back(part, time):
        part.answers = 1 if time < 3 else 10**6

    told, failure, count = virtual_time.run(revived(comes_back))
    assert told == ["server died"] * 3
    assert failure is None
    assert count == 3


def test_a_part_that_cannot_be_revived_fails_as_whoever_tried_says():
    async def gives_up(part, time):
        raise InfraError("server died again after 0 restarts")

    told, failure, count = virtual_time.run(revived(gives_up))
    assert (told, failure, count) == (["server died"], "server died again after 0 restarts", 0)


def test_the_count_of_revived_parts_is_taken_once():
    async def main():
        health = Health(1.0, 60.0)
        part = Part(1, error=InfraError("died"))

        async def comes_back(_error):
            part.answers = 10**6

        health.watch(part, comes_back)
        await asyncio.sleep(5)
        health.forget(part)
        return health.take_revived(), health.take_revived()

    assert virtual_time.run(main()) == (1, 0)
