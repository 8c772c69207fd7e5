"""How much of a run's startup overlaps, and how long its first tokens take: the product, in child processes.

    python benchmarks/startup.py [RECIPE] [key=value ...] [--pairs 3] [--cold] [--results FOLDER]

Each measurement is a child process running `gymloop train` on the recipe, cut down to one tiny step; it reads the
timeline that the run leaves in `<run>/startup.json`, and the moment at which the run says that tokens were sampled. The
two modes alternate, so that a slow spell of the machine falls on both, and a first run that is not counted warms the
page cache for both. With `--cold` that first run counts: it begins with empty caches of compiled graphs and kernels,
which the others then find filled. Printed for each run as it ends, and as medians:

* the startup table, with `compile cache hit`, `miss` or `off` where the engine has such a cache.
* first tokens: from the start of the command (the interpreter's start and imports included) to the first reply with
  sampled tokens. Goal: at most 60 s cold and 25 s warm.
* overlapped / longest task alone: the longest task is taken from the sequential run, where it has the machine for
  itself. 1.0 is a perfect overlap on a machine with a core to spare for everything else; the goal is at most 1.05.
* overlapped / longest task together: the longest task of the overlapped run itself, slowed by its neighbours. The
  difference to the line above is contention, not lack of overlap.
* overlapped / critical path: the longest chain of tasks that need each other, in the same run. 1.0 means that no task
  waited for anything but what it needs; whatever the first line has above this one is the chain itself.
* overlapped / sequential sum: what overlapping saves.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from gymloop.models.store import cache_root
from gymloop.startup import Timeline

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "grpo.num_prompts_per_step=1",
    "grpo.num_generations_per_prompt=2",
    "grpo.max_num_steps=1",
    "grpo.max_rollout_turns=1",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "sft_warmup.steps=0",
    "policy.generation.max_new_tokens=1",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
)
FIRST_TOKENS = re.compile(r"first sampled tokens after \d")
FIRST_TOKENS_GOAL_S = {"cold": 60.0, "warm": 25.0}
KERNEL_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE")
"""Where libraries keep what they compile outside of the engine's own cache."""
END_S = 60.0
"""A run that was asked to end has this long."""


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        timeline: of its startup.
        first_tokens_s: from the start of the command.
    """

    timeline: Timeline
    first_tokens_s: float

    @property
    def total_s(self) -> float:
        return self.timeline.metrics()["startup/total_s"]

    @property
    def longest(self) -> tuple[str, float]:
        """The longest task, and its seconds."""
        return max(((record.task, record.seconds) for record in self.timeline.records), key=lambda task: task[1])


@dataclass(frozen=True)
class Pair:
    overlapped: Measured
    sequential: Measured

    def ratios(self) -> dict[str, float]:
        return {
            "overlapped / longest task alone": self.overlapped.total_s / self.sequential.longest[1],
            **own_ratios(self.overlapped),
            "overlapped / sequential sum": (
                self.overlapped.total_s / self.sequential.timeline.metrics()["startup/sequential_sum_s"]
            ),
        }


def own_ratios(overlapped: Measured) -> dict[str, float]:
    """What can be said of an overlapped run without a sequential one."""
    path = overlapped.timeline.metrics()["startup/critical_path_s"]
    return {
        "overlapped / longest task together": overlapped.total_s / overlapped.longest[1],
        "overlapped / critical path": overlapped.total_s / path,
    }


@dataclass(frozen=True)
class Session:
    """What all runs of one call have in common.

    Attributes:
        recipe: its path.
        overrides: of the recipe.
        results: where the runs leave their files.
        environment: of the runs.
        limit_s: seconds that one run may take.
    """

    recipe: Path
    overrides: tuple[str, ...]
    results: Path
    environment: Mapping[str, str]
    limit_s: float

    def measure(self, name: str, *, sequential: bool = False) -> Measured:
        """Run the product once in a child process."""
        command = [sys.executable, "-m", "gymloop.cli.main", "train", str(self.recipe), "--run", name]
        command += ["--sequential"] if sequential else []
        command += [*TINY, f"logger.log_dir={self.results}", *self.overrides]
        began = time.monotonic()
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines: list[tuple[float, str]] = []
        reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
        reader.start()
        try:
            child.wait(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            _end(child)
            self._give_up(command, f"did not end within {self.limit_s:g} s", lines)
        except BaseException:
            _end(child)
            raise
        reader.join(timeout=10)
        if child.returncode != 0:
            self._give_up(command, f"ended with {child.returncode}", lines)
        first = next((when for when, line in lines if FIRST_TOKENS.search(line)), None)
        if first is None:
            self._give_up(command, "never said that tokens were sampled", lines)
        text = (self.results / self.recipe.stem / name / "startup.json").read_text()
        return Measured(Timeline.from_json(text), first - began)

    def _give_up(self, command: list[str], what: str, lines: list[tuple[float, str]]) -> NoReturn:
        sys.exit(f"{' '.join(command)}\n{what}:\n{''.join(line for _, line in lines)[-6000:]}")


def _read(child: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    """Keep each line of a child's output with the moment at which it came."""
    if child.stdout is not None:
        lines.extend((time.monotonic(), line) for line in child.stdout)


def _end(child: subprocess.Popen[str]) -> None:
    """As Ctrl-C would: the run ends its own processes. A group that is still there after that is killed."""
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def empty_caches(folder: Path) -> dict[str, str]:
    """Variables that give a run caches of its own in ``folder``: of graphs and kernels nothing, all else as it is."""
    own = folder / "gymloop"
    own.mkdir(parents=True)
    if cache_root().is_dir():
        for entry in cache_root().iterdir():
            if entry.name != "vllm":
                (own / entry.name).symlink_to(entry)
    return {"GYMLOOP_CACHE": str(own), **{name: str(folder / name.lower()) for name in KERNEL_CACHES}}


def show(mode: str, run: Measured, warmth: str) -> None:
    """Print one run: its table, and its first tokens beside their goal."""
    task, seconds = run.longest
    print(f"{mode}: total {run.total_s:.2f} s, longest task {task} {seconds:.2f} s")
    Console(width=120, highlight=False).print(run.timeline.table())
    goal = FIRST_TOKENS_GOAL_S[warmth]
    print(f"{mode}: first tokens {run.first_tokens_s:.2f} s after the command (goal {goal:g} s {warmth})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe, key=value")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each mode")
    parser.add_argument("--cold", action="store_true", help="begin with empty caches and count the first run")
    parser.add_argument("--results", type=Path, help="keep the runs' files in this folder")
    parser.add_argument("--run-limit", type=float, default=600.0, help="seconds that one run may take")
    arguments = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a child is ended too
    recipe = arguments.recipe.resolve()
    print(f"{recipe.name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gymloop-startup-") as folder:
        caches = empty_caches(Path(folder) / "caches") if arguments.cold else {}
        session = Session(
            recipe,
            tuple(arguments.overrides),
            (arguments.results or Path(folder) / "results").resolve(),
            {**os.environ, **caches},
            arguments.run_limit,
        )
        first = session.measure("first")
        if arguments.cold:
            show("cold", first, "cold")
            for title, value in own_ratios(first).items():
                print(f"cold: {title} {value:.3f}", flush=True)
        pairs = [measure_pair(session, index) for index in range(arguments.pairs)]
    if pairs:
        summarise(pairs)


def measure_pair(session: Session, index: int) -> Pair:
    """One run of each mode, printed as each ends."""
    overlapped = session.measure(f"overlapped-{index}")
    show(f"overlapped {index + 1}", overlapped, "warm")
    sequential = session.measure(f"sequential-{index}", sequential=True)
    show(f"sequential {index + 1}", sequential, "warm")
    pair = Pair(overlapped, sequential)
    for title, value in pair.ratios().items():
        print(f"pair {index + 1}: {title} {value:.3f}", flush=True)
    return pair


def summarise(pairs: list[Pair]) -> None:
    """Medians over all pairs."""
    for title in pairs[0].ratios():
        values = [pair.ratios()[title] for pair in pairs]
        print(f"{title:<36} {statistics.median(values):.3f}   ({', '.join(f'{value:.3f}' for value in values)})")
    for mode in ("overlapped", "sequential"):
        firsts = [getattr(pair, mode).first_tokens_s for pair in pairs]
        text = ", ".join(f"{value:.2f}" for value in firsts)
        print(f"{f'first tokens, {mode}, s':<36} {statistics.median(firsts):.2f}   ({text})")


if __name__ == "__main__":
    main()
