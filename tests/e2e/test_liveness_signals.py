"""SIGINT and SIGTERM in every phase of a run: the documented exit code within 30 s, the last finished step saved.

The runs are real but for the place of their workers, see ``forked``; ``test_liveness`` has them on Ray.
"""

from __future__ import annotations

import json
import signal
import time

import pytest
import yaml

import forked
from gymloop.training import manifest

GRACE_S = 30


class Lab:
    def __init__(self, folder, model, nursery):
        self.folder = folder
        self.nursery = nursery
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(
            yaml.safe_dump(
                {
                    "grpo": {
                        "num_prompts_per_step": 2,
                        "num_generations_per_prompt": 3,
                        "max_num_steps": 1000,
                        "max_num_epochs": 1000,
                        "max_rollout_turns": 1,
                        "val_period": 2,
                    },
                    "sft_warmup": {"steps": 2, "batch_size": 2},
                    "policy": {
                        "model_name": str(model),
                        "max_total_sequence_length": 128,
                        "precision": "float32",
                        "optimizer": {"kwargs": {"lr": 0.001}},
                        "generation": {"max_new_tokens": 8, "torch_cfg": {"max_batch_size": 6}},
                    },
                    "data": {
                        "train": {"environment": "letters", "num_tasks": 8},
                        "validation": {"environment": "letters", "num_tasks": 2, "seed": 9},
                    },
                    "env": {"environments": {"letters": {"entrypoint": "letters:Letters"}}},
                    "checkpointing": {"save_period": 3},
                    "logger": {"log_dir": str(folder / "results"), "tensorboard_enabled": False},
                    "startup": {"deadline_s": 60.0},
                }
            )
        )

    def signalled(self, name, where, number):
        """Run until ``where``, then send the signal to itself; returns how it ended and after how long."""
        running = self.nursery.start("train", self.recipe, "--run", name, die=where, number=number)
        began = time.monotonic()
        done = running.wait()
        return done, time.monotonic() - began

    def steps(self, name):
        path = self.folder / "results" / "tiny" / name / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    def checkpoints(self, name):
        folder = self.folder / "results" / "tiny" / name / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def lab(tmp_path_factory, toy):
    with forked.Nursery() as nursery:
        yield Lab(tmp_path_factory.mktemp("signals"), toy("q"), nursery)


PHASES = {
    # where the signal comes: checkpoints afterwards
    "startup": ("gymloop.policy.worker:PolicyWorker.load:1:before", []),
    "first_sync": ("gymloop.serving.worker:EngineWorker.load_weights:1:before", []),
    "warmup": ("gymloop.policy.worker:PolicyWorker.sft:1:before", []),
    "rollouts": ("gymloop.rollouts.collector:Collector._rollout:8:before", ["step_1"]),
    "update": ("gymloop.policy.worker:PolicyWorker.train:2:before", ["step_2"]),
    "weight_sync": ("gymloop.serving.worker:EngineWorker.load_weights:4:before", ["step_2"]),
    "validation": ("gymloop.training.loop:_validate:1:before", ["step_2"]),
    "save": ("gymloop.policy.worker:PolicyWorker.save:1:before", ["step_3"]),
}


QUICK = (("startup", signal.SIGTERM), ("update", signal.SIGINT), ("save", signal.SIGTERM))
CASES = [(phase, number) for phase in PHASES for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("phase", "number"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_f15_a_signal_in_any_phase_saves_the_last_finished_step_and_ends_with_the_documented_code(lab, phase, number):
    where, checkpoints = PHASES[phase]
    name = f"{phase}-{number.name}"
    done, seconds = lab.signalled(name, where, number)
    assert done.code == 128 + number, done.output
    assert seconds < GRACE_S
    assert lab.checkpoints(name) == checkpoints, done.output
    if checkpoints:
        assert f"step_{lab.steps(name)[-1]}" == checkpoints[-1], "the last finished step is the one saved"
    else:
        assert "stopped" in done.output or "stopping" in done.output


@pytest.mark.slow
def test_a_second_signal_ends_the_run_without_saving(lab):
    """The first comes in an update, the second when the save begins."""
    running = lab.nursery.start(
        "train",
        lab.recipe,
        "--run",
        "twice",
        die="gymloop.policy.worker:PolicyWorker.save:1:before",
        number=signal.SIGINT,
    )
    # Step 3 is saved by its period; the run has then been asked once.
    deadline = time.monotonic() + 60
    while not (lab.folder / "results/tiny/twice/metrics.jsonl").exists() or 3 not in lab.steps("twice"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.kill(signal.SIGINT)
    done = running.wait()
    assert done.code == 130, done.output
    # Cut short, that save may lie there as what it is, unfinished: only a whole one has the name of a step.
    folder = lab.folder / "results/tiny/twice/checkpoints"
    for name in lab.checkpoints("twice"):
        if not name.startswith("tmp_"):
            manifest.verify(folder / name, manifest.read(folder / name, int(name.removeprefix("step_"))))
    more = ("grpo.max_num_steps=6", "--run", "twice", "--resume")
    resumed = lab.nursery.start("train", lab.recipe, *more).wait()
    assert resumed.code == 0, resumed.output
    assert lab.steps("twice") == list(range(7)), "no step is missing and none counted twice"
    assert lab.checkpoints("twice") == ["step_3", "step_6"], "and nothing unfinished is left"
