"""The startup graph: overlap, first failure, deadlines, teardown (acceptance behaviours A2, A3, A4)."""

import asyncio
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from gymloop.errors import ConfigError, DataError
from gymloop.startup import StartupError, Task, run_graph
from gymloop.startup.graph import CANCEL_S


def sleeper(name, seconds, needs=(), log=None, deadline_s=5.0, error=None):
    """A task that sleeps; its result is its name, its teardown appends the name to ``log``."""

    async def run(context):
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return name

    async def undo(result):
        log.append(result)

    return Task(name, run, needs, deadline_s=deadline_s, teardown=undo if log is not None else None)


async def forever(context):
    await asyncio.Event().wait()


async def test_a2_independent_tasks_take_as_long_as_the_longest_of_them():
    began = time.monotonic()
    started = await run_graph([sleeper("environment", 0.5), sleeper("engine", 0.7)])
    seconds = time.monotonic() - began
    total = started.timeline.metrics()["startup/sequential_sum_s"]
    assert seconds >= 0.69
    assert total >= 1.19
    assert seconds < total - 0.2


async def test_one_at_a_time_takes_the_sum_in_the_order_given():
    began = time.monotonic()
    tasks = [
        sleeper("ready", 0.0, needs=("engine",)),
        sleeper("socket", 0.1),
        sleeper("engine", 0.1, needs=("socket",)),
        sleeper("data", 0.1),
    ]
    started = await run_graph(tasks, max_parallel=1)
    assert time.monotonic() - began >= 0.3
    assert list(started.results) == ["socket", "engine", "ready", "data"]


async def test_a_task_begins_when_its_needs_have_ended_and_sees_only_their_results():
    seen = {}

    async def ready(context):
        seen.update(context.results)
        return "ready"

    tasks = [
        Task("ready", ready, ("engine",), deadline_s=5),
        sleeper("engine", 0.05, needs=("socket",)),
        sleeper("socket", 0.05),
        sleeper("data", 0.0),
    ]
    started = await run_graph(tasks)
    assert seen == {"engine": "engine"}
    assert started.results == {"socket": "socket", "data": "data", "engine": "engine", "ready": "ready"}
    records = {record.task: record for record in started.timeline.records}
    assert records["engine"].start >= records["socket"].end >= 0.049
    assert records["engine"].start - records["socket"].end < 2.0


async def test_reading_a_result_that_is_not_in_needs_names_both_tasks():
    async def nosy(context):
        return context.results["data"]

    with pytest.raises(StartupError, match="'nosy' reads the result of 'data' without naming it in needs"):
        await run_graph([sleeper("data", 0), Task("nosy", nosy, deadline_s=5)])


async def test_a3_first_failure_is_raised_at_once_under_its_name_with_its_cause_and_all_is_torn_down():
    log, cancelled = [], []

    async def slow(context):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append("environment")
            raise

    cause = RuntimeError("no such file model.safetensors")
    tasks = [
        sleeper("socket", 0.0, log=log),
        sleeper("data", 0.05, log=log),
        Task("environment", slow, deadline_s=60),
        sleeper("engine", 0.2, needs=("socket",), log=log, error=cause),
        sleeper("ready", 0, needs=("engine", "environment"), log=log),
    ]
    began = time.monotonic()
    with pytest.raises(StartupError) as caught:
        await run_graph(tasks)
    assert time.monotonic() - began < 10
    said = r"startup task 'engine' failed after \d+\.\d s: RuntimeError: no such file model\.safetensors"
    assert re.fullmatch(said, str(caught.value))
    assert caught.value.__cause__ is cause
    assert caught.value.task == "engine"
    assert caught.value.kind == "infra"
    assert cancelled == ["environment"]
    assert log == ["data", "socket"]
    assert {record.task: record.outcome for record in caught.value.timeline.records} == {
        "socket": "done",
        "data": "done",
        "environment": "cancelled",
        "engine": "failed",
        "ready": "not started",
    }


async def test_the_error_keeps_the_kind_of_its_cause():
    with pytest.raises(StartupError, match=r"'data' failed after \d+\.\d s: row 3 has no input$") as caught:
        await run_graph([sleeper("data", 0, error=DataError("row 3 has no input"))])
    assert caught.value.kind == "data"


async def test_of_two_failures_the_earlier_is_raised_and_the_other_is_noted():
    async def fails_when_cancelled(context):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise OSError("port lost") from None

    tasks = [
        Task("environment", fails_when_cancelled, deadline_s=60),
        sleeper("engine", 0.05, error=ValueError("bad weights")),
    ]
    with pytest.raises(StartupError, match="'engine' failed") as caught:
        await run_graph(tasks)
    assert caught.value.__notes__ == ["startup task 'environment' failed as well: OSError: port lost"]


async def test_a4_a_task_without_progress_is_named_with_what_it_waited_for():
    async def stuck(context):
        context.progress("http://127.0.0.1:3000/healthz")
        await asyncio.Event().wait()

    began = time.monotonic()
    with pytest.raises(StartupError) as caught:
        await run_graph([Task("environment", stuck, deadline_s=0.3), sleeper("engine", 0.05)])
    assert time.monotonic() - began < 10
    assert str(caught.value) == (
        "startup task 'environment' made no progress for 0.3 s; it was waiting for http://127.0.0.1:3000/healthz"
    )


async def test_a_remark_stays_with_its_task_and_is_no_progress():
    async def load(context):
        context.remark("compile cache hit")

    async def stuck(context):
        for _ in range(100):
            context.remark("still here")
            await asyncio.sleep(0.05)

    started = await run_graph([Task("engine", load, deadline_s=5), sleeper("policy", 0.01)])
    assert {record.task: record.remarks for record in started.timeline.records} == {
        "engine": ("compile cache hit",),
        "policy": (),
    }
    with pytest.raises(StartupError, match=r"no progress for 0\.2 s"):
        await run_graph([Task("engine", stuck, deadline_s=0.2)])


async def test_progress_extends_the_deadline_also_from_a_thread():
    def load(context):
        for shard in range(5):
            time.sleep(0.5)
            context.progress(f"shard {shard}")
        return "loaded"

    async def run(context):
        return await context.in_thread(load, context)

    events = []
    started = await run_graph([Task("engine", run, deadline_s=2.0)], events.append)
    assert started.results["engine"] == "loaded"
    assert [event.message for event in events if event.kind == "progress"] == [f"shard {n}" for n in range(5)]
    assert [message for _, message in started.timeline.records[0].waited_for] == [f"shard {n}" for n in range(5)]


async def test_close_tears_down_in_reverse_order_of_completion_and_only_once():
    log = []
    started = await run_graph([sleeper("slow", 0.2, log=log), sleeper("fast", 0.0, log=log)])
    assert await started.close(1.0) == ()
    assert log == ["slow", "fast"]
    assert await started.close(1.0) == ()
    assert log == ["slow", "fast"]


async def test_every_teardown_runs_although_one_raises_and_one_hangs(caplog):
    log = []

    async def quick(context):
        return None

    def raises(result):
        raise OSError("gone")

    def hangs(result):
        threading.Event().wait(5)

    tasks = [
        sleeper("first", 0.0, log=log),
        Task("second", quick, ("first",), deadline_s=5, teardown=raises),
        Task("third", quick, ("second",), deadline_s=5, teardown=hangs),
    ]
    started = await run_graph(tasks)
    began = time.monotonic()
    troubles = await started.close(1.0)
    assert time.monotonic() - began < 4
    assert troubles == (
        "teardown of startup task 'third' did not end and was abandoned",
        "teardown of startup task 'second' failed: OSError: gone",
    )
    assert log == ["first"]
    assert [record.message for record in caplog.records] == list(troubles)


async def test_a_half_built_task_is_undone_when_another_fails():
    log = []

    async def half(context):
        context.on_teardown(lambda: log.append("actor killed"))
        await asyncio.sleep(30)

    with pytest.raises(StartupError, match="'engine'"):
        await run_graph(
            [Task("policy", half, deadline_s=60), sleeper("engine", 0.05, error=RuntimeError("x")), sleeper("data", 0)]
        )
    assert log == ["actor killed"]


async def test_a_task_that_ignores_cancellation_is_named_and_left_and_what_it_still_builds_is_torn_down():
    release, log = asyncio.Event(), []

    async def stubborn(context):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    tasks = [
        Task("policy", stubborn, deadline_s=60, teardown=log.append),
        sleeper("engine", 0.05, error=RuntimeError("x")),
    ]
    began = time.monotonic()
    with pytest.raises(StartupError, match="'engine'") as caught:
        await run_graph(tasks)
    seconds = time.monotonic() - began
    assert seconds >= CANCEL_S
    assert caught.value.__notes__ == ["startup task 'policy' ignored its cancellation and was abandoned"]
    release.set()
    for _ in range(100):
        if log:
            break
        await asyncio.sleep(0.01)
    assert log == ["late"]


async def test_work_in_a_thread_does_not_delay_the_failure_and_its_late_result_is_undone():
    release, undone = threading.Event(), threading.Event()

    async def load(context):
        return await context.in_thread(release.wait, 5, undo=lambda result: undone.set())

    began = time.monotonic()
    with pytest.raises(StartupError, match="'engine'"):
        await run_graph([Task("policy", load, deadline_s=60), sleeper("engine", 0.05, error=RuntimeError("x"))])
    assert time.monotonic() - began < 4
    release.set()
    assert await asyncio.to_thread(undone.wait, 5)


async def test_a_thread_that_outlives_its_task_says_nothing_more():
    release, spoke = threading.Event(), threading.Event()

    async def load(context):
        def work():
            release.wait(5)
            context.progress("shard 7")
            spoke.set()

        await context.in_thread(work)

    events = []
    with pytest.raises(StartupError, match="'engine'"):
        await run_graph(
            [Task("policy", load, deadline_s=60), sleeper("engine", 0.05, error=RuntimeError("x"))], events.append
        )
    release.set()
    assert await asyncio.to_thread(spoke.wait, 5)
    await asyncio.sleep(0.01)
    assert [event.kind for event in events if event.task == "policy"] == ["started", "cancelled"]


async def test_cancelling_the_graph_tears_down_and_stays_a_cancellation():
    log = []
    graph = asyncio.create_task(run_graph([sleeper("data", 0.0, log=log), Task("engine", forever, deadline_s=60)]))
    await asyncio.sleep(0.1)
    graph.cancel()
    with pytest.raises(asyncio.CancelledError):
        await graph
    assert log == ["data"]


async def test_a_second_cancellation_shortens_the_teardown_but_skips_none():
    log = []

    async def hangs(result):
        await asyncio.sleep(30)

    async def quick(context):
        return None

    tasks = [sleeper("data", 0.0, log=log), Task("engine", quick, ("data",), deadline_s=5, teardown=hangs)]
    closing = asyncio.create_task((await run_graph(tasks)).close(20.0))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert time.monotonic() - began < 10
    assert log == ["data"]


async def test_a_task_that_cancels_itself_is_a_failure():
    async def run(context):
        raise asyncio.CancelledError

    with pytest.raises(StartupError, match=r"'engine' failed after \d+\.\d s: it cancelled itself"):
        await run_graph([Task("engine", run, deadline_s=5)])


async def test_a_view_that_raises_does_not_stop_the_startup(caplog):
    def view(event):
        raise ValueError("no terminal")

    started = await run_graph([sleeper("data", 0)], view)
    assert started.results == {"data": "data"}
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


async def test_events_tell_the_story_in_order():
    events = []
    await run_graph([sleeper("b", 0, needs=("a",)), sleeper("a", 0)], events.append)
    assert [(event.task, event.kind) for event in events] == [
        ("a", "started"),
        ("a", "done"),
        ("b", "started"),
        ("b", "done"),
    ]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([sleeper("sockets", 0), sleeper("engine", 0, needs=("soket",))], "'engine' needs 'soket', .* is 'sockets'"),
        ([sleeper("a", 0, needs=("b",)), sleeper("b", 0, needs=("a",))], "wait for each other: a -> b -> a"),
        ([sleeper("a", 0, needs=("a",))], "wait for each other: a -> a"),
        (
            [sleeper("x", 0, needs=("a",)), sleeper("a", 0, needs=("b",)), sleeper("b", 0, needs=("a",))],
            "each other: a -> b -> a",
        ),
        ([sleeper("a", 0), sleeper("a", 0)], "two startup tasks are named 'a'"),
        ([sleeper("a", 0, deadline_s=0.0)], "'a' has deadline_s 0.0"),
    ],
)
async def test_a_graph_that_cannot_run_is_refused_before_anything_starts(tasks, message):
    events = []
    with pytest.raises(ConfigError, match=message):
        await run_graph(tasks, events.append)
    assert events == []


def test_ctrl_c_during_startup_tears_down_and_a_hanging_thread_does_not_hold_the_process():
    program = textwrap.dedent(
        """
        import asyncio, signal, threading
        from gymloop.startup import Task, run_graph

        # A job in the background of a shell without job control is started with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        async def socket(context):
            return 7

        async def engine(context):
            print("loading", flush=True)
            await context.in_thread(threading.Event().wait)

        asyncio.run(run_graph([
            Task("socket", socket, deadline_s=60, teardown=lambda port: print("closed", port, flush=True)),
            Task("engine", engine, ("socket",), deadline_s=60),
        ]))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert out == "closed 7\n"
    assert "KeyboardInterrupt" in err
