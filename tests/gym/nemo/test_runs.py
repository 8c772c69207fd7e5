"""Whole runs whose recipe names NeMo Gym's configs: servers started, watched, killed, started again, ended.

The servers are those of a stand-in installation; the runs are the product's own but for the place of their workers.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import threading
import time

import pytest
import yaml

import forked
from calculator_server import rows, serving

from ..test_runs_over_http import ENDED_WITHIN_S, NAMED_WITHIN_S, PROMPTS, SIZE, Lab
from .stand_in import AGENT, BLOCKS, CONFIG, OWN_ROW, SERVER, gone, make, make_own_agent, processes

LONG = "grpo.max_num_steps=100000"


class GymLab(Lab):
    """Recipes that start servers of one stand-in installation."""

    def hosted(self, name, *, count=4, **settings):
        self.installation = make(self.folder / f"gym-{name}")
        tasks = [{**row, "agent_ref": {"name": AGENT}} for row in rows(count)]
        recipe = self.recipe(name, {}, tasks)
        content = yaml.safe_load(recipe.read_text())
        override = {SERVER: {"resources_servers": {SERVER: settings}}} if settings else {}
        content["env"] = {
            "should_use_nemo_gym": True,
            "nemo_gym_installation": f"gym-{name}",
            "nemo_gym": {"config_paths": [CONFIG], "is_trajectory_collection": False, **override},
        }
        recipe.write_text(yaml.safe_dump(content))
        return recipe

    def until_step(self, running, recipe, step):
        self.until(running, lambda: any(line["step"] >= step for line in self.metrics(recipe)), f"step {step}")

    def kill_server(self):
        (pid,) = processes(self.installation)
        os.kill(pid, signal.SIGKILL)
        return pid


@pytest.fixture(scope="module")
def lab(tmp_path_factory, toy):
    with forked.Nursery() as nursery:
        yield GymLab(tmp_path_factory.mktemp("hosted"), toy("q"), nursery)


@contextlib.contextmanager
def head_server(config):
    """The address of what answers as NeMo Gym's head server does."""

    class Head(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(yaml.safe_dump(config)).encode()
            self.send_response(200 if self.path == "/global_config_dict_yaml" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Head) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.slow
def test_a_run_plays_on_the_servers_of_a_running_nemo_gym_and_leaves_them_alone(lab):
    recipe = lab.hosted("attached")
    with serving() as server:
        host, port = server.url.removeprefix("http://").split(":")
        config = yaml.safe_load(BLOCKS)
        config[SERVER]["resources_servers"][SERVER] |= {"host": host, "port": int(port), "judge_key": "k"}
        with head_server(config) as url:
            overrides = ["~env.nemo_gym_installation", "~env.nemo_gym.config_paths"]
            done = lab.start(recipe, *overrides, f"+env.nemo_gym.head_server_url={url}").wait()
        assert done.code == 0, done.output
        assert server.log()["verify"] == 2 * PROMPTS * SIZE
        assert server.exit_code is None
    assert not processes(lab.installation)
    assert all(record["truncated"] for record in lab.records(recipe, 2)), "the agent's max_steps is 1"


def test_a_run_starts_the_servers_of_its_recipe_trains_on_them_and_ends_them(lab):
    recipe = lab.hosted("trains")
    done = lab.start(recipe).wait()
    assert done.code == 0, done.output
    assert gone(lab.installation, 5)
    steps = lab.metrics(recipe)[1:]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert (step["rollouts/finished"], step["rollouts/failed"]) == (PROMPTS * SIZE, 0)
        assert step["tools/rollouts_with_calls"] == 1.0
        assert step["health/server_restarts"] == 0
    for record in lab.records(recipe, 2):
        assert len(record["weight_versions"]) == 2
        (output,) = [item for item in record["output"] if item["type"] == "function_call_output"]
        assert output["output"] == "408", "what the server's tool said"
        assert record["truncated"], "the agent's max_steps is 1, and the run's limit 2"
    assert "starting calculator" in (lab.run_dir(recipe) / "logs" / "calculator.log").read_text()
    assert "startup/gym.calculator_s" in lab.metrics(recipe)[0]


@pytest.mark.slow
def test_an_agent_of_its_own_gets_the_address_of_the_runs_model_and_plays_beside_the_others(lab):
    recipe = lab.hosted("own", count=1)
    config = make_own_agent(lab.folder)
    with (lab.folder / "own.jsonl").open("a") as file:
        file.write(json.dumps(OWN_ROW) + "\n")
    done = lab.start(recipe, f"env.nemo_gym.config_paths=[{CONFIG},{config}]").wait()
    assert done.code == 0, done.output
    rewards = [record["reward"] for step in (1, 2) for record in lab.records(recipe, step)]
    assert rewards.count(0.5) == 2 * SIZE
    assert len(rewards) == 2 * PROMPTS * SIZE
    timeline = json.loads((lab.run_dir(recipe) / "startup.json").read_text())
    needs = {task["task"]: tuple(task["needs"]) for task in timeline["records"]}
    assert needs["gym.calculator"] == ("gym",), "it needs neither model nor Ray"
    assert needs["gym.own"] == ("gym", "server")


def test_a_server_that_is_killed_is_named_within_10_s_and_started_again_and_the_run_trains_on(lab):
    recipe = lab.hosted("killed")
    running = lab.start(recipe, LONG)
    lab.until_step(running, recipe, 1)
    first = lab.kill_server()
    began = time.monotonic()
    named = "restart 1 of 3 (health.max_server_restarts), since NeMo Gym server calculator ended, killed by SIGKILL"
    lab.until(running, lambda: named in lab.log(recipe), "its name")
    assert time.monotonic() - began < NAMED_WITHIN_S
    assert "starting calculator" in lab.log(recipe).partition(named)[2], "with the end of its log"
    lab.until(running, lambda: "answers again" in lab.log(recipe), "its return")
    last = lab.metrics(recipe)[-1]["step"]
    lab.until_step(running, recipe, last + 2)
    (second,) = processes(lab.installation)
    assert second != first
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait().code == 143
    steps = lab.metrics(recipe)[1:]
    assert sum(step["health/server_restarts"] for step in steps) == 1
    assert sum(step["rollouts/finished"] + step["rollouts/failed"] for step in steps) == len(steps) * PROMPTS * SIZE
    assert all(step["rollouts/failed"] == 0 for step in steps), "another attempt makes good what the death cost"
    assert gone(lab.installation, 5)


@pytest.mark.slow
def test_f15_8_beyond_its_budget_a_server_that_dies_ends_the_run_by_name(lab):
    recipe = lab.hosted("budget")
    running = lab.start(recipe, LONG, "health.max_server_restarts=1")
    lab.until_step(running, recipe, 1)
    lab.kill_server()
    lab.until(running, lambda: "answers again" in lab.log(recipe), "its return")
    lab.kill_server()
    began = time.monotonic()
    said = "NeMo Gym server calculator failed again after 1 restarts (health.max_server_restarts): NeMo Gym server"
    lab.until(running, lambda: said in lab.log(recipe), "its name")
    assert time.monotonic() - began < NAMED_WITHIN_S
    done = running.wait()
    assert time.monotonic() - began < ENDED_WITHIN_S
    assert done.code == 1, done.output
    assert said in done.output
    assert gone(lab.installation, 5)


@pytest.mark.slow
def test_without_restarts_the_first_death_ends_the_run(lab):
    recipe = lab.hosted("none")
    running = lab.start(recipe, LONG, "health.max_server_restarts=0")
    lab.until_step(running, recipe, 1)
    lab.kill_server()
    done = running.wait()
    assert done.code == 1, done.output
    assert re.search(r"^failed in step \d+.*: NeMo Gym server calculator ended, killed by SIGKILL", done.output, re.M)


@pytest.mark.slow
def test_a_server_that_dies_at_once_each_time_ends_the_run_fast(lab):
    flag = lab.folder / "no-words"
    recipe = lab.hosted("loop", dies_if=str(flag))
    running = lab.start(recipe, LONG)
    lab.until_step(running, recipe, 1)
    flag.touch()
    lab.kill_server()
    began = time.monotonic()
    done = running.wait()
    assert time.monotonic() - began < 20
    assert done.code == 1, done.output
    assert (
        "calculator was started again and failed at once: NeMo Gym server calculator ended, exit code 3" in done.output
    )
    assert "no such dictionary: words.txt" in done.output


def test_a_server_that_dies_at_its_first_start_fails_the_startup_with_its_last_words(lab):
    flag = lab.folder / "never"
    flag.touch()
    recipe = lab.hosted("cold", dies_if=str(flag))
    began = time.monotonic()
    done = lab.start(recipe).wait()
    assert time.monotonic() - began < 20
    assert done.code == 1
    assert "startup task 'gym.calculator' failed" in done.output
    assert "NeMo Gym server calculator ended, exit code 3" in done.output
    assert "no such dictionary: words.txt" in done.output
    assert gone(lab.installation, 5)


def test_f15_1_a_killed_run_leaves_no_server_and_the_next_start_works(lab):
    recipe = lab.hosted("orphan")
    running = lab.start(recipe, LONG)
    lab.until_step(running, recipe, 1)
    assert processes(lab.installation)
    running.kill()
    assert running.wait().code == -signal.SIGKILL
    assert gone(lab.installation, 15)
    again = lab.start(recipe, "--run", "again").wait()
    assert again.code == 0, again.output
