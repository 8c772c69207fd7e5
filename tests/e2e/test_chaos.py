"""While environment, engine and network are killed, paused and slowed by turns, a run trains on, and counts right.

The trouble is that of ``chaos``. With ``deterministic: true`` what is not hit must be as in a calm run, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

import forked
from chaos import Schedule
from homes import Home, gone

PROMPTS, SIZE, SEED, CALL_S = 2, 3, 11, 3.0
STEPS = 30
TRAINED = ("reward/mean", "reward/std", "policy/loss", "policy/grad_norm", "tokens/sampled", "tokens/trained")
TROUBLE = {"seed": 26, "prompts_per_step": PROMPTS, "share": 0.5}
CAUSES = {
    ("environment", "kill"): {"raised"},
    ("environment", "pause"): {"timeout"},
    ("engine", "kill"): {"aborted"},
    ("network", "kill"): {"disconnect"},
    ("network", "pause"): {"timeout"},
}


class Lab:
    """A folder with a recipe, and runs of it by name, calm or not."""

    def __init__(self, folder: Path, model: Path, nursery: forked.Nursery) -> None:
        self.folder = folder
        self.nursery = nursery
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(
            yaml.safe_dump(
                {
                    "grpo": {
                        "num_prompts_per_step": PROMPTS,
                        "num_generations_per_prompt": SIZE,
                        "max_num_steps": STEPS,
                        "max_rollout_turns": 1,
                        "seed": SEED,
                    },
                    "rollouts": {"call_timeout_s": CALL_S, "max_skipped_steps": 1},
                    "policy": {
                        "model_name": str(model),
                        "max_total_sequence_length": 128,
                        "precision": "float32",
                        "optimizer": {"kwargs": {"lr": 0.01}},
                        "generation": {"max_new_tokens": 8, "torch_cfg": {"max_batch_size": 6}},
                    },
                    "data": {
                        "train": {"environment": "troubled", "num_tasks": PROMPTS * STEPS + 20},
                        "shuffle": False,
                    },
                    "env": {"environments": {"troubled": {"entrypoint": "chaos:Troubled"}}},
                    "checkpointing": {"save_period": 1},
                    "logger": {"log_dir": str(folder / "results"), "tensorboard_enabled": False},
                    "startup": {"deadline_s": 60.0},
                    "deterministic": True,
                }
            )
        )

    def train(self, name: str, *overrides: str, trouble: dict | None = None, **how) -> forked.Done:
        if trouble is not None:
            groups = [f"e0-r{index:05d}" for index in range(PROMPTS * STEPS + 20)]
            how["prepare"] = ("chaos:install", {"groups": groups, "size": SIZE, "run_seed": SEED, **trouble})
        return self.nursery.run("train", self.recipe, "--run", name, "--resume", *overrides, **how)

    def dir(self, name: str) -> Path:
        return self.folder / "results" / "tiny" / name

    def metrics(self, name: str) -> list[dict]:
        """By step, without step 0."""
        return [json.loads(line) for line in (self.dir(name) / "metrics.jsonl").read_text().splitlines()][1:]

    def records(self, name: str) -> list[list[dict]]:
        """Every rollout of every step, in order."""
        files = sorted((self.dir(name) / "trajectories").glob("step_*.jsonl"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]

    def weights(self, name: str, step: int) -> str:
        folder = self.dir(name) / "checkpoints" / f"step_{step}" / "policy" / "weights"
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def lab(tmp_path_factory, toy):
    with forked.Nursery() as nursery:
        yield Lab(tmp_path_factory.mktemp("chaos"), toy("q"), nursery)


def name_of(record: dict) -> tuple[str, int]:
    return record["group_id"], record["sample_id"]


def said(record: dict) -> tuple:
    """What a rollout came to, without its time and attempts."""
    return record["reward"], record["turns"], record["sampled_tokens"], json.dumps(record["output"], sort_keys=True)


def assert_each_rollout_has_one_record(steps: list[list[dict]]) -> None:
    for index, records in enumerate(steps):
        rows = range(index * PROMPTS, (index + 1) * PROMPTS)
        expected = [(f"e0-r{row:05d}", sample) for row in rows for sample in range(SIZE)]
        assert sorted(map(name_of, records)) == expected, f"step {index + 1}"
        for record in records:
            assert ("reward" in record) != ("failure" in record)


def failed_attempts(records: list[dict], schedule: Schedule, attempts: int) -> int:
    total = 0
    for record in records:
        trouble = schedule.trouble(*name_of(record))
        total += min(trouble.attempts, attempts) if trouble and trouble.fails else 0
    return total


def healed(lab: Lab, steps: int) -> None:
    """All trouble passes: nothing of what is trained may differ from the calm run."""
    schedule = Schedule(**TROUBLE, lasting=0.0)
    only = f"grpo.max_num_steps={steps}"
    assert lab.train(f"calm-{steps}", only).code == 0
    done = lab.train(f"healed-{steps}", only, trouble={**TROUBLE, "lasting": 0.0})
    assert done.code == 0, done.output
    calm, records = lab.records(f"calm-{steps}"), lab.records(f"healed-{steps}")
    assert len(records) == steps
    assert_each_rollout_has_one_record(records)
    assert [[said(record) for record in step] for step in records] == [[said(r) for r in step] for step in calm]
    for step, quiet, loud in zip(records, lab.metrics(f"calm-{steps}"), lab.metrics(f"healed-{steps}"), strict=True):
        assert {key: loud[key] for key in TRAINED} == {key: quiet[key] for key in TRAINED}
        assert (loud["rollouts/finished"], loud["rollouts/failed"], loud["rollouts/missing"]) == (PROMPTS * SIZE, 0, 0)
        assert loud["failures/attempts"] == failed_attempts(step, schedule, 3)
        assert quiet["failures/attempts"] == 0
    assert lab.weights(f"healed-{steps}", steps) == lab.weights(f"calm-{steps}", steps)
    hit = sum(metrics["failures/attempts"] > 0 for metrics in lab.metrics(f"healed-{steps}"))
    assert hit >= steps // 3, "there was trouble"


def test_a13_trouble_that_passes_changes_no_bit_in_a_few_steps(lab):
    healed(lab, 4)


@pytest.mark.slow
def test_a13_trouble_that_passes_changes_no_bit_of_thirty_training_steps(lab):
    healed(lab, STEPS)


@pytest.mark.slow
def test_a13_a14_trouble_that_lasts_costs_exactly_the_rollouts_it_hits(lab):
    """The weights stay as they are, so that every rollout of thirty steps can be compared."""
    schedule, attempts = Schedule(**TROUBLE, lasting=0.25), 2
    still = ("policy.optimizer.kwargs.lr=0.0", f"rollouts.max_infra_attempts={attempts}")
    assert lab.train("still", *still).code == 0
    done = lab.train("lasting", *still, trouble={**TROUBLE, "lasting": 0.25})
    assert done.code == 0, done.output
    calm = {name_of(record): record for step in lab.records("still") for record in step}
    steps = lab.records("lasting")
    assert len(steps) == STEPS
    assert_each_rollout_has_one_record(steps)
    kinds: Counter = Counter()
    for records, metrics in zip(steps, lab.metrics("lasting"), strict=True):
        failures = [record for record in records if "failure" in record]
        for record in records:
            trouble = schedule.trouble(*name_of(record))
            lost = trouble is not None and trouble.fails and trouble.attempts >= attempts
            assert ("failure" in record) == lost, record
            if lost:
                kinds[trouble.party, trouble.manner] += 1
                assert record["cause"] in CAUSES[trouble.party, trouble.manner], record
                party = "environment troubled, verify" if trouble.party == "environment" else "model http://"
                assert record["where"].startswith(party), record
            else:
                assert said(record) == said(calm[name_of(record)])
        assert metrics["rollouts/failed"] == metrics["failures/infra"] == len(failures)
        assert metrics["rollouts/finished"] == PROMPTS * SIZE - len(failures)
        assert metrics["rollouts/missing"] == metrics["failures/data"] == metrics["failures/policy"] == 0
        assert metrics["failures/attempts"] == failed_attempts(records, schedule, attempts)
        lost_by_group = Counter(record["group_id"] for record in failures)
        assert metrics["groups/short"] == sum(count > SIZE - 2 for count in lost_by_group.values())
        rewards = [record["reward"] for record in records if "reward" in record]
        assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards)), "no failure is a reward of 0"
    assert kinds.keys() == CAUSES.keys(), "each party was lost in each of its ways"


def test_f13_a_step_in_which_all_fail_trains_nothing_and_the_run_ends_with_the_partys_name(lab):
    done = lab.train(
        "dead",
        "grpo.max_num_steps=9",
        "rollouts.max_infra_attempts=1",
        "++env.environments.troubled.kwargs.dead_from=4",
    )
    assert done.code == 1, done.output
    assert "step 3 trains nothing: all 2 groups were dropped" in done.output
    (error,) = [line for line in done.output.splitlines() if line.startswith("gymloop: ")]
    assert "2 steps in a row had nothing to train on (rollouts.max_skipped_steps is 1)" in error
    assert "environment troubled, verify: ConnectionError: the judge is gone" in error
    assert [metrics["rollouts/failed"] for metrics in lab.metrics("dead")] == [0, 0, 6]
    assert lab.weights("dead", 3) == lab.weights("dead", 2)


def test_more_failures_than_a_step_may_have_end_the_run_at_once(lab):
    done = lab.train(
        "spent",
        "rollouts.max_infra_attempts=1",
        "rollouts.max_failed_rollouts_per_step=2",
        "++env.environments.troubled.kwargs.dead_from=3",
    )
    assert done.code == 1, done.output
    (error,) = [line for line in done.output.splitlines() if line.startswith("gymloop: ")]
    assert "step 2: 3 rollouts failed for good, more than rollouts.max_failed_rollouts_per_step = 2" in error
    assert "worst: environment troubled with 3 (3 raised)" in error
    assert len(lab.metrics("spent")) == 1


def test_a24_a_run_that_refills_and_is_killed_goes_on_with_the_same_prompts(lab):
    trouble = {**TROUBLE, "share": 0.9, "lasting": 0.9, "seed": 7}
    arguments = ("grpo.max_num_steps=4", "rollouts.max_infra_attempts=1", "rollouts.on_short_group=refill")
    arguments += ("rollouts.call_timeout_s=3.0", "rollouts.max_skipped_steps=9")
    whole = lab.train("refilled", *arguments, trouble=trouble)
    assert whole.code == 0, whole.output
    refilled = [metrics["groups/refilled"] for metrics in lab.metrics("refilled")]
    assert sum(refilled) > 0
    groups = [sorted({record["group_id"] for record in step}) for step in lab.records("refilled")]
    assert [len(step) for step in groups] == [PROMPTS + count for count in refilled]
    flat = [group for step in groups for group in step]
    assert flat == [f"e0-r{row:05d}" for row in range(len(flat))], "no prompt is lost, none comes twice"

    killed = lab.train("resumed", *arguments, trouble=trouble, die="gymloop.training.loop:prepare_batch:3:before")
    assert killed.code == -9, killed.output
    assert lab.train("resumed", *arguments, trouble=trouble).code == 0
    assert [[name_of(r) for r in step] for step in lab.records("resumed")] == [
        [name_of(r) for r in step] for step in lab.records("refilled")
    ]
    assert [m["groups/refilled"] for m in lab.metrics("resumed")] == refilled
    assert lab.weights("resumed", 4) == lab.weights("refilled", 4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a13_an_engine_that_stands_still_for_a_while_is_waited_for_and_a_dead_one_ends_the_run_by_name(tmp_path, toy):
    """The engine's own process: SIGSTOP and SIGCONT in the midst of steps, then SIGKILL."""
    home = Home(tmp_path, toy("q"))
    process = home.start("grpo.max_num_steps=100000", "grpo.max_num_epochs=100000", "health.unresponsive_after_s=20")
    try:
        home.wait_for_step(1, process)
        log = str(home.run_dir / "logs" / "engine.log")
        (engine,) = [pid for pid in home.processes() if os.path.realpath(f"/proc/{pid}/fd/1") == log]
        for _ in range(3):
            os.kill(engine, signal.SIGSTOP)
            time.sleep(2.0)
            os.kill(engine, signal.SIGCONT)
            home.wait_for_step(home.metrics()[-1]["step"] + 1, process)
        assert all(entry["rollouts/failed"] == entry["rollouts/missing"] == 0 for entry in home.metrics()[1:])
        os.kill(engine, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1, output
        assert re.search(r"^gymloop: .*engine died", output, re.MULTILINE), output
        assert gone(home, 30), home.processes()
    finally:
        home.kill_all()
