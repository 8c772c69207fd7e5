"""The contract with NeMo Gym: its recorded rollouts, replayed through gymloop on hosted servers, get their rewards.

The table is ``contract.py``. At most four servers run at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymloop.gym.agent import read_arguments
from gymloop.gym.http import Cookies, HttpServer
from gymloop.gym.http_source import HttpSource
from gymloop.gym.nemo.host import Gym, close, host
from gymloop.gym.nemo.install import Installation
from gymloop.gym.verdict import read_number
from gymloop.lifeline import reaped

from .contract import ENVIRONMENTS, Recorded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

AT_ONCE = 4
CALL_S = 120.0
NOBODY = ("127.0.0.1", 9)
"""The policy's address, for servers that would ask a judge: none of the recorded rows may need it."""


RAY = """
import sys
import ray._private.utils as utils
utils.get_dashboard_dependency_error = lambda: ImportError("left out")
import ray
print(ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False).address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


RAY_ENVIRON = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""A run's Ray hands on whether it asks for a token; this one asks for none."""


@contextmanager
def light_ray(installation: Installation) -> Iterator[str]:
    """The address of a Ray that a server can join, as a run's: of the same Python, and without a dashboard.

    With one, as the server would start it itself, it ends where the dashboard's agent is not up within 15 s.
    """
    with tempfile.TemporaryDirectory(prefix="gr") as short, reaped():  # Ray's sockets have no place for a long name
        process = subprocess.Popen(
            [str(installation.python), "-c", RAY],
            env={**os.environ, **RAY_ENVIRON, "RAY_TMPDIR": short},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


class Hosting:
    """The servers of one batch of environments at a time; a test of the next batch ends them and starts its own."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self.installation = installation
        self._folder = folder
        self._runner = asyncio.Runner()
        self._batch: tuple[Recorded, ...] = ()
        self._ray = ExitStack()
        self._servers: dict[str, Any] = {}
        self._urls: dict[str, str] = {}

    def url(self, wanted: Recorded) -> str:
        if wanted not in self._batch:
            self.end()
            together = [one for one in ENVIRONMENTS if not one.ray and not missing(one, self.installation)]
            place = 0 if wanted.ray else together.index(wanted) // AT_ONCE * AT_ONCE
            batch = (wanted,) if wanted.ray else tuple(together[place : place + AT_ONCE])
            ray = self._ray.enter_context(light_ray(self.installation)) if wanted.ray else None
            self._urls = self.run(self._start(batch, ray))
            self._batch = batch
        return self._urls[wanted.name]

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    async def _start(self, batch: tuple[Recorded, ...], ray: str | None) -> dict[str, str]:
        given: dict[str, Any] = {"config_paths": [self._config(one) for one in batch]}
        for one in batch:
            given |= one.given
        gym = Gym.load(self.installation, given, [self._folder], os.environ)
        self._servers = await host(
            gym, self._folder / "logs", model=NOBODY, ray_address=ray, environ={**os.environ, **RAY_ENVIRON}
        )
        return {gym.blocks.servers[name].type: server.url for name, server in self._servers.items()}

    def _config(self, one: Recorded) -> str:
        if not one.servers_only:
            return one.config_path
        blocks = yaml.safe_load((self.installation.site_packages / one.config_path).read_text())
        path = self._folder / f"{one.name}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in blocks.items() if "resources_servers" in value}))
        return str(path)

    def end(self) -> None:
        servers, self._servers, self._batch = self._servers, {}, ()
        self.run(close(servers))
        self._ray.close()

    def close(self) -> None:
        self.end()
        self._runner.close()


@pytest.fixture(scope="module")
def hosting(installation, tmp_path_factory) -> Iterator[Hosting]:
    hosting = Hosting(installation, tmp_path_factory.mktemp("contract"))
    yield hosting
    hosting.close()


def missing(one: Recorded, installation: Installation) -> list[str]:
    return [module for module in one.modules if not list(installation.site_packages.glob(f"{module}*"))]


@pytest.mark.parametrize("one", ENVIRONMENTS, ids=lambda one: one.name)
def test_recorded_rollouts_get_their_rewards(hosting, one):
    if lacks := missing(one, hosting.installation):
        if "GYMLOOP_TEST_GYM" in os.environ:
            pytest.skip(f"the given installation lacks {', '.join(lacks)}: --extra {' --extra '.join(one.extras)}")
        pytest.fail(f"the tests' own installation lacks {', '.join(lacks)}")
    evidence = {"recorded": replayed, "steps": stepped, "played": played, "solved": solved}[one.evidence]
    hosting.run(evidence(one, hosting.url(one), hosting.installation))


async def replayed(one: Recorded, url: str, installation: Installation) -> None:
    rows = {said_in(row): row for row in read(one, "example.jsonl", installation)}
    recordings = read(one, "example_rollouts.jsonl", installation)
    assert len(recordings) == 5
    recorded = {line: recording["reward"] for line, recording in enumerate(recordings, 1)}
    got: dict[int, float] = {}
    async with HttpSource(one.name, url, call_timeout_s=CALL_S) as source:
        for line, recording in enumerate(recordings, 1):
            if line in one.undecided:
                continue
            # The recordings do not keep the order of the rows, and not every field of a row.
            row = rows[said_in(recording)]
            for _ in range(1 if line in one.except_rows else one.tries):
                got[line] = await replay(one, source, row, recording)
                if got[line] == recorded[line]:
                    break
    differ = {line for line in got if got[line] != recorded[line]}
    assert differ == set(one.except_rows), f"got {got}, recorded {recorded}"


async def replay(one: Recorded, source: HttpSource, row: dict, recording: dict) -> float:
    session = await source.seed_session(row)
    for item in recording["response"]["output"]:
        if item["type"] == "function_call":
            arguments = read_arguments(item["arguments"])
            assert isinstance(arguments, dict)
            await session.call_tool(item["name"], arguments)
    response = {key: value for key, value in recording["response"].items() if key not in one.drops}
    reward = (await session.verify(response)).reward
    await session.close()
    return reward


async def stepped(one: Recorded, url: str, installation: Installation) -> None:
    rows = read(one, "example.jsonl", installation)
    recordings = read(one, "example_rollouts.jsonl", installation)
    async with HttpServer(url, call_timeout_s=CALL_S) as server:
        for recording in recordings:
            row = rows[recording["_ng_task_index"]]
            cookies, total, seen = Cookies(), 0.0, []
            await server.post("/reset", row, cookies, opens=True)
            output = recording["response"]["output"]
            for item in output:
                if item.get("role") == "assistant":
                    step = await turn(server, row, [item], cookies)
                    total += read_number(step, "reward", url)
                    seen.append(step["observation"])
            assert step["terminated"] == recording["terminated"]  # the agent, too, truncates, after so many turns
            assert total == pytest.approx(recording["reward"], abs=1e-9)
            told = [item["content"] for item in output if item.get("role") == "user"]
            assert told
            assert seen[: len(told)] == told


async def played(one: Recorded, url: str, installation: Installation) -> None:
    move, worth = {"blackjack": (card, card_worth), "grl_tetris": (down, total_worth)}[one.name]
    (row, *_) = read(one, "example.jsonl", installation)
    async with HttpServer(url, call_timeout_s=CALL_S) as server:
        for number in range(5):
            cookies = Cookies()
            step = (await server.post("/reset", row, cookies, opens=True)).json()
            total = 0.0
            for _ in range(100):
                text = f"<action>{move(step['observation'], number)}</action>"
                content = [{"type": "output_text", "text": text, "annotations": []}]
                item = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": content}
                step = await turn(server, row, [item], cookies)
                total += read_number(step, "reward", url)
                if step["terminated"]:
                    break
            assert step["terminated"]
            assert total == pytest.approx(worth(step["info"]))


def card(observation: str, number: int) -> str:
    mine = int(re.search(r"Your hand: .* = (\d+)", observation)[1])
    return "hit" if mine < 12 + number else "stand"


def card_worth(info: dict[str, Any]) -> float:
    return {"win": 1.0, "draw": 0.0, "loss": -1.0, "bust": -1.0}[info["result"]]


def down(observation: str, number: int) -> str:
    return "Down"


def total_worth(info: dict[str, Any]) -> float:
    return info["total_reward"]


async def turn(server: HttpServer, row: dict, items: list, cookies: Cookies) -> dict[str, Any]:
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "output": items,
    }
    return (await server.post("/step", {**row, "response": response}, cookies)).json()


async def solved(one: Recorded, url: str, installation: Installation) -> None:
    async with HttpSource(one.name, url, call_timeout_s=CALL_S) as source:
        for row in read(one, "example.jsonl", installation):
            for calls, reward in ((row["ground_truth"], 1.0), ([], 0.0)):
                session = await source.seed_session(row)
                output = []
                for index, call in enumerate(calls):
                    output.append({"type": "function_call", "id": f"fc_{index}", "call_id": f"c{index}", **call})
                    result = await session.call_tool(call["name"], json.loads(call["arguments"]))
                    output.append({"type": "function_call_output", "call_id": f"c{index}", "output": result})
                assert (await session.verify({"status": "completed", "output": output})).reward == reward
                await session.close()


def read(one: Recorded, file: str, installation: Installation) -> list[dict[str, Any]]:
    path = installation.site_packages / "resources_servers" / one.name / "data" / file
    return [json.loads(line) for line in path.read_text().splitlines()]


def said_in(row: dict[str, Any]) -> str:
    """What tells rows apart that have no id: the messages of the input."""
    value = row["responses_create_params"]["input"]
    return value if isinstance(value, str) else json.dumps([(item.get("role"), text(item)) for item in value])


def text(item: dict[str, Any]) -> str:
    content = item.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
