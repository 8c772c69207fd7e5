"""A server that is not gymloop's: what it is sent, and what is made of a reply with no tokens, some, or all."""

import re

import pytest

from gymloop.errors import InfraError
from gymloop.gym.foreign import ForeignModel, read_foreign_reply
from gymloop.gym.model_client import ContextFull, refusal
from gymloop.rollouts.trajectory import Turn

from .scripted import END, Say, ScriptedModel, ids, serving

USER = [{"role": "user", "content": "p"}]


def bare(reply):
    choice = reply["choices"][0]
    for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        choice["message"].pop(key)
    choice.pop("weight_versions")
    choice.pop("malformed_tool_calls")


async def ask(say, **more):
    model = ScriptedModel({"p": [say]})
    async with serving(model) as client:
        foreign = ForeignModel(
            client.url.removesuffix("/chat/completions"), "toy", sampling={"temperature": 0.5}, api_key="k",
            max_concurrency=1, call_timeout_s=5, ready_timeout_s=5,
        )  # fmt: skip
        async with foreign:
            return await foreign.chat(USER, [], max_tokens=8, **more), model


async def test_a_reply_without_tokens_is_a_turn_without_tokens():
    reply, model = await ask(Say("fine", change=bare), profile="validation", noise_key="a/0/0")
    assert reply.turn == Turn((), (), (), "stop", None, None)
    assert not reply.turn.has_tokens
    assert reply.message == {"role": "assistant", "content": "fine"}
    assert model.requests == [{"temperature": 0.5, "model": "toy", "messages": USER, "max_tokens": 8}]
    sent = {name.lower(): value for name, value in model.headers[0].items()}
    assert sent["authorization"] == "Bearer k"
    assert not [name for name in sent if name.startswith("x-gymloop")]


async def test_the_recipes_sampling_wins_over_the_rows():
    _, model = await ask(Say("fine", change=bare), extra={"temperature": 1.5, "seed": 3})
    assert (model.requests[0]["temperature"], model.requests[0]["seed"]) == (0.5, 3)


async def test_tokens_are_read_where_there_are_any_and_the_next_turn_continues_them():
    reply, _ = await ask("fine")
    assert reply.turn == Turn(tuple(ids("user:p\n")), (*ids("fine"), END), (-0.5,) * 5, "stop", 3, 3)
    _, model = await ask("fine", previous=reply.turn)
    assert model.requests[0]["required_prefix_token_ids"] == [*ids("user:p\n"), *ids("fine"), END]
    _, model = await ask(Say("fine", change=bare), previous=Turn((), (), (), "stop", None, None))
    assert "required_prefix_token_ids" not in model.requests[0]


async def test_tokens_without_versions_are_tokens():
    reply, _ = await ask(Say("fine", change=lambda body: body["choices"][0].pop("weight_versions")))
    assert reply.turn.sampled_ids == (*ids("fine"), END)
    assert (reply.turn.first_version, reply.turn.last_version) == (None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body["choices"][0]["message"].pop("generation_log_probs"), "has no generation_log_probs"),
        (lambda body: body.update(choices=[]), "has not one choice"),
        (lambda body: body.update(choices=None), "has not one choice"),
        (lambda body: body["choices"][0].pop("message"), "has no message"),
        (lambda body: (bare(body), body["choices"][0].update(finish_reason=None)), "has finish_reason None"),
    ],
)
async def test_a_reply_that_is_half_there_is_an_infra_error(change, said):
    with pytest.raises(InfraError, match=re.escape(said)):
        await ask(Say("fine", change=change))


def test_a_list_is_no_reply():
    with pytest.raises(InfraError, match="has not one choice"):
        read_foreign_reply([], (), "http://h/v1/chat/completions")


def test_nothing_said_is_told_from_something_cut():
    def reply(**message):
        choice = {"finish_reason": "length", "message": message}
        return read_foreign_reply({"choices": [choice]}, (), "u")

    assert reply(content=None).is_empty
    assert not reply(content="a").is_empty


def test_a_full_context_is_recognised_by_what_vllm_says_of_it():
    body = b'{"error": {"code": 400, "message": "This model\'s maximum context length is 8192 tokens. However, ..."}}'
    assert isinstance(refusal(400, body, "u"), ContextFull)
