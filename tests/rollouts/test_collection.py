"""What a collection's lines hold, which rollouts are missing, and what a damaged file says."""

import json
from dataclasses import replace

import orjson
import pytest

from gymloop.errors import ConfigError
from gymloop.rollouts.collection import (
    Tally,
    as_result,
    differences,
    missing,
    read_lines,
    to_line,
    wanted,
    without_failures,
)
from gymloop.rollouts.flags import Flags
from gymloop.rollouts.trajectory import Failure, Trajectory, Turn

ROW = {"id": "a", "responses_create_params": {"input": "x"}, "agent_ref": {"name": "toy"}, "answer": 4}
TURN = Turn((1, 2), (3,), (-0.5,), "stop", 4, 5)
ITEM = {"type": "message", "role": "assistant", "id": "msg_0", "content": [{"type": "output_text", "text": "4"}]}
BUNDLE = {"prompt_token_ids": (1, 2), "generation_token_ids": (3,), "generation_log_probs": (-0.5,)}
TASKS = wanted("train", [ROW, ROW | {"id": "b"}], 2, None)


def finished(task=TASKS[0], reward=1.0, **more):
    made = Trajectory(task.group_id, task.sample_id, 1, (TURN,), reward, output=(ITEM | BUNDLE,), flags=(Flags(True),))
    return as_result(task, replace(made, **more))


def failed(task=TASKS[1]):
    return as_result(task, Failure(task.group_id, task.sample_id, 2, "infra", "gone", "model x", "disconnect"))


def read(*lines):
    return read_lines([line if isinstance(line, bytes) else to_line(line) for line in lines], "o.jsonl")


def test_tasks_are_named_by_part_and_place_whatever_the_limit():
    assert [(task.group_id, task.sample_id) for task in TASKS] == [
        ("train-r00000", 0), ("train-r00000", 1), ("train-r00001", 0), ("train-r00001", 1)
    ]  # fmt: skip
    assert wanted("train", [ROW, ROW], 2, 1) == [task for task in TASKS if task.group_id == "train-r00000"]
    assert wanted("validation", [ROW], 1, 9)[0].group_id == "val-r00000"


def test_a_finished_rollout_is_the_run_reply_of_an_agent_server_and_ours():
    result = json.loads(to_line(finished(components={"right": 1.0}, tool_calls=2)))
    assert result["answer"] == 4
    assert (result["_ng_task_index"], result["_ng_rollout_index"]) == (0, 0)
    assert (result["reward"], result["reward_components"]) == (1.0, {"right": 1.0})
    assert result["response"]["output"][0]["generation_token_ids"] == [3]
    assert (result["response"]["object"], result["response"]["status"]) == ("response", "completed")
    ours = result["gymloop"]
    assert (ours["group_id"], ours["sample_id"], ours["attempt"]) == ("train-r00000", 0, 1)
    assert (ours["weight_versions"], ours["tool_calls"], ours["invalid_tool_call_turns"]) == ([4, 5], 2, [0])
    assert ours["tokens"]["sampled"] == 1
    assert ours["tokens"]["segments"][0]["tokens"] == 3


def test_a_truncated_rollout_says_so_as_a_response_does():
    response = finished(truncated=True, cut=True)["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    out_of_turns = finished(truncated=True)["response"]
    assert (out_of_turns["status"], out_of_turns["incomplete_details"]) == ("completed", None)


def test_what_else_the_environment_said_is_in_the_result():
    result = finished(details={"extracted_answer": "4", "_ng_rollout_index": 9})
    assert (result["extracted_answer"], result["_ng_rollout_index"]) == ("4", 0)
    assert "details" not in result["gymloop"]


def test_a_rollout_without_token_ids_has_tokens_null():
    bare = replace(TURN, prompt_ids=(), sampled_ids=(), logprobs=(), first_version=None, last_version=None)
    assert finished(turns=(bare,), output=(ITEM,))["gymloop"]["tokens"] is None
    assert finished(turns=(TURN, bare))["gymloop"]["tokens"] is None


def test_a_failure_has_a_record_and_no_reward():
    result = failed()
    assert "reward" not in result
    assert "response" not in result
    assert result["answer"] == 4
    assert result["failure"] == {"kind": "infra", "cause": "disconnect", "reason": "gone", "where": "model x"}
    assert result["gymloop"] == {"group_id": "train-r00000", "sample_id": 1, "attempt": 2}


def test_what_has_no_line_is_missing_in_order():
    found = read(finished(TASKS[2]), failed())
    assert found.done == {("train-r00001", 0), ("train-r00000", 1)}
    assert found.failed == {("train-r00000", 1)}
    assert missing(TASKS, found.done) == [TASKS[0], TASKS[3]]


@pytest.mark.parametrize("tail", [b'{"gymloop": {"gro', b"\0\0\0\0", b'{"gymloop": {}}', b"not json\n", b"[1]\n"])
def test_a_torn_last_line_is_not_there(tail):
    first = to_line(finished())
    found = read(first, tail)
    assert (found.done, found.size) == ({("train-r00000", 0)}, len(first))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([b"not json\n", finished()], r"o\.jsonl, line 1: is not JSON, and lines follow it"),
        ([finished(), {"reward": 1}], r"line 2: is no rollout of a collection"),
        ([finished(), {"gymloop": {"group_id": "a", "sample_id": True}}], r"line 2: is no rollout"),
        ([finished(), finished()], r"line 2: rollout train-r00000/0 has a line before it"),
    ],
)
def test_a_damaged_file_is_refused_by_line(lines, said):
    with pytest.raises(ConfigError, match=said):
        read(*lines)


def test_failures_are_taken_out_and_nothing_else():
    lines = [to_line(finished()), to_line(failed()), to_line(finished(TASKS[3])), b"{torn"]
    assert list(without_failures(lines)) == [lines[0], lines[2]]


def test_sums_are_those_of_the_lines_in_any_order():
    lines = [
        finished(TASKS[0], 1.0, tool_calls=1),
        finished(TASKS[1], 0.25, truncated=True),
        finished(TASKS[2], 0.0, turns=()),
        failed(TASKS[3]),
    ]
    tally = read(*lines[::-1]).tally
    again = Tally()
    for line in lines:
        again.add(orjson.loads(to_line(line)))
    assert tally == again
    assert (tally.finished, tally.rewards, tally.passed, tally.solved) == (3, 1.25, 1, {"train-r00000"})
    assert (tally.with_calls, tally.truncated, tally.untokened, tally.tokens) == (1, 1, 1, 2)
    said = "\n".join(tally.sentences(2))
    assert "reward mean 0.4167  passed 33.3% of rollouts (reward at least 1), 50.0% of 2 rows at least once" in said
    assert "tool calls in 33.3%  truncated 33.3%  without token ids 1" in said
    assert "failed for good: 1 infra (disconnect)" in said


def test_nothing_collected_adds_up_to_nothing():
    assert list(Tally().sentences(3)) == []


def test_collections_differ_by_the_fields_that_both_know():
    assert differences({"seed": 1, "rows": "a"}, {"seed": 1, "weights": "w"}) == []
    assert differences({"seed": 1, "rows": "a" * 99}, {"seed": 2, "rows": "b"}) == [
        "seed was 2 and is 1",
        f"rows was b and is {'a' * 57}...",
    ]
