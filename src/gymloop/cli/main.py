"""``gymloop VERB``: parse, run the verb's module, and end with one message and an exit code that says who must act.

0 done, 1 a failure that is not the caller's, 2 the recipe or the command line is wrong, 130 interrupted. No verb's
module is imported before it is chosen, so ``check`` and ``--help`` load neither torch nor ray. ``GYMLOOP_DEBUG=1``
shows tracebacks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from gymloop import __version__
from gymloop.config.nearest import did_you_mean
from gymloop.errors import ConfigError, GymloopError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest verb; options are written out in full."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            message = f"unknown verb {choice[1]!r}{did_you_mean(choice[1], re.findall(r'[a-z]+', choice[2]))}"
        print(f"gymloop: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    parser.add_argument(
        "overrides",
        metavar="OVERRIDE",
        nargs="*",
        help="changes to the recipe: key=value, +key=value adds, ++key=value adds or changes, ~key removes",
    )


def build_parser() -> argparse.ArgumentParser:
    """Every verb with its arguments; ``module`` is what runs it."""
    parser = _Parser(prog="gymloop", description="Reinforcement learning of LLM agents in gyms.")
    parser.add_argument("--version", action="version", version=f"gymloop {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True, parser_class=_Parser)

    check = verbs.add_parser("check", help="say everything that is wrong with a recipe, starting nothing")
    _add_recipe(check)
    check.set_defaults(module="gymloop.cli.check")

    train = verbs.add_parser("train", help="train the policy of a recipe")
    _add_recipe(train)
    train.add_argument("--run", metavar="NAME", help="name of the run's folder; the time by default")
    train.add_argument("--resume", action="store_true", help="go on from the run's latest complete checkpoint")
    train.add_argument("--sequential", action="store_true", help="start one task after another, to compare")
    train.set_defaults(module="gymloop.cli.train")

    models = verbs.add_parser("models", help="models on this machine")
    deeds = models.add_subparsers(title="deeds", metavar="DEED", dest="deed", required=True, parser_class=_Parser)
    fetch = deeds.add_parser("fetch", help="get a model ahead of a run and print its folder")
    fetch.add_argument("model", metavar="ID", help="a Hugging Face id, as in policy.model_name")
    fetch.set_defaults(module="gymloop.cli.models")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of one call; overrides may stand before and after options."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        options = ("--run", "--resume", "--sequential", "--help", "--version")
        parser.error(f"unknown argument {unknown[0]!r}{did_you_mean(unknown[0], options)}")
    if rest:
        args.overrides.extend(rest)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:  # argparse's way of ending: 0 after --help, 2 after a message
        return int(end.code or 0)
    try:
        return int(importlib.import_module(args.module).run(args))
    except GymloopError as error:
        if os.environ.get("GYMLOOP_DEBUG") == "1":
            traceback.print_exc()
        print(f"gymloop: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("gymloop: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
