"""What NeMo Gym's head server says of its servers, said by the one server there is.

NeMo Gym's collector asks a head server for the configuration of all servers (``/global_config_dict_yaml``, a JSON
string of YAML), finds the environment server in front of the agent that a row names, and posts the row to its ``/run``.
All of these are one address here, so an unmodified collector that takes this server for its head finds everything.
"""

from __future__ import annotations

import os
import time
from typing import Any

import yaml

KIND = "gymloop"


def configuration(name: str, host: str, port: int, *, plays: bool) -> dict[str, Any]:
    """Server blocks by instance.

    Args:
        name: of the environment, which rows carry in ``agent_ref.name``.
        host: where clients reach the server.
        port: likewise.
        plays: whether it answers ``/run``.
    """
    at = {"host": host, "port": port}
    resources = {"type": "resources_servers", "name": f"{name}_resources_server"}
    blocks: dict[str, Any] = {resources["name"]: {"resources_servers": {KIND: dict(at)}}}
    if plays:
        agent = {"type": "responses_api_agents", "name": name}
        blocks[name] = {"responses_api_agents": {KIND: {**at, "resources_server": resources}}}
        blocks[f"{name}_environment_server"] = {"environment_servers": {KIND: {**at, "agent_server": agent}}}
    return {**blocks, "head_server": dict(at), "observability_enabled": False}


def as_yaml(config: dict[str, Any]) -> str:
    """The body of ``/global_config_dict_yaml``, before it is written as a JSON string."""
    return yaml.safe_dump(config, sort_keys=False)


def instances(config: dict[str, Any], started: float) -> list[dict[str, Any]]:
    """The body of ``/server_instances``."""
    found = []
    for name, block in config.items():
        if not isinstance(block, dict) or name == "head_server":
            continue
        (server_type,) = block
        at = block[server_type][KIND]
        found.append(
            {
                "name": name,
                "process_name": name,
                "server_type": server_type,
                "host": at["host"],
                "port": at["port"],
                "url": f"http://{at['host']}:{at['port']}",
                "pid": os.getpid(),
                "status": "success",
                "start_time": started,
                "uptime_seconds": time.time() - started,
            }
        )
    return found
