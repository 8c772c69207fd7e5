"""Hosting, on real processes of a private server that behaves as told."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.gym.nemo.host import close, host, prepare
from gymloop.gym.nemo.server import NemoGymServer


async def get(url: str) -> dict:
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as response:
        return await response.json()


async def checked(server: NemoGymServer) -> None:
    """As ``cluster.health`` does."""
    async with asyncio.timeout(20):
        while True:
            await server.check()
            await asyncio.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def servers_in(root: Path) -> list[int]:
    """Processes of hosted servers that are alive."""
    folder = str(root / "resources_servers" / "odd")
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _folder(pid) == folder and alive(int(pid))]


def _folder(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def gone(pid: int, within_s: float = 10) -> bool:
    until = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


async def test_servers_know_their_configuration_and_run_their_own_app(odd, tmp_path):
    gym = odd({"a": {"colour": "red"}, "b": {}}, global_aiohttp_connector_limit=7)
    servers = await host(gym, tmp_path / "logs", model=("127.0.0.1", 3000), ray_address="1.2.3.4:5")
    pids = [server.pid for server in servers.values()]
    try:
        told = await get(servers["a"].url + "/told")
        config = told["config"]
        assert told["name"] == "a"
        assert config["a"]["resources_servers"]["odd"]["colour"] == "red"
        for name, server in servers.items():
            settings = config[name]["resources_servers"]["odd"]
            assert server.url == f"http://{settings['host']}:{settings['port']}"
        assert config["policy_model"]["responses_api_models"]["gymloop"]["port"] == 3000
        assert config["ray_head_node_address"] == "1.2.3.4:5"
        assert config["global_aiohttp_connector_limit"] == 7
        assert config["dry_run"] is False
        assert told["argv"] == ["app.py"]
        assert told["path"] == told["cwd"] == str(tmp_path / "resources_servers" / "odd")
        for server in servers.values():
            await server.check()
    finally:
        await close(servers)
    assert all(gone(pid) for pid in pids)
    with pytest.raises((aiohttp.ClientError, OSError)):
        await get(servers["a"].url + "/healthz")


async def test_a_server_that_dies_at_start_is_named_with_its_last_words_and_the_others_end(odd, tmp_path):
    gym = odd({"good": {"sleeps": 30}, "bad": {"dies": True}})
    begun = time.monotonic()
    with pytest.raises(InfraError, match=r"(?s)NeMo Gym server bad ended, exit code 1.*no such dictionary: words\.txt"):
        await host(gym, tmp_path)
    assert time.monotonic() - begun < 15
    assert not servers_in(tmp_path)


async def test_a_server_that_is_never_ready_is_named_at_the_deadline(odd, tmp_path):
    with pytest.raises(InfraError, match=r"(?s)server slow did not become ready within 5 s.*starting slow"):
        await host(odd({"slow": {"sleeps": 60}}, server_spinup_timeout_seconds=5), tmp_path)


async def test_a_death_is_told_by_the_next_check_and_a_restart_keeps_the_address(odd, tmp_path):
    servers = await host(odd({"a": {}}), tmp_path)
    server = servers["a"]
    try:
        url = server.url
        asked = asyncio.create_task(get(url + "/die"))  # aiohttp asks again when the connection is lost
        with pytest.raises(InfraError, match="ended, exit code 3"):
            await checked(server)
        with pytest.raises(aiohttp.ClientError):
            await asked
        with pytest.raises(InfraError, match=r"(?s)server a ended, exit code 3; .*a tool went wrong"):
            await server.check()
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(url + "/healthz")
        await server.restart(30)
        await server.check()
        assert server.url == url
    finally:
        await close(servers)


async def test_a_server_that_ignores_the_request_to_end_is_killed_with_what_it_started(odd, tmp_path):
    servers = await host(odd({"a": {"stubborn": str(tmp_path / "child")}}), tmp_path / "logs")
    pid, child = servers["a"].pid, int((tmp_path / "child").read_text())
    assert alive(child)
    await close(servers)
    assert gone(pid)
    assert gone(child)


async def test_closing_twice_does_nothing(odd, tmp_path):
    servers = await host(odd({"a": {}}), tmp_path)
    await close(servers)
    await close(servers)


def test_a_server_does_not_outlive_the_process_that_hosts_it(odd, tmp_path):
    odd({"a": {}})
    source = f"""
import asyncio, sys, pathlib
from gymloop.gym.nemo.host import Gym, host
from gymloop.gym.nemo.install import Installation
folder = pathlib.Path({str(tmp_path)!r})
here = Installation(folder, pathlib.Path(sys.executable), folder / "none", "0")
async def main():
    servers = await host(Gym.load(here, {{"config_paths": ["odd.yaml"]}}, [folder], {{}}), folder / "logs")
    print(servers["a"].pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(process.stdout.readline())
        assert alive(pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    assert gone(pid)


async def test_the_port_is_held_from_the_first_moment(odd, tmp_path):
    servers = prepare(odd({"a": {}}), tmp_path, model=None, ray_address=None, environ={})
    port = urlsplit(servers["a"].url).port
    assert 10001 <= port <= 20000
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    await close(servers)


async def test_a_range_without_a_free_port_is_a_config_error_and_nothing_is_held(odd, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"no free port between {port} and {port}"):
            await host(odd({"a": {}}, port_range_low=port, port_range_high=port), tmp_path)


def test_a_server_that_calls_the_policy_needs_its_address(odd, tmp_path):
    gym = odd({"a": {"judge": {"type": "responses_api_models", "name": "policy_model"}}})
    with pytest.raises(ConfigError, match="a call policy_model, and no address"):
        prepare(gym, tmp_path, model=None, ray_address=None, environ={})


def test_an_override_that_the_servers_code_never_names_is_refused(odd):
    with pytest.raises(ConfigError, match=r"env\.nemo_gym\.a\.resources_servers\.odd\.colur: nothing in that server's"):
        odd({"a": {}}, a={"resources_servers": {"odd": {"colur": "red"}}})
    assert odd({"a": {}}, a={"resources_servers": {"odd": {"sleeps": 0}}}).blocks.servers["a"].settings["sleeps"] == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config_paths": []}, r"config_paths: expected a list"),
        ({"config_paths": ["none.yaml"]}, r"NeMo Gym has no none\.yaml; looked in"),
        ({"port_range_low": "x"}, r"port_range_low: expected a number"),
    ],
)
def test_what_is_wrong_with_the_block_is_said(odd, given, said):
    with pytest.raises(ConfigError, match=said):
        odd({"a": {}}, **given)


async def test_a_server_that_says_that_it_is_not_well_yet_is_asked_again(odd, tmp_path):
    servers = await host(odd({"a": {"unwell_s": 1.0}}), tmp_path)
    try:
        await servers["a"].check()
    finally:
        await close(servers)


async def test_a_wait_that_is_cancelled_leaves_nothing(odd, tmp_path):
    gym = odd({"a": {"sleeps": 60}})
    starting = asyncio.create_task(host(gym, tmp_path))
    log = tmp_path / "a.log"
    until = time.monotonic() + 20
    while not (log.exists() and "starting" in log.read_text()) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not servers_in(tmp_path)


async def test_a_death_is_told_although_a_check_waits_in_the_queue_of_a_server_that_stands_still(odd, tmp_path):
    servers = await host(odd({"a": {}}), tmp_path)
    server = servers["a"]
    stuck = asyncio.create_task(get(server.url + "/stand_still"))
    try:
        async with asyncio.timeout(20):
            while "standing still" not in (tmp_path / "a.log").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            checking = asyncio.create_task(server.check())
            await asyncio.sleep(0.5)
            assert not checking.done(), "how long it may be silent is for the caller to say"
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(InfraError, match="server a ended, killed by SIGKILL"):
                await checking
    finally:
        stuck.cancel()
        await close(servers)


async def test_a_server_that_was_closed_cannot_be_started_again(odd, tmp_path):
    servers = await host(odd({"a": {}}), tmp_path)
    await close(servers)
    with pytest.raises(InfraError, match="server a was closed"):
        servers["a"].start()
