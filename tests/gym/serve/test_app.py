"""A served environment on the wire: NeMo Gym's routes, its words for what is wrong, and nothing a client can break."""

import json
import socket

import httpx
import pytest
import yaml

from gymloop.errors import ConfigError
from gymloop.gym import Environment, tool
from gymloop.gym.contract import ROLLOUT_SEED
from gymloop.gym.nemo.attach import addresses
from gymloop.gym.serve.app import EnvironmentApp
from gymloop.gym.serve.refusal import NO_SESSION
from gymloop.gym.serve.run import Play
from gymloop.gym.session import InProcessSource

from .served import ROW, SAID, Odd, in_background, seeded, serving, until, verify


@pytest.fixture(scope="module")
def served():
    with serving() as running:
        yield running


@pytest.fixture
def client(served):
    with served.client() as one:
        yield one


def test_every_sign_of_life_answers_like_nemo_gym(client):
    for path in ("/", "/healthz", "/health", "/livez", "/readyz"):
        assert client.get(path).json() == {"status": "ok"}


def test_a_session_is_seed_tools_verify_and_its_cookie_is_nemo_gyms(served, client):
    reply = client.post("/seed_session", json={**ROW, "name": "whole"})
    assert (reply.status_code, reply.json()) == (200, {})
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith("Odd___odd=")
    assert {"path=/", "httponly"} <= set(cookie.lower().split("; "))
    first = client.post("/add", json={"by": 2})
    assert (first.status_code, first.text, first.headers["content-type"]) == (200, "2", "text/plain; charset=utf-8")
    assert first.headers["set-cookie"] == cookie, "some agents keep only the last reply's cookies"
    assert client.post("/add", json={"by": 3}).text == "5"
    verdict = verify(client, SAID, name="whole", answer=42).json()
    assert verdict == {
        **ROW, "name": "whole", "answer": 42, "response": {"output": [SAID]},
        "reward": 5.0, "reward_components": {"count": 5.0},
        "mask_sample": False, "failure_kind": None, "failure_reason": None,
    }  # fmt: skip
    assert [event for event in served.log if event[1] == "whole"][1:] == [("verify", "whole"), ("close", "whole")]
    assert client.post("/close_session", json={}).json() == {}, "what has ended is closed"


def test_the_rollout_seed_decides_the_sessions_draws_and_is_not_part_of_the_row(served, client):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        seeded(client, name=name, **{ROLLOUT_SEED: seed})
    drawn = {event[1]: event[2] for event in served.log if event[0] == "seed"}
    assert drawn["a"] == drawn["b"] != drawn["c"]


def test_without_a_seed_the_place_in_the_collection_decides_and_without_a_place_chance(served, client):
    for name, place in (("p", {"_ng_task_index": 3, "_ng_rollout_index": 1}), ("q", {"_ng_task_index": 3}), ("r", {})):
        for repeat in "12":
            seeded(client, name=name + repeat, **place)
    seeded(client, name="other", _ng_task_index=3, _ng_rollout_index=2)
    drawn = {event[1]: event[2] for event in served.log if event[0] == "seed"}
    assert drawn["p1"] == drawn["p2"] != drawn["other"]
    assert drawn["q1"] != drawn["q2"]
    assert drawn["r1"] != drawn["r2"]


def test_what_a_tool_says_is_the_text_that_an_agent_in_process_reads(client):
    seeded(client)
    assert client.post("/told", json={"what": "é"}).text == '{"what":"é"}'
    refused = client.post("/add", json={"by": -1})
    assert (refused.status_code, refused.text) == (200, "Error: only upwards")
    empty = client.post("/add", json={"by": 0})
    assert (empty.status_code, empty.text) == (204, "")


@pytest.mark.parametrize(
    ("tool_name", "arguments", "status", "said"),
    [
        ("add", {"by": "2"}, 422, "Error: add, argument 'by': Input should be a valid integer"),
        ("add", {"to": 2}, 422, "Error: add has no argument 'to'; its arguments: by"),
        ("told", {}, 422, "Error: told needs the argument 'what'"),
        ("ad", {}, 404, "Error: there is no tool 'ad' (did you mean 'add'?)"),
        ("seed", {}, 404, "Error: there is no tool 'seed'"),
        ("__init__", {}, 404, "Error: there is no tool '__init__'"),
        ("../verify", {}, 404, "Error: there is no tool"),
    ],
)
def test_bad_arguments_are_a_422_with_the_sentence_for_the_model(client, tool_name, arguments, status, said):
    seeded(client)
    url = f"/{tool_name.replace('/', '%2F')}"
    reply = client.post(url, json=arguments)
    assert reply.status_code == status
    assert reply.text.startswith(said)
    assert verify(client).json()["reward"] == 0.0, "the session goes on"


def test_a_call_without_a_session_is_a_400_in_nemo_gyms_words(served):
    for cookies in ({}, {"Odd___odd": "made up"}):
        with httpx.Client(base_url=served.url, cookies=cookies, trust_env=False, verify=False) as stranger:
            for reply in (stranger.post("/add", json={"by": 1}), verify(stranger)):
                assert (reply.status_code, reply.json()) == (400, {"detail": NO_SESSION})
            given = stranger.post("/seed_session", json=ROW).headers["set-cookie"]
            assert "made up" not in given, "a token that was not given out is nobody's"


def test_what_the_environment_raises_is_a_500_with_one_sentence_and_the_session_is_freed(served, client):
    seeded(client)
    reply = client.post("/fail", json={})
    assert (reply.status_code, reply.json()) == (500, "environment odd, fail: RuntimeError: boom")
    assert client.post("/add", json={}).text == "1", "the session goes on"
    reply = client.post("/seed_session", json={**ROW, "name": "unseeded", "broken": True})
    assert (reply.status_code, reply.json()) == (500, "environment odd, seed: RuntimeError: no dictionary")
    assert ("close", "unseeded") in served.log
    seeded(client, name="unjudged", bad_verdict=True)
    assert verify(client).status_code == 500
    assert ("close", "unjudged") in served.log
    assert verify(client).json() == {"detail": NO_SESSION}, "a verdict is asked for once"
    unusable = client.post("/seed_session", json={**ROW, "unusable": True})
    assert (unusable.status_code, unusable.json()) == (422, {"detail": "the row has no answer"})


GOOD = {**ROW, "response": {"output": [SAID]}}


def changed(**response):
    return {**ROW, "response": response}


HOSTILE = {
    "not json": (b"{", "json_invalid", "the body is not JSON"),
    "nan": (b'{"a": NaN}', "json_invalid", "the body is not JSON"),
    "not utf-8": (b'{"a": "\xff"}', "json_invalid", "the body is not JSON"),
    "too deep": (b"[" * 100_000, "json_invalid", "the body is not JSON"),
    "a list": (b"[]", "dict_type", "the body is a JSON array; expected an object"),
    "text": (b'"x"', "dict_type", "the body is a JSON string; expected an object"),
    "a number": (b"3", "dict_type", "the body is a JSON number; expected an object"),
    "null": (b"null", "dict_type", "the body is a JSON null; expected an object"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("route", ["/seed_session", "/add", "/verify", "/close_session", "/aggregate_metrics"])
def test_a_body_that_is_no_object_is_a_422_as_fastapi_words_it(client, route, what):
    raw, kind, said = HOSTILE[what]
    reply = client.post(route, content=raw)
    (problem,) = reply.json()["detail"]
    assert (reply.status_code, problem["type"], problem["loc"][0]) == (422, kind, "body")
    assert problem["msg"].startswith(said)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"response": {"output": []}}, ["responses_create_params"]),
        ({**ROW, "responses_create_params": 3}, ["responses_create_params"]),
        ({**GOOD, "responses_create_params": {}}, ["responses_create_params", "input"]),
        (ROW, ["response"]),
        ({**ROW, "response": [1]}, ["response"]),
        (changed(), ["response", "output"]),
        (changed(output={}), ["response", "output"]),
        (changed(output=[3]), ["response", "output", 0]),
        (changed(output=[SAID, {"type": 3}]), ["response", "output", 1, "type"]),
        (changed(output=[{"type": "message"}]), ["response", "output", 0, "content"]),
        (changed(output=[{"type": "message", "content": [{"image": 1}]}]), ["response", "output", 0, "content"]),
        (changed(output=[{"type": "function_call", "name": "add"}]), ["response", "output", 0, "call_id"]),
        (changed(output=[{"type": "function_call_output"}]), ["response", "output", 0, "call_id"]),
    ],
)
def test_a_request_to_verify_that_no_environment_could_read_is_refused_and_the_session_stays(client, body, place):
    seeded(client)
    client.post("/add", json={})
    reply = client.post("/verify", json=body)
    (problem,) = reply.json()["detail"]
    assert (reply.status_code, problem["loc"]) == (422, ["body", *place])
    assert verify(client).json()["reward"] == 1.0


@pytest.mark.parametrize("seed", ["7", 1.5, None, True, [1]])
def test_a_seed_that_is_no_integer_is_refused(client, seed):
    reply = client.post("/seed_session", json={**ROW, ROLLOUT_SEED: seed})
    assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body", ROLLOUT_SEED])


def test_what_came_in_goes_out_again_token_ids_and_unknown_fields_included(client):
    seeded(client)
    said = {**SAID, "prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5], "x": "y"}
    value = verify(client, said, extra={"deep": [1]}).json()
    assert value["response"]["output"] == [said]
    assert value["extra"] == {"deep": [1]}


def test_a_body_is_bounded_in_bytes_and_in_time():
    with serving(max_body_bytes=1000, body_timeout_s=1.5) as served, served.client() as client:
        assert client.post("/seed_session", json={"x": "a" * 900}).status_code == 200
        large = client.post("/seed_session", json={"x": "a" * 1000})
        assert large.status_code == 413
        assert large.json() == {"detail": "the request body is larger than 1000 bytes, the most this server takes"}
        chunked = client.post("/seed_session", content=(b"a" * 100 for _ in range(20)))
        assert chunked.status_code == 413
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as slow:
            slow.sendall(b"POST /seed_session HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert b"408" in slow.recv(4000).partition(b"\r\n")[0]
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as gone:
            gone.sendall(b"POST /seed_session HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("begun", [b"", b"POST /seed_session HTT"])
def test_headers_that_do_not_come_are_a_408(begun):
    with serving(header_timeout_s=0.3) as served, socket.create_connection(("127.0.0.1", served.port), 10) as slow:
        slow.sendall(begun)
        status, _, rest = slow.recv(4000).partition(b"\r\n")
        assert b"408" in status
        assert json.loads(rest.partition(b"\r\n\r\n")[2]) == {"detail": "the request headers did not arrive in time"}


def test_a_call_that_does_not_end_is_a_500_in_time_and_the_session_is_not_lost():
    with serving(call_timeout_s=1.5) as served, served.client() as client:
        seeded(client)
        reply = client.post("/wait", json={"seconds": 60.0})
        assert (reply.status_code, reply.json()) == (500, "environment odd, wait: no answer within 1.5 s")
        assert client.post("/add", json={}).text == "1"


def test_calls_of_one_session_run_one_at_a_time_and_those_of_others_meanwhile():
    with serving() as served, served.client() as client, served.client() as other:
        seeded(client)
        seeded(other)
        waiting = in_background(lambda: client.post("/wait", json={"seconds": 5.0}))
        until(lambda: ("waits", 5.0) in served.log)
        assert other.post("/add", json={}).text == "1"
        assert ("waited", 5.0) not in served.log
        with httpx.Client(base_url=served.url, cookies=client.cookies, trust_env=False, verify=False) as same:
            assert same.post("/add", json={}, timeout=60).text == "1"
        assert ("waited", 5.0) in served.log
        waiting.join(10)


def test_metrics_and_the_heads_answers_come_in_nemo_gyms_shape(client, served):
    asked = {"verify_responses": [{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0}]}
    assert client.post("/aggregate_metrics", json=asked).json()["key_metrics"] == {"mean/reward": 1.0}
    config = yaml.safe_load(json.loads(client.get("/global_config_dict_yaml").text))
    assert addresses(config, served.url, ["odd_resources_server"]) == {"odd_resources_server": served.url}, (
        "gymloop itself can attach"
    )
    assert client.get("/reverify_mode").json() == "unsupported"
    (instance,) = client.get("/server_instances").json()
    assert (instance["name"], instance["url"]) == ("odd_resources_server", served.url)
    assert client.get("/add").status_code == 405
    assert client.delete("/seed_session").status_code == 405


def test_a_server_with_a_model_tells_of_an_agent_and_an_environment_server():
    with serving(play=Play("http://127.0.0.1:9/v1", "toy")) as served, served.client() as client:
        config = yaml.safe_load(json.loads(client.get("/global_config_dict_yaml").text))
        assert config["odd"]["responses_api_agents"]["gymloop"]["port"] == served.port
        bound = config["odd_environment_server"]["environment_servers"]["gymloop"]["agent_server"]
        assert bound == {"type": "responses_api_agents", "name": "odd"}
        assert addresses(config, served.url, ["odd"]) == {"odd": served.url}


def test_run_without_a_model_says_what_is_missing(client):
    reply = client.post("/run", json=ROW)
    assert reply.status_code == 404
    assert "--model-url" in reply.json()["detail"]


def test_a_tool_called_like_a_route_and_a_name_that_is_no_cookie_are_refused():
    class Bad(Environment):
        @tool
        def verify_session(self) -> str:
            """Fine."""
            return ""

        @tool
        def run(self) -> str:
            """Run."""
            return ""

        def verify(self, response):
            return 0.0

    with pytest.raises(ConfigError, match="environment bad: the tool 'run' is called like a route"):
        EnvironmentApp(InProcessSource("bad", Bad), ("127.0.0.1", 1))
    with pytest.raises(ConfigError, match="environment name 'a b'"):
        EnvironmentApp(InProcessSource("a b", Odd), ("127.0.0.1", 1))
