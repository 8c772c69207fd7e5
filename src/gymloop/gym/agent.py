"""The ``tool_calling`` agent: call the model, run the tools it asks for, in order, until it asks for none.

Semantics of NeMo Gym's ``simple_agent``, with its gaps closed. A turn cut by a limit runs no tool and ends the rollout.
What the model wrote wrongly (arguments that are not a JSON object, a tool that does not exist) is answered with one
short sentence, always the same, under that call's id, and the other calls of the turn still run. Arguments that are
missing (empty text or ``null``) are ``{}``. An envelope that is no call at all (its JSON is cut) stays text: without
another call the turn is final, and it is counted as a bad call. Where the row says ``parallel_tool_calls: false`` only
the first call of a turn runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gymloop.gym.contract import Row, Session
from gymloop.gym.deadline import within
from gymloop.gym.items import (
    Message,
    call_item,
    chat_messages,
    chat_tools,
    message_item,
    output_item,
    reasoning_item,
)
from gymloop.gym.model_client import ChatReply, ContextFull, ModelClient, Profile
from gymloop.gym.tools import nearest
from gymloop.rollouts.trajectory import Turn

# Fields of responses_create_params that are the agent's business; every other one is the server's to accept or refuse.
OWN_FIELDS = {
    "input",
    "instructions",
    "tools",
    "parallel_tool_calls",
    "model",
    "max_output_tokens",
    "metadata",
    "store",
    "stream",
    "user",
}


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Conversation:
    """What an agent has done so far; complete when ``tool_calling`` returns.

    Attributes:
        turns: model calls, in order.
        output: Responses items; the last item of each model call carries its token bundle.
        truncated: a turn ended by ``length``, the context was full, or the turn limit was hit.
        tool_calls: calls that the session ran.
        bad_tool_calls: calls that could not be read or routed.
        new_segments: turns after the first whose prompt does not continue the turn before.
        where: what is being waited for.
    """

    turns: list[Turn] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False
    tool_calls: int = 0
    bad_tool_calls: int = 0
    new_segments: int = 0
    where: str = "agent"

    def response(self) -> dict[str, Any]:
        """The body that ``verify`` scores."""
        return {
            "object": "response",
            "status": "incomplete" if self.truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if self.truncated else None,
            "output": self.output,
        }


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
    params: Mapping[str, Any] = row["responses_create_params"]
    messages = chat_messages(params["input"], params.get("instructions"))
    flat_tools = params.get("tools") or ()
    tools = chat_tools(flat_tools)
    names = [tool["name"] for tool in flat_tools]
    limit = min(max_tokens, params.get("max_output_tokens") or max_tokens)
    extra = {key: value for key, value in params.items() if key not in OWN_FIELDS and value is not None}
    one_call = params.get("parallel_tool_calls") is False

    for index in range(max_turns):
        conversation.where = f"model {model.url}"
        previous = conversation.turns[-1] if conversation.turns else None
        try:
            reply = await model.chat(
                messages,
                tools,
                max_tokens=limit,
                previous=previous,
                profile=profile,
                extra=extra,
                noise_key=None if rollout_id is None else f"{rollout_id}/{index}",
            )
        except ContextFull:
            if previous is None:  # the row itself is too long
                raise
            conversation.truncated = True
            return
        record_turn(conversation, reply, index)
        messages.append(reply.message)
        if reply.finish_reason == "length":
            conversation.truncated = True
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
            conversation.output.append(output_item(call["id"], text))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    conversation.truncated = True


def record_turn(conversation: Conversation, reply: ChatReply, index: int) -> None:
    """Append the turn and its items, the token bundle on the last one."""
    turn = reply.turn
    if turn.divergence is not None:
        conversation.new_segments += 1
        log.debug("turn %d begins a new segment: %s", index, turn.divergence)
    conversation.bad_tool_calls += reply.malformed_tool_calls
    conversation.turns.append(turn)
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    calls = reply.message.get("tool_calls") or []
    items = [call_item(f"fc_{index}_{position}", call, status) for position, call in enumerate(calls)]
    if reply.message["content"] or not items:
        items.insert(0, message_item(f"msg_{index}", reply.message["content"], status))
    if reasoning := reply.message.get("reasoning_content"):
        items.insert(0, reasoning_item(f"rs_{index}", reasoning))
    items[-1]["prompt_token_ids"] = turn.prompt_ids
    items[-1]["generation_token_ids"] = turn.sampled_ids
    items[-1]["generation_log_probs"] = turn.logprobs
    conversation.output += items


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
