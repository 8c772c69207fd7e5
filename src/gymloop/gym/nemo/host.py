"""Starts the servers that a set of NeMo Gym configs needs: each from its own ``app.py``, all at once, and ends them.

No head server, no relay and no Ray of their own: a server's process gets the merged configuration in
``NEMO_GYM_CONFIG_DICT`` and its own name in ``NEMO_GYM_CONFIG_PATH``, which is NeMo Gym's contract with the processes
that it starts itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from gymloop.errors import ConfigError
from gymloop.gym.nemo.blocks import POLICY_MODEL, Block, Blocks
from gymloop.gym.nemo.gym import Gym
from gymloop.gym.nemo.install import OF_THIS_INTERPRETER, Installation
from gymloop.gym.nemo.server import Command, NemoGymServer
from gymloop.startup.sockets import hold_socket

HOST = "127.0.0.1"
_LAUNCH = Path(__file__).with_name("launch.py")
_UNWANTED = (*OF_THIS_INTERPRETER, "PYTHONSTARTUP", "VIRTUAL_ENV", "GYMLOOP_API_KEY")
"""Of this process's interpreter, and the key to its generation server: not for others."""


async def host(
    gym: Gym,
    logs: Path,
    *,
    model: tuple[str, int] | None = None,
    ray_address: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, NemoGymServer]:
    """Start every server of ``gym`` and return them, by instance, when all are ready.

    Args:
        gym: what to start.
        logs: folder for a log per server.
        model: host and port of the policy's server, for servers that call ``policy_model`` themselves.
        ray_address: of the run's Ray, for servers that use Ray.
        environ: of the servers, but for what concerns this process's interpreter.

    Raises:
        ConfigError: a server has no folder, or no port is free.
        InfraError: one did not start; none is left running.
    """
    servers = prepare(gym, logs, model=model, ray_address=ray_address, environ=environ)
    try:
        for server in servers.values():
            server.start()
        async with asyncio.TaskGroup() as group:
            for server in servers.values():
                group.create_task(server.ready(gym.deadline_s))
    except BaseException as error:
        await close(servers)
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None  # the first to fail; the others were cancelled for it
        raise
    return servers


def prepare(
    gym: Gym, logs: Path, *, model: tuple[str, int] | None, ray_address: str | None, environ: Mapping[str, str]
) -> dict[str, NemoGymServer]:
    """Hold a port for every server and say how each is started; starts nothing. For arguments see ``host``."""
    callers = [name for name in gym.blocks.servers if gym.needs_model(name)]
    if model is None and callers:
        raise ConfigError(f"{', '.join(callers)} call {POLICY_MODEL}, and no address of the policy's server was given")
    held = hold(gym)
    return {name: hosted(gym, held, name, logs, model, ray_address, environ) for name in held}


def hold(gym: Gym) -> dict[str, socket.socket]:
    """A listening socket for every server, by instance; from here on all addresses are true.

    Raises:
        ConfigError: no port is free; none is held.
    """
    held: dict[str, socket.socket] = {}
    try:
        for name, block in gym.blocks.servers.items():
            held[name] = hold_socket(*_ports(block, gym.ports), HOST)
    except BaseException:
        for sock in held.values():
            sock.close()
        raise
    return held


def address(sock: socket.socket) -> str:
    """The base URL of whatever will serve on a held socket."""
    host, port = sock.getsockname()[:2]
    return f"http://{host}:{port}"


def hosted(
    gym: Gym,
    held: Mapping[str, socket.socket],
    name: str,
    logs: Path,
    model: tuple[str, int] | None,
    ray_address: str | None,
    environ: Mapping[str, str],
) -> NemoGymServer:
    """One server, ready to be started on its held socket; it knows the addresses of all. See ``host``."""
    folder = gym.folders[name]
    where = {other: sock.getsockname()[:2] for other, sock in held.items()}
    config = orjson.dumps(_config(gym.blocks, where, model, ray_address)).decode()
    command = Command(
        [str(gym.installation.python), str(_LAUNCH), "{fd}", str(gym.blocks.servers[name].settings["entrypoint"])],
        folder,
        {
            **{key: value for key, value in environ.items() if key not in _UNWANTED},
            "NEMO_GYM_CONFIG_DICT": config,
            "NEMO_GYM_CONFIG_PATH": name,
            **_path(folder, gym.installation),
            "PYTHONUNBUFFERED": "1",
        },
        logs / f"{name}.log",
    )
    return NemoGymServer(name, address(held[name]), command=command, held=held[name])


async def close(servers: Mapping[str, NemoGymServer]) -> None:
    """End all of them at the same time."""
    # bounded: each kills what has not ended after a grace
    await asyncio.gather(*(server.close() for server in servers.values()))


def _config(
    blocks: Blocks,
    where: Mapping[str, tuple[str, int]],
    model: tuple[str, int] | None,
    ray_address: str | None,
) -> dict[str, Any]:
    """The configuration as NeMo Gym's servers expect to find it."""
    config: dict[str, Any] = {
        **blocks.settings,
        "head_server": {"host": HOST, "port": 1},  # nobody calls it: every server has the configuration already
        "dry_run": False,
    }
    if ray_address is not None:
        config["ray_head_node_address"] = ray_address
    for name, block in (*blocks.servers.items(), *blocks.agents.items()):
        settings = dict(block.settings)
        if name in where:
            settings["host"], settings["port"] = where[name]
        config[name] = {block.kind: {block.type: settings}}
    if model is not None:
        served = {"entrypoint": "app.py", "host": model[0], "port": model[1]}
        config[POLICY_MODEL] = {"responses_api_models": {"gymloop": served}}
    return config


def _path(folder: Path, installation: Installation) -> dict[str, str]:
    """Where a private server's package is found; an installed one is found anyway."""
    root = folder.parents[1]
    return {} if root == installation.site_packages else {"PYTHONPATH": str(root)}


def _ports(block: Block, ports: tuple[int, int]) -> tuple[int, int]:
    port = block.settings.get("port")
    if port is None:
        return ports
    if not isinstance(port, int) or isinstance(port, bool):
        raise ConfigError(f"{block.name}: port {port!r} is no number")
    return port, port
