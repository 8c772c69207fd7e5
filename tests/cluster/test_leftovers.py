"""A startup that fails leaves no process, actor, placement, socket, thread or shared memory (A3); each is listed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from gymloop.cluster.actor import RayRemote
from gymloop.cluster.health import Health
from gymloop.cluster.local import RayCluster
from gymloop.errors import ConfigError
from gymloop.lifeline import tied
from gymloop.startup import StartupError, Task, hold_socket, run_graph

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left is read from /proc")

MARK = "GYMLOOP_TEST_LEFTOVERS"


def processes() -> set[str]:
    """Marked processes but this one: pid and command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}=1".encode() in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command and int(entry.name) != os.getpid():
                    found.add(f"{entry.name} {command}")
        except OSError:
            continue
    return found


def sockets() -> set[str]:
    """What this process listens on."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(entry))
        except OSError:
            continue
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [fields for fields in map(str.split, lines) if fields[3] == "0A"]
    return {fields[1] for fields in listening if f"socket:[{fields[9]}]" in mine}


def threads() -> set[str]:
    """Ray's client keeps its own until the process ends; they are none of the startup's."""
    return {
        thread.name for thread in threading.enumerate() if thread.name.startswith(("startup-", "teardown-", "ray-"))
    }


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


class Worker:
    def big(self) -> bytes:
        return bytes(5_000_000)

    def sleep(self) -> None:
        threading.Event().wait(60)


def left() -> dict[str, set[str]]:
    return {
        "processes": processes(),
        "sockets": sockets(),
        "threads": threads(),
        "shared memory": shared_memory(),
    }


async def settled(before: dict[str, set[str]], within_s: float) -> dict[str, set[str]]:
    """What is there beyond ``before``, once it stopped shrinking to nothing or the time is over."""
    for _ in range(int(within_s / 0.1)):
        after = {kind: found - before[kind] for kind, found in left().items()}
        if not any(after.values()):
            break
        await asyncio.sleep(0.1)
    return after


async def test_a3_a_failed_startup_leaves_no_process_actor_socket_thread_placement_or_shared_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(MARK, "1")
    before = left()
    seen: dict[str, object] = {}
    health = Health(1.0, 60.0)

    async def ray_(context):
        cluster = RayCluster(num_cpus=2)
        context.on_teardown(cluster.disconnect)
        await context.in_thread(cluster.connect)

    async def socket_(context):
        sock = hold_socket(20000, 29999)
        context.on_teardown(sock.close)

    async def fetch(context):
        process = await asyncio.create_subprocess_exec(*tied(["sleep", "60"]))
        try:
            await process.wait()
        finally:
            process.kill()
            await process.wait()

    async def engine(context):
        remote = RayRemote("engine", Worker, env={}, log_file=tmp_path / "engine.log", num_cpus=1)
        context.on_teardown(remote.kill)
        health.watch(remote)
        context.on_teardown(partial(health.forget, remote))
        seen["reference"] = remote.refer("big")
        await remote.call("big", timeout=100)
        seen["during"] = await context.in_thread(left)
        await remote.call("sleep", timeout=100)

    async def data(context):
        while "during" not in seen:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        raise ConfigError("data.train: the file is empty")

    tasks = [
        Task("ray", ray_, deadline_s=100),
        Task("socket", socket_, deadline_s=100),
        Task("fetch", fetch, deadline_s=100),
        Task("engine", engine, ("ray", "socket"), deadline_s=100),
        Task("data", data, deadline_s=100),
    ]
    with pytest.raises(StartupError, match=r"'data' failed after .*: data\.train: the file is empty") as caught:
        await run_graph(tasks, teardown_s=30)
    assert not getattr(caught.value, "__notes__", []), "every teardown ended"
    during = seen["during"]
    for kind in ("processes", "sockets", "threads"):
        assert during[kind] - before[kind], f"the startup had {kind} to leave behind"
    after = await settled(before, 15)
    assert not any(after.values()), after


async def test_a3_a_failed_startup_gives_back_its_actors_and_their_place_on_a_cluster_that_lives_on(tmp_path):
    """The cluster belongs to somebody else, as with RAY_ADDRESS: only what the startup placed on it goes."""
    code = (
        "import ray, sys, time\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.readline()\n"
        "total = ray.cluster_resources()['CPU']\n"
        "for _ in range(150):\n"
        "    if (free := ray.available_resources().get('CPU', 0)) == total: break\n"
        "    time.sleep(0.1)\n"
        "print(total, free, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    owner = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-c", code]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        address = (await asyncio.wait_for(owner.stdout.readline(), 100)).decode().strip()
        program = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from gymloop.cluster.actor import RayRemote
from gymloop.cluster.local import RayCluster
from gymloop.startup import StartupError, Task, run_graph

class Worker:
    def pid(self):
        import os
        return os.getpid()

async def engine(context):
    cluster = RayCluster(num_cpus=2)
    await context.in_thread(cluster.connect)
    remote = RayRemote("engine", Worker, env={{}}, log_file=Path({str(tmp_path / "engine.log")!r}), num_cpus=1)
    context.on_teardown(remote.kill)
    print(await remote.call("pid", timeout=100), flush=True)
    raise ValueError("x")

async def main():
    try:
        await run_graph([Task("engine", engine, deadline_s=100)])
    except StartupError as error:
        print(error, flush=True)
    await asyncio.sleep(30)  # the connection stays, so what frees the place is the teardown and not the end of the job

asyncio.run(main())
"""
        run = await asyncio.create_subprocess_exec(
            *tied([sys.executable, "-c", program]),
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_ADDRESS": address},
        )
        try:
            pid = int(await asyncio.wait_for(run.stdout.readline(), 100))
            said = (await asyncio.wait_for(run.stdout.readline(), 100)).decode()
            assert "startup task 'engine' failed" in said
            for _ in range(100):
                if not os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC240
                    break
                await asyncio.sleep(0.1)
            assert not os.path.exists(f"/proc/{pid}"), "the actor's process is gone"  # noqa: ASYNC240
            owner.stdin.write(b"\n")
            total, free = (await asyncio.wait_for(owner.stdout.readline(), 60)).split()
            assert total == free, "the actor's CPU is free again"
        finally:
            run.kill()
            await run.wait()
    finally:
        owner.kill()
        await owner.wait()
