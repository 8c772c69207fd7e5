"""NeMo Gym's merge rules, on small configs worked out by hand."""

from __future__ import annotations

import pytest

from gymloop.errors import ConfigError
from gymloop.gym.nemo.blocks import Play, plays, select
from gymloop.gym.nemo.configs import Source, merge, parse


def resources(name: str = "shop", **settings) -> dict:
    return {name: {"resources_servers": {name: {"entrypoint": "app.py", **settings}}}}


def agent(name: str = "shop_agent", type_: str = "simple_agent", **settings) -> dict:
    return {
        name: {
            "responses_api_agents": {
                type_: {
                    "entrypoint": "app.py",
                    "resources_server": {"type": "resources_servers", "name": "shop"},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                    **settings,
                }
            }
        }
    }


def relay() -> dict:
    reference = {"type": "responses_api_agents", "name": "shop_agent"}
    return {
        "shop_relay": {"environment_servers": {"legacy_agent": {"entrypoint": "app.py", "agent_server": reference}}}
    }


def chosen(config: dict, overrides: dict | None = None, environ: dict | None = None):
    overrides = overrides or {}
    return select(merge([Source("a.yaml", config)], 1, overrides), overrides, environ or {})


def settings(config: dict, overrides: dict | None = None, environ: dict | None = None) -> dict:
    return dict(chosen(config, overrides, environ).servers["shop"].settings)


def test_a_resources_server_gets_a_process_and_the_simple_agent_and_the_relay_get_none():
    blocks = chosen({**resources(), **agent(max_steps=6), **relay()})
    assert list(blocks.servers) == ["shop"]
    assert blocks.agents["shop_agent"].settings["max_steps"] == 6


def test_an_agent_that_gymloop_does_not_play_gets_a_process():
    assert list(chosen({**resources(), **agent(type_="langgraph_agent")}).servers) == ["shop", "shop_agent"]


def test_a_file_overrides_what_it_pulls_in_and_a_later_sibling_an_earlier_one():
    sources = [
        Source("first", {"x": {"v": "first", "first": 1}}, includes=(2,)),
        Source("second", {"x": {"v": "second"}}, includes=(3,)),
        Source("pulled by first", {"x": {"v": "inner", "inner": 1, "list": [1, 2]}}),
        Source("pulled by second", {"x": {"first": 2, "list": [3]}}),
    ]
    assert merge(sources, 2, {})["x"] == {"v": "second", "first": 2, "inner": 1, "list": [3]}


def test_overrides_win_over_every_file():
    assert settings(resources(limit=1, kept=2), resources(limit=5)) == {"entrypoint": "app.py", "limit": 5, "kept": 2}


def test_inheriting_moves_the_block_and_keeps_what_stands_beside_it():
    config = {"generic": resources(limit=1, kept=2)["shop"], "shop": {"_inherit_from": "generic"}}
    config["shop"]["resources_servers"] = {"shop": {"limit": 3}}
    merged = merge([Source("a", config)], 1, {})
    assert merged == {"shop": {"resources_servers": {"shop": {"entrypoint": "app.py", "limit": 3, "kept": 2}}}}


def test_copying_leaves_the_origin_and_delete_key_removes():
    config = {"one": {"a": 1, "b": 2}, "two": {"_copy": "one", "_delete_key": "b", "c": 3}, "three": "${copy:one.a}"}
    assert merge([Source("a", config)], 1, {}) == {"one": {"a": 1, "b": 2}, "two": {"a": 1, "c": 3}, "three": 1}


def test_inheriting_from_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"shop inherits from generic, which no config has"):
        merge([Source("a", {"shop": {"_inherit_from": "generic"}})], 1, {})


def test_references_keep_their_type_alone_and_become_text_inside_text():
    config = {**resources(a="${n}", b="x${n}y", c="${oc.env:HOME_OF,7}", d="${oc.select:none,null}"), "n": 3}
    assert settings(config) == {"entrypoint": "app.py", "a": 3, "b": "x3y", "c": "7", "d": None}
    assert settings(config, environ={"HOME_OF": "there"})["c"] == "there"


def test_numbers_are_read_as_gym_reads_them_and_dates_stay_text():
    assert parse("a: 1e-3\nb: 2024-01-02\nc: 1.5\nd: 10_000\ne: yes", "f") == {
        "a": 0.001, "b": "2024-01-02", "c": 1.5, "d": 10_000, "e": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (resources(judge="???"), r"shop\.resources_servers\.shop\.judge is \?\?\?: give env\.nemo_gym\.shop"),
        (resources(a="${missing}"), r"\$\{missing\}: no config has missing"),
        (resources(a="${oc.env:NOT_SET}"), r"environment variable NOT_SET is not set"),
        (resources(a="${made.up:x}"), r"no reference that gymloop knows"),
        ({**resources(a="${b}"), "b": "${b}"}, r"refers to itself"),
        (agent(), r"no config has a resources server"),
        (
            resources(judge={"type": "responses_api_models", "name": "jugde"})
            | {"judge": {"responses_api_models": {"m": {"entrypoint": "app.py"}}}},
            r"refers to responses_api_models 'jugde', which no config has; did you mean 'judge'",
        ),
    ],
)
def test_what_cannot_be_settled_is_said(config, said):
    with pytest.raises(ConfigError, match=said):
        chosen(config)


def test_what_is_missing_in_a_block_that_is_not_needed_does_not_matter():
    other = {"judge": {"responses_api_models": {"m": {"entrypoint": "app.py", "key": "???"}}}}
    assert list(chosen({**resources(), **other}).servers) == ["shop"]


def test_a_judge_that_a_needed_server_calls_is_needed():
    config = resources(judge={"type": "responses_api_models", "name": "judge"})
    config["judge"] = {"responses_api_models": {"m": {"entrypoint": "app.py", "key": "${key}"}}}
    blocks = chosen(config, {"key": "k"})
    assert blocks.servers["judge"].settings["key"] == "k"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"skip_venv_if_present": True}, r"skip_venv_if_present: nothing reads it here, all servers share"),
        ({"port_range_lo": 1}, r"port_range_lo: nothing reads it; did you mean 'port_range_low'"),
        ({"invalid_tool_call_patterns": []}, r"invalid_tool_call_patterns: nothing reads it"),
        ({"policy_model": {"responses_api_models": {"vllm_model": {"x": 1}}}}, r"the policy is served by gymloop"),
        (relay(), r"shop_relay: gymloop starts no environment servers"),
        (
            {"shop_agent": {"responses_api_agents": {"simple_agent": {"max_turns": 3}}}},
            r"shop_agent: gymloop's tool_calling agent has no 'max_turns'; it reads max_steps",
        ),
        ({"shop_agent": {"max_steps": 3}}, r"shop_agent: nothing reads 'max_steps' there; expected shop_agent: \{resp"),
        (
            {"shop_agent": {"responses_api_agent": {"simple_agent": {"max_steps": 3}}}},
            r"nothing reads 'responses_api_agent' there; did you mean 'responses_api_agents'",
        ),
        ({"shop_agent": {"responses_api_agents": {}}, "default_host": "x"}, r"default_host: nothing reads it here"),
        ({"shop": {"limit": 5}}, r"shop: nothing reads 'limit' there; expected shop: \{resources_servers: \{shop: "),
        ({"shop": {"resource_servers": {"shop": {"limit": 5}}}}, r"did you mean 'resources_servers'"),
        ({"shop": {"resources_servers": {"shop": {"host": "10.0.0.1"}}}}, r"shop: nothing reads 'host', since gymloop"),
        ({"ray_head_node_address": "10.0.0.1:6379"}, r"ray_head_node_address: nothing reads it here, servers that use"),
    ],
)
def test_an_override_that_nothing_reads_is_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        chosen({**resources(), **agent(), **relay()}, override)


def test_settings_that_servers_read_are_passed_on():
    given = {"global_aiohttp_connector_limit": 100, "port_range_low": 15000}
    assert chosen(resources(), given).settings == {"global_aiohttp_connector_limit": 100}


def test_each_agent_says_where_and_how_its_rows_are_played():
    config = {
        **resources(),
        **agent("simple", max_steps=6),
        **agent("free"),
        **agent("steps", "gymnasium_agent"),
        **agent("own", "langgraph_agent"),
    }
    assert plays(chosen(config)) == {
        "simple": Play("shop", "tool_calling", 6),
        "free": Play("shop", "tool_calling", None),
        "steps": Play("shop", "gymnasium", 10),
        "own": Play("own", "remote"),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"resources_server": {"type": "resources_servers", "name": "shpo"}}, "did you mean 'shop'"),
        ({"resources_server": None}, "shop_agent plays on no server"),
        ({"max_steps": 0}, "shop_agent.max_steps is 0; expected a number of model calls"),
        ({"max_steps": "6"}, "shop_agent.max_steps is '6'"),
    ],
)
def test_an_agent_that_cannot_play_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        plays(chosen({**resources(), **agent(**settings)}))


@pytest.mark.parametrize(
    "settings",
    [{"execute_tools": False}, {"model_server": {"type": "responses_api_models", "name": "judge"}}],
)
def test_an_agent_that_would_do_something_else_than_gymloops_gets_a_process(settings):
    config = {**resources(), **agent(**settings), "judge": {"responses_api_models": {"m": {"entrypoint": "app.py"}}}}
    blocks = chosen(config)
    assert "shop_agent" in blocks.servers
    assert plays(blocks)["shop_agent"] == Play("shop_agent", "remote")


def test_the_values_of_a_block_are_not_in_its_text():
    blocks = chosen(resources(key="${oc.env:JUDGE}"), environ={"JUDGE": "hunter2"})
    assert blocks.servers["shop"].settings["key"] == "hunter2"
    assert "hunter2" not in repr(blocks)
