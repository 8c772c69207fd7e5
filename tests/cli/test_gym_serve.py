"""``gymloop gym serve`` as a user runs it: a process, its two lines, signals, and one sentence for each mistake."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from gymloop.cli.main import main

PYTHON = [sys.executable, "-m", "gymloop.cli.main", "gym", "serve"]
CALCULATOR = "gymloop.gym.calculator:Calculator"


@contextlib.contextmanager
def served(*arguments, **options):
    """The process, once it has said its first line."""
    process = subprocess.Popen(
        [*PYTHON, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def get(url):
    with urllib.request.urlopen(url, timeout=60) as reply:
        return reply.read()


def test_the_address_is_said_first_the_environment_is_served_and_ctrl_c_ends_it_in_order():
    with served(CALCULATOR, "--port", "0", "--kwargs", '{"two_step": 1.0}', "--name", "calc") as process:
        url = re.fullmatch(r"listening: (http://127\.0\.0\.1:\d+)\n", process.stdout.readline())[1]
        assert get(f"{url}/healthz") == b'{"status":"ok"}', "a request waits in the socket's queue"
        ready = process.stdout.readline()
        assert ready.startswith(f"ready: {url}  environment calc ({CALCULATOR}), tools: calculate")
        assert b"calc_resources_server" in get(f"{url}/server_instances")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "stopped by SIGINT" in process.stderr.read()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 5)


SLOW = """
import asyncio
from gymloop.gym import Environment, tool

class Slow(Environment):
    @tool
    async def wait(self) -> str:
        '''Wait for ever.'''
        await asyncio.sleep(600)

    def verify(self, response):
        return 0.0
"""


def test_an_environment_beside_the_user_is_found_and_sigterm_ends_it_with_a_call_under_way(tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    with served("mine:Slow", "--port", "0", cwd=tmp_path) as process:
        url = process.stdout.readline().split()[1]
        process.stdout.readline()
        seed = urllib.request.Request(f"{url}/seed_session", b"{}")
        with urllib.request.urlopen(seed, timeout=60) as reply:
            cookie = reply.headers["set-cookie"].partition(";")[0]
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as call:
            call.sendall(
                f"POST /wait HTTP/1.1\r\nhost: x\r\ncookie: {cookie}\r\ncontent-length: 2\r\n\r\n{{}}".encode()
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 143


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere:X"], "gym serve: cannot import 'nowhere'"),
        (["gymloop.gym.calculator:Calculater"], r"has no 'Calculater' \(did you mean 'Calculator'\?\)"),
        (["gymloop.gym.calculator"], "is not of the form module:Class"),
        ([CALCULATOR, "--kwargs", "{"], "--kwargs: not JSON"),
        ([CALCULATOR, "--kwargs", "[1]"], r"--kwargs: expected a JSON object of constructor arguments, got \[1\]"),
        ([CALCULATOR, "--kwargs", '{"steps": 1}'], "environment calculator: kwargs do not fit Calculator"),
        ([CALCULATOR, "--name", "a b"], "environment name 'a b'"),
        ([CALCULATOR, "--model-url", "http://127.0.0.1:1/v1"], "--model-url and --model-name belong together"),
        ([CALCULATOR, "--model-url", "127.0.0.1:1", "--model-name", "m"], "is not an address"),
        ([CALCULATOR, "--host", "203.0.113.1"], "is not an address of this machine"),
        ([CALCULATOR, "--prot", "1"], "unknown argument '--prot'; did you mean '--port'"),
        ([CALCULATOR, "--max-turns", "0"], "is not a whole number of at least 1"),
    ],
)
def test_each_mistake_is_one_sentence_and_exit_code_2(arguments, said, capsys):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    port = [] if "--prot" in arguments else ["--port", "0"]
    assert main(["gym", "serve", *arguments, *port]) == 2
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1


def test_a_taken_port_is_told_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gym", "serve", "nowhere:X", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"no free port between {port} and {port}" in error
    assert str(os.getpid()) in error or "taken" in error
