"""``docs/failures.md`` says what the code does: exit codes, kinds, causes, metrics, keys."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import get_args

import pytest

from gymloop.algorithms.step import rollout_metrics
from gymloop.cli import main as cli
from gymloop.config.schema import Recipe
from gymloop.errors import Cause, ConfigError, DataError, GymloopError, InfraError, PolicyError
from gymloop.observe.metrics import METRICS
from gymloop.rollouts.trajectory import Failure, FailureKind, Group
from gymloop.startup import StartupError, Timeline
from gymloop.training.schedule import EXIT_OUT_OF_TIME

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")


def first_column(header: str) -> list[str]:
    """The code words of a table's first column."""
    table = PAGE[PAGE.index(header) :].split("\n\n")[0]
    return [word for row in table.splitlines()[2:] for word in re.findall(r"`([^`]+)`", row.split("|")[1])]


def exit_code_of(error, monkeypatch) -> int:
    class Verb:
        @staticmethod
        def run(args):
            if isinstance(error, BaseException):
                raise error
            return error

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Verb)
    return cli.main(["check", "recipe.yaml"])


def test_every_exit_code_on_the_page_is_the_one_in_the_code(monkeypatch):
    table = PAGE[PAGE.index("| exit code |") :].split("\n\n")[0]
    documented = {int(row.split("|")[1]) for row in table.splitlines()[2:]}
    codes = {
        0: 0,
        1: InfraError("a worker died"),
        2: ConfigError("no such key"),
        130: KeyboardInterrupt(),
    }
    assert {exit_code_of(error, monkeypatch) for error in codes.values()} == set(codes)
    by_signal = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}
    assert documented == set(codes) | by_signal | {EXIT_OUT_OF_TIME}


@pytest.mark.parametrize(("kind", "code"), [("config", 2), ("infra", 1), ("data", 1)])
def test_a_startup_task_decides_the_exit_code_by_the_kind_of_its_cause(kind, code, monkeypatch):
    error = StartupError("startup task 'data' failed after 0.1 s: no rows", "data", kind, Timeline(()))
    assert exit_code_of(error, monkeypatch) == code


def test_every_kind_is_on_the_page_and_nothing_else():
    kinds = {error.kind for error in (InfraError, DataError, PolicyError, ConfigError)}
    assert set(first_column("| kind | class |")) == kinds
    assert set(get_args(FailureKind)) == kinds - {"config"}, "a config error ends the run and is no record"


def test_every_cause_is_on_the_page_and_nothing_else():
    assert set(first_column("| cause | what happened |")) == set(get_args(Cause))


def test_every_metric_of_failures_is_declared_and_on_the_page():
    failure = Failure("g", 0, 2, "infra", "boom", "environment toy, verify", "raised")
    measured = {
        name for name in rollout_metrics([Group("g", (), (failure,))], group_size=1) if name.startswith("failures/")
    }
    declared = {metric.name for metric in METRICS if metric.name.startswith("failures/")}
    assert measured == declared, "each by its own name, none by a family"
    shown = set(first_column("| metric | meaning |"))
    assert declared <= shown
    for name in shown:
        assert METRICS[name].help


def test_every_key_on_the_page_exists():
    for section, key in re.findall(r"`(grpo|rollouts|health|startup|checkpointing)\.(\w+)", PAGE):
        assert key in Recipe.model_fields[section].annotation.model_fields, f"{section}.{key}"


SOURCE = re.sub(r'"\n\s*f?"', "", "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")))


VARIABLE = (
    r"\.\.\.|[A-Z]{3,}\S*|'[^']*'|\S*\d\S*"
    r"|\b(?:the run's event loop|engine|policy|calculator|python|train|nan|inf)\b"
)
"""Dots, place holders, quoted names, numbers, and the names that stand as examples."""


def sentences() -> list[str]:
    """Everything in the first columns of the tables of messages."""
    tables = re.findall(r"\| message \|.*?(?=\n\n|\Z)", PAGE, re.DOTALL)
    rows = [row for table in tables for row in table.splitlines()[2:]]
    return [said for row in rows for said in re.findall(r"`([^`]+)`", row.split(" | ")[0]) if " " in said]


@pytest.mark.parametrize("said", sentences())
def test_every_sentence_on_the_page_is_one_of_the_code(said):
    """Between its variable parts (names, numbers, dots) it has words that stand so in the source."""
    pieces = re.split(VARIABLE, said)
    longest = max((piece.strip(" ;:,()") for piece in pieces), key=len)
    assert longest in SOURCE, longest


def test_every_error_says_its_cause_and_keeps_it_between_processes():
    import pickle

    assert GymloopError("what").cause == "other"
    error = pickle.loads(pickle.dumps(InfraError("no answer", cause="timeout")))
    assert (str(error), error.cause, error.kind) == ("no answer", "timeout", "infra")
