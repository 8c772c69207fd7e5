"""An engine's worker with a real vLLM: it answers before the model is there, serves tool calls, and dies as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import toys
from gymloop.errors import ConfigError, InfraError
from gymloop.generation.vllm.settings import VllmSettings
from gymloop.gym.model_client import ModelClient
from gymloop.models.load import load_causal_lm
from gymloop.serving.engine_spec import EngineSpec
from gymloop.serving.worker import EngineWorker
from gymloop.weights.snapshot import take

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SMALL = VllmSettings(kv_cache_memory_bytes=64 << 20)
LAG_S = 5.0
"""A server that is loaded beside answers within it; measured 0.35 s on idle cores."""


def spec(**fields: Any) -> EngineSpec:
    values = {"port_range": (23000, 23999), "max_model_len": 256, "max_batch_size": 4, "precision": "float32"}
    return EngineSpec("toy", None, request_timeout_s=60.0, threads=1, **{**values, "vllm": SMALL, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.build_toy(tmp_path_factory.mktemp("vllm"), "q", **toys.FOR_VLLM)


@dataclass
class Loaded:
    worker: EngineWorker
    url: str
    facts: dict[str, Any]
    statuses: set[int]
    slowest_s: float
    phases: list[tuple[str, int, int]] = field(default_factory=list)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Loaded]:
    """One worker for the module, watched while it loads; random weights until its first sync."""
    worker = EngineWorker(spec(vllm=VllmSettings(kv_cache_memory_bytes=64 << 20, load_format="dummy")))
    url = worker.url()
    statuses: set[int] = set()
    phases: list[tuple[str, int, int]] = []
    slowest = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal slowest
        with httpx.Client(base_url=url.removesuffix("/v1"), trust_env=False, timeout=60) as http:
            while not done.wait(0.05):
                began = time.monotonic()
                assert http.get("/livez").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                statuses.add(http.post("/v1/chat/completions", json={"model": "toy", "messages": HELLO}).status_code)
                if worker.load_progress() not in phases:
                    phases.append(worker.load_progress())

    watcher = threading.Thread(target=watch)
    watcher.start()
    facts = worker.load(str(folder), str(folder))
    done.set()
    watcher.join(60)
    yield Loaded(worker, url, facts, statuses, slowest, phases)
    worker.close()


def chat(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "toy", "messages": HELLO, "max_tokens": 8, **fields}
    return httpx.post(f"{url}/chat/completions", json=body, trust_env=False, timeout=60)


def test_the_server_answers_while_vllm_loads_and_its_url_stays(served: Loaded) -> None:
    assert served.statuses == {503}
    assert served.slowest_s < LAG_S
    assert served.worker.url() == served.url
    assert any("resident" in what for what, _, _ in served.phases), "progress is seen, so a deadline can be extended"
    assert served.facts["backend"] == "vllm"
    assert served.facts["compile_cache"] == "off", "nothing is compiled on a CPU unless asked for"
    assert served.facts["kv_cache_bytes"] == 64 << 20


def test_an_engine_with_random_weights_serves_nothing_before_its_first_sync(served: Loaded, folder: Path) -> None:
    refused = chat(served.url)
    assert refused.status_code == 503
    assert "first weight sync" in refused.text
    served.worker.load_weights(take(load_causal_lm(folder, "float32", "cpu").named_parameters()), 0)
    assert chat(served.url).status_code == 200


def test_f01_a_second_turn_begins_with_the_exact_ids_of_the_first(served: Loaded) -> None:
    first = chat(served.url, logprobs=True, seed=1).json()["choices"][0]["message"]
    prefix = [*first["prompt_token_ids"], *first["generation_token_ids"]]
    messages = [*HELLO, {"role": "assistant", "content": first["content"] or ""}, {"role": "user", "content": "And?"}]
    second = chat(served.url, messages=messages, required_prefix_token_ids=prefix, logprobs=True, seed=2)
    assert second.status_code == 200, second.text
    assert second.json()["choices"][0]["message"]["prompt_token_ids"][: len(prefix)] == prefix


def test_a11_a_prompt_at_the_context_limit_is_an_empty_reply_of_length(served: Loaded) -> None:
    reply = chat(served.url, messages=[{"role": "user", "content": "x" * 400}], logprobs=True)
    assert reply.status_code == 200
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["generation_token_ids"] == []


def test_weights_arrive_while_requests_run_and_replies_name_their_versions(served: Loaded, folder: Path) -> None:
    model = load_causal_lm(folder, "float32", "cpu")
    before = chat(served.url, temperature=0, logprobs=True).json()["choices"][0]["message"]
    for parameter in model.parameters():
        parameter.data += 0.3
    served.worker.load_weights(take(model.named_parameters()), 1)
    after = chat(served.url, temperature=0, logprobs=True).json()["choices"][0]["message"]
    assert after["generation_log_probs"] != before["generation_log_probs"]
    assert served.worker.weight_version() == 1


def test_an_engine_core_that_is_killed_is_named_and_later_calls_fail_by_name(served: Loaded) -> None:
    engine: Any = served.worker._engine
    os.kill(engine.pids[0], signal.SIGKILL)
    until = time.monotonic() + 10
    while not engine._life.dead:
        assert time.monotonic() < until
        time.sleep(0.1)
    with pytest.raises(InfraError, match="SIGKILL"):
        served.worker.check()
    assert chat(served.url).status_code >= 500


def test_a_folder_without_weights_is_refused_with_vllms_own_reason(tmp_path: Path) -> None:
    folder = toys.build_toy(tmp_path, "q", **toys.FOR_VLLM)
    (folder / "model.safetensors").unlink()
    worker = EngineWorker(spec())
    try:
        with pytest.raises(ConfigError, match=r"vLLM 0\.\d+.* could not start on .*: .*weights"):
            worker.load(str(folder), str(folder))
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("kv_bytes", "reason"),
    [
        pytest.param(
            4096, r"at least one request .*max seq len \(256\)|No available memory for the cache", id="too small"
        ),
        pytest.param(1 << 50, r"requested memory for kv \(1048576\.0 GiB\).*kv-cache-memory-bytes", id="too large"),
    ],
)
def test_a_kv_cache_that_cannot_be_is_refused_with_vllms_own_reason(folder: Path, kv_bytes: int, reason: str) -> None:
    worker = EngineWorker(spec(vllm=VllmSettings(kv_cache_memory_bytes=kv_bytes)))
    try:
        with pytest.raises(ConfigError, match=rf"vLLM 0\.\d+.* could not start on .*: .*({reason})"):
            worker.load(str(folder), str(folder))
    finally:
        worker.close()


async def test_a_call_made_while_vllm_loads_waits_for_it_and_one_that_may_not_wait_says_what_loads(
    folder: Path,
) -> None:
    worker = EngineWorker(spec())
    options: dict[str, Any] = {"max_concurrency": 2, "call_timeout_s": 60.0}
    loading = asyncio.get_running_loop().run_in_executor(None, worker.load, str(folder), str(folder))
    try:
        async with (
            ModelClient(worker.url(), "toy", ready_timeout_s=400.0, **options) as patient,
            ModelClient(worker.url(), "toy", ready_timeout_s=1.0, **options) as hasty,
        ):
            waiting = asyncio.ensure_future(patient.chat(HELLO, (), max_tokens=4))
            with pytest.raises(InfraError, match=r"still 503 after 1 s: .*(weights|torch|tokenizer|vLLM)"):
                await hasty.chat(HELLO, (), max_tokens=4)
            assert not loading.done()
            reply = await asyncio.wait_for(waiting, 500)
            assert reply.turn.sampled_ids
            await asyncio.wait_for(loading, 60)
    finally:
        await asyncio.to_thread(worker.close)


KILLED = """
import sys, time
from gymloop.generation.vllm.settings import VllmSettings
from gymloop.serving.engine_spec import EngineSpec
from gymloop.serving.worker import EngineWorker
if __name__ == "__main__":
    worker = EngineWorker(EngineSpec("toy", None, (23000, 23999), 256, 4, 60.0, precision="float32", threads=1,
                                     vllm=VllmSettings(kv_cache_memory_bytes=64 << 20)))
    print("serving", flush=True)
    worker.load(sys.argv[1], sys.argv[1])
"""


def test_nothing_is_left_of_a_worker_that_is_killed_while_it_loads(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(KILLED)
    mark = f"GYMLOOP_TEST_KILLED={os.getpid()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True, env={**os.environ, name: value}
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        until = time.monotonic() + 240
        while not any("spawn_main" in line or "VLLM" in line for line in marked(mark)):
            assert time.monotonic() < until, "vLLM's process did not start"
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait(timeout=10)
    until = time.monotonic() + 15
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def marked(mark: str) -> list[str]:
    """Command lines of the processes whose environment has the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
