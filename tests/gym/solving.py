"""A generation server that solves what it is asked, and the NeMo Gym that drives it."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack

import pytest

from gymloop.generation.engine import Sample
from gymloop.gym.nemo.install import Installation
from gymloop.serving.server import GenerationServer
from gymloop.tokens import Renderer
from gymloop.tokens.reply import reply_reader
from toys import BASE, build_toy, text_ids

from .nemo.real import real_gym

END = 2  # <|im_end|> of the toy family q


class SolvingEngine:
    """Plays the solution whose question is in the prompt: each turn the next call, then the last words.

    It says "ok" letter by letter, which the tokenizer merges, so a prompt that was tokenised anew shows.
    """

    weight_version = 7

    def __init__(self, solutions, max_model_len):
        self.solutions = solutions
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids, sampling, request_id, on_tokens=None):
        text = bytes(i - BASE for i in prompt_ids if BASE <= i < BASE + 256).decode(errors="replace")
        question = next(one for one in self.solutions if one in text)
        turn = text.count("<tool_response>")
        said = self.solutions[question][turn]
        ids = (*text_ids(said), END)[: sampling.max_new_tokens]
        return Sample(ids, (-0.5,) * len(ids), "stop" if ids[-1] == END else "length", 7, 7)

    def abort(self, request_id):
        pass


@pytest.fixture(scope="module", name="gym")
def driven_gym() -> Installation:
    """RunHelper wants the Python that NeMo Gym asks for."""
    found = real_gym()
    version = subprocess.run([found.python, "-c", "import sys; print(sys.version_info >= (3, 13))"],
                             capture_output=True, text=True, timeout=60, check=True).stdout.strip()  # fmt: skip
    if version != "True":
        pytest.skip(f"{found.folder} has a Python before 3.13, on which RunHelper is not supported; see GYM_PYTHON")
    return found


@pytest.fixture(name="model")
def solving_model(tmp_path):
    """``model(solutions, max_model_len)`` is a generation server that plays them."""
    folder = build_toy(tmp_path, "q", weights=False)
    with ExitStack() as stack:

        def start(solutions, max_model_len=200_000):
            held = socket.create_server(("127.0.0.1", 0))
            server = GenerationServer(held, "toy", None)
            server.start()
            stack.callback(server.close)
            server.ready(
                SolvingEngine(solutions, max_model_len),
                Renderer.load(folder, reader=reply_reader("hermes", None, None)),
            )
            return server

        yield start


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
