"""Sessions over HTTP against a server process that misbehaves: a typed failure, never a reward or a tool's result."""

import asyncio
import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from gymloop.errors import ConfigError, DataError, InfraError
from gymloop.gym.contract import ROLLOUT_SEED
from gymloop.gym.deadline import retry_after_s
from gymloop.gym.http import Cookies
from gymloop.gym.http_source import HttpSource
from gymloop.startup import hold_socket

from .misbehaving import Process, misbehaving

CALL_S = 3.0
RESPONSE = {"object": "response", "status": "completed", "incomplete_details": None, "output": []}


@pytest.fixture(scope="module")
def server():
    with misbehaving() as process:
        yield process


@contextlib.asynccontextmanager
async def opened(url, *, call_timeout_s=CALL_S, **limits):
    async with HttpSource("env", url, call_timeout_s=call_timeout_s, **limits) as source:
        yield source


def row(name, fault="", **fields):
    return {
        "responses_create_params": {"input": "hi", "tools": []},
        "agent_ref": {"name": "env"},
        "name": name,
        "fault": fault,
        **fields,
    }


async def play(source, task):
    """A session with one tool call; the verdict and the tool's text."""
    session = await source.seed_session(task)
    try:
        text = await session.call_tool("wx", {"city": "Oslo"})
        return await session.verify(RESPONSE), text, session
    finally:
        await session.close()


async def test_a_session_is_seed_tools_verify_close_and_the_cookies_come_back_as_they_were(server):
    async with opened(server.url) as source:
        verdict, text, session = await play(source, {**row("fine", reward=0.25), ROLLOUT_SEED: 7})
        await session.close()
    assert (verdict.reward, verdict.components) == (0.25, {})
    assert text == '{"output": "wx {\\"city\\": \\"Oslo\\"}"}'
    assert server.log()["fine"] == ["seed", "tool", "verify", "close"]
    bodies = server.bodies("fine")
    assert bodies["seed"] == {**row("fine", reward=0.25), ROLLOUT_SEED: 7}
    assert bodies["tool"] == {"city": "Oslo"}
    assert {key: bodies["verify"][key] for key in row("", "")} == row("fine"), "verify gets the row"
    assert bodies["verify"]["response"]["output"] == []


async def test_sessions_at_once_keep_their_cookies_apart(server):
    async with opened(server.url) as source:
        tasks = [row(f"apart-{index}", reward=float(index)) for index in range(20)]
        played = await asyncio.gather(*(play(source, task) for task in tasks))
    assert [verdict.reward for verdict, _, _ in played] == [float(index) for index in range(20)]


async def test_components_that_sum_are_the_verdicts(server):
    async with opened(server.url) as source:
        verdict, _, _ = await play(source, row("parts", "good-components"))
    assert verdict.components == {"a": 0.25, "b": 0.75}
    assert verdict.details == {}, "what it repeats of the row is no detail"


async def test_what_the_server_adds_is_kept_as_details(server):
    async with opened(server.url) as source:
        verdict, _, _ = await play(source, row("details", "explains"))
    assert verdict.details == {"extracted_answer": "4", "checks": [True, False]}


BUNDLED = {
    "type": "message",
    "id": "msg_0",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "hi", "annotations": []}],
    "prompt_token_ids": (1, 2),
    "generation_token_ids": (3,),
    "generation_log_probs": (-0.5,),
}


@pytest.mark.parametrize("send", [False, True])
async def test_token_ids_stay_here_unless_asked_for(server, send):
    name = f"tokens-{send}"
    async with opened(server.url, send_token_ids=send) as source:
        session = await source.seed_session(row(name))
        await session.verify({**RESPONSE, "output": [BUNDLED]})
    (seen,) = server.bodies(name)["verify"]["response"]["output"]
    assert ("prompt_token_ids" in seen) is send
    assert BUNDLED["generation_token_ids"] == (3,), "the conversation is left as it was"


VERDICT_FAULTS = {
    "missing-reward": "the reply has no reward",
    "null-reward": "reward is None; expected a finite number",
    "nan-reward": "not JSON",
    "inf-reward": "not JSON",
    "huge-reward": "/verify: ",
    "bool-reward": "reward is True; expected a finite number",
    "text-reward": "reward is '1.0'; expected a finite number",
    "list-reward": r"reward is \[1.0\]; expected a finite number",
    "components-do-not-sum": "reward 1.0 but its components sum to 0.9",
    "component-is-null": "reward_components: a is None",
    "components-are-a-list": r"reward_components is \[1.0\]; expected an object",
    "mask-is-a-number": "mask_sample is 1; expected true or false",
    "not-json": "not JSON .*reward=1.0",
    "a-number": "expected a JSON object",
    "empty": "not JSON .*an empty body",
}


@pytest.mark.parametrize("fault", VERDICT_FAULTS)
async def test_f13_a_verdict_that_is_no_number_is_a_bad_reply(server, fault):
    async with opened(server.url) as source:
        with pytest.raises(InfraError, match=VERDICT_FAULTS[fault]) as caught:
            await play(source, row(fault, fault))
    assert caught.value.cause == "bad_reply"
    assert f"{server.url}/verify" in str(caught.value)
    assert server.log()[fault] == ["seed", "tool", "verify", "close"]


async def test_a_reward_that_the_server_calls_no_measurement_is_its_failure(server):
    async with opened(server.url) as source:
        with pytest.raises(InfraError, match=r"no measurement \(mask_sample\): judge_unreachable: no judge") as caught:
            await play(source, row("masked", "masked"))
    assert caught.value.cause == "server_error"


FAULTS = {
    "hangs": ("timeout", "no reply within 3 s"),
    "cuts": ("disconnect", "lost the connection"),
    "closes": ("disconnect", "lost the connection"),
    "says 500": ("server_error", "500"),
    "html": ("bad_reply", "200, and an HTML page"),
    "html 404": ("bad_reply", "404, and an HTML page"),
    "html 502": ("server_error", "502"),
    "disguised-html": ("bad_reply", "an HTML page"),
    "redirects": ("bad_reply", "302"),
    "is-not-utf8": ("bad_reply", "not JSON|not UTF-8"),
    "is-empty": ("bad_reply", "empty body"),
    "is-long 3000000": ("bad_reply", "over 1000000 bytes"),
    "busy 30": ("busy", "still 429 after .* asks to wait 30 s more; the call has 3 s"),
    "loses-the-session": ("server_error", "the server lost the session"),
}


@pytest.mark.parametrize("route", ["seed", "tool", "verify"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_f13_each_fault_on_each_route_is_a_typed_failure_that_names_server_and_route(server, fault, route):
    cause, said = FAULTS[fault]
    name = f"{route} {fault}"
    began = time.monotonic()
    async with opened(server.url, max_reply_bytes=1_000_000) as source:
        with pytest.raises(InfraError, match=said) as caught:
            await play(source, row(name, name))
    assert time.monotonic() - began < CALL_S + 6
    assert caught.value.cause == cause
    assert f"{server.url}/{ {'seed': 'seed_session', 'tool': 'wx', 'verify': 'verify'}[route] }" in str(caught.value)
    log = server.log()[name]
    assert log.count(route) == 1, "nothing is asked twice"
    assert log == ["seed", "tool", "verify"][: log.index(route) + 1] + (["close"] if route != "seed" else [])


@pytest.mark.parametrize("route", ["seed", "tool", "verify"])
async def test_f13_busy_with_retry_after_is_asked_again_within_the_call(server, route):
    name = f"busy-once {route}"
    async with opened(server.url) as source:
        began = time.monotonic()
        verdict, _, _ = await play(source, row(name, f"once {route} busy 0.3"))
    assert verdict.reward == 1.0
    assert 0.3 <= time.monotonic() - began < CALL_S
    assert server.log()[name].count(route) == 2, "the first was not taken on"


async def test_busy_for_ever_ends_with_the_call(server):
    async with opened(server.url) as source:
        with pytest.raises(InfraError, match="still 429") as caught:
            await play(source, row("busy-for-ever", "seed busy 0.3"))
    assert caught.value.cause == "busy"
    assert 2 <= server.log()["busy-for-ever"].count("seed") <= 11


@pytest.mark.parametrize(("route", "repeated"), [("seed", True), ("tool", False), ("verify", False)])
async def test_503_is_asked_again_only_where_a_session_opens(server, route, repeated):
    name = f"unavailable {route}"
    work = row(name, f"once {route} unavailable 0.2")
    async with opened(server.url) as source:
        if repeated:
            assert (await play(source, work))[0].reward == 1.0
        else:
            with pytest.raises(InfraError, match="503") as caught:
                await play(source, work)
            assert caught.value.cause == "server_error"
    assert server.log()[name].count(route) == 1 + repeated


@pytest.mark.parametrize("status", [400, 404, 405, 409, 422])
async def test_what_a_tool_refuses_is_told_to_the_model(server, status):
    async with opened(server.url) as source:
        _, text, _ = await play(source, row(f"told {status}", f"tool says {status}"))
    assert text == '{"detail": "no such thing"}'


@pytest.mark.parametrize("status", [401, 403, 407, 408])
async def test_what_stands_before_a_tool_is_not(server, status):
    async with opened(server.url) as source:
        with pytest.raises(InfraError, match=str(status)):
            await play(source, row(f"not told {status}", f"tool says {status}"))


@pytest.mark.parametrize(
    ("route", "status", "kind"),
    [
        ("seed", 422, DataError),
        ("verify", 422, DataError),
        ("seed", 404, ConfigError),
        ("seed", 401, ConfigError),
        ("verify", 404, InfraError),
    ],
)
async def test_a_refusal_costs_the_row_and_a_wrong_address_the_run(server, route, status, kind):
    async with opened(server.url) as source:
        with pytest.raises(kind, match=str(status)):
            await play(source, row(f"refused {route} {status}", f"{route} says {status}"))


async def test_a_seed_may_say_null(server):
    async with opened(server.url) as source:
        await source.seed_session(row("null", "seed is-null"))


async def test_a_slow_seed_is_waited_for(server):
    async with opened(server.url, call_timeout_s=5.0) as source:
        verdict, _, _ = await play(source, row("slow", "seed is-slow 2"))
    assert verdict.reward == 1.0


@pytest.mark.slow
async def test_a_seed_of_30_s_is_waited_for_where_the_call_has_the_time_and_others_go_on(server):
    async with opened(server.url, call_timeout_s=60.0) as source:
        slow = asyncio.create_task(play(source, row("slow-30", "seed is-slow 30")))
        began = time.monotonic()
        for index in range(20):
            await play(source, row(f"beside {index}"))
        assert time.monotonic() - began < 20
        assert (await slow)[0].reward == 1.0


async def test_a_server_that_refuses_is_named_within_its_time_and_found_when_it_comes_back():
    with hold_socket(18000, 18999) as held:  # outside the range from which the kernel gives ports to others
        port = held.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    async with opened(url, call_timeout_s=20.0, refused_s=0.6) as source:
        began = time.monotonic()
        with pytest.raises(InfraError, match=rf"{url}/seed_session: no connection for \d\.\d s") as caught:
            await source.seed_session(row("refused"))
        assert caught.value.cause == "disconnect"
        assert time.monotonic() - began < 10
    started = []
    thread = threading.Thread(target=lambda: started.append(Process(port)))
    try:
        async with opened(url, call_timeout_s=20.0, refused_s=15.0) as source:
            thread.start()
            verdict, _, _ = await play(source, row("refused"))
            assert verdict.reward == 1.0
    finally:
        await asyncio.to_thread(thread.join, 20)
        for process in started:
            process.stop()


async def test_a_tool_call_is_not_repeated_on_a_server_that_died():
    with misbehaving() as own:
        async with opened(own.url, call_timeout_s=20.0) as source:
            session = await source.seed_session(row("dies", "tool dies"))
            with pytest.raises(InfraError, match="/wx: lost the connection") as caught:
                await session.call_tool("wx", {})
            assert caught.value.cause == "disconnect"
            assert own._process.wait(timeout=10) == -9
            began = time.monotonic()
            with pytest.raises(InfraError, match="/wx: no connection"):
                await session.call_tool("wx", {})
            with pytest.raises(InfraError, match="/verify: the session is lost, since its server has died"):
                await session.verify(RESPONSE)
            assert time.monotonic() - began < 4.5, "the session went with the server: there is nothing to wait for"


@pytest.mark.parametrize("status", [404, 405, 422])
async def test_a_server_without_close_is_asked_once(server, status):
    name = f"no-close {status}"
    async with opened(server.url) as source:
        await play(source, row(name, f"close says {status}"))
        await play(source, row(name, f"close says {status}"))
    assert server.log()[name] == ["seed", "tool", "verify", "close", "seed", "tool", "verify"]


async def test_a_close_that_fails_says_so_and_the_next_session_is_closed_again(server):
    async with opened(server.url) as source:
        with pytest.raises(InfraError, match="/close_session: 500"):
            await play(source, row("close-fails", "close says 500"))
        await play(source, row("close-works"))
    assert server.log()["close-works"][-1] == "close"


async def test_the_servers_own_routes_are_no_tools(server):
    async with opened(server.url) as source:
        session = await source.seed_session(row("own-routes"))
        assert await session.call_tool("verify", {}) == "Error: there is no tool 'verify'"
        assert (await session.call_tool("a/../verify", {})).startswith('{"output": "a/../verify')
    assert server.log()["own-routes"] == ["seed", "tool"]


def test_an_address_is_checked_before_anything_starts():
    with pytest.raises(ConfigError, match="'localhost:80' is not an address of a server; expected http://host:port"):
        HttpSource("env", "localhost:80", call_timeout_s=1.0)


def test_cookies_are_what_the_server_set_and_nothing_of_their_attributes():
    cookies = Cookies()
    assert cookies.header() == ""
    for header in ('S___x="a=b=="; Path=/; HttpOnly', "route = r1 ;Secure", "no-equals-sign", "S___x=new; Max-Age=9"):
        cookies.take(header)
    assert cookies.header() == "S___x=new; route=r1"


def test_retry_after_may_be_a_date():
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < retry_after_s(at) <= 30
    assert retry_after_s(format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)) == 0.05
    assert (retry_after_s("7"), retry_after_s("soon"), retry_after_s("inf"), retry_after_s(None)) == (
        7,
        None,
        None,
        None,
    )
