"""F07: whichever way a request comes, it samples from the run's profile or is refused by name; also without asserts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import f07
import toys
from gymloop.generation.vllm.settings import VllmSettings


@pytest.mark.parametrize(
    "flags", [pytest.param([], id="asserts"), pytest.param(["-O"], id="python -O", marks=pytest.mark.slow)]
)
def test_f07_every_way_to_a_sample_takes_the_profile_or_refuses(toy, flags):
    folder = toy("q")
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.6
    if flags:
        command = [sys.executable, *flags, str(Path(f07.__file__)), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
    else:
        result = f07.play(folder)
    assert result["asserts"] is not bool(flags)
    check(result, folder)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_f07_every_way_to_a_sample_takes_the_profile_or_refuses_on_vllm(tmp_path):
    folder = toys.build_toy(tmp_path, "q", **toys.FOR_VLLM)
    check(f07.play(folder, VllmSettings(kv_cache_memory_bytes=64 << 20)), folder)


def check(result, folder):
    import torch
    from transformers import AutoModelForCausalLM

    assert {name: one["refusal"] for name, one in result["chat"].items()} == {
        name: refusal for name, (_, refusal) in f07.REQUESTS.items()
    }
    assert {name: one["refusal"] for name, one in result["responses"].items()} == {
        name: f07.REQUESTS[name][1] for name in f07.BY_ITEMS
    }
    # Through the agent a refusal costs the row: a failure without a reward, which names the field.
    for name in f07.BY_ITEMS:
        fields, refusal = f07.REQUESTS[name]
        assert result["agent"][name]["refusal"] == (None if refusal is None else "data refused"), name
        if refusal is not None:
            code, field = refusal.split()
            assert f"400 {code}" in result["agent"][name]["said"]
            assert f"{field} is {fields[field]}" in result["agent"][name]["said"]
    assert result["validation"] == {"marked": 200, "unmarked": 400}

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ways = ("chat", "responses", "agent")
    served = [one for way in ways for one in result[way].values() if one["status"] == 200]
    assert len(served) == 5 + 3 + 3
    assert max(len(one["sampled"]) for one in served) == f07.TOKENS
    for one in served:
        ids = [*one["prompt"], *one["sampled"]]
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        steps = range(len(one["prompt"]) - 1, len(ids) - 1)
        wanted = logprobs[steps, one["sampled"]]
        assert (wanted - torch.tensor(one["logprobs"])).abs().max() < 1e-4
