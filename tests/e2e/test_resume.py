"""Killed anywhere, a run goes on as if it had not been: the same numbers, rows and weights, bit by bit (A23, F14).

Runs are real but for the place of their workers, see ``forked``; one is on Ray.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import forked
from gymloop.files import held

STEPS = 6
SAME = (
    "reward/mean",
    "reward/std",
    "policy/loss",
    "policy/grad_norm",
    "policy/lr",
    "tokens/sampled",
    "tokens/trained",
    "mismatch/kl",
    "weights/version",
    "validation/reward/mean",
    "sft/loss",
)
"""Metrics that hold no wall time."""


class Lab:
    """A folder with a recipe, and runs of it by name."""

    def __init__(self, folder: Path, model: Path, nursery: forked.Nursery) -> None:
        self.folder = folder
        self.nursery = nursery
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(
            yaml.safe_dump(
                {
                    "grpo": {
                        "num_prompts_per_step": 2,
                        "num_generations_per_prompt": 3,
                        "max_num_steps": STEPS,
                        "max_num_epochs": 2,
                        "max_rollout_turns": 1,
                        "val_period": 2,
                    },
                    "sft_warmup": {"steps": 1, "batch_size": 2},
                    "policy": {
                        "model_name": str(model),
                        "max_total_sequence_length": 128,
                        "precision": "float32",
                        "lr_warmup_steps": 5,
                        "optimizer": {"kwargs": {"lr": 0.01}},
                        "generation": {"max_new_tokens": 8, "torch_cfg": {"max_batch_size": 6}},
                    },
                    "data": {
                        "train": {"environment": "letters", "num_tasks": 8},
                        "validation": {"environment": "letters", "num_tasks": 2, "seed": 9},
                    },
                    "env": {"environments": {"letters": {"entrypoint": "letters:Letters"}}},
                    "checkpointing": {"save_period": 1},
                    "logger": {"log_dir": str(folder / "results"), "tensorboard_enabled": False},
                    "startup": {"deadline_s": 60.0},
                    "deterministic": True,
                }
            )
        )

    def arguments(self, name: str, *overrides: str) -> list[str]:
        """The same command for a first start and for every start after it."""
        return ["train", str(self.recipe), "--run", name, "--resume", *overrides]

    def train(self, name: str, *overrides: str, **how: Any) -> forked.Done:
        return self.nursery.run(*self.arguments(name, *overrides), **how)

    def dir(self, name: str) -> Path:
        return self.folder / "results" / "tiny" / name

    def checkpoints(self, name: str) -> list[str]:
        folder = self.dir(name) / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def metrics(self, name: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.dir(name) / "metrics.jsonl").read_text().splitlines()]

    def series(self, name: str) -> list[dict[str, float]]:
        return [{key: entry[key] for key in ("step", *SAME) if key in entry} for entry in self.metrics(name)]

    def said(self, name: str) -> dict[str, list[Any]]:
        """Every rollout of every step: who, what, and how it was scored."""
        result = {}
        for path in sorted((self.dir(name) / "trajectories").iterdir()):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            result[path.name] = [
                (row["group_id"], row["sample_id"], row["reward"], [item.get("content") for item in row["output"]])
                for row in rows
            ]
        return result

    def weights(self, name: str, step: int = STEPS) -> dict[str, str]:
        folder = self.dir(name) / "checkpoints" / f"step_{step}" / "policy"
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (folder / "weights" / "model.safetensors", folder / "optimizer.safetensors")
        }

    def assert_same(self, name: str, other: str, step: int = STEPS) -> None:
        assert self.series(name) == self.series(other)
        assert self.said(name) == self.said(other)
        assert self.weights(name, step) == self.weights(other, step)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, toy) -> Iterator[Lab]:
    with forked.Nursery() as nursery:
        made = Lab(tmp_path_factory.mktemp("resume"), toy("q"), nursery)
        done = made.train("reference")
        assert done.code == 0, done.output
        yield made


def test_the_reference_learns_from_something(lab):
    series = lab.series("reference")
    assert [entry["step"] for entry in series] == list(range(STEPS + 1))
    assert sum(entry["reward/std"] > 0 for entry in series[1:]) >= 4
    assert all(entry["policy/grad_norm"] > 0 for entry in series[1:])
    assert lab.checkpoints("reference") == ["step_5", "step_6"]


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_bits(lab):
    assert lab.train("again").code == 0
    lab.assert_same("again", "reference")


POINTS = {
    "while_rollouts_run": "gymloop.rollouts.collector:Collector._rollout:15:after",
    "rollouts_done": "gymloop.training.loop:prepare_batch:3:before",
    "update_done": "gymloop.training.fleet:sync_weights:4:before",
    "engine_has_the_weights": "gymloop.training.fleet:sync_weights:4:after",
    "while_validating": "gymloop.training.loop:_validate:2:after",
    "metrics_written": "gymloop.training.run:Run.record:4:after",
    "save_begins": "gymloop.training.checkpoint:CheckpointStore.begin:3:after",
    "half_the_policy_written": "gymloop.policy.state:save_file:5:after",
    "no_manifest_yet": "gymloop.training.manifest:write_synced:3:before",
    "manifest_written": "gymloop.training.manifest:write_synced:3:after",
    "renamed": "gymloop.training.checkpoint:CheckpointStore._rename:3:after",
    "old_one_about_to_go": "gymloop.training.checkpoint:remove:1:before",
    "old_one_gone": "gymloop.training.checkpoint:CheckpointStore._retain:3:after",
    "while_warming_up": "gymloop.training.loop:demonstration_batch:1:after",
    "before_the_first_step": "gymloop.training.run:Run.record:1:after",
    "at_the_epoch_boundary": "gymloop.training.loop:save:4:after",
    "over_the_epoch_boundary": "gymloop.training.loop:prepare_batch:5:after",
    "saving_the_last_step": "gymloop.training.manifest:write_synced:6:before",
    "last_step_saved": "gymloop.training.loop:save:6:after",
}
"""Where the run is killed; steps 1 to 4 are the first epoch."""

QUICK = ("half_the_policy_written", "over_the_epoch_boundary")


@pytest.mark.parametrize(
    "point", [point if point in QUICK else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]
)
def test_a23_a24_killed_at_any_point_the_run_goes_on_as_if_it_had_not_been(lab, point):
    killed = lab.train(point, die=POINTS[point])
    assert killed.code == -9, killed.output
    done = lab.train(point)
    assert done.code == 0, done.output
    lab.assert_same(point, "reference")
    assert lab.checkpoints(point) == ["step_5", "step_6"]


def test_a24_stopped_in_the_middle_of_rollouts_their_prompts_come_again(lab):
    """The loader had moved on already; the stop comes before the last rollout of step 3 is even asked for."""
    at = "gymloop.rollouts.collector:Collector._rollout:18:before"
    stopped = lab.train("stopped", "checkpointing.save_period=4", die=at, number=signal.SIGTERM)
    assert stopped.code == 143, stopped.output
    assert lab.checkpoints("stopped") == ["step_2"], "saved by the stop, after the position was put back"
    assert lab.train("stopped").code == 0
    lab.assert_same("stopped", "reference")


def test_a24_steps_that_trained_nothing_are_counted_over_a_resume(lab):
    """Every rollout is cut at its first token and filtered out: nothing to train, two steps before and two after."""
    nothing = ("policy.generation.max_new_tokens=1", "grpo.overlong_filtering=true", "sft_warmup.steps=0")
    assert lab.train("empty", *nothing, "grpo.max_num_steps=2").code == 0
    done = lab.train("empty", *nothing)
    assert done.code == 1, done.output
    assert "4 steps in a row had nothing to train on (rollouts.max_skipped_steps is 3)" in " ".join(done.output.split())
    assert lab.metrics("empty")[-1]["step"] == 3


@pytest.mark.slow
def test_killed_again_and_again_it_still_arrives(lab):
    for call in (1, 2, 1, 2, 1):
        lab.train("often", die=f"gymloop.training.manifest:write_synced:{call}:after")
    assert lab.train("often").code == 0
    lab.assert_same("often", "reference")


def test_rows_beyond_the_context_are_named_before_anything_is_trained(lab):
    """The engine's tokenizer says how long a prompt is; that is known before the first step."""
    done = lab.train("beyond", "policy.max_total_sequence_length=9", "sft_warmup.steps=0")
    assert done.code == 2, done.output
    flat = " ".join(done.output.split())
    assert "startup task 'lengths' failed" in flat
    assert "data.train: row 1: its first prompt has " in flat
    assert "tokens; policy.max_total_sequence_length is 9; data.train: row 2" in flat
    assert "data.train: and 3 of 8 rows more; data.validation: row 1" in flat
    assert lab.checkpoints("beyond") == []


@pytest.mark.slow
def test_validation_does_not_disturb_training(lab):
    assert lab.train("unvalidated", "grpo.val_period=0").code == 0
    assert lab.weights("unvalidated") == lab.weights("reference")


@pytest.mark.slow
def test_the_number_of_rollouts_at_once_changes_nothing(lab):
    """They arrive in another order then, and are decoded beside others."""
    assert lab.train("one-by-one", "rollouts.max_concurrency=1").code == 0
    lab.assert_same("one-by-one", "reference")


def test_a_finished_run_says_so_and_a_longer_one_goes_on(lab):
    assert lab.train("longer", "grpo.max_num_steps=2").code == 0
    done = lab.train("longer", "grpo.max_num_steps=2")
    assert done.code == 0
    assert "finished its 2 steps; nothing is left to do" in done.output
    assert "startup" not in done.output, "nothing was started to find that out"
    assert lab.train("longer").code == 0
    lab.assert_same("longer", "reference")


@pytest.mark.slow
def test_a_run_that_its_epochs_end_is_finished_too(lab):
    arguments = ("grpo.max_num_epochs=1", "grpo.max_num_steps=100")
    assert lab.train("epoch", *arguments).code == 0
    assert lab.checkpoints("epoch") == ["step_3", "step_4"]
    assert "finished its 4 steps" in lab.train("epoch", *arguments).output


def test_changed_data_are_an_error_with_an_override(lab):
    assert lab.train("data", "grpo.max_num_steps=2").code == 0
    changed = "data.train.seed=5"
    refused = lab.train("data", changed)
    assert refused.code == 2, "the recipe is wrong, not the machine"
    assert "the content of the training data changed, 8 rows with fingerprint" in refused.output
    assert "checkpointing.accept_changed_data=true" in refused.output
    accepted = lab.train("data", changed, "checkpointing.accept_changed_data=true")
    assert accepted.code == 0, accepted.output
    assert [entry["step"] for entry in lab.metrics("data")] == list(range(STEPS + 1))
    epochs = [{row[0][:3] for row in rows} for name, rows in lab.said("data").items() if name.startswith("step")]
    assert epochs == [{"e0-"}] * 2 + [{"e1-"}] * 4


@pytest.mark.slow
def test_another_models_checkpoint_is_one_sentence(lab, tmp_path, toy):
    assert lab.train("model", "grpo.max_num_steps=1").code == 0
    other = tmp_path / "q"
    shutil.copytree(toy("q"), other)
    assert lab.train("model", "grpo.max_num_steps=2", f"policy.model_name={other}").code == 0, "it only moved"
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    done = lab.train("model", f"policy.model_name={other}")
    assert done.code == 2, done.output
    assert f"belongs to model '{other}'" in done.output
    assert "has other weights to start from" in done.output


def test_a_run_that_is_still_going_is_not_started_a_second_time(lab):
    """Two runs in one folder would take each other's checkpoints apart and write each step twice."""
    with held(lab.dir("twice")):
        done = lab.train("twice")
    assert done.code == 2
    assert f"is in use by process {os.getpid()}, another run; wait for its end or choose another --run" in done.output
    assert not (lab.dir("twice") / "metrics.jsonl").exists()


def test_another_learning_rate_or_precision_goes_on_and_another_position_is_refused(lab):
    assert lab.train("other", "grpo.max_num_steps=1").code == 0
    for change, said in (
        ("grpo.num_prompts_per_step=4", "the loader's prompts_per_step changed, 2 in the checkpoint, 4 now"),
        ("grpo.seed=7", "the loader's seed changed, 42 in the checkpoint, 7 now"),
        ("data.shuffle=false", "the loader's shuffle changed, True in the checkpoint, False now"),
    ):
        refused = lab.train("other", change)
        assert refused.code == 2, refused.output
        assert said in refused.output
    for step, change in ((2, "policy.precision=bfloat16"), (3, "policy.optimizer.kwargs.lr=0.05")):
        done = lab.train("other", change, f"grpo.max_num_steps={step}")
        assert done.code == 0, done.output
    assert [entry["policy/lr"] for entry in lab.metrics("other")[1:]] == pytest.approx([0.002, 0.004, 0.03])


def test_the_best_may_be_gone_and_the_run_goes_on_from_the_newest(lab):
    best = ("checkpointing.metric_name=reward/mean", "checkpointing.keep_top_k=1", "checkpointing.keep_latest_k=1")
    assert lab.train("ranked", *best, "grpo.max_num_steps=4").code == 0
    rewards = {entry["step"]: entry["reward/mean"] for entry in lab.metrics("ranked") if entry["step"]}
    top = max(rewards, key=lambda step: (rewards[step], step))
    assert lab.checkpoints("ranked") == sorted({f"step_{top}", "step_4"})
    if top != 4:
        shutil.rmtree(lab.dir("ranked") / "checkpoints" / f"step_{top}")
    assert lab.train("ranked").code == 0
    lab.assert_same("ranked", "reference")


def test_time_that_runs_out_saves_and_ends_with_75_and_the_rest_comes_later(lab):
    limit = ("checkpointing.checkpoint_must_save_by=00:00:00:01", "checkpointing.save_period=100")
    done = lab.train("hurried", *limit, "grpo.max_num_epochs=100", "grpo.max_num_steps=400")
    assert done.code == 75, done.output
    step = lab.metrics("hurried")[-1]["step"]
    assert f"no time for step {step + 1}: checkpointing.checkpoint_must_save_by is too near" in done.output
    assert lab.checkpoints("hurried") == [f"step_{step}"]
    assert step < STEPS
    assert lab.train("hurried").code == 0
    lab.assert_same("hurried", "reference")


def test_a22_lr_0_leaves_weights_and_greedy_answers_as_they_are_after_every_sync(lab, toy):
    still = ("policy.optimizer.kwargs.lr=0.0", "sft_warmup.steps=0", "grpo.val_period=1", "grpo.max_num_steps=3")
    done = lab.train("still", *still, "policy.generation.val_temperature=0.0")
    assert done.code == 0, done.output
    saved = load_file(lab.dir("still") / "checkpoints" / "step_3" / "policy" / "weights" / "model.safetensors")
    base = load_file(toy("q") / "model.safetensors")
    assert saved.keys() == base.keys()
    assert all(np.array_equal(saved[name], base[name]) for name in base)
    said = lab.said("still")
    assert said["validation_00001.jsonl"] == said["validation_00002.jsonl"] == said["validation_00003.jsonl"]
    for entry in lab.metrics("still")[1:]:
        assert entry["policy/grad_norm"] > 0, "there was something to learn"
        assert entry["mismatch/kl"] < 1e-3
        assert entry["mismatch/max_abs_logprob_diff"] < 1e-4


# ---------------------------------------------------------------- on Ray


@pytest.mark.slow
def test_a23_killed_on_ray_it_goes_on_to_the_bits_of_the_run_without_ray(lab):
    """Driver, engine and policy are three processes here and one in the reference."""

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "gymloop.cli.main", *lab.arguments("ray")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(forked.__file__).parent)},
        )

    driver = start()
    deadline = time.monotonic() + 240
    while "step_3" not in lab.checkpoints("ray"):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.kill()
    driver.communicate()
    again = start()
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    lab.assert_same("ray", "reference")


# ---------------------------------------------------------------- F14


@pytest.mark.slow
@pytest.mark.parametrize(
    "milliseconds", [0, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 100, 125, 150, 200, 250, 300, 350, 400]
)
def test_f14_killed_around_the_save_of_step_3(lab, milliseconds):
    name = f"f14-{milliseconds}"
    folder = lab.dir(name) / "checkpoints"
    running = lab.nursery.start(*lab.arguments(name))
    deadline = time.monotonic() + 60
    while not any((folder / entry).exists() for entry in ("tmp_step_3", "step_3")):
        assert running.alive(), running.wait().output
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(milliseconds / 1000)
    running.kill()
    running.wait()
    done = lab.train(name)
    assert done.code == 0, done.output
    lab.assert_same(name, "reference")


def test_f14_a_file_size_limit_is_a_loud_warning_and_the_older_checkpoint_loads(lab):
    whole = lab.dir("reference") / "checkpoints" / "step_6"
    limit = max(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 2
    done = lab.train("limited", limit_after=("gymloop.training.loop:save:2", limit))
    assert done.code == 1, done.output
    assert done.output.count("WARNING: the policy was not written: ") == 4, "steps 3 to 6"
    assert "the run ends at step 6 without a checkpoint of it" in done.output
    assert "File too large" in done.output
    assert lab.checkpoints("limited") == ["step_1", "step_2"]
    assert [entry.get("checkpoint/failed") for entry in lab.metrics("limited")] == [None, None, 0, 0, 1, 1, 1]
    assert lab.series("limited") == lab.series("reference"), "training went on"
    assert lab.train("limited").code == 0
    lab.assert_same("limited", "reference")


def test_f14_a_truncated_newest_step_is_named_and_the_one_before_is_taken(lab):
    assert lab.train("truncated", "grpo.max_num_steps=4").code == 0
    part = lab.dir("truncated") / "checkpoints" / "step_4" / "policy" / "weights" / "model.safetensors"
    os.truncate(part, part.stat().st_size // 2)
    (lab.dir("truncated") / "checkpoints" / "step_9").mkdir()
    done = lab.train("truncated")
    assert done.code == 0, done.output
    flat = " ".join(done.output.split())
    assert "step_4 is damaged and is ignored: policy/weights/model.safetensors has" in flat
    (lab.dir("truncated") / "checkpoints" / "step_9").rmdir()
    lab.assert_same("truncated", "reference")


def test_f14_a_stray_empty_folder_is_ignored(lab):
    (lab.dir("stray") / "checkpoints" / "step_9").mkdir(parents=True)
    done = lab.train("stray", "grpo.max_num_steps=2")
    assert done.code == 0, done.output
    assert lab.series("stray") == lab.series("reference")[:3]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_a_read_only_folder_is_a_loud_warning(lab):
    folder = lab.dir("readonly") / "checkpoints"
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    done = lab.train("readonly", "grpo.max_num_steps=1")
    folder.chmod(0o700)
    assert done.code == 1
    assert "WARNING: checkpoint of step 1 was not written: Permission denied" in done.output


def test_no_file_of_a_run_is_pickled(lab):
    """A zip of torch.save, or a pickle of protocol 2 and later, would start with these bytes."""
    files = [path for path in lab.dir("reference").rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if path.read_bytes()[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")]
