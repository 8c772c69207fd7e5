"""The ``tool_calling`` agent: call the model, run the tools it asks for, in order, until it asks for none.

Semantics of NeMo Gym's ``simple_agent``, with its gaps closed. A turn cut by a limit runs no tool and ends the rollout.
What the model wrote wrongly (arguments that are not a JSON object, a tool that does not exist) is answered with one
short sentence, always the same, under that call's id, and the other calls of the turn still run. Arguments that are
missing (empty text or ``null``) are ``{}``. An envelope that is no call at all (its JSON is cut) stays text: without
another call the turn is final, and it is counted as a bad call. Where the row says ``parallel_tool_calls: false`` only
the first call of a turn runs.
"""

from __future__ import annotations

from typing import Any

import orjson

from gymloop.gym.contract import Row, Session
from gymloop.gym.deadline import within
from gymloop.gym.dialogue import Conversation, Dialogue
from gymloop.gym.items import Message
from gymloop.gym.model_client import ModelClient, Profile
from gymloop.gym.tools import nearest

__all__ = ["Conversation", "read_arguments", "tool_calling"]


async def tool_calling(
    row: Row,
    session: Session,
    model: ModelClient,
    conversation: Conversation,
    *,
    environment: str,
    max_turns: int,
    max_tokens: int,
    call_timeout_s: float,
    profile: Profile,
    rollout_id: str | None = None,
) -> None:
    """Drive one rollout, from the row's messages to the last assistant message, writing it into ``conversation``.

    Args:
        row: its ``responses_create_params`` give messages, tools, and perhaps a lower ``max_output_tokens``.
        session: already seeded.
        model: where turns are sampled.
        conversation: filled in as the rollout goes, so that a deadline can say what was waited for.
        environment: the environment's name, for errors.
        max_turns: model calls at most; the tools of the last one still run.
        max_tokens: tokens per model call at most.
        call_timeout_s: wall time of one tool call, seconds.
        profile: sampling profile.
        rollout_id: ``<group>/<sample>``; names the noise of the draws, see ``model_client.NOISE_HEADER``.

    Raises:
        InfraError: model or environment failed.
        DataError: the row cannot be used.
    """
    params = row["responses_create_params"]
    names = [tool["name"] for tool in params.get("tools") or ()]
    one_call = params.get("parallel_tool_calls") is False
    dialogue = Dialogue(row, model, conversation, max_tokens=max_tokens, profile=profile, rollout_id=rollout_id)
    for _ in range(max_turns):
        reply = await dialogue.turn()
        if reply is None or reply.finish_reason == "length":
            return
        calls = reply.message.get("tool_calls") or []
        if not calls:
            return
        for position, call in enumerate(calls):
            if one_call and position > 0:
                conversation.bad_tool_calls += 1
                text = "Error: only one tool call at a time"
            else:
                text = await _answer(call, session, names, conversation, environment, call_timeout_s)
            dialogue.answer(call["id"], text)
    conversation.truncated = True


async def _answer(
    call: Message,
    session: Session,
    names: list[str],
    conversation: Conversation,
    environment: str,
    call_timeout_s: float,
) -> str:
    """The tool's result, or the sentence that says why there is none."""
    name = call["function"]["name"]
    if name not in names:
        conversation.bad_tool_calls += 1
        return f"Error: there is no tool '{name}'{nearest(name, names)}"
    arguments = read_arguments(call["function"]["arguments"])
    if isinstance(arguments, str):
        conversation.bad_tool_calls += 1
        return f"Error: {arguments}"
    conversation.tool_calls += 1
    conversation.where = where = f"environment {environment}, {name}"
    return await within(call_timeout_s, where, session.call_tool(name, arguments))


def read_arguments(text: str) -> dict[str, Any] | str:
    """Arguments of a call from the text the model wrote, or the sentence that tells it what is wrong.

    A JSON string that itself holds an object is read as that object, since models write both.
    """
    value: Any = text
    for _ in range(2):
        if not isinstance(value, str):
            break
        if not value.strip():
            return {}
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return "the arguments are not valid JSON"
    if value is None or value == "":
        return {}
    return value if isinstance(value, dict) else "the arguments are not a JSON object"
