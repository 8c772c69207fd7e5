"""The real NeMo Gym 0.7 drives gymloop: its model proxy and agents on the generation server, its collector on ``/run``.

Both sides are unmodified. Only the engine behind the generation server is scripted, so that the rollouts really solve
their tasks; renderer, parser, splicing and server are the product's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from calculator_server import rows as calculator_rows
from gymloop.gym.calculator import Calculator
from gymloop.gym.serve.app import EnvironmentApp
from gymloop.gym.serve.run import Play
from gymloop.gym.serve.server import environment_server
from gymloop.gym.session import InProcessSource
from gymloop.lifeline import reaped

from .solving import call, driven_gym, solving_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
DRIVER = Path(__file__).with_name("gym_driver.py")
DRIVEN_S = 800


gym = driven_gym
model = solving_model


def drive(gym, folder: Path, wish: dict, environ: dict | None = None) -> list[dict]:
    """What NeMo Gym made of the wish."""
    (folder / "wish.json").write_text(json.dumps({**wish, "out": str(folder / "out.json")}))
    with (folder / "log").open("w") as log, reaped():
        done = subprocess.run(
            [str(gym.python), str(DRIVER), str(folder / "wish.json")],
            cwd=folder, env={**os.environ, **(environ or {})}, stdout=log, stderr=log, timeout=DRIVEN_S, check=False,
        )  # fmt: skip
    said = (folder / "log").read_text()
    assert done.returncode == 0, said[-6000:]
    return json.loads((folder / "out.json").read_text())


def model_calls(result: dict) -> list[dict]:
    """The items that carry a token bundle."""
    return [item for item in result["response"]["output"] if item.get("prompt_token_ids")]


def assert_contiguous(result: dict) -> int:
    """Every prompt begins with all tokens of the turn before; returns the number of turns."""
    seen: list[int] = []
    turns = model_calls(result)
    for index, item in enumerate(turns):
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        assert item["prompt_token_ids"][: len(seen)] == seen, f"turn {index} does not continue the turn before"
        assert len(item["prompt_token_ids"]) > len(seen)
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
    return len(turns)


def test_run_helper_completes_workplace_rollouts_on_the_generation_server(gym, model):
    data = gym.site_packages / "resources_servers" / "workplace_assistant" / "data" / "example.jsonl"
    rows, solutions = [], {}
    for task, line in enumerate(data.read_text().splitlines()):
        row = json.loads(line)
        row |= {"_ng_task_index": task, "agent_ref": {"name": "workplace_assistant_simple_agent"}}
        steps = [call(one["name"], one["arguments"]) for one in row["ground_truth"]]
        solutions[row["responses_create_params"]["input"][-1]["content"]] = [*steps, "It is done."]
        rows += [{**row, "_ng_rollout_index": repeat} for repeat in range(2)]
    # A question that no context holds.
    long = {**rows[0], "_ng_task_index": 90, "_ng_rollout_index": 0}
    params = long["responses_create_params"]
    long["responses_create_params"] = {**params, "input": [{"role": "user", "content": "Too long? " + "a" * 50_000}]}
    server = model(solutions, 40_000)
    with tempfile.TemporaryDirectory(prefix="gd") as short:  # Ray's sockets have no place for a long name
        folder = Path(short)
        for kind in ("resources_servers/workplace_assistant", "responses_api_agents/simple_agent",
                     "environment_servers/legacy_agent", "responses_api_models/vllm_model"):  # fmt: skip
            (folder / "venvs" / kind).mkdir(parents=True)
            (folder / "venvs" / kind / ".venv").symlink_to(gym.folder.resolve())
        with socket.create_server(("127.0.0.1", 0)) as free:
            head = {"host": "127.0.0.1", "port": free.getsockname()[1]}
        config = {
            "config_paths": [
                "resources_servers/workplace_assistant/configs/workplace_assistant.yaml",
                "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
            ],
            "policy_model_name": "toy",
            "policy_api_key": "none",
            "policy_base_url": [server.url],
            "head_server": head,
            "model_endpoint_readiness_timeout_seconds": 0,
            "uv_venv_dir": str(folder / "venvs"),
            "skip_venv_if_present": True,
        }
        path = f"{gym.folder.resolve() / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        # Ray's workers would starve at niceness 15, and its first driver waits for some that nothing here needs.
        ray = {"RAY_TMPDIR": short, "RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
        environ = {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0", **ray}
        done = drive(gym, folder, {"config": config, "rows": [*rows, long]}, environ)
    *solved, too_long = [one["result"] for one in done]
    for row, result in zip(rows, solved, strict=True):
        assert result["reward"] == 1.0
        assert assert_contiguous(result) == len(row["ground_truth"]) + 1 > 1
    # What does not fit is an empty message and a reason, as from vLLM, never an exception.
    assert too_long["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert too_long["reward"] == 0.0


def test_the_collector_drives_a_served_environment(gym, model, tmp_path):
    tasks = calculator_rows(3)
    source = InProcessSource("calculator", Calculator)
    rows, solutions = [], {}
    for task, row in enumerate(tasks):
        said, result, solver = [], "", Calculator().solve(row)
        probe = Calculator()
        try:
            step = next(solver)
            while True:
                said.append(call(step.name, json.dumps(dict(step.arguments))))
                result = probe.calculate(**step.arguments)
                step = solver.send(result)
        except StopIteration as end:
            said.append(end.value)
        solutions[row["responses_create_params"]["input"][0]["content"]] = said
        rows += [{**row, "_ng_task_index": task, "_ng_rollout_index": repeat} for repeat in range(2)]
    server = model(solutions)
    held = socket.create_server(("127.0.0.1", 0))
    at = held.getsockname()[:2]
    served = environment_server(held, EnvironmentApp(source, at, Play(server.url, "toy")))
    served.start()
    try:
        done = drive(gym, tmp_path, {"rows": rows, "head": {"host": at[0], "port": at[1]}})
    finally:
        served.close()
    for one in done:
        result, row = one["result"], one["row"]
        assert result["reward"] == 1.0
        assert result["reward_components"] == {"calls": 0.4, "answer": 0.6}
        assert assert_contiguous(result) == len(row["steps"]) + 1
        assert result["response"]["usage"]["output_tokens"] > 0
