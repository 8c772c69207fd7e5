"""NeMo Gym's own model proxy (``vllm_model``, token ids on), unmodified, in front of the generation server.

Wherever it looks for a call's tokens it finds the same ones: on the message, beside it as vLLM gives them, or in the
log-probabilities and ``/tokenize``. A stand-in between the two leaves out what the proxy would find first.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

import gymloop.gym.nemo.launch as launch

from .solving import call, driven_gym, solving_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
gym = driven_gym
model = solving_model
BUNDLE = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}]
LOOK = call("look", '{"at": "ok"}')


@contextmanager
def without(url: str, message: bool, beside: bool):
    """An address that passes everything on to ``url`` and leaves out tokens on the message, and beside it."""
    root = url.removesuffix("/v1")

    class Pass(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            with httpx.Client(timeout=60, trust_env=False, verify=False) as client:
                reply = client.post(f"{root}{self.path}", content=body)
            value = reply.json()
            asked.append(self.path)
            for choice in value.get("choices", ()) if reply.status_code == 200 else ():
                for key in BUNDLE if message else ():
                    choice["message"].pop(key, None)
                if beside:
                    choice.pop("token_ids", None)
            if beside:
                value.pop("prompt_token_ids", None)
            raw = json.dumps(value).encode()
            self.send_response(reply.status_code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            pass

    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pass)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def vllm_model(gym, folder: Path, url: str, **settings):
    """A client of the proxy's own process."""
    held = socket.create_server(("127.0.0.1", 0))
    host, port = held.getsockname()[:2]
    block = {
        "entrypoint": "app.py", "host": host, "port": port, "base_url": url, "api_key": "none", "model": "toy",
        "return_token_id_information": True, "uses_reasoning_parser": True, **settings,
    }  # fmt: skip
    config = {
        "policy_model": {"responses_api_models": {"vllm_model": block}},
        "head_server": {"host": host, "port": 1},
        "dry_run": False,
    }
    environ = {**os.environ, "NEMO_GYM_CONFIG_DICT": json.dumps(config), "NEMO_GYM_CONFIG_PATH": "policy_model"}
    with (folder / "proxy.log").open("w") as log:
        process = subprocess.Popen(
            [str(gym.python), launch.__file__, str(held.fileno()), "app.py"],
            cwd=gym.site_packages / "responses_api_models" / "vllm_model", env=environ, pass_fds=[held.fileno()],
            stdout=log, stderr=log,
        )  # fmt: skip
    held.close()
    try:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=300, trust_env=False, verify=False) as client:
            assert client.get("/healthz").status_code == 200
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def ask(client, items):
    body = {"input": items, "tools": TOOLS, "parallel_tool_calls": False, "temperature": 1.0, "max_output_tokens": 900}
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("source", ["on the message", "beside it", "in the logprobs and from /tokenize"])
def test_two_turns_are_contiguous_wherever_the_proxy_finds_the_tokens(gym, model, tmp_path, source):
    server = model({"Question?": [LOOK, "It is ok."]}, 4000)
    first = source == "on the message"
    with (
        without(server.url, message=not first, beside=source.startswith("in the")) as (url, asked),
        vllm_model(gym, tmp_path, url, request_prompt_and_generation_token_ids=source == "beside it") as client,
    ):
        items = [{"role": "user", "content": "Question?", "type": "message"}]
        turn = ask(client, items)
        (called,) = turn["output"]
        assert (called["type"], called["name"], called["arguments"]) == ("function_call", "look", '{"at": "ok"}')
        items += [called, {"type": "function_call_output", "call_id": called["call_id"], "output": "4C, ok"}]
        (said,) = ask(client, items)["output"]
    assert said["content"][0]["text"] == "It is ok."
    for item in (called, said):
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        assert item["generation_token_ids"][-1] == 2
    seen = called["prompt_token_ids"] + called["generation_token_ids"]
    assert said["prompt_token_ids"][: len(seen)] == seen
    assert ("/tokenize" in asked) == source.startswith("in the")


@pytest.mark.parametrize("turns", [1, 2])
def test_a_conversation_that_outgrows_the_context_is_an_empty_message_and_a_reason(gym, model, tmp_path, turns):
    server = model({"Question?": [LOOK, "Never said."]}, 1000)
    with vllm_model(gym, tmp_path, server.url) as client:
        long = "a" * 2000
        items = [{"role": "user", "content": f"Question?{long if turns == 1 else ''}", "type": "message"}]
        if turns == 2:
            (called,) = ask(client, items)["output"]
            items += [called, {"type": "function_call_output", "call_id": called["call_id"], "output": long}]
        reply = ask(client, items)
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert all(not part["text"] for item in reply["output"] for part in item["content"])
    assert all(not item.get("generation_token_ids") for item in reply["output"])
