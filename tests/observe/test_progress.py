"""What the terminal says, with and without a terminal."""

import asyncio
import io

from rich.console import Console

from gymloop.observe.progress import Progress
from gymloop.startup import Event, Task, run_graph

METRICS = {
    "reward/mean": 0.53125,
    "tools/rollouts_with_calls": 0.875,
    "mismatch/kl": 3.2e-6,
    "perf/tokens_per_s": 312.7,
    "time/step": 21.44,
}


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def test_a_step_is_one_line():
    target = console(False)
    Progress(target).step(3, 10, METRICS)
    assert target.file.getvalue() == (
        "step  3/10  reward 0.531  tool calls 88%  mismatch 3.2e-06  tokens/s 313  seconds 21.4\n"
    )


def test_a_missing_or_null_metric_is_a_dash():
    target = console(False)
    Progress(target).step(1, 9, METRICS | {"mismatch/kl": None})
    Progress(target).step(2, 9, {})
    first, second = target.file.getvalue().splitlines()
    assert "mismatch -" in first
    assert second == "step 2/9  reward -  tool calls -  mismatch -  tokens/s -  seconds -"


def test_without_a_terminal_every_change_of_the_startup_is_one_plain_line():
    target = console(False)
    progress = Progress(target)
    for event in (
        Event("engine", "started", 1.0),
        Event("engine", "progress", 2.0, "weights [1/2]"),
        Event("engine", "failed", 3.5, "OSError: [Errno 2] no such file " + "x" * 100),
        Event("policy", "cancelled", 3.6),
    ):
        progress.startup_event(event)
    assert target.file.getvalue().splitlines() == [
        "startup    1.0 s  engine: started",
        "startup    2.0 s  engine: waits for weights [1/2]",
        "startup    3.5 s  engine: failed after 2.5 s: OSError: [Errno 2] no such file " + "x" * 100,
        "startup    3.6 s  policy: cancelled after 0.0 s",
    ]


def test_a_failure_is_told_once_with_the_phase_and_its_log_has_the_whole_of_it(tmp_path):
    target = console(False)
    with Progress(target) as progress:
        progress.log_to(tmp_path / "run.log")
        progress.phase("step 3: weight sync")
        progress.failed(ValueError("engine died\n  engine.log: Killed"))
        progress.failed(ValueError("and what followed from it"))
    assert target.file.getvalue() == "failed in step 3: weight sync: engine died\n"
    log = (tmp_path / "run.log").read_text()
    assert "failed in step 3: weight sync: engine died\n  engine.log: Killed\n" in log
    assert "followed" not in log


def test_a_failure_while_starting_names_the_tasks_that_were_not_done():
    target = console(False)
    progress = Progress(target)
    for event in (
        Event("ray", "started", 0.0),
        Event("ray", "done", 1.0),
        Event("engine", "started", 1.0),
        Event("policy", "started", 1.0),
        Event("policy", "failed", 2.0, "policy died"),
        Event("engine", "cancelled", 2.0),
    ):
        progress.startup_event(event)
    progress.failed(ValueError("policy died"))
    assert target.file.getvalue().splitlines()[-1] == "failed in startup (engine, policy): policy died"


async def test_on_a_terminal_the_startup_is_live_and_ends_as_its_timeline():
    async def run(context):
        context.progress("weights [1/2]")
        await asyncio.sleep(0.05)

    target = console(True)
    with Progress(target) as progress:
        started = await run_graph([Task("engine", run, deadline_s=5)], progress.startup_event)
        progress.startup_done(started.timeline)
        progress.phase("step 1: rollouts 3/32")
        progress.phase("step 1: rollouts 4/32")
        progress.step(1, 10, METRICS)
    out = target.file.getvalue()
    assert "weights [1/2]" in out
    assert "engine *" in out
    assert "rollouts 4/32" in out
    assert out.index("engine *") < out.index("step  1/10")
    assert "\x1b[?25l" in out  # the cursor was hidden
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # and is shown again


def test_without_a_terminal_phases_are_silent():
    target = console(False)
    Progress(target).phase("step 1: rollouts 3/32")
    assert target.file.getvalue() == ""


def test_the_log_file_has_every_line_and_every_phase_once_with_its_time(tmp_path):
    log = tmp_path / "run.log"
    with Progress(console(False)) as progress:
        progress.say("before")
        progress.log_to(log)
        progress.phase("step 1: rollouts 1/4")
        progress.phase("step 1: rollouts 2/4")
        progress.phase("step 1: update on 40 tokens")
        progress.say("step 1/9  reward 0.5")
        progress.phase("step 2: rollouts 1/4")
    lines = log.read_text().splitlines()
    assert [line[9:] for line in lines] == [
        "step 1: rollouts 1/4",
        "step 1: update on 40 tokens",
        "step 1/9  reward 0.5",
        "step 2: rollouts 1/4",
    ]
    assert all(line[2] == line[5] == ":" for line in lines)
