"""Servers that another started, found through a running NeMo Gym head server.

A head server answers ``GET /global_config_dict_yaml`` with the configuration that its servers run with (a JSON string
that holds YAML), and so with the address of each. Nothing here starts or ends a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from gymloop.config.nearest import did_you_mean
from gymloop.errors import ConfigError, InfraError
from gymloop.gym.nemo.blocks import KINDS, Play, plays, select
from gymloop.gym.nemo.configs import parse

_CONFIG = "/global_config_dict_yaml"
_ASK_S = 30.0
_LARGEST = 32 * 2**20


async def attach_agents(url: str) -> dict[str, tuple[str, Play]]:
    """Where and how the rows of each agent of a running NeMo Gym are played, by the name that rows carry.

    Args:
        url: of its head server.

    Raises:
        ConfigError: it is no head server, or its servers do not fit together.
        InfraError: it does not answer.
    """
    config = await _configuration(url)
    found = plays(select(config, {}, {}))
    where = addresses(config, url, list({play.server: None for play in found.values()}))
    return {name: (where[play.server], play) for name, play in found.items()}


def addresses(config: dict[str, Any], url: str, names: Sequence[str]) -> dict[str, str]:
    """Where these servers of a head server's configuration are, by name.

    A server that listens on all addresses of the head's machine is reached where the head is.

    Raises:
        ConfigError: a name is missing from it.
    """
    found: dict[str, str] = {}
    for name, value in config.items():
        kind = next((kind for kind in KINDS if isinstance(value, dict) and isinstance(value.get(kind), dict)), None)
        if kind is None or len(value[kind]) != 1:
            continue
        (settings,) = value[kind].values()
        if isinstance(settings, dict) and settings.get("port"):
            host = str(settings.get("host") or "127.0.0.1")
            if host in ("0.0.0.0", "::"):
                host = urlsplit(url).hostname or host
            found[name] = f"http://{f'[{host}]' if ':' in host else host}:{settings['port']}"
    for name in names:
        if name not in found:
            known = ", ".join(found) or "none"
            raise ConfigError(
                f"the NeMo Gym at {url} has no server {name!r}{did_you_mean(name, found)}; it has {known}"
            )
    return {name: found[name] for name in names}


async def _configuration(url: str) -> dict[str, Any]:
    ask = url.rstrip("/") + _CONFIG
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S)) as client,
            client.get(ask) as response,
        ):
            if response.status >= 500:
                raise InfraError(f"{ask} answered {response.status}", cause="server_error")
            if not response.ok:
                raise ConfigError(f"{url} is no NeMo Gym head server: {_CONFIG} answered {response.status}")
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _LARGEST:
                    raise ConfigError(f"{ask} answered more than {_LARGEST // 2**20} MiB")
    except TimeoutError as error:
        raise InfraError(f"{ask}: no answer within {_ASK_S:g} s", cause="timeout") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise InfraError(f"{ask} cannot be asked: {type(error).__name__}: {error}", cause="disconnect") from error
    try:
        text = orjson.loads(body)
    except orjson.JSONDecodeError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(f"{url} is no NeMo Gym head server: {_CONFIG} answered {body[:80]!r}, not a string of YAML")
    return parse(text, ask)
