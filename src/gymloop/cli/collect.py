"""``gymloop collect``: rollouts of a recipe's rows, written to a file; called again it goes on with what is missing."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gymloop.config.load import load_recipe
from gymloop.config.plan import compile_plan
from gymloop.errors import ConfigError

API_KEY = "GYMLOOP_API_KEY"


def run(args: argparse.Namespace) -> int:
    """Collect; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until the collection has handlers of its own
        signal.signal(number, _end)
    url = args.model_url
    if url is not None and not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", url):
        raise ConfigError("--model-url is not an address; expected https://host/v1, the key in " + API_KEY)
    plan = compile_plan(load_recipe(args.recipe, args.overrides), args.recipe, "collect")
    from gymloop.training.collect import collect
    from gymloop.training.collection import Request

    request = Request(
        output=Path(args.output).expanduser().absolute(),
        part=args.data,
        generations=args.generations,
        limit=args.limit,
        model_url=url,
        model=args.model,
        api_key=os.environ.get(API_KEY) or None,
        retry_failed=args.retry_failed,
    )
    return asyncio.run(collect(plan, request))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
