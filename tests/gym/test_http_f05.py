"""F05 with an environment server over HTTP: bad arguments are answered to the model and never reach the server."""

import pytest

from gymloop.config.schema import Rollouts
from gymloop.gym.http_source import HttpSource
from gymloop.rollouts.collector import Collector, RolloutTask

from .misbehaving import misbehaving
from .scripted import ScriptedModel, call_text, serving

GOOD = call_text('{"city": "Oslo"}')
UNCLOSED = call_text('"{\\"city\\": \\"Oslo\\""')
NINE = {
    # calls that the server sees, and the last of them
    "a": (GOOD, 1, {"city": "Oslo"}),
    "b": (call_text('""'), 1, {}),
    "c": (UNCLOSED, 0, None),
    "d": (call_text('["Oslo"]'), 0, None),
    "e": (call_text("42"), 0, None),
    "f": (call_text("null"), 1, {}),
    "g": (call_text('{"city": "Oslo"}', name="wxx"), 0, None),
    "h": (UNCLOSED + GOOD, 1, {"city": "Oslo"}),
    "i": ('<tool_call>\n{"name": "wx", "arguments": {"city": "Oslo"\n</tool_call>', 0, None),
}


@pytest.fixture
def server():
    with misbehaving() as process:
        yield process


async def test_f05_the_server_sees_the_good_calls_and_every_rollout_finishes(server):
    said = []
    for _ in range(2):
        model = ScriptedModel({name: [text, "end"] for name, (text, _, _) in NINE.items()})
        tools = [{"type": "function", "name": "wx", "parameters": {"type": "object", "properties": {}}}]
        tasks = [
            RolloutTask(
                "nine",
                index,
                {
                    "responses_create_params": {"input": name, "tools": tools},
                    "agent_ref": {"name": "env"},
                    "name": name,
                    "fault": "pays for a city",
                },
            )
            for index, name in enumerate(NINE)
        ]
        async with serving(model) as client, HttpSource("env", server.url, call_timeout_s=5.0) as source:
            collector = Collector({"env": source}, client, Rollouts(), max_turns=3, max_tokens=64)
            (group,) = await collector.gather(tasks)
        assert (len(group.trajectories), group.failures) == (9, ())
        rewards = {name: one.reward for name, one in zip(NINE, group.trajectories, strict=True)}
        assert rewards == {name: float(name in ("a", "h")) for name in NINE}
        said.append(
            {
                (request["messages"][0]["content"], message["content"])
                for request in model.requests
                for message in request["messages"]
                if message["role"] == "tool" and message["content"].startswith("Error")
            }
        )
    assert said[0] == said[1], "the same words each time"
    assert {name for name, _ in said[0]} >= {"c", "d", "e", "g", "h"}
    for name, (_, calls, last) in NINE.items():
        assert server.log()[name].count("tool") == 2 * calls, name
        assert server.bodies(name).get("tool") == last, name
