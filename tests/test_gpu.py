"""A GPU is named as this process sees it, and asked of its driver where that can tell."""

import subprocess
import sys

import pytest
import torch

from gymloop import gpu

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.mark.parametrize(
    ("index", "visible", "name"),
    [
        (0, None, "0"),
        (3, None, "3"),
        (0, "5", "5"),
        (1, "5, 2", "2"),
        (0, "GPU-8c1f0e7a-1111-2222-3333-444444444444,GPU-0", "GPU-8c1f0e7a-1111-2222-3333-444444444444"),
        (1, "5", ""),
        (0, "", ""),
    ],
)
def test_the_visible_gpus_are_numbered_from_zero_in_the_order_of_the_variable(index, visible, name):
    assert gpu.named(index, visible) == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_driver_nothing_is_there_and_whoever_asks_for_a_gpu_hears_torchs_reason():
    assert not gpu.is_there()
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|nvidia"):
        gpu.gpu_of("cuda")


@on_a_gpu
def test_the_driver_and_cuda_tell_the_same_of_a_gpu():
    known, by_torch = gpu.gpu_of("cuda"), gpu._by_torch(0)
    assert (known.name, known.capability) == (by_torch.name, by_torch.capability)
    assert abs(known.memory - by_torch.memory) <= 0.01 * by_torch.memory


@on_a_gpu
def test_asking_makes_no_cuda_context():
    pytest.importorskip("pynvml")
    asked = (
        "import torch; from gymloop import gpu; gpu.is_there(); gpu.gpu_of('cuda'); print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False"]
