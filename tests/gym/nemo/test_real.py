"""Servers of the real NeMo Gym, hosted: every line of the contract that gymloop relies on, seen on the wire."""

from __future__ import annotations

import json
import os
import shutil

import aiohttp
import pytest
import yaml

import forked
from gymloop.errors import InfraError
from gymloop.gym.nemo.catalog import offers
from gymloop.gym.nemo.host import Gym, close, host
from gymloop.gym.nemo.install import Installation

from ..test_runs_over_http import Lab

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
    # Its packages come from a repository and a model page, so no installation of the tests has them.
    gym = Gym.load(installation, {"config_paths": [config("instruction_following")]}, [], os.environ)
    with pytest.raises(InfraError, match=r"(?s)instruction_following ended, exit code 1.*No module named"):
        await host(gym, tmp_path)


def test_the_catalog_tells_what_is_there_and_what_is_missing(installation):
    found = {offer.name: offer for offer in offers(installation)}
    assert len(found) > 100
    workplace = found["workplace_assistant"]
    assert (workplace.rows, workplace.needs, workplace.configs[0]) == (5, "", config("workplace_assistant"))
    assert "Ray" in found["code_gen"].needs
    assert "verifiable" in found["instruction_following"].needs


@pytest.fixture(scope="module")
def lab(tmp_path_factory, toy):
    """A toy model with positions for the many tools of a real environment."""
    folder = tmp_path_factory.mktemp("real")
    model = shutil.copytree(toy("q"), folder / "toy")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 16384}))
    with forked.Nursery() as nursery:
        yield Lab(folder, model, nursery)


def test_a_recipe_that_names_workplace_assistant_trains_two_steps_on_its_shipped_rows(lab, installation):
    recipe = lab.recipe("workplace", {}, [])
    content = yaml.safe_load(recipe.read_text())
    data = installation.site_packages / "resources_servers" / "workplace_assistant" / "data" / "example.jsonl"
    content["data"]["train"]["data_path"] = str(data)
    content["policy"]["max_total_sequence_length"] = 16384
    content["policy"]["generation"]["torch_cfg"]["max_batch_size"] = 4
    content["grpo"] |= {"num_generations_per_prompt": 2, "max_rollout_turns": 8}
    content["rollouts"] = {"call_timeout_s": 120.0}
    content["startup"] = {"deadline_s": 300.0}
    content["env"] = {
        "should_use_nemo_gym": True,
        "nemo_gym_installation": str(installation.folder),
        "nemo_gym": {
            "is_trajectory_collection": False,
            "config_paths": [
                "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
                config("workplace_assistant"),
            ],
            "workplace_assistant_simple_agent": {"responses_api_agents": {"simple_agent": {"max_steps": 2}}},
        },
    }
    recipe.write_text(yaml.safe_dump(content))
    call = (
        '<tool_call>\n{"name": "company_directory_find_email_address", "arguments": {"name": "carlos"}}\n</tool_call>'
    )
    how = {"prepare": ("dictated:install", {"folder": str(lab.model), "text": call})}
    done = lab.nursery.start("train", recipe, "--run", "r", limit_s=600, **how).wait()
    assert done.code == 0, done.output
    for number in (1, 2):
        step = lab.metrics(recipe)[number]
        assert (step["rollouts/finished"], step["rollouts/failed"]) == (4, 0)
        assert step["tools/calls_per_rollout"] >= 1
        for record in lab.records(recipe, number):
            outputs = [item["output"] for item in record["output"] if item["type"] == "function_call_output"]
            assert "carlos.rodriguez@atlas.com" in outputs[0], "what the real server's tool said"
            assert len(record["weight_versions"]) == 2, "max_steps of the override"
            assert record["reward"] in (0.0, 1.0)
