"""``gymloop gym serve MODULE:CLASS``: one environment behind NeMo Gym's routes, until it is told to stop.

The socket is held, and its address printed, before anything else is loaded; connections wait in its queue. Standard
output carries the lines ``listening: URL`` and ``ready: URL ...`` and nothing else. Exit codes: 2 the command line or
the environment is wrong, 1 another failure, 130 after SIGINT (Ctrl-C), 143 after SIGTERM; a second signal ends at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from gymloop.cli.stop import Stop
from gymloop.errors import ConfigError, InfraError
from gymloop.startup.sockets import hold_socket

if TYPE_CHECKING:
    from gymloop.gym.serve.run import Play
    from gymloop.gym.session import InProcessSource

ANY_PORT = (20000, 29999)
"""Where ``--port 0`` looks: below the ports that systems give to outgoing connections."""
_POLL_S = 1.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns 128 plus its number.

    Raises:
        ConfigError: the command line, the environment or the port cannot be used.
        InfraError: the server did not start, or ended by itself.
    """
    kwargs = _kwargs(args.kwargs)
    if (args.model_url is None) != (args.model_name is None):
        raise ConfigError("--model-url and --model-name belong together: where the model is, and its name there")
    low, high = (args.port, args.port) if args.port else ANY_PORT
    sock = hold_socket(low, high, args.host)
    with Stop() as stop, sock:
        host, port = sock.getsockname()[:2]
        host = args.advertised_host or _EVERYWHERE.get(host, host)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"listening: {url}", flush=True)

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        from gymloop.gym.serve.app import Bounds, EnvironmentApp
        from gymloop.gym.serve.server import environment_server

        source = _source(args.entrypoint, args.name, kwargs)
        bounds = Bounds(
            max_sessions=args.max_sessions, session_idle_s=args.session_timeout, call_timeout_s=args.call_timeout
        )
        server = environment_server(sock, EnvironmentApp(source, (host, port), _play(args), bounds))
        server.start()
        tools = ", ".join(source.environment.tool_specs) or "none"
        model = f", model {args.model_name} at {args.model_url}" if args.model_url else ""
        print(f"ready: {url}  environment {source.name} ({args.entrypoint}), tools: {tools}{model}", flush=True)
        try:
            while not stop.wait(_POLL_S):
                if not server.alive:
                    raise InfraError("the environment's server ended by itself; its last words are in the log above")
        finally:
            server.close()
    print(f"gymloop: stopped by {signal.Signals(stop.number).name}", file=sys.stderr)
    return stop.exit_code


def _source(entrypoint: str, name: str | None, kwargs: dict[str, Any]) -> InProcessSource:
    from gymloop.gym.session import InProcessSource
    from gymloop.gym.sources import load_environment

    if os.getcwd() not in sys.path:  # as ``python -m`` does: an environment may be a file beside the user
        sys.path.insert(0, os.getcwd())
    found = load_environment(entrypoint, "gym serve")
    return InProcessSource(name or found.__name__.lower(), found, kwargs)


def _play(args: argparse.Namespace) -> Play | None:
    if args.model_url is None:
        return None
    from gymloop.gym.serve.run import Play

    if not args.model_url.startswith(("http://", "https://")):
        raise ConfigError(f"--model-url: {args.model_url!r} is not an address; expected http://host:port/v1")
    return Play(args.model_url, args.model_name, max_turns=args.max_turns, max_tokens=args.max_tokens)


def _kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kwargs: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--kwargs: expected a JSON object of constructor arguments, got {text}")
    return value
