"""Every size, count and time has a bound with a code, and whatever happens to a request, its slot comes back."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gymloop.serving.limits import Limits

from .scripted import TOOL, USER, WX, Served, until


def raw(served: Served, data: bytes) -> socket.socket:
    sock = served.connected()
    sock.sendall(data)
    return sock


def reply(sock: socket.socket) -> tuple[int, str]:
    with sock:
        text = b""
        while piece := sock.recv(65536):
            text += piece
            if b"}}" in text:
                break
    return int(text.split()[1]), text.decode()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("size", [1500, 100_000])
def test_a_body_that_is_too_large_is_413(serve, size):
    served = serve(limits=Limits(max_body_bytes=1000))
    assert served.refused(413, messages=[{"role": "user", "content": "x" * size}]) == ("body_too_large", None)

    def pieces():
        yield from (b"x" * 100 for _ in range(size // 100))

    response = served.client.post("/v1/chat/completions", content=pieces())  # chunked, of no declared size
    assert response.status_code == 413
    until(lambda: served.server.active_requests == 0)
    served.say("4C.", 2)
    served.chat([USER])


def test_more_requests_than_slots_are_429_with_a_time_to_come_back(serve):
    served = serve(limits=Limits(max_concurrent=2))
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(served.post, messages=[USER]) for _ in range(2)]
        until(lambda: served.server.active_requests == 2)
        response = served.post(messages=[USER])
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_requests")
        assert float(response.headers["retry-after"]) > 0
        assert served.client.get("/v1/models").status_code == 200
        assert served.metric("gymloop_requests_in_flight") == 2
        served.server.close()
        for one in waiting:
            assert one.exception(20) is not None or one.result().status_code >= 500


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": [USER] * 4}, "too_many", "messages"),
        ({"tools": [WX] * 3}, "too_many", "tools"),
        ({"n": 5}, "too_many", "n"),
        ({"stop": ["a", "b", "c"]}, "too_many", "stop"),
    ],
)
def test_counts_are_bounded(serve, fields, code, param):
    limits = Limits(max_messages=3, max_tools=2, max_n=4, max_stop=2)
    assert serve(profiles=None, limits=limits).refused(400, **fields) == (code, param)


def test_a_body_that_does_not_come_is_408(serve):
    served = serve(limits=Limits(body_timeout_s=1.5))
    sock = raw(served, HEAD + b'content-length: 100\r\n\r\n{"mess')
    until(lambda: served.server.active_requests == 1)
    status, text = reply(sock)
    assert (status, "body_timeout" in text) == (408, True)
    until(lambda: served.server.active_requests == 0)


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/comple", HEAD])
def test_headers_that_do_not_come_are_408(serve, begun):
    served = serve(limits=Limits(header_timeout_s=0.3))
    status, text = reply(raw(served, begun))
    assert (status, "header_timeout" in text) == (408, True)


def test_an_idle_connection_may_send_a_second_request(serve):
    served = serve(limits=Limits(header_timeout_s=1.0))
    assert served.client.get("/readyz").status_code == 200
    time.sleep(2.0)
    assert served.client.get("/readyz").status_code == 200
    served.say("4C.", 2)
    served.engine.hold = None
    served.chat([USER])


def test_a_client_that_leaves_in_the_middle_of_its_body_frees_its_slot(serve):
    served = serve()
    sock = raw(served, HEAD + b'content-length: 100\r\n\r\n{"mess')
    until(lambda: served.server.active_requests == 1)
    sock.close()
    until(lambda: served.server.active_requests == 0)
    assert not served.engine.prompts


def test_a_client_that_leaves_while_the_engine_works_frees_its_slot(serve):
    served = serve()
    served.leave()
    assert served.engine.cancelled.wait(5)
    until(lambda: served.server.active_requests == 0)
    assert served.engine.aborted == served.engine.request_ids


# A11


@pytest.mark.parametrize("limit", [36, 35, 34])
@pytest.mark.parametrize("stream", [False, True])
def test_a11_a_prompt_that_fills_the_context_is_an_empty_turn(serve, limit, stream):
    served = serve(max_model_len=limit)
    for _ in range(2):
        served.say("4C.", 2)
    sampled = max(0, limit - 35)
    if stream:
        choice = served.stream(messages=[USER])[-1]["choices"][0]
        message = choice["delta"]
    else:
        (choice,) = served.chat([USER])["choices"]
        message = choice["message"]
    assert choice["finish_reason"] == "length"
    assert len(message["prompt_token_ids"]) == 35
    assert len(message["generation_token_ids"]) == len(message["generation_log_probs"]) == sampled
    assert len(served.engine.prompts) == sampled

    for body in [served.ok("/v1/responses", input=USER["content"])] if not stream else ():
        assert (body["status"], body["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
        assert len(body["output"][-1]["prompt_token_ids"]) == 35
        assert len(body["output"][-1]["generation_token_ids"]) <= 1


@pytest.mark.parametrize("limit", [6, 5, 4])
def test_a11_on_raw_prompts(serve, limit):
    served = serve(max_model_len=limit)
    served.say("4C.", 2)
    (choice,) = served.ok("/v1/completions", prompt="Oslo ")["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["prompt_token_ids"]) == 5
    assert len(choice["generation_token_ids"]) == max(0, limit - 5)


# Routes


def test_an_unknown_route_or_method_is_a_json_error(serve):
    served = serve()
    assert served.client.get("/nowhere").json()["error"]["code"] == "no_such_route"
    response = served.client.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert served.client.post("/livez").status_code == 405
    head = served.client.head("/readyz")
    assert (head.status_code, head.content) == (200, b"")
    assert served.client.get("/v1/models/toy").json()["id"] == "toy"
    assert served.client.get("/v1/models/other/model").status_code == 404


def test_a12_tokenize_gives_the_ids_that_chat_samples_from(serve):
    served = serve()
    history: list = [USER]
    for text in ("ok", "4C."):
        served.say(text, 2)
        message = served.chat(history, tools=[WX])["choices"][0]["message"]
        for route in ("/tokenize", "/v1/tokenize"):
            tokens = served.ok(route, model="toy", messages=history, tools=[WX], mm_processor_kwargs={})
            assert tuple(tokens["tokens"]) == served.engine.prompts[-1]
        history += [message, TOOL]
    exact = [*message["prompt_token_ids"], *message["generation_token_ids"]]
    served.say("x", 2)
    served.chat([TOOL], required_prefix_token_ids=exact, tools=[WX])
    tokens = served.ok("/tokenize", messages=[TOOL], required_prefix_token_ids=exact, tools=[WX])["tokens"]
    assert tuple(tokens) == served.engine.prompts[-1]
    served.say("x", 2)
    served.ok("/v1/responses", input=USER["content"])
    tokens = served.ok("/tokenize", messages=[USER])["tokens"]
    assert tuple(tokens) == served.engine.prompts[-1]
    assert served.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("assistant\n")
    assert served.refused(400, route="/tokenize", prompt=5) == ("invalid_type", "prompt")


# Completions


def test_a_raw_prompt_is_continued_as_it_is(serve):
    served = serve()
    for prompt in (
        "<|im_start|>Oslo",
        served.ok("/tokenize", prompt="<|im_start|>Oslo")["tokens"],
        ["<|im_start|>Oslo"],
    ):
        served.say(" is cold", 2)
        reply = served.ok("/v1/completions", prompt=prompt, logprobs=0, return_token_ids=True)
        (choice,) = reply["choices"]
        assert served.engine.prompts[-1][0] == 1
        assert (len(served.engine.prompts[-1]), choice["text"]) == (5, " is cold")
        assert choice["token_ids"] == choice["generation_token_ids"]
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * 9
        assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert served.engine.samplings[-1].max_new_tokens == 16
    for fields, code, param in (
        ({"echo": True}, "unsupported_field", "echo"),
        ({"logprobs": 5}, "unsupported_field", "logprobs"),
        ({"suffix": "x"}, "unsupported_field", "suffix"),
        ({"prompt": ["a", "b"]}, "unsupported_field", "prompt"),
        ({"prompt": [9999]}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"messages": [USER]}, "unknown_field", "messages"),
    ):
        assert served.refused(400, route="/v1/completions", **fields) == (code, param)


def test_a_completion_is_streamed(serve):
    served = serve()
    served.say(" is c\u00f4ld", 2)
    options = {"include_usage": True}
    *chunks, usage = served.stream("/v1/completions", prompt="Oslo", logprobs=0, stream_options=options)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " is c\u00f4ld"
    assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == 10
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks[-1]["choices"][0]["generation_token_ids"]) == 10
    assert usage["usage"]["total_tokens"] == 14


# Metrics


def test_metrics_count_what_was_served(serve):
    served = serve()
    assert "gymloop_requests_total" in served.client.get("/metrics").text
    served.say("4C.", 2)
    served.chat([USER])
    served.say("4C.", 2)
    served.stream(messages=[USER])
    served.refused(400, temperature=0.5)
    until(lambda: served.metric("gymloop_requests_in_flight") == 0)  # a stream is counted after its last byte
    assert served.metric('gymloop_requests_total{route="/v1/chat/completions",status="200"}') == 2
    assert served.metric('gymloop_requests_total{route="/v1/chat/completions",status="400"}') == 1
    assert served.metric('gymloop_refusals_total{code="off_profile"}') == 1
    assert served.metric("gymloop_prompt_tokens_total") == 70
    assert served.metric("gymloop_generation_tokens_total") == 8
    assert served.metric('gymloop_samples_total{finish_reason="stop"}') == 2
    assert served.metric("gymloop_weight_version") == 7
    assert served.metric("gymloop_requests_in_flight") == 0
    assert served.metric('gymloop_request_seconds_count{route="/v1/chat/completions"}') == 3
    assert served.metric("gymloop_time_to_first_token_seconds_count") == 1


def test_metrics_are_there_before_the_engine(serve):
    served = serve(ready=False)
    assert served.client.get("/metrics").status_code == 200
    assert served.post(messages=[USER]).status_code == 503
    assert served.metric('gymloop_refusals_total{code="not_ready"}') == 1


def test_no_line_is_logged_for_a_request(serve, caplog):
    caplog.set_level("INFO")
    served = serve()
    served.say("4C.", 2)
    served.chat([USER])
    assert [record for record in caplog.records if record.name.startswith(("gymloop", "uvicorn"))] == [] or all(
        "completions" not in record.getMessage() for record in caplog.records if record.name != "httpx"
    )
