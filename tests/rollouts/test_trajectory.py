"""Segments hold what was sampled in its own context, and say why they begin and where each token came from."""

from __future__ import annotations

import json

import pytest

from gymloop.rollouts.trajectory import Failure, Trajectory, Turn, all_segments, as_record, segments
from gymloop.tokens.divergence import AROUND, diverge, first_difference, read_divergence


def turn(prompt, sampled, divergence=None, provenance=None):
    logprobs = tuple(-0.5 for _ in sampled)
    return Turn(tuple(prompt), tuple(sampled), logprobs, "stop", 0, 0, divergence, provenance)


def trajectory(*turns, **named):
    return Trajectory("g", 0, 0, turns, 1.0, **named)


def test_turns_that_extend_one_another_are_one_segment():
    (segment,) = segments([turn([1, 2], [3]), turn([1, 2, 3, 4], [5, 6])])
    assert (segment.ids, segment.sampled) == ((1, 2, 3, 4, 5, 6), (2, 4, 5))
    assert segment.began is None


def test_a_turn_that_departs_begins_a_segment_that_says_so():
    told = diverge("messages[1] was edited", [1, 2, 3], [1, 9, 4], str)
    first, second = segments([turn([1, 2], [3]), turn([1, 9, 4], [5], told)])
    assert (first.first_turn, second.first_turn) == (0, 1)
    assert (first.began, second.began) == (None, told)
    assert second.ids == (1, 9, 4, 5)


def test_a_break_that_nobody_explained_is_still_located():
    (_, second) = segments([turn([1, 2], [3]), turn([1, 2, 4], [5])])
    assert second.began.index == 2
    assert (second.began.carried.ids, second.began.rendered.ids) == ((1, 2, 3), (1, 2, 4))
    assert second.began.carried.text is None
    assert "turn 1" in second.began.reason


def test_a_turn_without_samples_carries_its_prompt_and_a_segment_without_any_is_not_trained():
    (segment,) = segments([turn([1, 2], []), turn([1, 2, 3], [4])])
    assert segment.ids == (1, 2, 3, 4)
    turns = [turn([1, 2], [3]), turn([7], [])]
    assert len(all_segments(turns)) == 2
    assert [part.ids for part in segments(turns)] == [(1, 2, 3)]


def test_every_token_knows_its_provenance():
    turns = [
        turn([1, 2], [3], provenance=(("template", 1), ("environment", 1))),
        turn([1, 2, 3, 4, 5], [6, 7], provenance=(("environment", 1), ("template", 1))),
        turn([1, 2, 3, 4, 5, 6, 7, 8], [9]),
    ]
    (segment,) = segments(turns)
    assert segment.provenance == (
        ("template", 1),
        ("environment", 1),
        ("sampled", 1),
        ("environment", 1),
        ("template", 1),
        ("sampled", 2),
        ("unlabelled", 1),
        ("sampled", 1),
    )


def test_runs_that_cover_more_than_the_new_tokens_are_read_from_the_end():
    turns = [turn([1], [2]), turn([1, 2, 3], [4], provenance=(("environment", 2), ("template", 1)))]
    assert segments(turns)[0].provenance[2:] == (("template", 1), ("sampled", 1))


def test_a_record_shows_where_a_segment_departs():
    told = diverge("messages[1] was edited", [1, 2, 3], [1, 9, 4], lambda ids: "".join(map(str, ids)))
    record = json.loads(json.dumps(as_record(trajectory(turn([1, 2], [3]), turn([1, 9, 4], [5], told)))))
    first, second = record["segments"]
    assert (first["began"], first["tokens"], first["sampled"]) == (None, 3, 1)
    assert second["began"] == {
        "reason": "messages[1] was edited",
        "index": 1,
        "carried": {"start": 0, "ids": [1, 2, 3], "text": "123"},
        "rendered": {"start": 0, "ids": [1, 9, 4], "text": "194"},
    }
    assert read_divergence(second["began"]) == told
    assert "first difference at token 1: carried ids [1, 2, 3] '123', rendered ids [1, 9, 4] '194'" in str(told)


def test_a_record_shows_bad_calls_and_a_failure_has_no_reward():
    assert as_record(trajectory(turn([1], [2]), bad_tool_calls=2))["bad_tool_calls"] == 2
    assert "reward" not in as_record(Failure("g", 0, 0, "infra", "lost", "here"))


@pytest.mark.parametrize(
    ("carried", "rendered", "index"),
    [([1, 2], [1, 2, 3], None), ([1, 2], [1, 2], None), ([1, 2], [1], 1), ([1, 2], [], 0), ([1, 2], [1, 3], 1)],
)
def test_the_first_difference(carried, rendered, index):
    assert first_difference(carried, rendered) == index


def test_a_window_is_bounded_and_names_its_start():
    carried, rendered = list(range(100)), [*range(50), 999, *range(51, 100)]
    found = diverge("x", carried, rendered)
    assert (found.index, found.carried.start) == (50, 50 - AROUND)
    assert len(found.carried.ids) == len(found.rendered.ids) == 2 * AROUND


def test_what_is_no_record_of_a_divergence_is_none():
    assert read_divergence(None) is None
    assert read_divergence({"reason": 3}) is None
    assert read_divergence({"reason": "x", "carried": {"ids": ["a"]}}).carried is None
