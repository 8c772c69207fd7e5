"""How much of a run's startup overlaps: the product's own startup, overlapped and one task after another.

    python benchmarks/startup.py [RECIPE] [--pairs 3]

Each measurement is a child process running `gymloop train` on the recipe, cut down to one tiny step, and reads the
timeline that the run leaves in `<run>/startup.json`. The two modes alternate, so that a slow spell of the machine falls
on both, and a first run that is not counted warms the page cache for both. Printed for each pair, and as medians:

* overlapped / longest task alone: the longest task is taken from the sequential run, where it has the machine for
  itself. 1.0 is a perfect overlap on a machine with a core to spare for everything else; the goal is at most 1.10.
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
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
RUN_LIMIT_S = 600.0


@dataclass(frozen=True)
class Pair:
    overlapped: Timeline
    sequential: Timeline

    def ratios(self) -> dict[str, float]:
        total = self.overlapped.metrics()["startup/total_s"]
        return {
            "overlapped / longest task alone": total / longest(self.sequential)[1],
            "overlapped / longest task together": total / longest(self.overlapped)[1],
            "overlapped / critical path": total / self.overlapped.metrics()["startup/critical_path_s"],
            "overlapped / sequential sum": total / self.sequential.metrics()["startup/sequential_sum_s"],
        }


def longest(timeline: Timeline) -> tuple[str, float]:
    return max(((record.task, record.seconds) for record in timeline.records), key=lambda task: task[1])


def measure(recipe: Path, name: str, results: Path, overrides: list[str], *, sequential: bool) -> Timeline:
    """Run the product once in a child process and return the timeline of its startup."""
    command = [sys.executable, "-m", "gymloop.cli.main", "train", str(recipe), "--run", name]
    command += ["--sequential"] if sequential else []
    command += [*TINY, f"logger.log_dir={results}", *overrides]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=RUN_LIMIT_S)
    except BaseException:
        # As Ctrl-C would: the run ends its own processes. A group that is still there after that is killed.
        os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
        raise
    if child.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {child.returncode}:\n{output[-4000:]}")
    return Timeline.from_json((results / recipe.stem / name / "startup.json").read_text())


def describe(mode: str, timeline: Timeline) -> str:
    tasks = "  ".join(f"{record.task} {record.seconds:.2f}" for record in timeline.records)
    return f"  {mode:<10} total {timeline.metrics()['startup/total_s']:6.2f} s   {tasks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe, key=value")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each mode")
    arguments = parser.parse_args()
    recipe = arguments.recipe.resolve()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a child is ended too
    print(f"{recipe.name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="gymloop-startup-") as folder:
        results = Path(folder)
        measure(recipe, "warm", results, arguments.overrides, sequential=False)
        pairs = []
        for index in range(arguments.pairs):
            pair = Pair(
                overlapped=measure(recipe, f"overlapped-{index}", results, arguments.overrides, sequential=False),
                sequential=measure(recipe, f"sequential-{index}", results, arguments.overrides, sequential=True),
            )
            pairs.append(pair)
            print(f"pair {index + 1}: longest alone {longest(pair.sequential)[0]}")
            print(describe("overlapped", pair.overlapped))
            print(describe("sequential", pair.sequential), flush=True)
    for title in pairs[0].ratios():
        values = [pair.ratios()[title] for pair in pairs]
        print(f"{title:<36} {statistics.median(values):.3f}   ({', '.join(f'{value:.3f}' for value in values)})")


if __name__ == "__main__":
    main()
