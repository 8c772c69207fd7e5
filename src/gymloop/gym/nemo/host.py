"""Starts the servers that a set of NeMo Gym configs needs: each from its own ``app.py``, all at once, and ends them.

No head server, no relay and no Ray of their own: a server's process gets the merged configuration in
``NEMO_GYM_CONFIG_DICT`` and its own name in ``NEMO_GYM_CONFIG_PATH``, which is NeMo Gym's contract with the processes
that it starts itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gymloop.errors import ConfigError
from gymloop.gym.nemo import files
from gymloop.gym.nemo.blocks import POLICY_MODEL, Block, Blocks, select
from gymloop.gym.nemo.configs import merge
from gymloop.gym.nemo.install import Installation
from gymloop.gym.nemo.server import Command, NemoGymServer
from gymloop.models.store import cache_root
from gymloop.startup.sockets import hold_socket

HOST = "127.0.0.1"
PORTS = (10001, 20000)
"""NeMo Gym's own default range."""
DEADLINE_S = 300.0
_LAUNCH = Path(__file__).with_name("launch.py")
_UNWANTED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "GYMLOOP_API_KEY")
"""Of this process's interpreter, and the key to its generation server: not for others."""


@dataclass(frozen=True, slots=True)
class Gym:
    """What a run wants of NeMo Gym, read and settled; nothing is started yet.

    Attributes:
        installation: the environment that the servers run in.
        roots: where configs and server folders are looked for, the first wins.
        blocks: servers and agents.
        ports: first and last port that servers may take.
        deadline_s: time until every server must be ready, seconds.
    """

    installation: Installation
    roots: tuple[Path, ...]
    blocks: Blocks
    ports: tuple[int, int]
    deadline_s: float

    @classmethod
    def load(
        cls, installation: Installation, given: Mapping[str, Any], folders: Sequence[Path], environ: Mapping[str, str]
    ) -> Gym:
        """Read the configs of ``env.nemo_gym``.

        Args:
            installation: of `gymloop gym install`.
            given: the block ``env.nemo_gym``: ``config_paths``, and overrides of what the files say.
            folders: searched before the installed Gym, as a recipe's own folder.
            environ: for ``${oc.env:NAME}``.

        Raises:
            ConfigError: a file is missing, a value is, or a key that nothing reads is there.
        """
        paths = given.get("config_paths")
        if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str) for path in paths):
            raise ConfigError(f"env.nemo_gym.config_paths: expected a list of NeMo Gym config files, got {paths!r}")
        roots = (*folders, installation.site_packages)
        sources = files.read(paths, roots)
        merged = merge(sources, len(dict.fromkeys(paths)), given)
        merged.setdefault("results_dir", str(Path("results").absolute()))
        merged.setdefault("cache_dir", str(cache_root() / "nemo-gym" / "downloads"))
        blocks = select(merged, given, environ)
        for block in blocks.servers.values():
            for name in files.unread(block, given, files.server_folder(block, roots), installation.site_packages):
                where = f"env.nemo_gym.{block.name}.{block.kind}.{block.type}.{name}"
                raise ConfigError(f"{where}: nothing in that server's code reads it; remove it, or check its name")
        ports = (_number(given, "port_range_low", PORTS[0]), _number(given, "port_range_high", PORTS[1]))
        deadline = float(_number(given, "server_spinup_timeout_seconds", DEADLINE_S))
        return cls(installation, roots, blocks, (int(ports[0]), int(ports[1])), deadline)


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
    blocks = dict(gym.blocks.servers)
    folders = {name: files.server_folder(block, gym.roots) for name, block in blocks.items()}
    _refuse_missing_model(blocks, model)
    held = {}
    try:
        for name, block in blocks.items():
            held[name] = hold_socket(*_ports(block, gym.ports), HOST)
    except BaseException:
        for sock in held.values():
            sock.close()
        raise
    where = {name: sock.getsockname()[:2] for name, sock in held.items()}
    config = orjson.dumps(_config(gym.blocks, where, model, ray_address)).decode()
    clean = {name: value for name, value in environ.items() if name not in _UNWANTED}
    servers = {}
    for name, block in blocks.items():
        command = Command(
            [str(gym.installation.python), str(_LAUNCH), "{fd}", str(block.settings["entrypoint"])],
            folders[name],
            {
                **clean,
                "NEMO_GYM_CONFIG_DICT": config,
                "NEMO_GYM_CONFIG_PATH": name,
                **_path(folders[name], gym.installation),
                "PYTHONUNBUFFERED": "1",
            },
            logs / f"{name}.log",
        )
        address, port = where[name]
        servers[name] = NemoGymServer(name, f"http://{address}:{port}", command=command, held=held[name])
    return servers


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


def _refuse_missing_model(blocks: Mapping[str, Block], model: tuple[str, int] | None) -> None:
    if model is None:
        callers = [name for name, block in blocks.items() if any(to == POLICY_MODEL for _, to in block.references())]
        if callers:
            raise ConfigError(
                f"{', '.join(callers)} call {POLICY_MODEL}, and no address of the policy's server was given"
            )


def _ports(block: Block, ports: tuple[int, int]) -> tuple[int, int]:
    port = block.settings.get("port")
    if port is None:
        return ports
    if not isinstance(port, int) or isinstance(port, bool):
        raise ConfigError(f"{block.name}: port {port!r} is no number")
    return port, port


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"env.nemo_gym.{key}: expected a number above 0, got {value!r}")
    return value
