"""``gymloop collect --model-url``: a plain OpenAI server, which knows none of our fields, and gymloop's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import forked
from gymloop.generation.engine import Sample
from gymloop.serving.server import GenerationServer
from gymloop.tokens import Renderer
from toys import build_toy, text_ids

from ..serving.scripted import listen

KNOWN = {"model", "messages", "tools", "max_tokens", "temperature", "top_p", "n", "seed"}
KEY = "sk-of-a-test"
CALL = {"name": "calculate", "arguments": '{"expression": "12 * 34"}'}


class Plain:
    """Refuses every field that it does not know and every caller without the key; first calls a tool, then answers."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fail = 0
        plain = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(200, {"object": "list", "data": [{"id": "big-model"}, {"id": "small-model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self._say(*plain.reply(self.headers.get("authorization"), body))

            def _say(self, status: int, body: dict[str, Any]) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def reply(self, key: str | None, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if key != f"Bearer {KEY}":
            return 401, {"error": {"code": "invalid_api_key", "message": "who are you"}}
        self.requests.append(body)
        if unknown := set(body) - KNOWN:
            return 400, {"error": {"code": "unknown_parameter", "message": f"unknown: {unknown}"}}
        if len(self.requests) <= self.fail:
            return 500, {"error": {"message": "hiccup"}}
        if any(message["role"] == "assistant" for message in body["messages"]):
            message = {"role": "assistant", "content": "<think>The answer is 408"}
            finish = "stop"
        else:
            call = {"id": f"call_{len(self.requests)}", "type": "function", "function": CALL}
            message, finish = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return 200, {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 7}}


class Answering:
    """An engine that always says the same."""

    max_model_len = 1000
    weight_version = 5

    async def generate(self, prompt_ids, sampling, request_id, on_tokens=None):
        ids = (*text_ids("408"), 2)
        if on_tokens is not None:
            on_tokens(ids, (-0.5,) * len(ids))
        return Sample(ids, (-0.5,) * len(ids), "stop", 5, 5)

    def abort(self, request_id):
        pass


@pytest.fixture(scope="module")
def nursery() -> Iterator[forked.Nursery]:
    with forked.Nursery() as started:
        yield started


@pytest.fixture
def plain() -> Iterator[Plain]:
    server = Plain()
    yield server
    server.server.shutdown()


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
                "rollouts": {"max_infra_attempts": 2},
                "policy": {
                    "model_name": "never/loaded",
                    "max_total_sequence_length": 1024,
                    "optimizer": {"kwargs": {"lr": 1e-3}},
                    "generation": {"max_new_tokens": 12, "temperature": 0.7},
                },
                "data": {"train": {"environment": "calculator", "num_tasks": 3}},
                "env": {"environments": {"calculator": {"entrypoint": "gymloop.gym.calculator:Calculator"}}},
                "startup": {"deadline_s": 30.0},
            }
        )
    )
    return path


class Collecting:
    def __init__(self, nursery: forked.Nursery, recipe: Path) -> None:
        self.nursery = nursery
        self.recipe = recipe
        self.output = recipe.with_name("out.jsonl")

    def run(
        self, url: str, *arguments: str, key: str | None = KEY, model: str = "big-model", **how: Any
    ) -> forked.Done:
        words = ("--output", self.output, "--model-url", url, "--model", model)
        return self.nursery.run(
            "collect", self.recipe, *words, *arguments, prepare=("collect_key:put", {"key": key}), **how
        )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def collecting(nursery, recipe) -> Collecting:
    return Collecting(nursery, recipe)


def test_a_plain_openai_server_plays_and_its_rollouts_say_that_they_have_no_tokens(plain, collecting):
    done = collecting.run(plain.url)
    assert done.code == 0, done.output
    lines = collecting.lines()
    assert len(lines) == 6
    for line in lines:
        kinds = [item["type"] for item in line["response"]["output"]]
        assert kinds == ["function_call", "function_call_output", "message"]
        assert line["response"]["output"][1]["output"] == "408"
        assert not any("token_ids" in key for item in line["response"]["output"] for key in item)
        ours = line["gymloop"]
        assert ours["tokens"] is None
        assert ours["weight_versions"] == [None, None]
        assert (ours["turns"], ours["tool_calls"]) == (2, 1)
        assert ours["malformed_thinking_turns"] == [1]
    assert {request["temperature"] for request in plain.requests} == {0.7}
    assert {request["model"] for request in plain.requests} == {"big-model"}
    assert "without token ids 6" in done.output
    assert f"{6 * 2 * 7} tokens in" in done.output
    assert "engine" not in done.output, "nothing is loaded"


def test_it_goes_on_with_a_server_at_another_address_and_refuses_another_model(plain, collecting):
    killed = collecting.run(plain.url, die="gymloop.training.output:Output.append:2:after")
    assert killed.code == -9, killed.output
    elsewhere = Plain()
    try:
        other = collecting.run(elsewhere.url, model="small-model")
        assert other.code == 2
        assert "model was big-model and is small-model" in other.output
        assert collecting.run(elsewhere.url).code == 0
    finally:
        elsewhere.server.shutdown()
    ids = [(line["gymloop"]["group_id"], line["gymloop"]["sample_id"]) for line in collecting.lines()]
    assert len(ids) == len(set(ids)) == 6
    assert len(elsewhere.requests) == 8


def test_what_is_wrong_with_the_server_is_said_before_anything_is_collected(plain, collecting):
    unknown = collecting.run(plain.url, model="bg-model")
    assert unknown.code == 2
    assert "has no model 'bg-model'; did you mean 'big-model'?" in unknown.output
    nobody = collecting.run("http://127.0.0.1:9/v1")
    assert nobody.code == 1
    assert "startup task 'client' failed" in nobody.output
    assert "127.0.0.1:9/v1/models" in nobody.output
    assert not collecting.output.exists()


def test_the_key_comes_from_the_environment_and_is_never_shown(plain, collecting):
    refused = collecting.run(plain.url, key="wrong-key-xyz")
    assert refused.code == 2
    assert "401 invalid_api_key" in refused.output
    assert collecting.run(plain.url).code == 0
    for file in (collecting.output, *collecting.output.with_name("out.jsonl.run").rglob("*")):
        assert not file.is_file() or KEY not in file.read_text()


def test_a_server_that_stumbles_is_asked_again_and_the_rollout_says_so(plain, collecting):
    plain.fail = 1
    done = collecting.run(plain.url, "rollouts.max_concurrency=1")
    assert done.code == 0, done.output
    assert [line["gymloop"]["attempt"] for line in collecting.lines()] == [1, 0, 0, 0, 0, 0]


def test_gymloops_own_server_gives_tokens_here_too(collecting, tmp_path):
    folder = build_toy(tmp_path, "q", weights=False)
    server = GenerationServer(listen(), "big-model", None, default_max_tokens=64)
    server.start()
    server.ready(Answering(), Renderer.load(folder))
    try:
        done = collecting.run(server.url)
    finally:
        server.close()
    assert done.code == 0, done.output
    for line in collecting.lines():
        (item,) = line["response"]["output"]
        assert item["generation_token_ids"] == [*text_ids("408"), 2]
        assert line["gymloop"]["tokens"]["sampled"] == 4
        assert line["gymloop"]["weight_versions"] == [5, 5]
        assert "reward" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "x"], "--model is the name of the model at --model-url, which is missing"),
        (["--model-url", "localhost:1"], "--model-url is not an address"),
        (["--model-url", "http://me:secret@h/v1"], "--model-url is not an address"),
        (["--data", "validation"], "the recipe has no data.validation"),
        (["--data", "test"], "--data: unknown value 'test'"),
        (["--generations", "0"], "'0' is not a whole number of at least 1"),
        (["--outptu", "x"], "did you mean '--output'?"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused_in_a_sentence(recipe, words, said, capfd):
    from gymloop.cli.main import main

    assert main(["collect", str(recipe), "--output", str(recipe.with_name("o.jsonl")), *words]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "secret" not in error
