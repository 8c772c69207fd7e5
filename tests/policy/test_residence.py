"""Moving a policy moves all of its memory and changes nothing of what it computes."""

import enum

import numpy as np
import pytest
import torch

from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.config.schema import Loss, OptimizerKwargs
from gymloop.policy.residence import PinnedMemory, _forget_last_error, _launch, pack, slots
from gymloop.policy.spec import PolicySpec
from gymloop.policy.worker import PolicyWorker


def worker_of(folder, precision, **named):
    loss = Loss(reference_policy_kl_penalty=0.1)
    worker = PolicyWorker(PolicySpec(str(folder), 1.0, loss, OptimizerKwargs(lr=0.01), precision, threads=1, **named))
    worker.load()
    return worker


def tensors(worker):
    models = (worker._model, worker._reference)
    for model in models:
        yield from model.parameters()
        yield from model.buffers()
    yield from worker._optimizer.masters.values()
    for state in worker._optimizer.adamw.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def batch():
    rng = np.random.default_rng(3)
    sequences = []
    for sample in range(4):
        ids = rng.integers(2, 60, 12)
        sampled = np.arange(6, 12)
        sequences.append(
            TrainSequence(
                "g", sample, ids, sampled, np.full(6, sample - 1.5, np.float32), np.full(6, 1 / 24, np.float32),
                np.full(6, -4.0, np.float32),
            )
        )  # fmt: skip
    return TrainBatch(tuple(sequences))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_tensor_moves_once_and_training_goes_on_bit_by_bit_as_it_would_have(tiny, precision, tmp_path):
    moved, stayed = worker_of(tiny("llama"), precision), worker_of(tiny("llama"), precision)
    for worker in (moved, stayed):
        worker.train(batch())
    before = {tensor.data_ptr() for tensor in tensors(moved) if tensor.numel()}
    parameters = [id(parameter) for parameter in moved._model.parameters()]
    held = slots([moved._model, moved._reference], moved._optimizer)
    assert len({id(slot.tensor) for slot in held}) == len(held) == len({id(tensor) for tensor in tensors(moved)})
    blocks = []
    pack(held, lambda nbytes: blocks.append(torch.empty(nbytes + 128, dtype=torch.uint8)) or blocks[0])
    (block,) = blocks
    inside = range(block.data_ptr(), block.data_ptr() + block.numel())
    assert all(tensor.data_ptr() in inside for tensor in tensors(moved) if tensor.numel()), "one block holds them all"
    assert not before & {tensor.data_ptr() for tensor in tensors(moved) if tensor.numel()}, "nothing was left behind"
    assert [id(parameter) for parameter in moved._model.parameters()] == parameters
    embeddings = moved._model.get_input_embeddings().weight
    assert moved._model.get_output_embeddings().weight is embeddings, "what is tied stays tied"
    for worker in (moved, stayed):
        worker.train(batch())
    assert moved.snapshot().buffer.tobytes() == stayed.snapshot().buffer.tobytes()
    for worker, name in ((moved, "moved"), (stayed, "stayed")):
        worker.save(tmp_path / name)
    for name in ("weights/model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "moved" / name).read_bytes() == (tmp_path / "stayed" / name).read_bytes()


def test_a_policy_that_starts_on_the_host_saves_and_restores_there_and_trains_on_its_device(toy, tmp_path):
    worker = worker_of(toy("q"), "float32", starts_on_host=True)
    for _ in range(2):
        worker.to_device()
        worker.train(batch())
        worker.to_host()
        assert all(tensor.device.type == "cpu" for tensor in tensors(worker))
    worker.save(tmp_path / "p")
    again = worker_of(toy("q"), "float32", starts_on_host=True)
    again.restore(tmp_path / "p")
    again.to_device()
    assert again.snapshot().buffer.tobytes() == worker.snapshot().buffer.tobytes()


class Cuda:
    """CUDA's runtime as torch gives it: an error that nobody asked for is the next kernel's."""

    class cudaError(enum.IntEnum):
        success = 0
        memoryAllocation = 2

    def __init__(self, status):
        self.status, self.last, self.registered = self.cudaError(status), self.cudaError.success, []

    def cudaHostRegister(self, address, nbytes, flags):
        self.last = self.status
        if self.status == self.cudaError.success:
            self.registered.append(address)
        return self.status

    def cudaHostUnregister(self, address):
        self.registered.remove(address)

    def launch(self):
        last, self.last = self.last, self.cudaError.success
        if last != self.cudaError.success:
            raise RuntimeError(f"CUDA error: {last.name}")


def test_memory_that_cannot_be_page_locked_is_used_as_it_is_and_its_error_is_nobody_elses(caplog):
    cuda = Cuda(2)
    memory = PinnedMemory(4096, cuda, cuda.launch)
    assert not memory.locked
    assert memory.block.fill_(3).sum() == 3 * 4096
    cuda.launch()  # it would raise what is left
    assert [record.getMessage() for record in caplog.records] == [
        "0.0 GB of the policy's memory could not be page-locked (CUDA's error 2); it moves more slowly"
    ]
    memory.close()
    memory.close()


def test_page_locked_memory_is_unlocked_once(caplog):
    cuda = Cuda(0)
    memory = PinnedMemory(4096, cuda, lambda: pytest.fail("nothing has to be forgotten"))
    assert memory.locked
    assert cuda.registered == [memory.block.data_ptr()]
    memory.close()
    memory.close()
    assert not cuda.registered
    assert not caplog.records


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_after_memory_that_cannot_be_page_locked_does_not_fail_of_it():
    first = PinnedMemory(1 << 20)
    runtime = torch.cuda.cudart()
    again = runtime.cudaHostRegister(first.block.data_ptr(), 1 << 20, 0)  # registered already
    assert again != runtime.cudaError.success
    _forget_last_error(_launch)
    assert torch.ones(2, device="cuda").sum() == 2
    first.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_policy_that_comes_and_goes_learns_what_one_that_stays_on_its_gpu_learns(toy, precision):
    moved = worker_of(toy("q"), precision, device="cuda", starts_on_host=True)
    stayed = worker_of(toy("q"), precision, device="cuda")
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        moved.to_device()
        assert all(tensor.device.type == "cuda" for tensor in tensors(moved))
        losses = [worker.train(batch())["loss"] for worker in (moved, stayed)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        moved.to_host()
        assert all(tensor.device.type == "cpu" for tensor in tensors(moved))
    assert torch.cuda.memory_allocated() <= 4 * held, "nothing of the one that went is left there"
    moved.to_device()
    assert moved.snapshot().buffer.shape == stayed.snapshot().buffer.shape
    for (name, one), (_, other) in zip(moved.snapshot().tensors(), stayed.snapshot().tensors(), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=2e-2), name
    moved.close()
