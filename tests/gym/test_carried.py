"""Carried tokens change what a turn costs and nothing else: every reply means what it means when all of it is read."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.errors import InfraError
from gymloop.gym.carried import CarriedTokens
from gymloop.gym.model_client import read_reply
from gymloop.rollouts.trajectory import Turn

ids = st.lists(st.integers(0, 300), max_size=6).map(tuple)


def turn(prompt: tuple, sampled: tuple) -> Turn:
    return Turn(prompt, sampled, (-0.5,) * len(sampled), "stop", 1, 1)


def carrying(prompt: tuple, sampled: tuple) -> CarriedTokens:
    carried = CarriedTokens()
    carried.follow(turn(prompt, sampled))
    return carried


def reply(prompt: tuple, sampled: tuple = (9,), **more) -> bytes:
    message = {
        "role": "assistant",
        "content": "x",
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
    }
    choice = {"message": message, "finish_reason": "stop", "weight_versions": [1, 1]}
    return orjson.dumps({"choices": [choice], **more})


def read(raw: bytes, carried: CarriedTokens) -> Turn:
    cut = carried.cut(raw)
    return read_reply(
        orjson.loads(raw if cut is None else cut), carried.ids, "u", None if cut is None else carried
    ).turn


@given(ids.filter(bool), ids, ids, ids)
def test_a_reply_is_the_same_turn_whether_its_prompt_is_cut_or_read(prompt, sampled, new, other):
    carried = carrying(prompt, sampled)
    for said in (prompt + sampled + new, prompt + new, other or (1,), prompt + sampled):
        raw = reply(said)
        assert read(raw, carried) == read_reply(orjson.loads(raw), carried.ids, "u").turn


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=5))
def test_what_is_sent_is_the_last_turns_tokens_however_the_conversation_got_there(steps):
    carried = CarriedTokens()
    history: tuple = ()
    for number, (new, sampled) in enumerate(steps):
        prompt = (new if number % 3 == 2 else history + new) or (1,)  # every third begins anew
        carried.follow(turn(prompt, sampled))
        history = prompt + sampled
        assert carried.ids == history
        assert orjson.loads(b"".join(carried.json())) == list(history)


def test_a_prompt_that_continues_is_cut():
    carried = carrying((1, 2), (3,))
    assert orjson.loads(carried.cut(reply((1, 2, 3, 4))))["choices"][0]["message"]["prompt_token_ids"] == [4]
    assert orjson.loads(carried.cut(reply((1, 2, 3))))["choices"][0]["message"]["prompt_token_ids"] == []


@pytest.mark.parametrize(
    "raw",
    [
        reply((1, 2, 34)),  # the text goes on, the number is another
        reply((1, 2)),
        reply((12, 3)),
        reply((1, 2, 3, 4), prompt_token_ids=[1, 2, 3, 4]),  # two fields of the name
        reply((1, 2, 3, 4)).replace(b"[1,2", b"[1, 2"),  # other white space
        b'{"choices": []}',
        b"<html>",
    ],
)
def test_what_does_not_continue_byte_for_byte_is_read_whole(raw):
    assert carrying((1, 2), (3,)).cut(raw) is None


def test_the_first_turn_has_nothing_to_cut():
    assert CarriedTokens().cut(reply((1, 2))) is None


def test_text_of_the_model_that_spells_the_field_is_text():
    said = '"prompt_token_ids":[1,2,3,4]'
    raw = orjson.dumps({**orjson.loads(reply((1, 2, 3, 4))), "said": said})
    cut = carrying((1, 2), (3,)).cut(raw)
    assert cut is not None
    assert orjson.loads(cut)["said"] == said


def test_ids_behind_a_cut_are_checked():
    carried = carrying((1, 2), (3,))
    with pytest.raises(InfraError, match="has no prompt_token_ids"):
        read(reply((1, 2, 3, -4)), carried)
    with pytest.raises(InfraError, match="has no prompt_token_ids"):
        read(reply((1, 2, 3, True)), carried)
