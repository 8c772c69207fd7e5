"""A thousand rollouts at once on one real server: none is lost, and what they take is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from gymloop.config.schema import Rollouts
from gymloop.generation.engine import Sample
from gymloop.gym.http_source import HttpSource
from gymloop.gym.model_client import ModelClient
from gymloop.gym.nemo.gym import Gym
from gymloop.gym.nemo.host import close, host
from gymloop.rollouts.collector import Collector, expand
from gymloop.rollouts.trajectory import segments
from gymloop.serving.server import GenerationServer
from gymloop.startup.sockets import hold_socket
from gymloop.tokens import Renderer
from toys import build_toy, text_ids

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

NAME = "workplace_assistant"
ROLLOUTS = int(os.environ.get("GYMLOOP_TEST_ROLLOUTS", "1024"))
SIZE = 8
MOST_BYTES_PER_ROLLOUT = 400_000
MOST_BYTES = 150_000_000
"""Beside the rollouts: what server, collector and their libraries take."""
END = 2
FIND = {"name": "company_directory_find_email_address", "arguments": {"name": "carlos"}}


class Scripted:
    """An engine that takes no time: looks up an address, makes the call that solves the row, and says so."""

    max_model_len = 65_536
    weight_version = 7

    def __init__(self, calls: list[dict]) -> None:
        self._said = [text_ids(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>") for call in calls]
        self._said.append(text_ids("It is done."))
        self._opened = "".join(map(chr, text_ids("<tool_call>")))

    async def generate(self, prompt_ids, sampling, request_id, on_tokens=None):
        turn = "".join(map(chr, prompt_ids)).count(self._opened)
        ids = (*self._said[turn], END)
        return Sample(ids, (-0.5,) * len(ids), "stop", 7, 7)

    def abort(self, request_id):
        pass


class Watch(threading.Thread):
    """The most memory and sockets that this process had at once, looked at every tenth of a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = self.most_sockets = 0
        self.began_bytes = resident()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.most_bytes = max(self.most_bytes, resident())
            self.most_sockets = max(self.most_sockets, sockets())

    def end(self) -> None:
        self._over.set()
        self.join(10.0)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # closed meanwhile
            continue
    return found


async def test_1024_concurrent_rollouts_all_end_in_their_reward(installation, tmp_path, capsys):
    path = installation.site_packages / "resources_servers" / NAME / "data" / "example.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    (solution,) = row["ground_truth"]
    calls = [FIND, {"name": solution["name"], "arguments": json.loads(solution["arguments"])}]
    row["agent_ref"] = {"type": "responses_api_agents", "name": NAME}
    # The tools that are used: a toy's tokens are bytes, and all 27 would be most of what is measured.
    tools = row["responses_create_params"]["tools"]
    used = {call["name"] for call in calls}
    row["responses_create_params"]["tools"] = [tool for tool in tools if tool["name"] in used]
    for field in ("temperature", "top_p", "parallel_tool_calls"):
        row["responses_create_params"].pop(field, None)

    config = f"resources_servers/{NAME}/configs/{NAME}.yaml"
    servers = await host(Gym.load(installation, {"config_paths": [config]}, [], os.environ), tmp_path / "logs")
    face = GenerationServer(hold_socket(20000, 29999), "toy", None)
    try:
        face.start()
        face.ready(Scripted(calls), Renderer.load(build_toy(tmp_path, "q", weights=False)))
        limits = Rollouts(max_concurrency=ROLLOUTS, deadline_s=1500.0, call_timeout_s=1200.0, max_infra_attempts=1)
        prompts = [(f"g{index:04d}", row) for index in range(ROLLOUTS // SIZE)]
        watch = Watch()
        watch.start()
        async with (
            HttpSource(NAME, servers[NAME].url, call_timeout_s=1200.0, max_connections=ROLLOUTS) as source,
            ModelClient(face.url, "toy", max_concurrency=ROLLOUTS, call_timeout_s=300.0, ready_timeout_s=30.0) as model,
        ):
            collector = Collector({NAME: source}, model, limits, max_turns=6, max_tokens=512)
            groups = await collector.gather(expand(prompts, SIZE))
            inside = source.server.open_connections, model.open_connections
        watch.end()
    finally:
        await asyncio.to_thread(face.close)
        await close(servers)

    failures = [str(failure) for group in groups for failure in group.failures]
    assert not failures, Counter(failures).most_common(3)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    ids = {(trajectory.group_id, trajectory.sample_id) for trajectory in trajectories}
    assert ids == {(group_id, sample) for group_id, _ in prompts for sample in range(SIZE)}
    assert len(trajectories) == ROLLOUTS
    assert {(trajectory.reward, len(trajectory.turns), trajectory.tool_calls) for trajectory in trajectories} == {
        (1.0, 3, 2)
    }
    assert all(len(segments(trajectory.turns)) == 1 for trajectory in trajectories)
    grown = watch.most_bytes - watch.began_bytes
    with capsys.disabled():
        print(f"\n{ROLLOUTS} rollouts: {grown / 1e6:.0f} MB, {watch.most_sockets} sockets at most, {inside} at the end")
    assert grown < MOST_BYTES + ROLLOUTS * MOST_BYTES_PER_ROLLOUT
    # One for the environment, and both ends of one for the model, whose server is in this process.
    assert watch.most_sockets <= 3 * ROLLOUTS + 64
    assert max(inside) <= ROLLOUTS
