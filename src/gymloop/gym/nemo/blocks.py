"""Server blocks of NeMo Gym's merged configs: which ones a run needs, and which overrides nothing reads.

    NAME:                         the instance, as other blocks and rows call it
      resources_servers:          its kind
        workplace_assistant:      its type: the folder <kind>/<type> with its code
          entrypoint: app.py      its settings

Everything here is data in, data out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gymloop.config.nearest import did_you_mean
from gymloop.errors import ConfigError
from gymloop.gym.nemo.values import settle

KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
NATIVE_AGENTS: Mapping[str, Literal["tool_calling", "gymnasium"]] = {
    "simple_agent": "tool_calling",
    "gymnasium_agent": "gymnasium",
}
"""Types of agent whose part gymloop's own agents play, so that no process is started for them; see ``_native``."""
_MAX_STEPS = {"gymnasium_agent": 10}
"""NeMo Gym's default, where it has one."""
AGENT_KEYS = frozenset({"resources_server", "model_server", "max_steps", "datasets"})
"""Settings of a native agent's block that mean something here."""
POLICY_MODEL = "policy_model"

SERVERS_READ = frozenset(
    {
        "results_dir", "cache_dir", "hf_token", "verbose",
        "profiling_enabled", "profiling_results_dirpath", "observability_enabled", "telemetry",
        "global_aiohttp_connector_limit", "global_aiohttp_connector_limit_per_host",
        "global_aiohttp_client_request_debug", "global_aiohttp_tcp_keepalive_idle_seconds",
        "global_aiohttp_tcp_keepalive_interval_seconds", "global_aiohttp_tcp_keepalive_probes",
        "uvicorn_logging_show_200_ok", "uvicorn_proxy_headers", "uvicorn_forwarded_allow_ips",
        "uvicorn_timeout_worker_healthcheck",
    }
)  # fmt: skip
"""Top-level settings that NeMo Gym's servers read in their own processes."""
HOST_READS = frozenset({"config_paths", "port_range_low", "port_range_high", "server_spinup_timeout_seconds"})
"""Top-level settings that gymloop reads."""
_ENVIRONMENT = "all servers share the environment of `gymloop gym install`"
_HEAD = "gymloop starts no head server"
NOBODY_READS = {
    "allow_openai_version_skew": _ENVIRONMENT,
    "pip_install_verbose": _ENVIRONMENT,
    "python_version": _ENVIRONMENT,
    "skip_venv_if_present": _ENVIRONMENT,
    "uv_cache_dir": _ENVIRONMENT,
    "uv_lock_timeout": _ENVIRONMENT,
    "uv_pip_set_python": _ENVIRONMENT,
    "uv_venv_dir": _ENVIRONMENT,
    "head_server": _HEAD,
    "head_server_deps": _HEAD,
    "default_host": "servers listen on 127.0.0.1",
    "ray_head_node_address": "servers that use Ray join the run's",
    "disallowed_ports": "ports are held by listening on them; use port_range_low and port_range_high",
    "dry_run": "`gymloop check` starts nothing",
    "error_on_almost_servers": "a block that is no server is always an error",
    "model_endpoint_readiness_timeout_seconds": "the policy's own server is ready before rollouts begin",
    "use_absolute_ip": "servers and rollouts share one machine",
}
"""Top-level settings of NeMo Gym that have no meaning here, with the reason."""
HOST_SETS = {"host": "since gymloop says where a server listens"}
"""Settings of a server's block that are decided here, with the reason."""


@dataclass(frozen=True, slots=True)
class Block:
    """One server.

    Attributes:
        name: of the instance.
        kind: one of ``KINDS``.
        type: the folder under the kind that holds its code.
        settings: what its process is told, every value settled.
    """

    name: str
    kind: str
    type: str
    settings: Mapping[str, Any] = field(repr=False)  # may hold keys of judge models

    def references(self) -> Iterator[tuple[str, str]]:
        """``(kind, name)`` of every server that its settings name."""
        yield from _references(self.settings)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a set of configs amounts to.

    Attributes:
        servers: blocks that need a process of their own, by name; resources servers first.
        agents: blocks whose part gymloop's own agents play, by name.
        settings: top-level settings that go to every server.
    """

    servers: Mapping[str, Block]
    agents: Mapping[str, Block]
    settings: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Play:
    """How the rows that name one agent are played.

    Attributes:
        server: instance that the rollouts go to: the agent's resources server, or the agent itself.
        kind: gymloop's agent that plays them.
        max_steps: model calls of a rollout at most, beside the run's own limit; None sets none.
    """

    server: str
    kind: Literal["tool_calling", "gymnasium", "remote"]
    max_steps: int | None = None


def plays(blocks: Blocks) -> dict[str, Play]:
    """What each agent of the configs amounts to, by the name that rows carry in ``agent_ref.name``.

    Raises:
        ConfigError: an agent has no resources server among the blocks, or its max_steps is no number of steps.
    """
    found, problems = {}, []
    resources = [name for name, block in blocks.servers.items() if block.kind == "resources_servers"]
    for name, block in blocks.agents.items():
        reference = block.settings.get("resources_server")
        server = reference.get("name") if isinstance(reference, Mapping) else None
        if server not in resources:
            said = f"{server!r}, which no config has{did_you_mean(server, resources)}" if server else "no server"
            problems.append(f"the agent {name} plays on {said}")
            continue
        steps = block.settings.get("max_steps", _MAX_STEPS.get(block.type))
        if steps is not None and (type(steps) is not int or steps < 1):
            problems.append(f"{name}.max_steps is {steps!r}; expected a number of model calls, at least 1")
            continue
        found[name] = Play(server, NATIVE_AGENTS[block.type], steps)
    if problems:
        raise ConfigError("env.nemo_gym: " + "; ".join(problems))
    for name, block in blocks.servers.items():
        if block.kind == "responses_api_agents":
            found[name] = Play(name, "remote")
    return found


def select(merged: Mapping[str, Any], overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Blocks:
    """The servers to start and the agents to play, every value of theirs settled.

    Needed are all resources servers, agents that are not of ``NATIVE_AGENTS``, and whatever those refer to, but not
    ``policy_model``, which is gymloop's own, nor the relays that NeMo Gym puts before its agents.

    Args:
        merged: of ``merge``.
        overrides: as given to it; checked for keys that nothing reads.
        environ: for ``${oc.env:NAME}``.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    raw = {name: block for name, value in merged.items() if (block := _block(name, value)) is not None}
    wanted = [name for name, block in raw.items() if block.kind == "resources_servers"]
    wanted += [name for name, block in raw.items() if block.kind == "responses_api_agents" and not _native(block)]
    problems: list[str] = []
    used: set[str] = set()
    servers: dict[str, Block] = {}
    for name in wanted:  # grows while it is walked
        servers[name] = _settled(raw[name], merged, environ, problems, used)
        for kind, other in servers[name].references():
            if other == POLICY_MODEL or other in wanted:
                continue
            if other not in raw or raw[other].kind != kind:
                of_kind = [one for one, block in raw.items() if block.kind == kind]
                problems.append(f"{name} refers to {kind} {other!r}, which no config has{did_you_mean(other, of_kind)}")
            elif kind != "environment_servers":
                wanted.append(other)
    agents = {name: _settled(block, merged, environ, problems, used) for name, block in raw.items() if _native(block)}
    settings = {
        key: settle(value, merged, environ, (key,), problems, used)
        for key, value in merged.items()
        if key in SERVERS_READ
    }
    problems += _unread(overrides, raw, servers, agents, used)
    if not servers:
        problems.append("no config has a resources server, so there is nothing to start (config_paths)")
    if problems:
        raise ConfigError("env.nemo_gym: " + "; ".join(dict.fromkeys(problems)))
    return Blocks(servers, agents, settings)


def _block(name: str, value: Any) -> Block | None:
    if not isinstance(value, Mapping):
        return None
    for kind in KINDS:
        types = value.get(kind)
        if isinstance(types, Mapping) and len(types) == 1:
            ((type_, settings),) = types.items()
            if isinstance(settings, Mapping) and "entrypoint" in settings:
                return Block(name, kind, str(type_), settings)
    return None


def _native(block: Block) -> bool:
    """Whether gymloop's own agent does what this one would: one with another model, or without tools, is another."""
    model = block.settings.get("model_server")
    own_model = not isinstance(model, Mapping) or model.get("name") in (None, POLICY_MODEL)
    runs_tools = block.settings.get("execute_tools") is not False
    return block.kind == "responses_api_agents" and block.type in NATIVE_AGENTS and own_model and runs_tools


def _settled(
    block: Block, whole: Mapping[str, Any], environ: Mapping[str, str], problems: list[str], used: set[str]
) -> Block:
    path = (block.name, block.kind, block.type)
    return Block(block.name, block.kind, block.type, settle(block.settings, whole, environ, path, problems, used))


def _references(node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        if node.get("type") in KINDS and isinstance(node.get("name"), str):
            yield node["type"], node["name"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _unread(
    overrides: Mapping[str, Any],
    raw: Mapping[str, Block],
    servers: Mapping[str, Block],
    agents: Mapping[str, Block],
    used: set[str],
) -> Iterator[str]:
    """One clause for each override that changes nothing."""
    for key, value in overrides.items():
        if key in SERVERS_READ or key in HOST_READS or key in used:
            continue
        if key in NOBODY_READS:
            yield f"{key}: nothing reads it here, {NOBODY_READS[key]}; remove it"
        elif (block := servers.get(key) or agents.get(key)) is not None:
            settings = yield from _settings_of(block, value)
            if key in servers:
                for name in sorted(set(settings) & HOST_SETS.keys()):
                    yield f"{key}: nothing reads {name!r}, {HOST_SETS[name]}; remove it"
            else:
                for name in sorted(set(settings) - AGENT_KEYS):
                    yield f"{key}: gymloop's {NATIVE_AGENTS[block.type]} agent has no {name!r}; it reads max_steps"
        elif key in raw and raw[key].kind == "environment_servers":
            yield f"{key}: gymloop starts no environment servers; rollouts go to resources servers directly; remove it"
        elif key == POLICY_MODEL:
            yield f"{key}: the policy is served by gymloop, see policy.generation; remove it"
        elif key in raw:
            yield f"{key}: no server of these configs refers to it; remove it"
        else:
            known = [*servers, *agents, *sorted(SERVERS_READ | HOST_READS)]
            yield f"{key}: nothing reads it{did_you_mean(key, known)}"


def _settings_of(block: Block, value: Any) -> Generator[str, None, Mapping[str, Any]]:
    """The settings in an override of a block; yields a clause for whatever does not lie where the block's do."""
    expected = f"expected {block.name}: {{{block.kind}: {{{block.type}: {{...}}}}}}"
    for name in (block.kind, block.type):
        others = sorted(set(value) - {name}) if isinstance(value, Mapping) else [str(value)]
        for other in others:
            yield f"{block.name}: nothing reads {other!r} there{did_you_mean(other, [name])}; {expected}"
        value = value.get(name, {}) if isinstance(value, Mapping) else {}
    if not isinstance(value, Mapping):
        yield f"{block.name}: {value!r} are no settings; {expected}"
        return {}
    return value
