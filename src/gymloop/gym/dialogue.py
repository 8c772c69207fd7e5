"""The model's half of a rollout: what it was told so far, and its next turn. Every agent that calls the model has one.

The conversation is kept as chat messages, which the generation server speaks, and written into the ``Conversation`` as
Responses items, which environments speak; the last item of each model call carries its token bundle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gymloop.gym.carried import CarriedTokens
from gymloop.gym.contract import Row
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
    """What an agent has done so far; complete when the agent returns.

    Attributes:
        turns: model calls, in order.
        output: Responses items; the last item of each model call carries its token bundle.
        truncated: a turn ended by ``length``, the context was full, or the turn limit was hit.
        cut: the first two of these: the model was not done with what it was saying.
        tool_calls: calls that the session ran.
        bad_tool_calls: calls that could not be read or routed.
        new_segments: turns after the first whose prompt does not continue the turn before.
        where: what is being waited for.
    """

    turns: list[Turn] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False
    cut: bool = False
    tool_calls: int = 0
    bad_tool_calls: int = 0
    new_segments: int = 0
    where: str = "agent"

    def response(self) -> dict[str, Any]:
        """The body that ``verify`` scores."""
        return {
            "object": "response",
            "status": "incomplete" if self.cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if self.cut else None,
            "output": self.output,
        }


class Dialogue:
    """The model's half of one rollout.

    Args:
        row: its ``responses_create_params`` give messages, tools, and perhaps a lower ``max_output_tokens``.
        model: where turns are sampled.
        conversation: filled in as the dialogue goes.
        max_tokens: tokens per model call at most.
        profile: sampling profile.
        rollout_id: ``<group>/<sample>``; names the noise of the draws, see ``model_client.NOISE_HEADER``.

    Raises:
        DataError: the row cannot be used.
    """

    def __init__(
        self,
        row: Row,
        model: ModelClient,
        conversation: Conversation,
        *,
        max_tokens: int,
        profile: Profile,
        rollout_id: str | None,
    ) -> None:
        params: Mapping[str, Any] = row["responses_create_params"]
        self._messages: list[Message] = chat_messages(params["input"], params.get("instructions"))
        self._tools = chat_tools(params.get("tools") or ())
        self._limit = min(max_tokens, params.get("max_output_tokens") or max_tokens)
        self._extra = {key: value for key, value in params.items() if key not in OWN_FIELDS and value is not None}
        self._model = model
        self._conversation = conversation
        self._profile: Profile = profile
        self._rollout_id = rollout_id
        self._carried = CarriedTokens()

    def tell(self, text: str) -> None:
        """What the environment says to the model; no part of what the model's turns are judged by."""
        self._messages.append({"role": "user", "content": text})

    def observe(self, text: str) -> None:
        """As ``tell``, and kept among the items."""
        self._conversation.output.append({"type": "message", "role": "user", "content": text})
        self.tell(text)

    def answer(self, call_id: str, text: str) -> None:
        """The result of a tool call of the last turn."""
        self._conversation.output.append(output_item(call_id, text))
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    async def turn(self) -> ChatReply | None:
        """The model's next turn, recorded; None where the context has become full, which truncates the conversation.

        Raises:
            ContextFull: the row itself is too long.
            InfraError: the model failed.
            DataError: it refuses this row.
        """
        conversation = self._conversation
        index = len(conversation.turns)
        conversation.where = f"model {self._model.url}"
        try:
            reply = await self._model.chat(
                self._messages,
                self._tools,
                max_tokens=self._limit,
                previous=conversation.turns[-1] if index else None,
                carried=self._carried,
                profile=self._profile,
                extra=self._extra,
                noise_key=None if self._rollout_id is None else f"{self._rollout_id}/{index}",
            )
        except ContextFull:
            if not index:
                raise
            conversation.truncated = conversation.cut = True
            return None
        _record(conversation, reply, index)
        self._messages.append(reply.message)
        if reply.finish_reason == "length":
            conversation.truncated = conversation.cut = True
        return reply


def _record(conversation: Conversation, reply: ChatReply, index: int) -> None:
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
    if turn.has_tokens:
        items[-1]["prompt_token_ids"] = turn.prompt_ids
        items[-1]["generation_token_ids"] = turn.sampled_ids
        items[-1]["generation_log_probs"] = turn.logprobs
    conversation.output += items
