"""The choice of a transport as a table, and what cannot be asked for."""

import re

import pytest

from gymloop.errors import ConfigError
from gymloop.weights.place import Place, here
from gymloop.weights.transport import choose_transport


def cpu(host="a"):
    return Place(host, "10.0.0.1", "cpu")


def gpu(number="0", host="a"):
    return Place(host, "10.0.0.1", "cuda", number)


@pytest.mark.parametrize(
    ("policy", "engines", "transport", "reason"),
    [
        (cpu(), [cpu()], "shared_memory", "on one host, in main memory"),
        (cpu(), [cpu(), cpu()], "shared_memory", "on one host, in main memory"),
        (cpu(), [cpu("b")], "broadcast", "on several hosts"),
        (cpu(), [cpu(), cpu("b")], "broadcast", "on several hosts"),
        (gpu(), [gpu()], "cuda_ipc", "share a GPU"),
        (gpu(), [gpu("1")], "broadcast", "on several GPUs"),
        (gpu(), [gpu(), gpu("1")], "shared_memory", "on one host, one of these on its GPU"),
        (gpu(), [gpu(), gpu(host="b")], "object_store", "on several hosts, one of these on its GPU"),
        (gpu(), [gpu(host="b")], "broadcast", "on several GPUs"),
        (gpu(), [cpu()], "shared_memory", "on one host, on a CPU and a GPU"),
        (cpu(), [gpu()], "shared_memory", "on one host, on a CPU and a GPU"),
        (gpu(), [cpu("b")], "broadcast", "on several hosts"),
        (cpu(None), [cpu(None)], "object_store", "no anonymous shared memory"),
    ],
)
def test_the_places_choose(policy, engines, transport, reason):
    choice = choose_transport(policy, engines)
    assert choice.transport == transport
    assert reason in choice.reason


@pytest.mark.parametrize("asked", ["object_store", "broadcast", "shared_memory"])
def test_what_is_asked_for_is_taken_where_it_can_work(asked):
    assert choose_transport(cpu(), [cpu()], asked).transport == asked


def test_a_gpu_of_another_host_may_have_the_same_number():
    assert choose_transport(gpu(), [gpu(host="b")], "broadcast").transport == "broadcast"


@pytest.mark.parametrize(
    ("asked", "policy", "engines", "message"),
    [
        (
            "cuda_ipc",
            cpu(),
            [cpu()],
            "'cuda_ipc' cannot be used, because policy and engines are not all on a GPU; expected",
        ),
        ("cuda_ipc", gpu(), [gpu("1")], "not all on one GPU of one host; expected 'broadcast' (policy and engines"),
        ("cuda_ipc", gpu(), [gpu(host="b")], "not all on one GPU of one host"),
        ("shared_memory", cpu(), [cpu(), cpu("b")], "not all on one host; expected 'broadcast'"),
        ("broadcast", gpu(), [gpu()], "on one GPU, and NCCL takes one process per GPU; expected 'cuda_ipc'"),
        ("broadcast", gpu(), [gpu("1"), gpu()], "on one GPU, and NCCL takes one process per GPU"),
        ("shared_memory", cpu(None), [cpu(None)], "no anonymous shared memory; expected 'object_store'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason_and_what_can(asked, policy, engines, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        choose_transport(policy, engines, asked)
    assert str(caught.value).startswith("policy.generation.refit_transport: ")


def test_a_place_names_the_gpu_as_the_driver_does(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [here(device).gpu for device in ("cpu", "cuda", "cuda:1", "cuda:2")] == [None, "4", "6", "2"]
    assert here("cuda:1").device == "cuda"
    assert here("cpu").host == here("cuda").host
