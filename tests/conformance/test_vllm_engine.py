"""The conformance kit on vLLM, and what is particular to an engine whose model lives in processes of its own.

Each start of vLLM takes both cores for a while, so engines are shared: one per model for whatever leaves it as it was,
and one more per model on new weights. A check that wants an engine of its own gets the one of its model, or, for a
folder with other weights, one that is started once and kept.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import toys
from gymloop.errors import ConfigError, InfraError
from gymloop.generation.engine import Engine, Sampling
from gymloop.generation.vllm import control
from gymloop.generation.vllm_engine import VllmEngine
from gymloop.weights.shared import SharedSender

from . import engine as kit

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's attention on a CPU wants at least this
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # likely tokens, and none so likely that nothing changes it
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Any] = {
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
}
CORE = {
    "greedy_equals_generate_when_requests_join_at_random_times",
    "new_weights_answer_as_a_fresh_engine_on_them_and_again_after_a_second_sync",
    "the_same_weights_again_change_nothing",
    "a_snapshot_that_does_not_fit_is_refused_and_changes_nothing",
}
"""What runs on every family; the whole kit runs on the first."""
LAST = "close_in_flight_raises_infra_error_by_name"
"""It takes the engine of its family with it."""
"""Room for two engines at once, and what sleeping needs."""
MAKE = partial(
    VllmEngine,
    dtype="float32",
    arguments=toys.small_vllm(),
    environment={"OMP_NUM_THREADS": "1"},
)


class Subject(kit.Subject):
    """Checks that want an engine of their own share one, which gets the weights it started with back."""

    @asynccontextmanager
    async def fresh(self, folder: Path | None = None, **settings: Any) -> AsyncIterator[Engine]:
        if folder is not None:
            async with super().fresh(folder, **settings) as engine:
                yield engine
            return
        engine = self.shared()
        try:
            yield engine
        finally:
            if settings:  # the check closed it
                self._engines.clear()
            else:
                await asyncio.to_thread(engine.load_weights, kit.current(self), 0)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Subject]]:
    subjects: dict[str, Subject] = {}

    def get(family: str) -> Subject:
        if family not in subjects:
            for other in subjects.values():
                other.close()
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder)
            subjects[family] = Subject(MAKE, folder, tmp_path_factory.mktemp(f"{family}-scratch"))
        return subjects[family]

    yield get
    for subject in subjects.values():
        subject.close()


def cases() -> list[Any]:
    names = [*(name for name in kit.CHECKS if name != LAST)]
    found = [(family, name) for family in FAMILIES for name in names if family == next(iter(FAMILIES)) or name in CORE]
    return [pytest.param(family, name, id=f"{family}-{name}") for family, name in found]


@pytest.mark.parametrize(("family", "name"), cases())
async def test_vllm_conforms(subject_of: Callable[[str], Subject], family: str, name: str) -> None:
    await kit.CHECKS[name].run(subject_of(family))


async def test_a_step_with_learning_rate_0_leaves_logprobs_as_they_were_after_its_sync(
    subject_of: Callable[[str], Subject],
) -> None:
    """The canary: a sync that changes nothing may change no bit of what is sampled, however often it is done."""
    subject = subject_of("qwen3")
    engine = subject.shared()
    prompts = subject.prompts(4, 5, 40, seed=21)
    draws = [Sampling(16, seed=index) for index in range(4)]

    async def sampled() -> list[Any]:
        found = [await kit.soon(engine.generate(p, s, "canary")) for p, s in zip(prompts, draws, strict=True)]
        return [(one.token_ids, one.logprobs) for one in found]

    before = await sampled()
    for version in (1, 2):
        await asyncio.to_thread(engine.load_weights, kit.current(subject), version)
        assert await sampled() == before
    await asyncio.to_thread(engine.load_weights, kit.current(subject), 0)


async def test_sleep_frees_nothing_on_a_cpu_and_wakes_to_the_same_samples(
    subject_of: Callable[[str], Subject],
) -> None:
    engine: Any = subject_of("qwen3").shared()
    greedy = Sampling(8, temperature=0)
    before = await kit.soon(engine.generate([1, 2, 3], greedy, "before sleep"))
    await asyncio.to_thread(engine.sleep, 1)
    waiting = asyncio.create_task(engine.generate([1, 2, 3], greedy, "during sleep"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await asyncio.to_thread(engine.wake, ["weights"])
    await asyncio.to_thread(engine.wake, ["kv_cache"])
    assert (await kit.soon(waiting)).token_ids == before.token_ids


async def test_a_temperature_that_vllm_would_change_is_refused(subject_of: Callable[[str], Subject]) -> None:
    with pytest.raises(ConfigError, match=r"at least 0\.01"):
        await subject_of("qwen3").shared().generate([1], Sampling(1, temperature=0.005), "cold")


async def test_close_in_flight_raises_infra_error_by_name(subject_of: Callable[[str], Subject]) -> None:
    engine: Any = subject_of("qwen3").shared()
    pids = engine.pids
    assert pids
    await kit.CHECKS[LAST].run(subject_of("qwen3"))
    assert not alive(pids)


async def test_an_engine_core_that_is_killed_in_an_update_is_named_in_seconds_by_requests_syncs_and_checks(
    subject_of: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of("llama-tied")
    engine: Any = subject.shared()
    gate = kit.Gate()
    calls = [engine.generate([i + 1], Sampling(90, temperature=0), f"lost {i}", gate) for i in range(20)]
    tasks = [asyncio.create_task(call) for call in calls]
    await kit.soon(gate.open.wait())
    await asyncio.to_thread(engine.pause, kit.LIMIT_S)  # so that no request can end meanwhile
    os.kill(engine.pids[0], signal.SIGSTOP)  # and no update
    weights = kit.current(subject)
    asked = asyncio.Event()
    loop, call = asyncio.get_running_loop(), engine._llm.collective_rpc

    def noted(*args: Any, **named: Any) -> Any:
        loop.call_soon_threadsafe(asked.set)
        return call(*args, **named)

    monkeypatch.setattr(engine._llm, "collective_rpc", noted)
    update = asyncio.create_task(asyncio.to_thread(engine.load_weights, weights, 1))
    await kit.soon(asked.wait())
    began = time.monotonic()
    os.kill(engine.pids[0], signal.SIGKILL)
    with pytest.raises(InfraError, match="SIGKILL"):
        await kit.soon(update)
    results = await kit.soon(asyncio.gather(*tasks, return_exceptions=True))
    assert time.monotonic() - began < 10
    assert all(isinstance(result, InfraError) for result in results)
    assert "'lost 0'" in str(results[0])
    assert "was killed by SIGKILL" in str(results[0])
    with pytest.raises(InfraError, match="SIGKILL"):
        engine.require_alive()
    with pytest.raises(InfraError, match="SIGKILL"):
        engine.require_serving()
    with pytest.raises(InfraError, match="SIGKILL"):
        await asyncio.to_thread(engine.load_weights, kit.current(subject), 1)
    with pytest.raises(InfraError, match="SIGKILL"):
        await engine.generate([1], Sampling(1), "late")
    await asyncio.to_thread(subject.close)


async def test_a_weight_update_that_vllm_does_not_answer_ends_the_engine_after_a_few_stalls(
    subject_of: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in flight, the update and whatever comes later are told of the same cause, and close kills it."""
    subject = subject_of("llama-tied")
    engine: Any = subject.shared()
    pids = engine.pids
    gate = kit.Gate()
    waiting = asyncio.create_task(engine.generate([1], Sampling(90, temperature=0), "waits", gate))
    await kit.soon(gate.open.wait())
    await asyncio.to_thread(engine.pause, kit.LIMIT_S)
    monkeypatch.setattr(control, "LOCAL_STALL_S", 0.5)
    with closing(SharedSender()) as sender:
        offer = sender.copied(kit.current(subject), 1, stall_s=0.5)
        os.kill(pids[0], signal.SIGSTOP)
        began = time.monotonic()
        late = "the engine is dead: its update to weight version 1 took longer than 2 s"
        with pytest.raises(InfraError, match=late):
            await asyncio.to_thread(engine.take_weights, offer, 1)
    with pytest.raises(InfraError, match=f"'waits' was lost: {late}"):
        await kit.soon(waiting)
    with pytest.raises(InfraError, match=late):
        engine.require_alive()
    with pytest.raises(InfraError, match=late):
        await asyncio.to_thread(engine.resume)
    assert time.monotonic() - began < 10
    await asyncio.to_thread(subject.close)
    assert not alive(pids)


def test_a_build_for_another_device_than_was_planned_with_is_refused_before_anything_loads(tmp_path):
    other = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"computes on .* was to compute on '{other}'; expected"):
        MAKE(toys.build_toy(tmp_path, "q", weights=True), max_batch_size=2, max_model_len=64, device=other)
