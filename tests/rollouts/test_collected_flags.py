"""A collector flags each turn by its text and by what the server's parser could not read, and withholds rewards."""

import pytest

from gymloop.config.schema import RewardPenalties, Rollouts
from gymloop.gym.session import InProcessSource
from gymloop.rollouts.collector import Collector, RolloutTask
from gymloop.rollouts.flags import Flags, Patterns
from gymloop.rollouts.trajectory import as_record

from ..gym.scripted import Say, ScriptedModel, Weather, call_text, row, serving

GOOD = call_text('{"city": "Oslo"}')
CALL, THINKING, NONE = Flags(True, False), Flags(False, True), Flags()


async def played(*script, **more):
    source = InProcessSource("weather", Weather)
    task = RolloutTask("g", 0, row("p", list(source.tools), "weather"))
    async with serving(ScriptedModel({"p": list(script)})) as client:
        collector = Collector({"weather": source}, client, Rollouts(), max_turns=4, max_tokens=32, **more)
        (group,) = await collector.gather([task])
    (trajectory,) = group.trajectories
    return trajectory


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ([GOOD, "It is cold."], (NONE, NONE)),
        ([GOOD, "<tool_call>{"], (NONE, CALL)),
        ([f"{GOOD}\n<tool_call>\n{{cut", "<think> It is cold."], (CALL, THINKING)),
        ([Say("<tool_call>{", finish="length")], (CALL,)),
    ],
)
async def test_each_turn_has_its_flags(script, flags):
    trajectory = await played(*script)
    assert trajectory.flags == flags
    record = as_record(trajectory)
    assert record["invalid_tool_call_turns"] == [i for i, each in enumerate(flags) if each.invalid_tool_call]
    assert record["malformed_thinking_turns"] == [i for i, each in enumerate(flags) if each.malformed_thinking]


async def test_a_call_that_only_the_parser_knows_as_one_is_flagged_by_the_count():
    def malformed(reply):
        reply["choices"][0]["malformed_tool_calls"] = 1

    say = Say('[TOOL_CALLS] wx {"city', change=malformed)
    assert (await played(say)).flags == (CALL,)
    assert (await played(say, patterns=Patterns(invalid_tool_call=()))).flags == (NONE,)


async def test_a_reward_is_withheld_where_the_recipe_says_so():
    kept = await played(GOOD, " ")
    assert (kept.reward, kept.penalties) == (1.0, ())
    taken = await played(GOOD, " ", penalties=RewardPenalties(penalize_empty_final_answer=True))
    assert (taken.reward, taken.penalties, taken.components) == (0.0, ("empty_final_answer",), {"seen": 1.0})
