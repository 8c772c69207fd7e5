"""A worker behaves the same inline and in a Ray actor; a dead one is named at once."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from gymloop.cluster.actor import RayRemote
from gymloop.cluster.health import Health, first_failure
from gymloop.cluster.local import RayCluster
from gymloop.cluster.remote import InlineRemote
from gymloop.errors import ConfigError, InfraError


class Worker:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def big(self) -> np.ndarray:
        return np.arange(1_000_000, dtype=np.uint8)

    def total(self, array: np.ndarray) -> tuple[int, bool]:
        return int(array.sum()), bool(array.flags.writeable)

    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    def refuse(self) -> None:
        raise ConfigError("port 1 is taken; choose another")

    def slip(self) -> None:
        raise ValueError("not on purpose")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pid(self) -> int:
        return os.getpid()

    def hold_the_interpreter(self) -> None:
        ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the interpreter's lock

    def die(self) -> None:
        print("last words", flush=True)
        os._exit(7)

    def check(self) -> None:
        if self.value < 0:
            raise InfraError("its memory is gone")

    def close(self) -> None:
        self.value = -1


def refuse_to_be_built():
    raise ConfigError("no port is free")


async def ended(pid: int) -> None:
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC240
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")


@pytest.fixture(scope="module")
def ray_cluster():
    cluster = RayCluster(num_cpus=2)
    cluster.connect()
    yield
    cluster.disconnect()
    cluster.disconnect()


@pytest.fixture(params=["inline", "ray"])
def remote(request, tmp_path):
    if request.param == "inline":
        made = InlineRemote("adder", partial(Worker, 5))
    else:
        request.getfixturevalue("ray_cluster")
        made = RayRemote("adder", partial(Worker, 5), env={"OMP_NUM_THREADS": "3"}, log_file=tmp_path / "adder.log")
    yield made
    made.kill()


async def test_calls_reach_one_worker_that_keeps_its_state(remote):
    assert await remote.call("add", 2, timeout=60) == 7
    assert await remote.call("add", 3, timeout=60) == 10


async def test_a_reference_travels_to_another_call_without_being_looked_at(remote):
    total, _ = await remote.call("total", remote.refer("big"), timeout=60)
    assert total == int(np.arange(1_000_000, dtype=np.uint8).sum())


async def test_what_a_worker_raises_on_purpose_arrives_as_it_was(remote):
    with pytest.raises(ConfigError, match="port 1 is taken; choose another"):
        await remote.call("refuse", timeout=60)


async def test_a_call_that_takes_too_long_is_named(remote):
    await remote.call("add", 0, timeout=60)
    begin = time.monotonic()
    with pytest.raises(InfraError, match=r"adder did not finish sleep within 0 s"):
        await remote.call("sleep", 3.0, timeout=0.3)
    assert time.monotonic() - begin < 2.9


async def test_a_worker_that_was_killed_fails_its_check_with_its_name(remote):
    await remote.call("add", 0, timeout=60)
    await remote.check()
    remote.kill()
    health = Health(period_s=0.2, unresponsive_after_s=60)
    health.watch(remote)
    with pytest.raises(InfraError, match="adder"):
        await asyncio.wait_for(health.failed(), 10)


async def test_a_worker_that_says_itself_that_it_cannot_go_on_fails_its_check_with_its_name(remote):
    await remote.check()
    await remote.call("add", -6, timeout=60)
    with pytest.raises(InfraError, match=r"^adder: its memory is gone$"):
        await remote.check()
    await remote.call("add", 6, timeout=60)
    await remote.check()


async def test_heartbeats_are_answered_while_every_thread_of_the_worker_is_busy(remote):
    await remote.check()
    busy = [asyncio.ensure_future(remote.call("sleep", 6.0, timeout=60)) for _ in range(8)]
    await asyncio.sleep(0.5)
    await asyncio.wait_for(remote.check(), 5)
    assert not any(work.done() for work in busy)
    await asyncio.gather(*busy)


async def test_ray_gives_the_actor_its_own_thread_count(ray_cluster, tmp_path):
    remote = RayRemote("adder", partial(Worker, 5), env={"OMP_NUM_THREADS": "3"}, log_file=tmp_path / "adder.log")
    assert await remote.call("threads", timeout=60) == "3"
    remote.kill()


async def test_arrays_pass_between_ray_workers_through_shared_memory(ray_cluster, tmp_path):
    remote = RayRemote("adder", partial(Worker, 5), env={}, log_file=tmp_path / "adder.log")
    _, writeable = await remote.call("total", remote.refer("big"), timeout=60)
    assert not writeable, "a read-only array is mapped from the object store; a copy would be writeable"
    remote.kill()


async def test_a_slip_in_a_ray_worker_names_worker_method_and_error(ray_cluster, tmp_path):
    remote = RayRemote("adder", partial(Worker, 5), env={}, log_file=tmp_path / "adder.log")
    with pytest.raises(InfraError, match="adder failed in slip: ValueError: not on purpose"):
        await remote.call("slip", timeout=60)
    remote.kill()


async def test_a_dead_ray_worker_ends_the_work_within_10_s_with_its_last_words(ray_cluster, tmp_path):
    remote = RayRemote("adder", partial(Worker, 5), env={}, log_file=tmp_path / "adder.log")
    await remote.call("add", 0, timeout=60)
    health = Health(period_s=2, unresponsive_after_s=60)
    health.watch(remote)

    async def work() -> None:
        with pytest.raises(InfraError):
            await remote.call("die", timeout=60)
        await asyncio.sleep(60)

    begin = time.monotonic()
    with pytest.raises(InfraError, match=r"(?s)adder died.*last words"):
        await first_failure(work(), health.failed())
    assert time.monotonic() - begin < 10


async def test_a_ray_worker_that_dies_while_it_makes_anothers_argument_is_the_one_named(ray_cluster, tmp_path):
    giver = RayRemote("giver", partial(Worker, 5), env={}, log_file=tmp_path / "giver.log")
    taker = RayRemote("taker", partial(Worker, 5), env={}, log_file=tmp_path / "taker.log")
    with pytest.raises(InfraError, match=r"(?s)^giver died during its part in total of taker.*giver\.log: .* die"):
        await taker.call("total", giver.refer("die"), timeout=60)
    assert await taker.call("add", 1, timeout=60) == 6
    taker.kill()


async def test_a_stopped_ray_worker_is_named_with_its_state_and_killing_it_leaves_no_process(ray_cluster, tmp_path):
    remote = RayRemote("adder", partial(Worker, 5), env={}, log_file=tmp_path / "adder.log")
    pid = await remote.call("pid", timeout=60)
    health = Health(period_s=0.2, unresponsive_after_s=3)
    health.watch(remote)
    await asyncio.sleep(3)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(InfraError, match=rf"adder does not respond: .* process {pid}: it is stopped"):
        await first_failure(asyncio.sleep(60), health.failed())
    assert 2.5 < time.monotonic() - begin < 15
    health.forget(remote)
    remote.kill()
    await ended(pid)


async def test_a_worker_whose_interpreter_is_stuck_is_named_with_its_stack(ray_cluster, tmp_path):
    remote = RayRemote("adder", partial(Worker, 5), env={}, log_file=tmp_path / "adder.log")
    pid = await remote.call("pid", timeout=60)
    health = Health(period_s=0.2, unresponsive_after_s=3)
    health.watch(remote)
    await asyncio.sleep(3)
    stuck = remote.call("hold_the_interpreter", timeout=60)
    with pytest.raises(InfraError, match=rf"(?s)adder does not respond.* process {pid}: .*hold_the_interpreter"):
        await first_failure(stuck, health.failed())
    health.forget(remote)
    remote.kill()
    await ended(pid)


async def test_what_the_constructor_raises_on_purpose_arrives_as_it_was(ray_cluster, tmp_path):
    remote = RayRemote("adder", refuse_to_be_built, env={}, log_file=tmp_path / "adder.log")
    with pytest.raises(ConfigError, match="no port is free"):
        await remote.call("add", 1, timeout=60)
    await remote.check()
    remote.kill()


async def test_ray_lives_on_when_the_thread_that_connected_has_ended(tmp_path):
    code = (
        "import threading, time; from gymloop.cluster.local import RayCluster\n"
        "cluster = RayCluster(num_cpus=1)\n"
        "thread = threading.Thread(target=cluster.connect); thread.start(); thread.join(100); time.sleep(1)\n"
        "import ray; print(ray.get(ray.remote(lambda: 7).remote(), timeout=60)); cluster.disconnect()\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "7\n", done.stderr


async def test_first_failure_returns_the_work_and_ends_the_watches():
    ended = []

    async def watch() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("watch")

    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    assert await first_failure(work(), watch()) == "done"
    assert ended == ["watch"]


async def test_first_failure_cancels_the_work_when_a_watch_raises():
    ended = []

    async def watch() -> None:
        await asyncio.sleep(0.01)
        raise InfraError("the engine died")

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    with pytest.raises(InfraError, match="the engine died"):
        await first_failure(work(), watch())
    assert ended == ["work"]


async def test_a_cluster_that_cannot_be_joined_is_one_sentence(monkeypatch):
    import ray

    def refuse(**_):
        raise ConnectionError("no such host")

    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.1:6379")
    monkeypatch.setattr(ray, "init", refuse)
    said = r"could not join the Ray cluster at RAY_ADDRESS=203.0.113.1:6379: .*no such host"
    monkeypatch.setattr("gymloop.cluster.local.require_answer", lambda _: None)
    with pytest.raises(InfraError, match=said):
        RayCluster(num_cpus=1).connect()
