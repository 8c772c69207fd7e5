"""Servers that another started, found by URL or through a head server that answers as NeMo Gym's does."""

from __future__ import annotations

import orjson
import pytest
import yaml
from aiohttp import web

from gymloop.errors import ConfigError, InfraError
from gymloop.gym.nemo.attach import addresses, attach_agents
from gymloop.gym.nemo.blocks import Play

CONFIG = {
    "shop": {"resources_servers": {"shop": {"entrypoint": "app.py", "host": "127.0.0.1", "port": 7001}}},
    "wide": {"resources_servers": {"wide": {"entrypoint": "app.py", "host": "0.0.0.0", "port": 7002}}},
    "shop_agent": {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "host": "h", "port": 7003}}},
    "policy_model_name": "m",
    "head_server": {"host": "127.0.0.1", "port": 11000},
}


@pytest.fixture
async def serve():
    """``await serve({"/path": text})`` is the URL of a server with these answers."""
    runners = []

    async def start(answers: dict[str, str], status: int = 200) -> str:
        app = web.Application()
        for path, text in answers.items():

            async def answer(_request: web.Request, text: str = text) -> web.Response:
                return web.Response(text=text, content_type="application/json", status=status)

            app.router.add_get(path, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def test_a_head_server_tells_where_its_servers_are():
    assert addresses(CONFIG, "http://node7:11000", ["shop", "wide", "shop_agent"]) == {
        "shop": "http://127.0.0.1:7001",
        "wide": "http://node7:7002",  # on all addresses: where the head is
        "shop_agent": "http://h:7003",
    }
    with pytest.raises(ConfigError, match="has no server 'shpo'; did you mean 'shop'"):
        addresses(CONFIG, "http://node7:11000", ["shpo"])


@pytest.mark.parametrize("answer", ["<html>", "{}", "3"])
async def test_what_is_no_head_server_is_said(serve, answer):
    url = await serve({"/global_config_dict_yaml": answer})
    with pytest.raises(ConfigError, match="is no NeMo Gym head server"):
        await attach_agents(url)


async def test_a_server_without_that_route_is_no_head_server(serve):
    with pytest.raises(ConfigError, match="answered 404"):
        await attach_agents(await serve({"/healthz": "{}"}))


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_head_server_that_is_not_up_yet_is_infra_so_that_it_is_asked_again(serve, status):
    with pytest.raises(InfraError, match=f"answered {status}"):
        await attach_agents(await serve({"/global_config_dict_yaml": "starting"}, status))


async def test_nobody_there_is_infra(unused_tcp_port_factory):
    with pytest.raises(InfraError, match="cannot be asked"):
        await attach_agents(f"http://127.0.0.1:{unused_tcp_port_factory()}")


async def test_a_head_server_says_where_and_how_the_rows_of_its_agents_are_played(serve):
    shop = {"resources_server": {"type": "resources_servers", "name": "shop"}}
    config = {
        "shop": CONFIG["shop"],
        "simple": {
            "responses_api_agents": {
                "simple_agent": {"entrypoint": "app.py", "host": "h", "port": 7003, "max_steps": 6, **shop}
            }
        },
        "own": {
            "responses_api_agents": {"langgraph_agent": {"entrypoint": "app.py", "host": "h", "port": 7004, **shop}}
        },
    }
    url = await serve({"/global_config_dict_yaml": orjson.dumps(yaml.safe_dump(config)).decode()})
    assert await attach_agents(url) == {
        "simple": ("http://127.0.0.1:7001", Play("shop", "tool_calling", 6)),
        "own": ("http://h:7004", Play("own", "remote")),
    }
