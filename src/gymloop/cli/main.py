"""``gymloop VERB``: parse, run the verb's module, and end with one message and an exit code that says who must act.

0 done, 1 a failure that is not the caller's, 2 the recipe or the command line is wrong, 75 a run that saved and ended
in time, 130 interrupted. No verb's module is imported before it is chosen, so ``check`` and ``--help`` load neither
torch nor ray. ``GYMLOOP_DEBUG=1`` shows tracebacks.
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

from gymloop import __version__, bytecode
from gymloop.config.nearest import did_you_mean
from gymloop.config.secrets import masked_override
from gymloop.errors import GymloopError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest verb; options are written out in full."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            what = f"{choice[1]}: unknown value" if choice[1].startswith("-") else "unknown verb"
            message = f"{what} {choice[2]!r}{did_you_mean(choice[2], re.findall(r'[a-z0-9]+', choice[3]))}"
        print(f"gymloop: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    parser.add_argument(
        "overrides",
        metavar="OVERRIDE",
        nargs="*",
        default=[],  # argparse calls a list without one required
        help="changes to the recipe: key=value, +key=value adds, ++key=value adds or changes, ~key removes",
    )


class _Keys(argparse.Action):
    """Like ``--help``: needs no recipe."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from gymloop.config.keys import reference

        print(reference())
        parser.exit()


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder or a Hugging Face id")
    parser.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument("--port", metavar="PORT", type=_port, default=8000, help="0 takes any (default: %(default)s)")
    parser.add_argument("--served-model-name", metavar="NAME", help="the name that clients give; MODEL by default")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja file, instead of the model's own template")
    parser.add_argument(
        "--tool-parser", metavar="NAME", default="hermes", help="how calls are read (default: %(default)s)"
    )
    parser.add_argument("--tool-parser-plugin", metavar="FILE", help="Python file that defines further tool parsers")
    parser.add_argument(
        "--reasoning-parser", metavar="NAME", help="how reasoning is told from the answer; none by default"
    )
    parser.add_argument("--reasoning-parser-plugin", metavar="FILE", help="Python file that defines further ones")
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=_count,
        help="prompt and answer together, tokens; the model's own by default",
    )
    parser.add_argument(
        "--max-batch-size", metavar="N", type=_count, help="requests decoded together; by default what memory allows"
    )
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--device", metavar="DEVICE", default="auto", help="as torch names it; a GPU by default, if any"
    )
    parser.add_argument("--verbose", action="store_true", help="log debug messages, among them a line a request")
    parser.epilog = "The environment variable GYMLOOP_API_KEY, where it is set, is the key that clients must send."


def _add_collect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", required=True, help="JSONL; one that is there already is completed")
    parser.add_argument(
        "--data",
        choices=("train", "validation"),
        default="train",
        help="whose rows and sampling (default: %(default)s)",
    )
    parser.add_argument(
        "--generations",
        metavar="N",
        type=_count,
        help="rollouts of each row; grpo.num_generations_per_prompt by default",
    )
    parser.add_argument("--limit", metavar="N", type=_count, help="rows, from the first on; all by default")
    parser.add_argument(
        "--model-url", metavar="URL", help="of an OpenAI-compatible server, instead of the recipe's engine"
    )
    parser.add_argument("--model", metavar="NAME", help="the name of the model there; policy.model_name by default")
    parser.add_argument("--retry-failed", action="store_true", help="take rollouts that failed for good again")
    parser.epilog = (
        "The environment variable GYMLOOP_API_KEY, where it is set, is the key for the server at --model-url."
    )


def _add_gym(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--version", metavar="VERSION", dest="gym_version", default="0.7.0", help="of nemo-gym (default: %(default)s)"
    )
    parser.add_argument(
        "--extra", metavar="PACKAGE", action="append", default=[], help="a package some server needs; may be repeated"
    )
    parser.add_argument(
        "--python", metavar="PYTHON", default=sys.executable, help="3.11 or newer (default: the one that runs this)"
    )


def _add_gym_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("entrypoint", metavar="MODULE:CLASS", help="a subclass of gymloop.gym.Environment")
    parser.add_argument("--kwargs", metavar="JSON", help="constructor arguments, a JSON object")
    parser.add_argument("--name", metavar="NAME", help="as rows carry it in agent_ref.name; the class's, in lower case")
    parser.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument("--port", metavar="PORT", type=_port, default=9000, help="0 takes any (default: %(default)s)")
    parser.add_argument("--advertised-host", metavar="HOST", help="where clients on other machines reach it")
    parser.add_argument("--model-url", metavar="URL", help="a generation server to play rollouts with, for POST /run")
    parser.add_argument("--model-name", metavar="NAME", help="the model that it serves")
    counts = {
        "--max-turns": (16, "model calls of one rollout"),
        "--max-tokens": (1024, "tokens of one model call"),
        "--max-sessions": (16384, "sessions open at once"),
    }
    for option, (default, what) in counts.items():
        parser.add_argument(
            option, metavar="N", type=_count, default=default, help=f"{what}, at most (default: %(default)s)"
        )
    parser.add_argument(
        "--call-timeout",
        metavar="S",
        type=_count,
        default=60,
        help="seconds for a tool or verdict (%(default)s)",
    )
    parser.add_argument(
        "--session-timeout",
        metavar="S",
        type=_count,
        default=3600,
        help="seconds of silence that end a session (default: %(default)s)",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Every verb with its arguments; ``module`` is what runs it."""
    parser = _Parser(prog="gymloop", description="Reinforcement learning of LLM agents in gyms.")
    parser.add_argument("--version", action="version", version=f"gymloop {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True, parser_class=_Parser)

    check = verbs.add_parser("check", help="say everything that is wrong with a recipe, starting nothing")
    _add_recipe(check)
    check.add_argument("--resolved", action="store_true", help="print the recipe as YAML with everything settled")
    check.add_argument("--explain", action="store_true", help="print derived values with their origin, and the startup")
    check.add_argument("--deep", action="store_true", help="also load tokenizer and environments, and render all rows")
    check.add_argument("--keys", action=_Keys, nargs=0, help="print every key of a recipe, and exit")
    check.set_defaults(module="gymloop.cli.check")

    train = verbs.add_parser("train", help="train the policy of a recipe")
    _add_recipe(train)
    train.add_argument("--run", metavar="NAME", help="name of the run's folder; the time by default")
    train.add_argument("--resume", action="store_true", help="go on from the run's latest complete checkpoint")
    train.add_argument("--sequential", action="store_true", help="start one task after another, to compare")
    train.set_defaults(module="gymloop.cli.train")

    collect = verbs.add_parser("collect", help="write rollouts of a recipe to a file, training nothing")
    _add_recipe(collect)
    _add_collect(collect)
    collect.set_defaults(module="gymloop.cli.collect")

    serve = verbs.add_parser("serve", help="serve a model behind an OpenAI-compatible URL")
    _add_serve(serve)
    serve.set_defaults(module="gymloop.cli.serve")

    models = verbs.add_parser("models", help="models on this machine")
    deeds = models.add_subparsers(title="deeds", metavar="DEED", dest="deed", required=True, parser_class=_Parser)
    fetch = deeds.add_parser("fetch", help="get a model ahead of a run and print its folder")
    fetch.add_argument("model", metavar="ID", help="a Hugging Face id, as in policy.model_name")
    fetch.set_defaults(module="gymloop.cli.models")

    gym = verbs.add_parser("gym", help="NeMo Gym's servers: install and list them, and serve yours like them")
    deeds = gym.add_subparsers(title="deeds", metavar="DEED", dest="deed", required=True, parser_class=_Parser)
    install = deeds.add_parser("install", help="make the environment they run in, once, and print its folder")
    _add_gym(install)
    install.set_defaults(module="gymloop.cli.gym")
    listed = deeds.add_parser("list", help="print its resources servers and what each needs")
    listed.add_argument("server", metavar="SERVER", nargs="?", help="one of them, with its config files")
    listed.add_argument("--folder", metavar="FOLDER", help="another virtual environment that has nemo-gym")
    _add_gym(listed)
    listed.set_defaults(module="gymloop.cli.gym")
    served = deeds.add_parser("serve", help="serve an environment of yours as NeMo Gym's servers serve theirs")
    _add_gym_serve(served)
    served.set_defaults(module="gymloop.cli.gym_serve")
    return parser


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a parser and of the verbs below it."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                found |= _options(verb)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of one call; overrides may stand before and after options."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        if "=" in unknown[0] and hasattr(args, "overrides"):
            shown = masked_override(unknown[0])
            parser.error(f"unknown argument {shown!r}; an override has no dashes: {shown.lstrip('-')}")
        options = sorted(option for option in _options(parser) if option.startswith("--"))
        parser.error(f"unknown argument {unknown[0]!r}{did_you_mean(unknown[0], options)}")
    if rest:
        args.overrides.extend(rest)
    return args


def _keep_bytecode() -> None:
    libraries = bytecode.lost()
    if libraries is not None:
        from gymloop.models.store import cache_root

        bytecode.keep(cache_root() / "bytecode", libraries)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        try:
            args = parse(sys.argv[1:] if argv is None else argv)
        except SystemExit as end:  # argparse's way of ending: 0 after --help, 2 after a message
            return int(end.code or 0)
        if argv is None:  # this process is the command's own
            _keep_bytecode()
        code = int(importlib.import_module(args.module).run(args))
        sys.stdout.flush()
        return code
    except GymloopError as error:
        if os.environ.get("GYMLOOP_DEBUG") == "1":
            traceback.print_exc()
        print(f"gymloop: {error}", file=sys.stderr)
        return 2 if error.kind == "config" else 1  # a startup task's kind is that of its cause
    except KeyboardInterrupt:
        print("gymloop: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough, as in `gymloop check ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
