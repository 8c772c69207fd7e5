"""Servers of the real NeMo Gym, hosted: every line of the contract that gymloop relies on, seen on the wire."""

from __future__ import annotations

import json
import os

import aiohttp
import pytest

from gymloop.gym.nemo.catalog import offers
from gymloop.gym.nemo.host import Gym, close, host
from gymloop.gym.nemo.install import Installation

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def config(name: str) -> str:
    return f"resources_servers/{name}/configs/{name}.yaml"


def rows(installation: Installation, name: str, file: str) -> list[dict]:
    path = installation.site_packages / "resources_servers" / name / "data" / file
    return [json.loads(line) for line in path.read_text().splitlines()]


async def post(client: aiohttp.ClientSession, url: str, body: dict) -> dict:
    async with client.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_two_real_servers_are_hosted_and_end_without_a_trace(installation, tmp_path):
    names = ["example_single_tool_call", "workplace_assistant"]
    gym = Gym.load(installation, {"config_paths": [config(name) for name in names]}, [], os.environ)
    assert gym.blocks.agents["workplace_assistant_simple_agent"].settings["max_steps"] == 6
    servers = await host(gym, tmp_path)
    try:
        timeout = aiohttp.ClientTimeout(total=60)
        for name, tool, arguments in [
            (names[0], "get_weather", {"city": "SF"}),
            (names[1], "company_directory_find_email_address", {"name": "carlos"}),
        ]:
            recorded = rows(installation, name, "example_rollouts.jsonl")[0]
            row = rows(installation, name, "example.jsonl")[0]
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(timeout=timeout, cookie_jar=jar) as client:
                url = servers[name].url
                await post(client, f"{url}/seed_session", row)
                assert await post(client, f"{url}/{tool}", arguments)
                verdict = await post(client, f"{url}/verify", {**row, "response": recorded["response"]})
            assert verdict["reward"] == recorded["reward"]
            await servers[name].check()
        async with aiohttp.ClientSession(timeout=timeout) as client:
            # The one route whose imports are put off until somebody asks for it.
            asked = {"verify_responses": [{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0}]}
            metrics = await post(client, f"{servers[names[0]].url}/aggregate_metrics", asked)
            assert metrics["agent_metrics"]["mean/reward"] == 1.0
    finally:
        pids = [server.pid for server in servers.values()]
        await close(servers)
    assert not {str(pid) for pid in pids} & set(os.listdir("/proc"))


async def test_a_real_server_without_its_package_dies_with_the_reason_in_the_error(installation, tmp_path):
    if (installation.site_packages / "reasoning_gym").exists():
        pytest.skip("this environment has reasoning-gym")
    gym = Gym.load(installation, {"config_paths": [config("reasoning_gym")]}, [], os.environ)
    with pytest.raises(Exception, match=r"(?s)reasoning_gym ended, exit code 1.*No module named 'reasoning_gym'"):
        await host(gym, tmp_path)


def test_the_catalog_tells_what_is_there_and_what_is_missing(installation):
    found = {offer.name: offer for offer in offers(installation)}
    assert len(found) > 100
    workplace = found["workplace_assistant"]
    assert (workplace.rows, workplace.needs, workplace.configs[0]) == (5, "", config("workplace_assistant"))
    assert "Ray" in found["code_gen"].needs
    if not (installation.site_packages / "reasoning_gym").exists():
        assert found["reasoning_gym"].needs == "--extra 'reasoning-gym>=0.1.19'"
