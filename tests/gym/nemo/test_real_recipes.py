"""The shipped recipes on the real NeMo Gym: each passes ``check``, and whole runs of two are paid as their servers pay.

The runs are the product's own but for the place of their workers, see ``forked``; a toy model says what is dictated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from gymloop.cli import main as cli

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RECIPES = Path(__file__).parents[3] / "recipes"
GYM = [path for path in sorted(RECIPES.glob("*.yaml")) if "nemo_gym:" in path.read_text(encoding="utf-8")]
SIZES = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=2")
STEPS, ROLLOUTS = 2, 8


def overrides(path: Path, installation) -> list[str]:
    text = path.read_text(encoding="utf-8")
    given = [f"env.nemo_gym_installation={installation.folder}"]
    given += ["~env.nemo_gym_extra"] if "nemo_gym_extra:" in text else []
    if "nano" in path.name:
        rows = "resources_servers/workplace_assistant/data/example.jsonl"
        given += [f"data.{part}.data_path={rows}" for part in ("train", "validation")]
    return given


@pytest.mark.parametrize("path", GYM, ids=lambda path: path.stem)
def test_a25_every_recipe_is_sound_with_the_real_configs_and_rows(capsys, installation, path):
    assert cli.main(["check", str(path), *overrides(path, installation)]) == 0, capsys.readouterr().err


@pytest.fixture(scope="module")
def nursery():
    with forked.Nursery() as nursery:
        yield nursery


def trained(nursery, folder, model, installation, name, says, *further):
    """The metrics of the steps of a short run with a toy model, and the records of its rollouts."""
    path = RECIPES / f"{name}.yaml"
    small = [
        f"policy.model_name={model}",
        "~policy.tokenizer.chat_template",
        "policy.generation.max_new_tokens=8",
        "policy.max_total_sequence_length=2048",
        f"logger.log_dir={folder}",
        "checkpointing.enabled=false",
        "policy.precision=float32",
    ]
    how = {"prepare": ("dictated:install", {"folder": str(model), "text": says})}
    argv = [path, "--run", "r", *overrides(path, installation), *SIZES, *small, *further]
    done = nursery.start("train", *argv, **how).wait()
    assert done.code == 0, done.output
    run = folder / name / "r"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [
        json.loads(line)
        for file in sorted((run / "trajectories").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [step for step in steps if step["step"] > 0], records


def test_blackjack_is_played_over_several_turns_and_pays_what_the_hand_is_worth(nursery, tmp_path, toy, installation):
    steps, records = trained(nursery, tmp_path, toy("q"), installation, "blackjack", "<action>hit</action>")
    assert [step["step"] for step in steps] == [1, 2]
    assert len(records) == STEPS * ROLLOUTS
    for step in steps:
        assert (step["rollouts/finished"], step["rollouts/failed"]) == (ROLLOUTS, 0)
    for record in records:
        assert record["reward"] in (-1.0, 0.0, 1.0)
        turns = len([item for item in record["output"] if item.get("role") == "assistant"])
        assert turns in (1, 2), "the card drawn ends the hand, or the word after it, which is none, stands"
        if turns == 1:
            assert record["reward"] == -1.0, "only a bust ends a hand at once"
        else:
            told = [item["content"] for item in record["output"] if item.get("role") == "user"]
            assert all("Your hand: [" in text and "Dealer shows: " in text for text in told)
    assert {len(record["weight_versions"]) for record in records} >= {2}, "hands of several turns were played"


def test_the_parts_of_a_reward_reach_the_metrics(nursery, tmp_path, toy, installation):
    says = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Francisco"}}\n</tool_call>'
    further = ["sft_warmup.steps=0", "~sft_warmup.data_path", "data.shuffle=false"]
    steps, records = trained(nursery, tmp_path, toy("q"), installation, "multireward", says, *further)
    for step in steps:
        parts = {name: step[f"reward/components/{name}/mean"] for name in ("correctness", "schema_valid", "format")}
        assert parts["schema_valid"] == parts["format"] == 1.0
        assert step["reward/mean"] == pytest.approx(sum(parts.values()))
    # The first of the two rows asks for San Francisco.
    assert steps[0]["reward/components/correctness/mean"] == 0.5
    assert {record["reward"] for record in records[:ROLLOUTS]} == {2.0, 3.0}


def test_the_workplace_recipe_runs_with_the_real_model_and_all_27_tools(tmp_path, installation):
    path = RECIPES / "workplace_assistant_cpu.yaml"
    sizes = ["grpo.num_prompts_per_step=1", "grpo.max_num_steps=1", "startup.deadline_s=300"]
    command = [sys.executable, "-m", "gymloop.cli.main", "train", str(path), "--run", "r"]
    done = subprocess.run(
        [*command, *overrides(path, installation), *sizes],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "results" / path.stem / "r"
    records = [json.loads(line) for line in (run / "trajectories" / "step_00001.jsonl").read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        assert record["segments"][0]["tokens"] > 1200, "the tools were shown"
        assert 0.0 <= record["reward"] <= 1.0


def test_the_reasoning_recipe_trains_on_its_puzzles_and_keeps_the_answer_that_was_read(
    nursery, tmp_path, toy, installation
):
    steps, records = trained(nursery, tmp_path, toy("q"), installation, "reasoning_gym", "<answer>Zoey</answer>")
    assert [(step["rollouts/finished"], step["rollouts/failed"]) for step in steps] == [(ROLLOUTS, 0)] * STEPS
    assert all(0.0 <= record["reward"] <= 1.0 for record in records)
    assert {record["details"]["extracted_answer"] for record in records} == {"Zoey"}
