"""Whole training runs in a second or two: workers inside the run's own process, forked from one that has torch loaded.

    with Nursery() as nursery:
        done = nursery.run("train", recipe, "--run", "r", "--resume", die="gymloop.training.loop:save:2:before")

The run is the product's own ``gymloop train``; only where its workers live is changed (``InlineRemote`` instead of Ray
actors), by replacing two names from outside. ``die`` kills the process with SIGKILL around the n-th call of a function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUN_LIMIT_S = 120


@dataclass(frozen=True)
class Done:
    """How a run ended: exit code (negative: the signal that killed it) and everything it printed."""

    code: int
    output: str


class Nursery:
    """The process that forks runs; a context manager."""

    def __enter__(self) -> Nursery:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def start(
        self,
        *argv: object,
        die: str | None = None,
        number: int = signal.SIGKILL,
        limit_after: tuple[str, int] | None = None,
        prepare: tuple[str, dict[str, Any]] | None = None,
        limit_s: int = RUN_LIMIT_S,
    ) -> Running:
        """Begin a run.

        Args:
            argv: of ``gymloop``.
            die: ``module:qualified.name:call:before|after``.
            number: the signal that ``die`` sends.
            limit_after: a function, as in ``die`` with its call, from whose return on no file may grow beyond so many
                bytes.
            prepare: ``module:function``, called with these arguments in the run's process before the run.
            limit_s: a run that takes longer is killed.
        """
        descriptor, output = tempfile.mkstemp(prefix="run-", suffix=".log")
        os.close(descriptor)
        order = {
            "argv": [str(word) for word in argv],
            "die": die,
            "limit_after": limit_after,
            "prepare": prepare,
            "limit_s": limit_s,
            "output": output,
        }
        order["number"] = int(number)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Running(self._answer()["pid"], self, Path(output))

    def run(self, *argv: object, **how: Any) -> Done:
        """A run from start to end."""
        return self.start(*argv, **how).wait()

    def _answer(self) -> dict[str, int]:
        line = self._process.stdout.readline()
        assert line, "the process that forks runs has ended"
        return json.loads(line)


class Running:
    """A run in progress; one at a time."""

    def __init__(self, pid: int, nursery: Nursery, output: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._output = output
        self._done: Done | None = None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def alive(self) -> bool:
        """Whether the process has not ended yet; a zombie has."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    def wait(self) -> Done:
        """Wait until it ends."""
        if self._done is None:
            code = self._nursery._answer()["code"]
            self._done = Done(code, self._output.read_text())
            self._output.unlink()
        return self._done


# ---------------------------------------------------------------- the process that forks


def serve() -> None:
    """Load what is slow to load, then fork a run for each line of standard input."""
    # No call into torch before the fork: its thread pools would not survive it.
    for name in ("torch", "transformers.models.llama.modeling_llama", "matplotlib.backends.backend_agg"):
        importlib.import_module(name)
    for name in ("cli.train", "training.train", "policy.worker", "generation.torch_engine", "tokens.renderer"):
        importlib.import_module(f"gymloop.{name}")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_run(order)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
    os._exit(0)  # nothing here is worth the seconds that torch takes to leave


def _become_run(order: dict[str, Any]) -> None:
    code = 70
    try:
        signal.alarm(order["limit_s"])
        sink = os.open(order["output"], os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(sink, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.path.insert(0, str(HERE))
        _workers_inside()
        if order["die"]:
            target, when = order["die"].rsplit(":", 1)
            _around(target, when, lambda: os.kill(os.getpid(), order["number"]))
        if order["limit_after"]:
            target, size = order["limit_after"]
            _around(target, "after", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
        if order["prepare"]:
            (module, _, function), arguments = order["prepare"][0].partition(":"), order["prepare"][1]
            getattr(importlib.import_module(module), function)(**arguments)
        from gymloop.cli.main import main

        code = main(order["argv"])
    except BaseException:  # noqa: BLE001  (not swallowed: this process ends here, with 70)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _workers_inside() -> None:
    from gymloop.cluster.placement import Place
    from gymloop.cluster.remote import InlineRemote
    from gymloop.training.tasks import engine, worker

    class NoCluster:
        address = None
        joins = False

        def __init__(self, **_: object) -> None: ...

        def connect(self) -> None: ...

        def disconnect(self) -> None: ...

    class NoPlaces:
        def place(self, share: object) -> Place:
            return Place()

    engine.RayCluster = NoCluster
    engine.reserve = lambda *_: NoPlaces()
    worker.RayRemote = lambda name, build, **_: InlineRemote(name, build)


def _around(target: str, when: str, act: Any) -> None:
    """Replace ``module:qualified.name`` so that its n-th call, ``:n``, is preceded or followed by ``act``."""
    module, path, number = target.rsplit(":", 2)
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    real = getattr(owner, name)
    calls = iter(range(1, 1_000_000))

    if inspect.iscoroutinefunction(real):

        @functools.wraps(real)
        async def replaced(*args: Any, **kwargs: Any) -> Any:
            call = next(calls)
            if call == int(number) and when == "before":
                act()
            result = await real(*args, **kwargs)
            if call == int(number) and when == "after":
                act()
            return result
    else:

        @functools.wraps(real)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            call = next(calls)
            if call == int(number) and when == "before":
                act()
            result = real(*args, **kwargs)
            if call == int(number) and when == "after":
                act()
            return result

    setattr(owner, name, replaced)


if __name__ == "__main__":
    serve()
