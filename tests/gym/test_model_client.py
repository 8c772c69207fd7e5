"""What the client accepts of a chat server, and whose fault everything else is."""

import math
import re
import time

import pytest
from aiohttp import web

from gymloop.errors import ConfigError, DataError, InfraError
from gymloop.gym.model_client import ModelClient
from gymloop.rollouts.trajectory import Turn

from .scripted import END, Say, ScriptedModel, ids, serving

USER = [{"role": "user", "content": "p"}]


async def ask(*steps, **options):
    script = {"p": {0: list(steps)}}
    model = ScriptedModel(script)
    async with serving(model, **options) as client:
        return await client.chat(USER, [], max_tokens=8), model


def setting(path, value):
    """A change that sets, or with ``del`` removes, a field of the only choice."""

    def change(reply):
        *parents, last = path.split(".")
        target = reply["choices"][0]
        for name in parents:
            target = target[name]
        if value is del_:
            target.pop(last)
        else:
            target[last] = value

    return change


del_ = object()


async def test_a_good_reply_becomes_a_turn():
    reply, model = await ask("ok")
    assert reply.turn == Turn(tuple(ids("user:p\n")), (*ids("ok"), END), (-0.5, -0.5, -0.5), "stop", 3, 3)
    assert reply.message == {"role": "assistant", "content": "ok"}
    assert not reply.new_segment
    assert model.requests[0] == {"model": "toy", "messages": USER, "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("message.prompt_token_ids", del_, "has no prompt_token_ids"),
        ("message.prompt_token_ids", [], "has no prompt_token_ids"),
        ("message.prompt_token_ids", [1, True], "has no prompt_token_ids"),
        ("message.generation_token_ids", del_, "has no generation_token_ids"),
        ("message.generation_token_ids", [1, -1], "has no generation_token_ids"),
        ("message.generation_log_probs", del_, "has no generation_log_probs"),
        ("message.generation_log_probs", [-0.5], "has 3 generation_token_ids but 1 generation_log_probs"),
        ("message.generation_log_probs", [-0.5, None, -0.5], "generation_log_probs[1] = None"),
        ("message.generation_log_probs", [-0.5, -0.5, 0.7], "generation_log_probs[2] = 0.7"),
        ("message.content", 7, "has content that is not text"),
        ("message.tool_calls", [{"id": 1}], "has unreadable tool_calls"),
        ("weight_versions", del_, "has no weight_versions"),
        ("finish_reason", "content_filter", "has finish_reason 'content_filter'"),
        ("finish_reason", [], "has finish_reason []"),
        ("finish_reason", "abort", "was aborted by the engine"),
    ],
)
async def test_a_reply_that_lacks_or_contradicts_its_tokens_is_an_infra_error(path, value, said):
    with pytest.raises(InfraError, match=re.escape(said)):
        await ask(Say("ok", change=setting(path, value)))


async def test_logprobs_that_are_not_finite_are_an_infra_error():
    with pytest.raises(InfraError, match="not JSON"):  # Python's json writes NaN, which is not JSON
        await ask(Say("ok", change=setting("message.generation_log_probs", [math.nan] * 3)))


async def test_html_with_status_200_is_an_infra_error_that_shows_it():
    page = Say(raw=b"<html>log in</html>", headers={"content-type": "text/html"})
    with pytest.raises(InfraError, match=r"/v1/chat/completions: replied with text/html, not JSON: '<html>log in"):
        await ask(page)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *[(status, InfraError) for status in (500, 502, 503, 504, 408, 302)],
        *[(status, DataError) for status in (400, 422)],
        *[(status, ConfigError) for status in (401, 404)],
    ],
)
async def test_a_status_decides_whose_fault_it_is(status, kind):
    with pytest.raises(kind, match=rf"/v1/chat/completions: {status}"):
        await ask(Say(status=status, raw=b'{"error": "because"}'))


async def test_a_server_that_loads_is_waited_for():
    loading = Say(status=503, raw=b'{"error": "loading"}', headers={"retry-after": "0.1"})
    reply, model = await ask(loading, loading, "ok")
    assert reply.message["content"] == "ok"
    assert len(model.requests) == 3


async def test_a_server_that_never_gets_ready_is_given_up_within_the_bound():
    loading = Say(status=503, raw=b'{"error": "loading weights"}', headers={"retry-after": "0.1"})
    start = time.monotonic()
    with pytest.raises(InfraError, match=r"still 503 after 0\.3 s: loading weights"):
        await ask(loading, ready_timeout_s=0.3)
    assert time.monotonic() - start < 10


async def test_a_reply_that_does_not_come_is_an_infra_error_within_the_timeout():
    start = time.monotonic()
    with pytest.raises(InfraError, match=r"no reply within 0\.2 s"):
        await ask(Say("ok", delay=20), call_timeout_s=0.2)
    assert time.monotonic() - start < 10


async def test_no_server_is_an_infra_error_that_names_the_url():
    client = ModelClient("http://127.0.0.1:9/v1", "toy", max_concurrency=1, call_timeout_s=2.0, ready_timeout_s=1.0)
    async with client:
        with pytest.raises(
            InfraError, match=r"127\.0\.0\.1:9/v1/chat/completions: no connection: cannot connect to 127\.0\.0\.1:9"
        ):
            await client.chat(USER, [], max_tokens=8)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, {"data": [{"id": "toy", "weight_version": 7}]}, None),
        (200, {"data": [{"id": "toy"}]}, "/v1/models: has weight_version None"),
        (200, {"data": [{"id": "toy", "weight_version": True}]}, "has weight_version True"),
        (200, {"data": []}, "has weight_version None"),
        (200, [], "has weight_version None"),
        (503, {"error": {"code": "not_ready", "message": "loading"}}, "/v1/models: 503 not_ready: loading"),
    ],
)
async def test_the_weight_version_is_the_servers_or_an_infra_error(status, body, said):
    async def models(request):
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        async with ModelClient(url, "toy", max_concurrency=1, call_timeout_s=2, ready_timeout_s=1) as client:
            if said is None:
                assert await client.weight_version() == 7
            else:
                with pytest.raises(InfraError, match=re.escape(said)):
                    await client.weight_version()
    finally:
        await runner.cleanup()
