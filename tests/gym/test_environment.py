"""In-process sessions: one instance each, and every fault of the user's code has a name and a kind."""

import asyncio
import math
import threading
import time

import pytest

from gymloop.errors import ConfigError, DataError, InfraError
from gymloop.gym import Environment, ToolError, Verdict, call, tool
from gymloop.gym.deadline import within
from gymloop.gym.session import InProcessSource, demonstrate

from .scripted import row

RESPONSE = {"output": []}


class Counter(Environment):
    """Count to a target with a tool."""

    def tasks(self, rng):
        while True:
            target = rng.randint(2, 5)
            yield {"prompt": f"Count to {target}.", "target": target}

    def seed(self, row):
        self.count = 0

    @tool
    def increment(self, by: int = 1) -> str:
        """Add to the counter."""
        if by < 0:
            raise ToolError("by must not be negative")
        self.count += by
        return str(self.count)

    def verify(self, response):
        return float(self.count == self.row["target"])

    def solve(self, row):
        for _ in range(row["target"]):
            result = yield call("increment")
        return f"I counted to {result}."


def source(cls=Counter, **kwargs) -> InProcessSource:
    return InProcessSource("counter", cls, kwargs)


async def test_sessions_share_nothing():
    rows = source().generate(2, seed=0)
    one, two = [await source().seed_session(rows[0]) for _ in range(2)]
    assert await one.call_tool("increment", {"by": 2}) == "2"
    assert await two.call_tool("increment", {}) == "1"


def test_generated_rows_are_nemo_gym_rows_and_follow_from_the_seed():
    rows = source().generate(3, seed=7)
    assert rows == source().generate(3, seed=7)
    assert rows != source().generate(3, seed=8)
    first = rows[0]
    assert first["agent_ref"] == {"type": "responses_api_agents", "name": "counter"}
    prompt = f"Count to {first['target']}."
    assert first["responses_create_params"]["input"] == [{"role": "user", "content": prompt}]
    assert [entry["name"] for entry in first["responses_create_params"]["tools"]] == ["increment"]


async def test_what_the_model_did_wrong_is_text():
    session = await source().seed_session(source().generate(1, 0)[0])
    assert await session.call_tool("increment", {"by": -1}) == "Error: by must not be negative"
    assert await session.call_tool("increment", {"by": "2"}) == (
        "Error: increment, argument 'by': Input should be a valid integer"
    )
    assert await session.call_tool("incremnt", {}) == "Error: there is no tool 'incremnt' (did you mean 'increment'?)"


async def test_async_methods_and_results_that_are_not_text():
    class Later(Counter):
        async def seed(self, row):
            await asyncio.sleep(0)
            self.count = 10

        @tool
        async def state(self) -> dict:
            """Tell all."""
            return {"count": self.count, "ok": True}

        async def verify(self, response):
            return Verdict(0.5, {"a": 0.25, "b": 0.25})

    session = await source(Later).seed_session(row("p", []))
    assert await session.call_tool("state", {}) == '{"count":10,"ok":true}'
    assert (await session.verify(RESPONSE)).components == {"a": 0.25, "b": 0.25}


class Faulty(Environment):
    def __init__(self, value=None, error=None):
        self.value, self.error = value, error

    def verify(self, response):
        if self.error is not None:
            raise self.error
        return self.value() if callable(self.value) else self.value


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"error": KeyError("answer")}, "environment counter, verify: KeyError: 'answer'"),
        ({"error": TimeoutError("db")}, "environment counter, verify: TimeoutError: db"),
        ({"value": math.nan}, "environment counter, verify: returned nan; expected a Verdict or a finite number"),
        ({"value": True}, "environment counter, verify: returned True; expected a Verdict or a finite number"),
        (
            {"value": Verdict(1.0, details={"read": object()})},
            "environment counter, verify: details are not JSON (Type is not JSON serializable: object)",
        ),
        ({"value": "1.0"}, "environment counter, verify: returned '1.0'"),
        ({"value": None}, "environment counter, verify: returned None"),
        ({"value": lambda: Verdict(True)}, "environment counter, verify: verify returned reward = True"),
        ({"value": lambda: Verdict(math.inf)}, "environment counter, verify: verify returned reward = inf"),
        ({"value": lambda: Verdict(1.0, {"a": 0.4})}, "environment counter, verify: verify returned reward 1.0 but"),
    ],
)
async def test_a_verdict_that_is_no_finite_number_is_an_infra_error(kwargs, said):
    session = await source(Faulty, **kwargs).seed_session(row("p", []))
    with pytest.raises(InfraError) as caught:
        await session.verify(RESPONSE)
    assert str(caught.value).startswith(said)


async def test_a_data_error_of_the_environment_stays_one():
    session = await source(Faulty, error=DataError("row 3 has no answer")).seed_session(row("p", []))
    with pytest.raises(DataError, match="row 3 has no answer"):
        await session.verify(RESPONSE)


async def test_a_session_that_could_not_be_seeded_is_closed():
    closed = []

    class Broken(Faulty):
        def seed(self, row):
            raise OSError("no disk")

        def close(self):
            closed.append(self)

    with pytest.raises(InfraError, match="environment counter, seed: OSError: no disk"):
        await source(Broken).seed_session(row("p", []))
    assert len(closed) == 1


async def test_close_runs_once():
    closed = []

    class Closing(Faulty):
        def close(self):
            closed.append(1)

    session = await source(Closing).seed_session(row("p", []))
    await session.close()
    await session.close()
    assert closed == [1]


async def test_a_blocking_environment_leaves_the_loop_free_and_is_left_behind_at_its_deadline():
    release = threading.Event()

    class Sleeper(Faulty):
        blocking = True

        def verify(self, response):
            release.wait(10)
            return 1.0

    session = await source(Sleeper).seed_session(row("p", []))
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    start = time.monotonic()
    with pytest.raises(InfraError, match="verify: no answer within 1 s"):
        await within(1.0, "verify", session.verify(RESPONSE))
    assert time.monotonic() - start < 5
    assert beats >= 5
    beating.cancel()
    release.set()


async def test_a_plain_method_that_holds_the_loop_is_reported():
    class Holder(Faulty):
        def verify(self, response):
            time.sleep(0.2)
            return 1.0

    session = await source(Holder).seed_session(row("p", []))
    with pytest.raises(InfraError, match="held the event loop for"):
        await within(0.05, "verify", session.verify(RESPONSE))


async def test_errors_in_a_thread_reach_the_caller():
    class Threaded(Faulty):
        blocking = True

    session = await source(Threaded, error=KeyError("x")).seed_session(row("p", []))
    with pytest.raises(InfraError, match="environment counter, verify: KeyError: 'x'"):
        await session.verify(RESPONSE)


async def test_a_demonstration_plays_the_solver_through_the_real_tools():
    task = next(task for task in source().generate(20, 0) if task["target"] == 2)
    demonstration = await demonstrate(source(), task)
    roles = [message["role"] for message in demonstration["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert demonstration["messages"][2]["content"] == "1"
    assert demonstration["messages"][-1]["content"] == "I counted to 2."
    assert demonstration["messages"][1]["tool_calls"][0]["function"] == {"name": "increment", "arguments": "{}"}
    assert demonstration["tools"][0]["function"]["name"] == "increment"


async def test_a_solver_that_fails_its_own_verify_is_an_error():
    class Wrong(Counter):
        def solve(self, row):
            yield call("increment", by=9)
            return "nine"

    with pytest.raises(ConfigError, match="its own verify gives it 0 "):
        await demonstrate(source(Wrong), source().generate(1, 0)[0])


async def test_no_solver_is_said():
    with pytest.raises(ConfigError, match=r"Faulty has no solve\(\)"):
        await demonstrate(source(Faulty), row("p", []))


def test_an_environment_that_cannot_work_is_refused_before_anything_starts():
    class Unjudged(Environment):
        pass

    with pytest.raises(ConfigError, match=r"Unjudged has no verify\(\)"):
        source(Unjudged)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'hard'"):
        source(Counter, hard=True)
    with pytest.raises(ConfigError, match="generates no tasks"):
        source(Faulty).generate(1, 0)


def test_a_generator_that_ends_or_fails_is_said():
    class Short(Counter):
        def tasks(self, rng):
            yield {"prompt": "a"}

    class Bare(Counter):
        def tasks(self, rng):
            yield {"question": "a"}

    class Crash(Counter):
        def tasks(self, rng):
            yield {"prompt": [1][3]}

    for cls, said in (
        (Short, "ended after 1 of the 2"),
        (Bare, r"tasks\[0\]: 'prompt' is None"),
        (Crash, "IndexError"),
    ):
        with pytest.raises(ConfigError, match=said):
            source(cls).generate(2 if cls is Short else 1, 0)


def test_an_override_without_the_mark_is_no_tool():
    class Fewer(Counter):
        def increment(self, by: int = 1) -> str:
            return ""

    assert list(Fewer.tool_specs) == []
    assert list(Counter.tool_specs) == ["increment"]
