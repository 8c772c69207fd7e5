"""Joining a cluster that somebody else started, or saying within seconds why not; what workers see of environments."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymloop.cluster.actor import RayRemote
from gymloop.cluster.local import RayCluster, require_answer, told
from gymloop.errors import ConfigError, InfraError
from gymloop.lifeline import tied
from gymloop.startup import hold_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what processes have is read from /proc")

SECRETS = {"HF_TOKEN": "hf_mine", "WANDB_API_KEY": "w_mine", "MY_ENDPOINT": "e_mine"}
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""A cluster of this test's own; no token of the user's is used or made."""


class Worker:
    """Says what it sees."""

    def environment(self):
        return dict(os.environ)

    def initial(self):
        """As the process was started; whoever may read this process's memory sees it."""
        return Path("/proc/self/environ").read_bytes().decode()

    def pid(self):
        return os.getpid()

    def close(self):
        pass


def free_port():
    """Outside the ranges from which the kernel and Ray give ports to others meanwhile."""
    with hold_socket(31000, 31999) as held:
        return held.getsockname()[1]


# ---------------------------------------------------------------- a cluster of our own


@pytest.fixture(scope="module")
def own_cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        cluster = RayCluster(num_cpus=1)
        cluster.connect()
        yield cluster
        cluster.disconnect()


async def test_a_secret_of_the_driver_reaches_no_worker_not_even_its_first_environment(
    own_cluster, tmp_path, monkeypatch
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth9")  # set after Ray has started
    remote = RayRemote("w", Worker, env={"OMP_NUM_THREADS": "3"}, log_file=tmp_path / "w.log")
    seen = await remote.call("environment", timeout=120)
    first = await remote.call("initial", timeout=60)
    assert not set(SECRETS) & set(seen)
    for value in SECRETS.values():
        assert value not in first
    assert seen["OMP_NUM_THREADS"] == "3"
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["NCCL_SOCKET_IFNAME"] == "eth9", "as on a cluster that is joined"
    remote.kill()


@pytest.mark.slow
async def test_what_the_recipe_names_a_worker_sees(own_cluster, tmp_path):
    remote = RayRemote("w", Worker, env={}, log_file=tmp_path / "w.log", further_env=("MY_ENDPOINT",))
    seen = await remote.call("environment", timeout=120)
    assert seen["MY_ENDPOINT"] == "e_mine"
    assert "HF_TOKEN" not in seen
    remote.kill()


# ---------------------------------------------------------------- somebody else's


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The address of a cluster that is started as a person starts it, with a secret in its own environment."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--num-cpus=2", "--block",
        "--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("head") / "head.log"
    with log.open("w") as out:
        head = subprocess.Popen(
            tied(command), env=environment | OPEN | {"AWS_SECRET_ACCESS_KEY": "theirs"}, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)


def program(text, address, **environment):
    """Run a driver in a process of its own, since a process has one connection to Ray."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | OPEN | {"RAY_ADDRESS": address} | environment,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


JOIN = """
import asyncio, json, os, time
from pathlib import Path
from gymloop.cluster.actor import RayRemote
from gymloop.cluster.local import RayCluster
class Worker:  # here, so that it travels by value: the cluster's machines do not have this file
    def environment(self): return dict(os.environ)
    def pid(self): return os.getpid()
began = time.monotonic()
cluster = RayCluster(num_cpus=64)
cluster.connect()
"""


@pytest.mark.slow
def test_joining_leaves_the_cluster_as_it_was_but_for_our_actors(others, tmp_path):
    told = program(
        JOIN
        + f"""
import ray
@ray.remote(num_cpus=0, lifetime="detached", name="theirs", namespace="theirs")
class Theirs:
    def pid(self): return os.getpid()
theirs = ray.get(Theirs.remote().pid.remote(), timeout=60)
remote = RayRemote("ours", Worker, env={{}}, log_file=Path({str(tmp_path / "ours.log")!r}), num_cpus=1)
async def work():
    seen = await remote.call("environment", timeout=120)
    return await remote.call("pid", timeout=60), sorted(seen)
ours, seen = asyncio.run(work())
cpus = ray.cluster_resources()["CPU"]
remote.kill()
cluster.disconnect()
print(json.dumps([theirs, ours, seen, cpus, cluster.joins]))
""",
        others,
        HF_TOKEN="hf_mine",
    )
    theirs, ours, seen, cpus, joins = told
    assert joins
    assert cpus == 2, "the cluster is the other's, whatever we would have started"
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(seen), "neither our secrets nor the cluster's"
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{ours}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{ours}"), "our actor is gone"
    assert os.path.exists(f"/proc/{theirs}"), "theirs lives"
    again = program(JOIN + "cluster.disconnect(); print(json.dumps(time.monotonic() - began))", others)
    assert again < 60, "the head still takes whoever joins"


@pytest.mark.slow
def test_what_the_driver_sets_reaches_workers_of_processes_that_had_none_of_it(others, tmp_path):
    log = tmp_path / "ours.log"
    seen, logs = program(
        JOIN
        + f"""
import ray
os.environ["OMP_NUM_THREADS"] = "7"
remote = RayRemote(
    "ours", Worker, env={{"OMP_NUM_THREADS": "3"}}, log_file=Path({str(log)!r}),
    further_env=("MY_ENDPOINT", "WANDB_API_KEY", "MY_ABSENT", "CUDA_VISIBLE_DEVICES"),
)
seen = asyncio.run(remote.call("environment", timeout=120))
logs = str(Path(ray._private.worker._global_node.get_session_dir_path()) / "logs")
remote.kill()
cluster.disconnect()
print(json.dumps([seen, logs]))
""",
        others,
        NCCL_SOCKET_IFNAME="a-network-of-mine",
        VLLM_LOGGING_LEVEL="INFO",
        HF_HUB_CACHE="/a-hub-of-mine",
        VLLM_CACHE_ROOT="/of/$HOME/mine",
        GYMLOOP_CACHE=str(tmp_path),
        CUDA_VISIBLE_DEVICES="5",
        MY_ENDPOINT="an-endpoint-of-mine",
        WANDB_API_KEY="a-key-of-mine",
        HF_TOKEN="a-token-of-mine",
        MY_SETTING="a-setting-of-mine",
    )
    assert seen["NCCL_SOCKET_IFNAME"] == "a-network-of-mine"
    assert seen["VLLM_LOGGING_LEVEL"] == "INFO"
    assert seen["HF_HUB_CACHE"] == "/a-hub-of-mine"
    assert seen["VLLM_CACHE_ROOT"] == "/of/$HOME/mine"
    assert seen["GYMLOOP_CACHE"] == str(tmp_path)
    assert seen["OMP_NUM_THREADS"] == "3", "what the run computes comes before what the driver has"
    assert seen["MY_ENDPOINT"] == "an-endpoint-of-mine"
    assert seen["WANDB_API_KEY"] == "a-key-of-mine"
    assert not {"HF_TOKEN", "MY_SETTING", "MY_ABSENT", "AWS_SECRET_ACCESS_KEY"} & set(seen)
    assert seen.get("CUDA_VISIBLE_DEVICES") != "5", "which GPUs is Ray's to say"
    written = "".join(path.read_text(errors="replace") for path in [log, *Path(logs).rglob("*")] if path.is_file())
    assert "/a-hub-of-mine" in written, "Ray logs what it is given as a variable"
    for secret in ("an-endpoint-of-mine", "a-key-of-mine", "a-token-of-mine", "a-setting-of-mine"):
        assert secret not in written


@pytest.mark.slow
def test_another_version_on_the_cluster_is_one_sentence_with_both(others):
    text = """
import json, time
from ray._raylet import GcsClient
import ray._private.ray_constants as constants
from gymloop.cluster.local import RayCluster
from gymloop.errors import ConfigError
import os
client = GcsClient(address=os.environ["RAY_ADDRESS"])
space = constants.KV_NAMESPACE_CLUSTER
before = client.internal_kv_get(b"CLUSTER_METADATA", space)
client.internal_kv_put(
    b"CLUSTER_METADATA", json.dumps({**json.loads(before), "ray_version": "1.2.3"}).encode(), True, space
)
began = time.monotonic()
try:
    RayCluster(num_cpus=1).connect()
    said = "joined"
except ConfigError as error:
    said = str(error)
finally:
    client.internal_kv_put(b"CLUSTER_METADATA", before, True, space)
print(json.dumps([said, time.monotonic() - began]))
"""
    said, seconds = program(text, others)
    assert "it runs Ray 1.2.3 and Python" in said
    assert said.endswith("; expected the same on both")
    assert "\n" not in said
    assert seconds < 30


LEFT_AT_ONCE = """
import contextlib, json, os, sys, threading, time
from pathlib import Path
from gymloop.cluster import local
from gymloop.cluster.local import RayCluster

def children():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread or a child has ended meanwhile
            for pid in (task / "children").read_text().split():
                found.append(os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0")[0].decode()))
    return found

local.SETTLE_LIMIT_S = local.DISCONNECT_LIMIT_S = 60.0  # the machine may be busy
cluster = RayCluster(num_cpus=1)
threading.Thread(target=cluster.connect, daemon=True).start()
while "gcs_server" not in children():
    time.sleep(0.001)
cluster.disconnect()
print(json.dumps([cluster._thread.is_alive(), children()]))
"""


def test_a_cluster_that_is_left_while_its_head_starts_is_gone_and_holds_nothing_up():
    alive, children = program(LEFT_AT_ONCE, "")
    assert not alive, "Ray's start would hold Python's lock for 30 s were its head process killed now"
    assert not {"gcs_server", "raylet"} & set(children)


def test_an_address_where_nobody_listens_is_told_within_seconds():
    address = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(InfraError, match=rf"could not join .* RAY_ADDRESS={address}: Connection refused; is its head"):
        require_answer(address)
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_listener_that_is_no_ray_head_is_told_within_the_bound():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        text = """
import json, os, time
from gymloop.cluster.local import RayCluster
from gymloop.errors import InfraError
began = time.monotonic()
try:
    RayCluster(num_cpus=1).connect()
    said = "joined"
except InfraError as error:
    said = str(error)
print(json.dumps([said, time.monotonic() - began]), flush=True)
os._exit(0)
"""
        said, seconds = program(text, address)
    assert f"could not join the Ray cluster at RAY_ADDRESS={address}" in said
    assert seconds < 60


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "head", "h:0", "h:99999", "a b:6379"])
def test_what_is_no_address_is_refused_with_what_was_expected(address):
    with pytest.raises(ConfigError, match="expected host:port of its head"):
        require_answer(address)
    if "://" in address:
        with pytest.raises(ConfigError, match="not through Ray's client"):
            require_answer(address)


def test_a_host_without_an_address_is_told():
    with pytest.raises(InfraError, match=r"could not join .*RAY_ADDRESS=no-such-host\.invalid:6379"):
        require_answer("no-such-host.invalid:6379")


def test_rays_own_words_are_one_line():
    error = told(RuntimeError("a\n   b\nc"), "join the Ray cluster at RAY_ADDRESS=h:1")
    assert str(error) == "could not join the Ray cluster at RAY_ADDRESS=h:1: RuntimeError: a b c"


@pytest.mark.slow
async def test_a_loop_is_not_held_up_by_a_cluster_that_cannot_be_joined(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(InfraError, match="Connection refused"):
        await asyncio.wait_for(asyncio.to_thread(RayCluster(num_cpus=1).connect), 20)
