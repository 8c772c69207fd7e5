"""A turn that is wrong in form, from the model's words to the policy's gradient: a whole run, see ``forked``."""

from __future__ import annotations

import json

import pytest

import forked
from homes import Home

CUT = '<tool_call>\n{"name": "calculate", "arguments": {"expr'


@pytest.mark.slow
def test_invalid_tool_calls_are_counted_written_down_and_trained_against(tmp_path, toy):
    home = Home(tmp_path, toy("q"))
    how = ("grpo.max_num_steps=1", "grpo.val_period=0", "sft_warmup.steps=0", "policy.generation.max_new_tokens=64")
    said = ("dictated:install", {"folder": str(toy("q")), "text": CUT})
    with forked.Nursery() as nursery:
        for name, advantage in (("plain", "null"), ("penalty", "-5.0")):
            words = (*how, f"+grpo.invalid_tool_call_advantage={advantage}")
            done = nursery.run("train", home.recipe, "--run", name, *words, prepare=said)
            assert done.code == 0, done.output
    runs = home.run_dir.parent
    last = {
        name: json.loads((runs / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("plain", "penalty")
    }
    for metrics in last.values():
        assert metrics["rollouts/invalid_tool_call_rate"] == 1.0
        assert metrics["rollouts/malformed_thinking_rate"] == 0.0
        assert metrics["signal/zero_groups"] == metrics["groups/kept"] == 2, "all rewards are equal"
    assert (last["plain"]["signal/penalised_turns"], last["penalty"]["signal/penalised_turns"]) == (0, 6)
    assert last["plain"]["policy/grad_norm"] == 0
    assert last["penalty"]["policy/grad_norm"] > 0
    lines = (runs / "penalty" / "trajectories" / "step_00001.jsonl").read_text().splitlines()
    assert [json.loads(line)["invalid_tool_call_turns"] for line in lines] == [[0]] * 6
