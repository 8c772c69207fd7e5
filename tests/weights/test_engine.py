"""The embedded engine and a sync that stops half way: it samples nothing until a whole sync has mended it."""

import asyncio
import threading

import pytest
import torch

from gymloop.errors import InfraError
from gymloop.generation.engine import Sampling
from gymloop.generation.torch_engine import TorchEngine
from gymloop.models.load import load_causal_lm
from gymloop.weights.offer import SyncAborted, SyncRequest
from gymloop.weights.receiver import WeightReceiver
from gymloop.weights.sender import WeightSender
from gymloop.weights.snapshot import take
from toys import build_toy

GREEDY = Sampling(8, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return build_toy(tmp_path_factory.mktemp("toy"), "q")


@pytest.fixture
def engine(folder):
    engine = TorchEngine(folder, dtype="float32", max_batch_size=2, max_model_len=64)
    yield engine
    engine.close()


class Half:
    """A source whose sender dies after the first parameter."""

    def __init__(self, snapshot):
        self.manifest, self.nbytes, self._snapshot = snapshot.manifest, snapshot.nbytes, snapshot

    def pieces(self):
        yield next(self._snapshot.pieces())
        raise SyncAborted("bucket 2 of 9 did not arrive: Connection closed by peer")

    def tensors(self):
        raise NotImplementedError


def other_weights(folder):
    model = load_causal_lm(folder, "float32", "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


async def test_after_an_aborted_update_the_engine_refuses_with_the_syncs_name_until_a_complete_one(engine, folder):
    model = other_weights(folder)
    before = await engine.generate([20, 21, 22], GREEDY, "before")
    with pytest.raises(SyncAborted):
        engine.load_weights(Half(take(model.named_parameters())), 1)
    with pytest.raises(
        InfraError, match=r"no weights to sample from: their sync to version 1 was not finished .*bucket 2"
    ):
        await engine.generate([20, 21, 22], GREEDY, "refused")
    engine.require_alive()
    with pytest.raises(InfraError, match="no weights to sample from"):
        engine.require_serving()
    assert engine.weight_version == 0
    engine.load_weights(take(model.named_parameters()), 1)
    engine.require_serving()
    after = await engine.generate([20, 21, 22], GREEDY, "after")
    assert (after.first_version, after.last_version) == (1, 1)
    assert after.logprobs != before.logprobs
    model.save_pretrained(folder / "other")
    fresh = TorchEngine(folder / "other", dtype="float32", max_batch_size=2, max_model_len=64)
    expected = await fresh.generate([20, 21, 22], GREEDY, "fresh")
    fresh.close()
    assert after.token_ids == expected.token_ids
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_what_is_in_flight_when_an_update_is_aborted_fails_with_its_name(engine, folder):
    started = asyncio.Event()
    request = asyncio.ensure_future(
        engine.generate([20, 21], Sampling(60, temperature=0), "long", lambda *_: started.set())
    )
    await asyncio.wait_for(started.wait(), 60)
    engine.pause(60)
    with pytest.raises(SyncAborted):
        await asyncio.to_thread(engine.load_weights, Half(take(other_weights(folder).named_parameters())), 1)
    engine.resume()
    with pytest.raises(InfraError, match=r"request 'long' was lost: .*sync to version 1 was not finished"):
        await asyncio.wait_for(request, 60)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_the_engines_parameters_are_the_policys_after_a_sync_in_small_buckets(engine, folder, transport):
    model = other_weights(folder)
    sender = WeightSender(model.named_parameters, "cpu")
    receiver = WeightReceiver("cpu")
    offer = sender.offer(SyncRequest(transport, 4, 1, 4096, True, 30.0))
    failed = []

    def take_them():
        try:
            with receiver.opened(offer, 4) as source:
                engine.load_weights(source, 4)
        except InfraError as error:
            failed.append(error)

    thread = threading.Thread(target=take_them)
    thread.start()
    thread.join(60)
    assert not failed
    sender.release(True)
    receiver.close()
    sender.close()
    for (name, ours), (_, theirs) in zip(
        engine._live_decoder().model.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
