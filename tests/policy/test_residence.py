"""Moving a policy moves all of its memory and changes nothing of what it computes."""

import enum
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.config.schema import Loss, OptimizerKwargs
from gymloop.errors import ConfigError
from gymloop.models.load import tensor_elements
from gymloop.models.tensors import persistent_buffers
from gymloop.policy import residence
from gymloop.policy.residence import (
    TENSOR_ROOM,
    PinnedMemory,
    Residence,
    _forget_last_error,
    _launch,
    estimated_bytes,
    pack,
    slots,
)
from gymloop.policy.spec import PolicySpec
from gymloop.policy.worker import PolicyWorker
from gymloop.weights.layout import lay_out, total_bytes


def unloaded(folder, precision, kl_penalty=0.1, **named):
    loss = Loss(reference_policy_kl_penalty=kl_penalty)
    return PolicyWorker(PolicySpec(str(folder), 1.0, loss, OptimizerKwargs(lr=0.01), precision, threads=1, **named))


def worker_of(folder, precision, **named):
    worker = unloaded(folder, precision, **named)
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


class Memory:
    """Makes page-locked memory without a GPU, and remembers what it was asked for and by whom.

    Args:
        hold: whether it waits for ``go``.
    """

    def __init__(self, hold=False):
        self.cuda, self.asked, self.threads, self.made = Cuda(0), [], [], []
        self.go, self.called = threading.Event(), threading.Event()
        if not hold:
            self.go.set()

    def __call__(self, nbytes):
        self.asked.append(nbytes)
        self.threads.append(threading.current_thread())
        self.called.set()
        assert self.go.wait(10)
        self.made.append(PinnedMemory(nbytes, self.cuda))
        return self.made[-1]

    def join(self):
        assert self.called.wait(10)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(10)
                assert not thread.is_alive()


def to_host(place, worker):
    place.to_host(worker._models(), worker._optimizer)


def laid_out(worker):
    """Bytes of all that the policy holds now."""
    return total_bytes(lay_out(("", slot.tensor) for slot in slots(worker._models(), worker._optimizer)))


def inside(block, worker):
    addresses = range(block.data_ptr(), block.data_ptr() + block.numel())
    return all(tensor.data_ptr() in addresses for tensor in tensors(worker) if tensor.numel())


def test_memory_reserved_early_is_the_one_used(tiny):
    worker, memory = worker_of(tiny("llama"), "bfloat16"), Memory(hold=True)
    place = Residence("cuda", memory)
    place.reserve(4 << 20)  # returns though nothing is locked yet
    threading.Timer(0.05, memory.go.set).start()
    to_host(place, worker)
    assert memory.asked == [4 << 20]
    assert memory.threads != [threading.current_thread()]
    assert inside(memory.made[0].block, worker)
    place.close()
    place.close()
    assert not memory.cuda.registered


def test_memory_reserved_too_small_is_unlocked_and_made_anew_with_room_for_the_moments(tiny):
    worker, memory = worker_of(tiny("llama"), "bfloat16"), Memory()
    held = laid_out(worker)
    place = Residence("cuda", memory)
    place.reserve(held)  # all that is there now, and nothing of what comes with the first step
    to_host(place, worker)
    first, second = memory.made
    assert first.block.numel() == held
    assert not first.locked
    assert memory.cuda.registered == [second.block.data_ptr()]
    assert inside(second.block, worker)
    worker.train(batch())
    assert held < laid_out(worker) <= second.block.numel()


def test_memory_that_could_not_be_reserved_is_asked_for_once_more(tiny):
    worker, memory = worker_of(tiny("llama"), "float32"), Memory()

    def refuse_the_reservation(nbytes):
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("not that much")
        return memory(nbytes)

    place = Residence("cuda", refuse_the_reservation)
    place.reserve(1 << 20)
    to_host(place, worker)
    assert inside(memory.made[0].block, worker)
    place.close()


@pytest.mark.parametrize("done", [False, True])
def test_what_is_reserved_and_never_used_is_given_back_also_while_it_is_made(done):
    memory = Memory(hold=not done)
    place = Residence("cuda", memory)
    place.reserve(4096)
    if done:
        memory.join()
        assert memory.made[0].locked
    place.close()  # waits for nothing
    place.close()
    memory.go.set()
    memory.join()
    assert memory.made
    assert not memory.cuda.registered


def test_a_reservation_that_failed_can_be_closed(caplog):
    tried = threading.Event()

    def refuse(nbytes):
        tried.set()
        raise MemoryError("not that much")

    place = Residence("cuda", refuse)
    place.reserve(4096)
    place.close()
    place.close()
    assert tried.wait(10)
    for thread in threading.enumerate():
        if thread.name == "page-locking":
            thread.join(10)
    assert not caplog.records


def test_nothing_is_reserved_on_a_cpu(tiny, monkeypatch):
    monkeypatch.setattr(residence, "PinnedMemory", lambda nbytes: pytest.fail("nothing moves"))
    monkeypatch.setattr(PolicyWorker, "_reserve", lambda *_: pytest.fail("nothing is estimated"))
    worker_of(tiny("llama"), "float32", starts_on_host=True).close()
    place = Residence("cpu", Memory())
    place.reserve(4096)
    place.close()
    assert not place._memory.asked


@pytest.mark.parametrize(("precision", "kl_penalty"), [("bfloat16", 0.1), ("float32", 0.0)])
@pytest.mark.parametrize("name", ["llama", "llama-untied"])
def test_a_load_reserves_what_it_then_asks_for(tiny, name, precision, kl_penalty):
    """But for the buffers, which no checkpoint holds: they have a second room per tensor."""
    worker, memory = unloaded(tiny(name), precision, kl_penalty, device="cuda", starts_on_host=True), Memory()
    worker._residence = Residence("cuda", memory)
    worker.load()
    (reserved,) = memory.asked
    assert memory.threads != [threading.current_thread()]
    assert memory.made[0].locked

    plain = Memory()
    to_host(Residence("cuda", plain), worker)
    buffers = [buffer for model in worker._models() for buffer in model.buffers()]
    assert buffers
    assert not persistent_buffers(worker._model)
    of_buffers = total_bytes(lay_out((str(id(one)), one) for one in buffers)) + len(buffers) * TENSOR_ROOM
    others = len(slots(worker._models(), worker._optimizer)) - len(buffers)
    assert plain.asked == [reserved - others * TENSOR_ROOM + of_buffers]
    worker.close()
    assert not memory.cuda.registered


@pytest.mark.parametrize("name", ["qwen3", "phi-bias", "gemma2-softcap", "mamba", "apertus", "gemma4", "glm4-moe"])
def test_one_block_is_enough_for_a_load_and_all_steps_whatever_the_model(tiny, name):
    worker, memory = unloaded(tiny(name), "bfloat16", device="cuda", starts_on_host=True), Memory()
    worker._residence = Residence("cuda", memory)
    worker.load()
    assert len(memory.asked) == 1
    for master in worker._optimizer.masters.values():
        master.grad = torch.zeros_like(master)
    worker._optimizer.step()
    assert laid_out(worker) <= memory.asked[0]
    worker.close()


def test_a_tied_head_that_the_checkpoint_holds_is_counted_once(tiny, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    stored = load_file(folder / "model.safetensors")
    head = stored["model.embed_tokens.weight"].clone()
    save_file(stored | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config = AutoConfig.from_pretrained(folder)
    with_head, without = (
        estimated_bytes(tensor_elements(one), config, "bfloat16", reference=True) for one in (folder, tiny("llama"))
    )
    assert with_head == without
    worker, memory = unloaded(folder, "bfloat16", device="cuda", starts_on_host=True), Memory()
    worker._residence = Residence("cuda", memory)
    worker.load()
    assert memory.asked == [without]


@pytest.mark.parametrize(
    ("precision", "reference", "expected"),
    [
        ("bfloat16", False, 150 * (2 + 4 + 8) + 2 * 2 * 2048),
        ("bfloat16", True, 150 * (2 + 4 + 2 + 8) + 2 * 3 * 2048),
        ("float32", False, 150 * (4 + 8) + 2 * 1 * 2048),
        ("float32", True, 150 * (4 + 4 + 8) + 2 * 2 * 2048),
    ],
)
def test_the_estimate_by_hand(precision, reference, expected):
    elements = {"embed": 100, "lm_head.weight": 50}
    config = LlamaConfig(tie_word_embeddings=False)
    assert estimated_bytes(elements, config, precision, reference=reference) == expected


def test_a_folder_that_cannot_be_read_reserves_nothing_and_loading_says_why(tmp_path):
    worker, memory = unloaded(tmp_path, "float32", device="cuda", starts_on_host=True), Memory()
    worker._residence = Residence("cuda", memory)
    with pytest.raises(ConfigError, match="it has no config"):
        worker.load()
    assert not memory.asked
    worker.close()


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
