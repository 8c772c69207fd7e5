"""A folder with a recipe for a tiny run in it, ways to run it there, and to find all processes that descend from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import load_file

from gymloop.compat import settle_precision

MARK = "GYMLOOP_TEST_TREE"
START_LIMIT_S = 150
ON_VLLM = (
    "policy.generation.backend=vllm",
    "+policy.generation.vllm_cfg={load_format: dummy, max_num_seqs: 8, kv_cache_memory_bytes: 67108864}",
    "startup.deadline_s=400",
)
"""Overrides that run a recipe on a small vLLM."""


class Home:
    """A folder with a recipe in it, and ways to run the recipe there."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(
            yaml.safe_dump(
                {
                    "grpo": {
                        "num_prompts_per_step": 2,
                        "num_generations_per_prompt": 3,
                        "max_num_steps": 3,
                        "max_rollout_turns": 2,
                        "val_period": 2,
                        "max_val_samples": 2,
                    },
                    "sft_warmup": {"steps": 1, "batch_size": 2},
                    "policy": {
                        "model_name": str(model),
                        "max_total_sequence_length": 1024,
                        "precision": "float32",
                        "optimizer": {"kwargs": {"lr": 1e-3}},
                        "generation": {"max_new_tokens": 12, "torch_cfg": {"max_batch_size": 8}},
                    },
                    "data": {
                        "train": {"environment": "calculator", "num_tasks": 8},
                        "validation": {"environment": "calculator", "num_tasks": 2, "seed": 9},
                    },
                    "env": {"environments": {"calculator": {"entrypoint": "gymloop.gym.calculator:Calculator"}}},
                    "checkpointing": {"save_period": 1},
                    "logger": {"log_dir": str(folder / "results")},
                    "startup": {"deadline_s": 120.0},
                }
            )
        )

    @property
    def run_dir(self) -> Path:
        return self.folder / "results" / "tiny" / "r"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gymloop.cli.main", "train", str(self.recipe), "--run", "r", *arguments]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, MARK: str(self.folder)},
            start_new_session=True,
        )

    def train(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=280)
        return process.returncode, output

    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not any(entry["step"] >= step for entry in self.metrics()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"step {step} did not come within {START_LIMIT_S} s"
            time.sleep(0.1)

    def processes(self) -> dict[int, str]:
        """Everything alive that descends from a run started here, by the marked environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{MARK}={self.folder}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command:  # a zombie has none
                        found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def weights(self, step: int) -> dict[str, np.ndarray]:
        files = sorted((self.run_dir / "checkpoints" / f"step_{step}" / "policy").rglob("model*.safetensors"))
        assert files, "a checkpoint holds the model's weights"
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def kill_all(self) -> None:
        """Leave nothing behind, whatever the test found."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def engine_and_trainer_agree(metrics: dict[str, float], most: float) -> bool:
    """Whether a step's logprobs are of the same weights, in the precision that this CPU computes in by default.

    A logit that is rounded to bfloat16 moves a single logprob by tenths, and the distribution hardly.

    Args:
        metrics: of the step.
        most: difference of two logprobs in float32.
    """
    if settle_precision("auto", "cpu") == "bfloat16":
        return metrics["mismatch/kl"] < 5e-3
    return metrics["mismatch/max_abs_logprob_diff"] < most


def gone(home: Home, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while home.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not home.processes()
