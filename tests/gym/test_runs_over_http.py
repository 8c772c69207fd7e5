"""Whole runs against environment servers in processes of their own: one that behaves, one that does not, one killed.

The runs are the product's own but for the place of their workers, see ``forked``.
"""

import json
import os
import re
import signal
import time

import pytest
import yaml

import forked
from calculator_server import rows, serving, write_rows
from gymloop.startup import hold_socket

from .misbehaving import misbehaving

PROMPTS, SIZE = 2, 3
NAMED_WITHIN_S = 10.0
ENDED_WITHIN_S = 60.0


class Lab:
    """A folder with recipes, and runs of them."""

    def __init__(self, folder, model, nursery):
        self.folder = folder
        self.model = model
        self.nursery = nursery

    def recipe(self, name, environments, tasks, **rollouts):
        write_rows(self.folder / f"{name}.jsonl", tasks)
        recipe = {
            "grpo": {
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": SIZE,
                "max_num_steps": 2,
                "max_num_epochs": 10_000,
                "max_rollout_turns": 2,
            },
            "rollouts": {"call_timeout_s": 10.0, **rollouts},
            "policy": {
                "model_name": str(self.model),
                "max_total_sequence_length": 1024,
                "precision": "float32",
                "optimizer": {"kwargs": {"lr": 1e-3}},
                "generation": {"max_new_tokens": 8, "torch_cfg": {"max_batch_size": 6}},
            },
            "data": {"train": {"data_path": f"{name}.jsonl"}, "shuffle": False},
            "env": {"environments": environments},
            "checkpointing": {"enabled": False},
            "logger": {"log_dir": str(self.folder / "results"), "tensorboard_enabled": False},
            "startup": {"deadline_s": 30.0},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    def start(self, recipe, *overrides):
        how = {"prepare": ("dictated:install", {"folder": str(self.model)})}
        return self.nursery.start("train", recipe, "--run", "r", *overrides, **how)

    def run_dir(self, recipe):
        return self.folder / "results" / recipe.stem / "r"

    def metrics(self, recipe):
        path = self.run_dir(recipe) / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def records(self, recipe, step):
        path = self.run_dir(recipe) / "trajectories" / f"step_{step:05d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def log(self, recipe):
        path = self.run_dir(recipe) / "logs" / "run.log"
        return path.read_text() if path.exists() else ""

    def until(self, running, condition, what):
        give_up = time.monotonic() + 60
        while not condition():
            assert running.alive(), f"{what}: {running.wait().output}"
            assert time.monotonic() < give_up, f"{what} did not come"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, toy):
    with forked.Nursery() as nursery:
        yield Lab(tmp_path_factory.mktemp("servers"), toy("q"), nursery)


def server_at(url, **fields):
    return {"calculator": {"url": url, **fields}}


def test_a16_a_run_trains_on_an_environment_behind_http_with_tool_calls(lab):
    with serving() as server:
        recipe = lab.recipe("calls", server_at(server.url), rows(4))
        done = lab.start(recipe).wait()
        assert done.code == 0, done.output
        calls = server.log()
        assert server.exit_code is None, "a run does not end a server that it has not started"
    steps = lab.metrics(recipe)[1:]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert (step["rollouts/finished"], step["rollouts/failed"]) == (PROMPTS * SIZE, 0)
        assert step["tokens/trained"] == step["tokens/sampled"] > 0
        assert step["tools/rollouts_with_calls"] == 1.0
    every = 2 * PROMPTS * SIZE
    assert calls == {"seed_session": every, "calculate": every, "verify": every, "close_session": every, "open": 0}
    for record in lab.records(recipe, 2):
        (output,) = [item for item in record["output"] if item["type"] == "function_call_output"]
        assert output["output"] == "408", "what the server's tool said"


def free_port():
    """Outside the range from which the kernel gives ports to others meanwhile."""
    with hold_socket(18000, 18999) as held:
        return held.getsockname()[1]


def test_a_remote_agent_and_a_gymnasium_play_in_one_run(lab):
    """The agent server calls the run's model by itself, at the port that the recipe fixes."""
    port = free_port()
    plain = {"responses_create_params": {"input": "hi", "tools": []}}
    far = {**plain, "agent_ref": {"name": "far"}, "model_url": f"http://127.0.0.1:{port}/v1"}
    steps = {**plain, "agent_ref": {"name": "steps"}, "name": "steps"}
    with serving() as agent, misbehaving() as gymnasium:
        environments = {
            "far": {"url": agent.url, "agent": "remote"},
            "steps": {"url": gymnasium.url, "agent": "gymnasium"},
        }
        recipe = lab.recipe("others", environments, [far, steps])
        ports = [f"policy.generation.port_range_{end}={port}" for end in ("low", "high")]
        done = lab.start(recipe, *ports).wait()
        assert done.code == 0, done.output
        assert agent.log() == {"run": 2 * SIZE, "open": 0}
    records = [(step, record) for step in (1, 2) for record in lab.records(recipe, step)]
    assert len(records) == 2 * PROMPTS * SIZE
    for step, record in records:
        assert "reward" in record, record
        assert record["weight_versions"] == [step - 1, step - 1], "asked of the server"
    assert {record["reward"] for _, record in records} == {0.5, 1.0}


def test_a_server_that_is_still_starting_is_waited_for_and_named(lab):
    port = free_port()
    recipe = lab.recipe("nobody", server_at(f"http://127.0.0.1:{port}"), rows(2))
    began = time.monotonic()
    done = lab.start(recipe, "startup.deadline_s=3").wait()
    assert time.monotonic() - began < 15
    assert done.code == 1
    said = (
        rf"startup task 'environments' failed .*: environment server calculator at http://127.0.0.1:{port} "
        r"did not answer within 3 s: GET /healthz: ClientConnectorError"
    )
    assert re.search(said, done.output), done.output


def test_f13_when_every_rollout_of_a_step_fails_nothing_is_trained_and_the_end_names_server_and_route(lab):
    """In two steps the server has a login page for one of two rows; from the third on it fails every verdict."""

    def row(number):
        fault = "verify says 500" if number >= 2 * PROMPTS else "verify html" if number % PROMPTS else ""
        return {
            "responses_create_params": {"input": "hi", "tools": []},
            "agent_ref": {"name": "odd"},
            "name": f"row-{number}",
            "fault": fault,
        }

    with misbehaving() as server:
        recipe = lab.recipe(
            "fails",
            {"odd": {"url": server.url}},
            [row(number) for number in range(10 * PROMPTS)],
            max_infra_attempts=1,
            max_skipped_steps=1,
        )
        done = lab.start(recipe, "grpo.max_num_steps=10").wait()
        assert server.exit_code is None
    assert done.code == 1, done.output
    steps = lab.metrics(recipe)[1:]
    assert [step.get("weights/version") for step in steps] == [1, 2, None], "a step without a verdict trains nothing"
    assert [step["rollouts/failed"] for step in steps] == [SIZE, SIZE, PROMPTS * SIZE]
    for record in lab.records(recipe, 1):
        assert ("reward" in record) == (record["group_id"] == "e0-r00000")
        assert record.get("cause") == (None if "reward" in record else "bad_reply")
    failures = lab.records(recipe, 3)
    assert len(failures) == PROMPTS * SIZE
    for record in failures:
        assert "reward" not in record
        assert record["failure"] == "infra"
        assert record["where"] == "environment odd, verify"
        assert f"{server.url}/verify: 500" in record["reason"]
    assert f"{server.url}/verify: 500" in done.output
    assert "environment odd" in done.output


def test_f15_8_an_environment_server_killed_in_step_2_is_named_within_10_s_and_ends_the_run(lab):
    with serving() as server:
        recipe = lab.recipe("killed", server_at(server.url), rows(4))
        running = lab.start(recipe, "grpo.max_num_steps=100000")
        lab.until(running, lambda: any(step["step"] == 1 for step in lab.metrics(recipe)), "step 1")
        server.kill()
        began = time.monotonic()
        named = f"environment server calculator at {server.url} is gone"
        lab.until(running, lambda: named in lab.log(recipe), "the server's name")
        seconds = time.monotonic() - began
        done = running.wait()
        assert time.monotonic() - began < ENDED_WITHIN_S
    assert seconds < NAMED_WITHIN_S
    assert done.code == 1, done.output
    assert re.search(rf"^failed in step \d+.*: {re.escape(named)}", done.output, re.MULTILINE), done.output
    assert not running.alive()


@pytest.mark.slow
def test_a_server_that_ignores_sigterm_is_not_the_runs_to_end(lab):
    with serving("--ignore-sigterm") as server:
        recipe = lab.recipe("stubborn", server_at(server.url), rows(4))
        running = lab.start(recipe, "grpo.max_num_steps=100000")
        lab.until(running, lambda: len(lab.metrics(recipe)) > 1, "step 1")
        os.kill(running.pid, signal.SIGTERM)
        began = time.monotonic()
        done = running.wait()
        assert time.monotonic() - began < 20
        assert done.code == 143, done.output
        os.kill(server.pid, signal.SIGTERM)
        assert server.log()["seed_session"] > 0, "it serves on"
