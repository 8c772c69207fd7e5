"""The process that vLLM's core is forked from lives whatever its imports do; its forks meet the cause themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ASKED = """
import sys

def ask(connection):
    told = ["gymloop.generation.vllm.preloaded" in sys.modules, "vllm.v1.engine.core" in sys.modules]
    try:
        import vllm.v1.engine.core
    except BaseException as error:
        told.append(f"{type(error).__name__}: {error}")
    connection.send(told)
"""
MAIN = """
import multiprocessing, multiprocessing.forkserver, os, sys
if {late!r}:
    sys.path.insert(0, {late!r})
import asked
context = multiprocessing.get_context("forkserver")
multiprocessing.forkserver.set_forkserver_preload(["gymloop.generation.vllm.preloaded"])
for _ in range(2):
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=asked.ask, args=(sender,))
    process.start()
    sender.close()
    print(receiver.recv() if receiver.poll(60) else "no answer", flush=True)
    process.join(60)
"""


def stand_in(folder: Path, core: str) -> Path:
    """A package that is imported as vLLM, whose core's module holds ``core``."""
    for package in ("vllm", "vllm/v1", "vllm/v1/engine"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "vllm" / "v1" / "engine" / "core.py").write_text(core)
    (folder / "vllm" / "platforms.py").write_text(
        "class current_platform:\n    is_cuda = staticmethod(lambda: False)\n"
    )
    (folder / "asked.py").write_text(ASKED)
    return folder


def answers_of_two_forks(path: Path, late: bool = False) -> tuple[list[str], str]:
    """What two forks say, and what was said on standard error; ``late`` makes the path known at run time only."""
    program = MAIN.format(late=str(path) if late else "")
    environment = {"PATH": "/usr/bin:/bin", **({} if late else {"PYTHONPATH": str(path)})}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_what_is_loaded_ahead_is_there_in_every_fork(tmp_path: Path):
    answers, errors = answers_of_two_forks(stand_in(tmp_path, "loaded = True\n"))
    assert answers == ["[True, True]"] * 2
    assert not errors


@pytest.mark.parametrize(
    ("core", "cause"),
    [
        ("raise RuntimeError('no kernel for this device')", "RuntimeError: no kernel for this device"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('not on this machine')", "SystemExit: not on this machine"),
    ],
)
def test_an_error_ahead_ends_no_server_and_every_fork_meets_it_itself(core: str, cause: str, tmp_path: Path):
    answers, errors = answers_of_two_forks(stand_in(tmp_path, core))
    assert answers == [str([True, False, cause])] * 2
    assert "vLLM's modules could not be loaded ahead of its processes" in errors
    assert cause in errors


def test_forks_find_what_only_this_process_has_on_its_path(tmp_path: Path):
    """Python before 3.12.8 and 3.13.1 does not tell the server of the path: nothing is loaded ahead, and all works."""
    answers, _ = answers_of_two_forks(stand_in(tmp_path, "loaded = True\n"), late=True)
    assert answers in (["[True, True]"] * 2, ["[True, False]"] * 2)
