"""CUDA IPC but for the device: which handles are offered, how they are mapped and let go of, how a refusal reads."""

import ctypes
import pickle

import pytest
import torch

from gymloop.errors import InfraError
from gymloop.weights.ipc import CudaDriver, IpcSender, _Handle
from gymloop.weights.offer import SyncRequest
from gymloop.weights.receiver import WeightReceiver

REQUEST = SyncRequest("cuda_ipc", 1, 1, 1 << 20, False, 5.0, device="cuda")


class Device:
    """Memory of this process in the driver's place: an allocation is a storage, its handle its address."""

    def __init__(self, *allocations):
        self.blocks = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in allocations}
        self.exported, self.mapped, self.calls = [], [], []

    def block_of(self, pointer):
        return next((base, size) for base, size in self.blocks.items() if base <= pointer < base + size)

    def export(self, block):
        self.calls.append("export")
        self.exported.append(block)
        return block.to_bytes(8, "little")

    def map(self, handle):
        self.calls.append("map")
        self.mapped.append(int.from_bytes(handle, "little"))
        return self.mapped[-1]

    def unmap(self, block):
        self.calls.append("unmap")
        self.mapped.remove(block)

    def synchronize(self):
        self.calls.append("wait")


@pytest.fixture
def parameters():
    shared = torch.arange(64, dtype=torch.float32)
    return [("a", shared[:16].view(4, 4)), ("b", torch.ones(5, dtype=torch.bfloat16)), ("c", shared[32:])], shared


def test_each_allocation_has_one_handle_and_each_parameter_its_place_in_it(parameters):
    named, shared = parameters
    device = Device(shared, named[1][1])
    offer = pickle.loads(pickle.dumps(IpcSender(device).offer(named, REQUEST, None)))
    assert len(offer.carrier.handles) == 2
    assert offer.carrier.lies_in == ((0, 0), (1, 0), (0, 128))
    assert device.calls == ["wait", "export", "export"], "the policy's last kernels have ended before anybody reads"


def test_the_receiver_maps_each_allocation_once_waits_for_its_copies_and_unmaps(parameters):
    named, shared = parameters
    device = Device(shared, named[1][1])
    offer = IpcSender(device).offer(named, REQUEST, None)
    receiver = WeightReceiver("cuda")
    receiver._memory = device
    device.calls.clear()
    with receiver.opened(offer, 1) as source:
        assert sorted(device.mapped) == sorted(device.exported)
        assert source.addresses == tuple(value.data_ptr() for _, value in named)
    assert device.mapped == []
    assert device.calls == ["wait", "map", "map", "wait", "unmap", "unmap"], "its copies are done before it lets go"
    with (
        pytest.raises(ValueError, match="the engine"),
        receiver.opened(IpcSender(device).offer(named, SyncRequest("cuda_ipc", 2, 1, 1, False, 5.0), None), 2),
    ):
        raise ValueError("the engine")
    assert device.mapped == []
    assert receiver.version == 1


def test_memory_that_other_processes_cannot_read_as_it_lies_is_refused():
    loose = torch.ones(4, 4).t()[:, :2]
    with pytest.raises(InfraError, match="'w' is not contiguous"):
        IpcSender(Device(loose)).offer([("w", loose)], REQUEST, None)
    whole = torch.ones(8)
    device = Device(whole)
    device.blocks = {whole.data_ptr(): 16}
    with pytest.raises(InfraError, match="'w' is not within one allocation"):
        IpcSender(device).offer([("w", whole)], REQUEST, None)


def test_a_handle_is_64_bytes_and_survives_the_journey():
    handle = _Handle.from_buffer_copy(bytes(range(64)))
    assert ctypes.sizeof(_Handle) == 64
    assert bytes(_Handle.from_buffer_copy(bytes(handle))) == bytes(range(64))


def test_what_the_driver_refuses_is_told_with_its_number():
    class Refusing:
        def __getattr__(self, name):
            return lambda *_: 201

    driver = CudaDriver.__new__(CudaDriver)
    driver._cuda = Refusing()
    with pytest.raises(InfraError, match="refused cuIpcGetMemHandle with error 201; memory of expandable segments"):
        driver.export(0)
    with pytest.raises(InfraError, match="refused cuIpcOpenMemHandle_v2 with error 201"):
        driver.map(bytes(64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the driver")
def test_a_machine_without_the_driver_says_so():
    with pytest.raises(InfraError, match="driver library cannot be loaded"):
        CudaDriver()
