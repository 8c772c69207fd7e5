"""vLLM takes offers in its own processes, by each transport: what it then samples is what the policy computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from gymloop.errors import InfraError
from gymloop.generation.engine import Sampling
from gymloop.generation.vllm_engine import VllmEngine
from gymloop.models.load import load_causal_lm
from gymloop.serving.receiving import InVllmsProcesses
from gymloop.weights import broadcast
from gymloop.weights.offer import Offer, SyncAborted, SyncRequest
from gymloop.weights.sender import WeightSender
from gymloop.weights.snapshot import take
from gymloop.weights.transport import Transport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [20, 21, 22, 23]
GREEDY = Sampling(8, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.build_toy(tmp_path_factory.mktemp("takes"), "q", **toys.FOR_VLLM)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        folder,
        dtype="float32",
        max_batch_size=4,
        max_model_len=128,
        arguments=toys.small_vllm(),
        environment={"OMP_NUM_THREADS": "1"},
    )
    yield engine
    engine.close()


class Policy:
    """A model whose weights change with every version, and the product's sender."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_causal_lm(folder, "float32", "cpu")
        self.sender = WeightSender(self.model.named_parameters, "cpu")

    @torch.no_grad()
    def learn(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))

    def offer(self, transport: Transport, version: int, *, stall_s: float = 60.0, checksums: bool = True) -> Offer:
        return self.sender.offer(SyncRequest(transport, version, 1, 4096, checksums, stall_s))

    @torch.no_grad()
    def greedy(self) -> tuple[list[int], list[float]]:
        ids, logprobs = list(PROMPT), []
        for _ in range(GREEDY.max_new_tokens):
            row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        return ids[len(PROMPT) :], logprobs


@pytest.fixture
def policy(folder: Path) -> Iterator[Policy]:
    policy = Policy(folder)
    yield policy
    policy.sender.close()


def sampled(engine: VllmEngine) -> Any:
    return asyncio.run(asyncio.wait_for(engine.generate(PROMPT, GREEDY, "sampled"), 60))


def assert_samples_as(policy: Policy, engine: VllmEngine, version: int) -> None:
    sample = sampled(engine)
    ids, logprobs = policy.greedy()
    assert list(sample.token_ids) == ids
    assert sample.logprobs == pytest.approx(logprobs, abs=1e-3)
    assert (sample.first_version, sample.last_version) == (version, version)


@pytest.mark.parametrize("transport", ["shared_memory", "object_store", "broadcast"])
def test_after_each_sync_vllm_samples_what_the_policy_computes(
    engine: VllmEngine, policy: Policy, transport: Transport
) -> None:
    receiving = InVllmsProcesses(engine, "cpu", 1)
    for version in (3, 4):
        policy.learn(seed=version)
        receiving.take(policy.offer(transport, version), version, 1)
        policy.sender.release(True)
        assert_samples_as(policy, engine, version)
    assert receiving.version == 4
    with pytest.raises(InfraError, match="5 was expected"):
        receiving.take(policy.offer("shared_memory", 4), 4, 1)


def test_bytes_that_are_not_the_policys_change_nothing(engine: VllmEngine, policy: Policy) -> None:
    engine.load_weights(take(policy.model.named_parameters()), 1)
    before = sampled(engine)
    offer = policy.offer("shared_memory", 2)
    memory = policy.sender._sender._memory  # type: ignore[union-attr]
    memory[offer.manifest[3].offset] ^= 1
    with pytest.raises(InfraError, match=rf"the bytes of '{offer.manifest[3].name}' that arrived"):
        engine.take_weights(offer, 2)
    assert sampled(engine) == before


def test_a_policy_that_is_gone_before_its_first_bucket_leaves_the_old_weights(
    engine: VllmEngine, policy: Policy
) -> None:
    engine.load_weights(take(policy.model.named_parameters()), 1)
    before = sampled(engine)
    offer = policy.offer("broadcast", 2, stall_s=2.0)
    policy.sender.release(False)
    with pytest.raises(SyncAborted):
        engine.take_weights(offer, 2)
    assert sampled(engine) == before
    policy.learn(seed=7)
    engine.take_weights(policy.offer("broadcast", 2), 2)
    policy.sender.release(True)
    assert_samples_as(policy, engine, 2)


def test_an_engine_that_forgot_its_weights_refuses_until_they_come(engine: VllmEngine, policy: Policy) -> None:
    engine.load_weights(take(policy.model.named_parameters()), 1)
    engine.sleep(2)
    engine.wake(None)
    with pytest.raises(InfraError, match="no weights to sample from: they were forgotten"):
        sampled(engine)
    engine.take_weights(policy.offer("shared_memory", 2), 2)
    assert_samples_as(policy, engine, 2)


def test_nothing_is_sampled_between_a_sync_and_the_wake_up_of_the_kv_cache(engine: VllmEngine, policy: Policy) -> None:
    """As in a run on a shared GPU, where the policy has the memory of the cache meanwhile."""

    async def turns() -> Any:
        await asyncio.to_thread(engine.sleep, 2)
        await asyncio.to_thread(engine.wake, ["weights"])
        await asyncio.to_thread(engine.pause, 60)
        await asyncio.to_thread(engine.take_weights, policy.offer("shared_memory", 3), 3)
        await asyncio.to_thread(engine.resume)
        waiting = asyncio.create_task(engine.generate(PROMPT, GREEDY, "early"))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await asyncio.to_thread(engine.wake, ["kv_cache"])
        return await asyncio.wait_for(waiting, 60)

    policy.learn(seed=11)
    sample = asyncio.run(turns())
    assert list(sample.token_ids) == policy.greedy()[0]


def test_nothing_is_sampled_after_a_policy_died_half_way(
    engine: VllmEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last: on a CPU, whose layers are processed one by one, nothing mends the engine; on a GPU the next sync does."""
    whole = broadcast.pack

    def pack(buffer: Any, tensors: Any, offer: Offer, index: int, begin: int, end: int) -> None:
        if end == offer.nbytes:
            raise InfraError("the policy's process died")
        whole(buffer, tensors, offer, index, begin, end)

    monkeypatch.setattr(broadcast, "pack", pack)
    with pytest.raises(SyncAborted, match=r"bucket .* did not arrive"):
        engine.take_weights(policy.offer("broadcast", 2, stall_s=3.0), 2)
    with pytest.raises(InfraError, match=r"the update to weight version 2 failed half way: .*bucket"):
        sampled(engine)
    with pytest.raises(InfraError, match=r"failed half way|the engine is dead"):
        engine.require_serving()
    if not torch.cuda.is_available():
        with pytest.raises(InfraError, match=r"the engine is dead"):
            engine.require_alive()
        return
    monkeypatch.undo()
    policy.sender.release(False)
    policy.learn(seed=9)
    engine.take_weights(policy.offer("shared_memory", 2), 2)
    assert_samples_as(policy, engine, 2)
