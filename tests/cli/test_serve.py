"""``gymloop serve``: up at once, ready with one line to copy, quiet while it works, gone when it is told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO

import httpx
import pytest
from rich.console import Console

from gymloop.cli import main as cli
from gymloop.cli import serve
from gymloop.observe.progress import Progress
from gymloop.serving.traffic import Traffic, summary

HELLO = [{"role": "user", "content": "Hello!"}]
LIMIT_S = 200


def port_pair() -> int:
    """A free port whose next one is free too."""
    for port in range(21000, 21999, 2):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise RuntimeError("no free ports")


@dataclass
class Serving:
    """``gymloop serve`` as a user starts it: a process of its own."""

    process: subprocess.Popen[str]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)

    def read(self) -> None:
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=lambda s=stream, to=lines: to.extend(iter(s.readline, "")), daemon=True).start()

    def ready(self) -> str:
        """The URL, as soon as the process says that it is ready."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.out):
                if line.startswith("ready: "):
                    return line.split()[1]
            time.sleep(0.02)
        raise AssertionError(f"not ready: {''.join(self.err)}")

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def said(self) -> str:
        return "".join(self.err)


@pytest.fixture
def start() -> Iterator[Callable[..., Serving]]:
    running: list[Serving] = []

    def begin(*argv: str, **env: str) -> Serving:
        command = [sys.executable, "-m", "gymloop.cli.main", "serve", *argv]
        environment = {key: value for key, value in os.environ.items() if key != serve.API_KEY} | env
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        running.append(Serving(process))
        running[-1].read()
        return running[-1]

    yield begin
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait(timeout=10)


def group_is_empty(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_toy_is_up_at_once_then_answers_the_openai_client_and_leaves_on_sigterm(toy, start):
    import openai

    port = port_pair()
    named = ("--port", str(port), "--served-model-name", "toy")
    serving = start(str(toy("q")), *named, "--max-model-len", "512", "--precision", "float32")
    refused = httpx.Response(500)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and refused.status_code != 503:
        with contextlib.suppress(httpx.ConnectError):
            refused = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=20)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["message"].startswith("waiting for ")

    url = serving.ready()
    assert url == f"http://127.0.0.1:{port}/v1"
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    assert [model.id for model in client.models.list()] == ["toy"]
    # Any sampling: a served model is not locked to a profile.
    for index in range(20):
        reply = client.chat.completions.create(
            model="toy", messages=HELLO, max_tokens=5, temperature=0.3, top_p=0.8, seed=index, presence_penalty=0.5
        )
        assert 1 <= reply.usage.completion_tokens <= 5
    words = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=5, stream=True)
    assert list(words)[-1].choices[0].finish_reason in ("stop", "length")

    ready, example = serving.out
    assert re.search(r"model toy  \(float32 on cpu, 512 tokens of context, \d+ requests at once, [\d.]+ s\)", ready)
    command = shlex.split(example)
    assert command[:2] == ["curl", f"{url}/chat/completions"]
    body = json.loads(command[command.index("-d") + 1])
    assert httpx.post(command[1], json=body, trust_env=False, timeout=60).status_code == 200

    assert serving.stop(signal.SIGTERM) == 143
    assert "stopped by SIGTERM" in serving.said()
    assert "starting: the weights, 0% of " in serving.said()
    # 22 requests, and not a line for any of them.
    assert len(serving.err) < 12, serving.said()
    assert "Traceback" not in serving.said()
    assert group_is_empty(serving.process.pid)
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_a_signal_while_loading_ends_at_once(toy, start):
    serving = start(str(toy("q")), "--port", "0")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and "listening on" not in serving.said():
        time.sleep(0.01)
    assert serving.stop(signal.SIGTERM) == 143
    assert not serving.out
    assert group_is_empty(serving.process.pid)


@pytest.fixture
def serving_here(monkeypatch) -> Callable[..., int]:
    """``serving_here(argv, body)``: the verb in this process, which has torch loaded already; returns its exit code.

    ``body(url)`` runs in a thread, because signals arrive in this one; then comes the signal.
    """

    def serve_here(argv: list[str], body: Callable[[str], None], number: int = signal.SIGTERM) -> int:
        failure: list[BaseException] = []
        urls: list[str] = []

        def announce(url, *rest):
            urls.append(url)
            return f"ready: {url}"

        monkeypatch.setattr(serve, "announcement", announce)

        def client() -> None:
            deadline = time.monotonic() + LIMIT_S
            try:
                while not urls and time.monotonic() < deadline:
                    time.sleep(0.02)
                body(urls[0])
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
                failure.append(error)
            finally:
                os.kill(os.getpid(), number)

        thread = threading.Thread(target=client, daemon=True)
        thread.start()
        code = cli.main(["serve", *argv])
        thread.join(10)
        if failure:
            raise failure[0]
        return code

    return serve_here


def test_ctrl_c_ends_requests_in_flight_and_exits_130(toy, serving_here, capsys):
    ended: list[httpx.Response | httpx.HTTPError] = []
    threads: list[threading.Thread] = []
    asked_at: list[float] = []

    def body(url: str) -> None:
        def ask(stream: bool) -> None:
            endless = {"max_tokens": 4000, "ignore_eos": True, "stream": stream}
            try:
                ended.append(httpx.post(f"{url}/chat/completions", json=request | endless, trust_env=False, timeout=60))
            except httpx.HTTPError as error:
                ended.append(error)

        request = {"model": "toy", "messages": HELLO}
        threads.extend(threading.Thread(target=ask, args=(stream,)) for stream in (False, True))
        for thread in threads:
            thread.start()
        metrics = ""
        deadline = time.monotonic() + 30
        while "gymloop_requests_in_flight 2.0" not in metrics and time.monotonic() < deadline:
            metrics = httpx.get(url.replace("/v1", "/metrics"), trust_env=False, timeout=20).text
        asked_at.append(time.monotonic())

    argv = [str(toy("q")), "--port", "0", "--served-model-name", "toy"]
    assert serving_here(argv, body, signal.SIGINT) == 130
    assert time.monotonic() - asked_at[0] < 20
    for thread in threads:
        thread.join(10)
    assert len(ended) == 2, "a client still waits"
    assert all(isinstance(one, httpx.Response) for one in ended), "a stream was broken off"
    whole, stream = sorted(ended, key=lambda one: -one.status_code)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "server_closing")
    if stream.status_code == 200:  # it had begun
        *_, error, done = stream.text.strip().split("\n\n")
        assert '"code":"server_closing"' in error
        assert done == "data: [DONE]"
    else:
        assert stream.json()["error"]["code"] == "server_closing"
    said = capsys.readouterr().err
    assert "stopping; 2 requests in flight are ended" in said
    assert "ERROR" not in said
    assert not [thread for thread in threading.enumerate() if thread.name in ("loader", "generation-server", "close")]


def test_a_model_without_a_chat_template_completes_and_refuses_chat_by_name(toy, serving_here, capsys):
    def body(url: str) -> None:
        with httpx.Client(trust_env=False, timeout=60) as client:
            done = client.post(f"{url}/completions", json={"model": "bare", "prompt": "Hello", "max_tokens": 3})
            assert done.status_code == 200, done.text
            refused = client.post(f"{url}/chat/completions", json={"model": "bare", "messages": HELLO})
            assert refused.status_code == 400
            assert "has no chat template; give one" in refused.json()["error"]["message"]

    argv = [str(toy("bare")), "--port", "0", "--served-model-name", "bare", "--max-model-len", "256"]
    assert serving_here(argv, body) == 143
    assert "bare has no chat template: completions work, chat is refused" in capsys.readouterr().err


def test_a_template_file_serves_chat_of_a_model_that_has_none(toy, serving_here, tmp_path, capsys):
    template = tmp_path / "chat.txt"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")

    def body(url: str) -> None:
        reply = httpx.post(
            f"{url}/chat/completions",
            json={"model": "bare", "messages": HELLO, "max_tokens": 2},
            trust_env=False,
            timeout=60,
        )
        assert reply.status_code == 200, reply.text

    argv = [str(toy("bare")), "--port", "0", "--served-model-name", "bare", "--chat-template", str(template)]
    assert serving_here(argv, body) == 143


def test_the_key_from_the_environment_is_asked_for_and_never_shown(toy, serving_here, monkeypatch, capsys):
    monkeypatch.setenv(serve.API_KEY, "s3cret-key")

    def body(url: str) -> None:
        with httpx.Client(trust_env=False, timeout=60) as client:
            request = {"model": "toy", "messages": HELLO, "max_tokens": 2}
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret-key"}):
                refused = client.post(f"{url}/chat/completions", json=request, headers=headers)
                assert refused.status_code == 401, refused.text
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert client.get(url.replace("/v1", "/livez")).status_code == 200
            right = client.post(f"{url}/chat/completions", json=request, headers={"authorization": "Bearer s3cret-key"})
            assert right.status_code == 200, right.text

    argv = [str(toy("q")), "--port", "0", "--served-model-name", "toy", "--verbose"]
    assert serving_here(argv, body) == 143
    said = capsys.readouterr()
    assert "s3cret-key" not in said.out + said.err


def test_the_key_is_not_in_the_spec_s_text(monkeypatch, toy):
    monkeypatch.setenv(serve.API_KEY, "s3cret-key")
    spec = serve.read_spec(cli.parse(["serve", str(toy("q"))]))
    assert spec.api_key == "s3cret-key"
    assert "s3cret-key" not in repr(spec)
    text = serve.announcement("http://h:1/v1", spec, FACTS, 1.0)
    assert 'authorization: Bearer $GYMLOOP_API_KEY"' in text


FACTS = {"precision": "float32", "device": "cpu", "max_model_len": 512, "max_batch_size": 4, "chat": True}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--tool-parser", "herms"], "there is no parser 'herms'; did you mean 'hermes'?"),
        (["--reasoning-parser", "thinks"], "there is no parser 'thinks'; did you mean 'think'?"),
        (["--tool-parser-plugin", "none.py"], "--tool-parser-plugin: the file none.py does not exist"),
        (["--chat-template", "none.jinja"], "--chat-template: the file none.jinja cannot be read: No such file"),
        (["--port", "70000"], "--port: '70000' is no port"),
        (["--max-model-len", "0"], "--max-model-len: '0' is not a whole number of at least 1"),
        (["--max-batch-size", "many"], "'many' is not a whole number"),
        (["--precision", "float16"], "--precision: unknown value 'float16'; did you mean 'bfloat16'?"),
        (["--prt", "1"], "unknown argument '--prt'; did you mean '--port'?"),
        (["--host", "203.0.113.7"], "host '203.0.113.7' is not an address of this machine"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_2(toy, capsys, argv, sentence):
    assert cli.main(["serve", str(toy("q")), *argv]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_taken_port_is_named_with_the_next_free_one(toy, capsys):
    port = port_pair()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert cli.main(["serve", str(toy("q")), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"--port {port}: the port is taken on 127.0.0.1; {port + 1} is free" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("no such model", "'no such model' is neither a folder on this machine nor a Hugging Face id"),
        ("{empty}", "has no config.json"),
        ("{damaged}", "cannot be loaded"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_sentence_and_exit_2(toy, tmp_path, capsys, model, sentence):
    (tmp_path / "empty").mkdir()
    damaged = shutil.copytree(toy("q"), tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"not weights")
    name = model.format(empty=tmp_path / "empty", damaged=damaged)
    assert cli.main(["serve", name, "--port", "0"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("gymloop: ")
    assert sentence in last


def test_a_context_beyond_the_models_is_refused(toy, capsys):
    assert cli.main(["serve", str(toy("q")), "--port", "0", "--max-model-len", "5000"]) == 2
    assert "max_position_embeddings" in capsys.readouterr().err.splitlines()[-1]


def test_a_download_under_way_is_shown_and_ended(monkeypatch):
    said = "import sys, time; print('gymloop: fetching 1 of 9', file=sys.stderr, flush=True); time.sleep(60)"
    monkeypatch.setattr(serve, "FETCH", (sys.executable, "-c", said))
    failed: list[str] = []

    class Worker:
        def fail(self, reason):
            failed.append(reason)

    loader = serve._Loader(Worker(), "owner/model")
    loader.start()
    deadline = time.monotonic() + 30
    while loader.note != "fetching 1 of 9" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert loader.note == "fetching 1 of 9"
    loader.end()
    loader.join(10)
    assert not loader.is_alive()
    assert failed == ["fetching 1 of 9"]


# ---------------------------------------------------------------- what people read


def lines_of(terminal: bool, *shown: tuple) -> str:
    out = StringIO()
    with Progress(Console(file=out, force_terminal=terminal, width=100, highlight=False)) as progress:
        view = serve._LoadingView(progress)
        for one in shown:
            view.show(*one)
            if terminal:
                time.sleep(0.15)  # rich draws ten times a second
    return out.getvalue()


def test_loading_is_a_line_for_each_change_where_there_is_no_terminal():
    weights = [("the weights", done * 10**7, 538 * 10**6) for done in range(0, 54)]
    said = lines_of(False, ("the tokenizer", 0, 0), ("the tokenizer", 0, 0), *weights).splitlines()
    assert said == [
        "starting: the tokenizer",
        "starting: the weights, 0% of 538 MB",
        "starting: the weights, 25% of 538 MB",
        "starting: the weights, 50% of 538 MB",
        "starting: the weights, 75% of 538 MB",
    ]


def test_loading_is_one_line_with_bytes_and_percent_on_a_terminal():
    said = lines_of(True, ("the model's folder", 0, 0, "Fetching 9 files"), ("the weights", 269 * 10**6, 538 * 10**6))
    assert "starting: the model's folder, Fetching 9 files" in said
    assert "starting: the weights, 269 MB of 538 MB (50%)" in said


def test_a_summary_has_rates_and_is_silent_when_nothing_happens():
    before = Traffic(samples=10, prompt_tokens=1000, tokens=500, refused=1)
    now = Traffic(samples=30, prompt_tokens=21000, tokens=12500, refused=3, in_flight=7)
    text = "20 answered (2.0/s), 1,200 tokens/s, 2,000 prompt tokens/s, 7 in flight, 2 refused"
    assert summary(before, now, 10.0) == text
    assert summary(now, Traffic(30, 21000, 12500, 3, 0), 10.0) == ""


def test_the_announcement_quotes_what_a_shell_would_read(toy):
    spec = serve.read_spec(cli.parse(["serve", "it's", "--port", "0"]))
    example = serve.announcement("http://h:1/v1", spec, FACTS, 1.0).splitlines()[1]
    body = json.loads(shlex.split(example)[-1])
    assert body["model"] == "it's"
    bare = serve.announcement("http://h:1/v1", spec, FACTS | {"chat": False}, 1.0)
    assert "/v1/completions" in bare


@pytest.mark.slow
def test_smollm2_is_served_to_the_openai_client(start):
    import openai

    from gymloop.models.smollm2 import MODEL_ID

    serving = start(MODEL_ID, "--port", "0", "--max-model-len", "1024", "--max-batch-size", "4")
    client = openai.OpenAI(base_url=serving.ready(), api_key="unused", max_retries=0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    reply = client.chat.completions.create(model=MODEL_ID, messages=question, max_tokens=24, temperature=0)
    assert "Paris" in reply.choices[0].message.content
    pieces = client.chat.completions.create(
        model=MODEL_ID, messages=question, max_tokens=24, temperature=0, stream=True
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == reply.choices[0].message.content
    assert re.search(r"starting: the weights, (0|25|50|75|100)% of 538 MB", serving.said())
    assert serving.stop(signal.SIGINT) == 130
