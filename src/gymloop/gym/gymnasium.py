"""The ``gymnasium`` agent: each turn of the model is a step of an environment that pays as it goes.

Semantics of NeMo Gym's ``gymnasium_agent``. ``POST /reset`` (the row) may give an observation, which is a user message
after those of the row. ``POST /step`` (the row, and ``response`` with the items of this turn) gives ``reward``,
``terminated`` and ``truncated``; until one of the two is true, what it observed is the next user message, behind the
results of tools under ``info.tool_outputs``. The reward is the sum over the steps. ``POST /close`` frees the session
of a server whose reset says ``info.supports_explicit_close``.

A step is taken once: a server that fails in one ends the attempt. A conversation that has filled the context, or has
had its turns, ends truncated with the rewards of the steps taken.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from gymloop.errors import InfraError
from gymloop.gym.agents import Terms, freeing, seeded
from gymloop.gym.bundle import whole_response, without_tokens
from gymloop.gym.contract import Row, Verdict
from gymloop.gym.dialogue import Conversation, Dialogue
from gymloop.gym.http import Cookies, HttpServer
from gymloop.gym.model_client import ModelClient
from gymloop.gym.verdict import read_number


class Gymnasium:
    """Plays against one server, which somebody else opens and closes.

    Args:
        name: as rows carry it in ``agent_ref.name``.
        server: with ``/reset`` and ``/step``.
    """

    def __init__(self, name: str, server: HttpServer) -> None:
        self.name = name
        self.server = server

    async def play(self, row: Row, model: ModelClient, conversation: Conversation, terms: Terms) -> Verdict:
        """See ``gym.agents.Agent``."""
        cookies = Cookies()
        conversation.where = where = f"environment {self.name}, reset"
        reply = await self.server.post("/reset", seeded(row, terms), cookies, opens=True)
        if not 200 <= reply.status < 300:
            raise reply.error()
        reset = reply.json()
        info = _info(reset, reply.url)
        episode = _Episode(self, row, cookies, info.get("supports_step_idempotency") is True)
        if info.get("supports_explicit_close") is not True:
            return await episode.play(_observation(reset, reply.url), model, conversation, terms)
        where = f"environment {self.name}, close"
        async with freeing(where, episode.close):
            return await episode.play(_observation(reset, reply.url), model, conversation, terms)


class _Episode:
    def __init__(self, agent: Gymnasium, row: Row, cookies: Cookies, numbered: bool) -> None:
        self._agent = agent
        self._row = row
        self._cookies = cookies
        self._numbered = numbered

    async def play(
        self, observation: str | None, model: ModelClient, conversation: Conversation, terms: Terms
    ) -> Verdict:
        dialogue = Dialogue(
            self._row,
            model,
            conversation,
            max_tokens=terms.max_tokens,
            profile=terms.profile,
            rollout_id=terms.rollout_id,
        )
        if observation:
            dialogue.tell(observation)
        total = 0.0
        for _ in range(terms.max_turns):
            before = len(conversation.output)
            reply = await dialogue.turn()
            if reply is None:
                return Verdict(total)
            cut = reply.finish_reason == "length"
            if cut and reply.is_empty:  # the context is full: the model said nothing that could be a step
                return Verdict(total)
            step, url = await self._step(conversation, conversation.output[before:], cut)
            total += read_number(step, "reward", url)
            terminated, truncated = (_flag(step, key, url) for key in ("terminated", "truncated"))
            conversation.truncated |= truncated
            if terminated or truncated:
                return Verdict(total)
            for call_id, text in _tool_outputs(step, url):
                conversation.tool_calls += 1
                dialogue.answer(call_id, text)
            if told := _observation(step, url):
                dialogue.observe(told)
        conversation.truncated = True
        return Verdict(total)

    async def _step(
        self, conversation: Conversation, items: list[dict[str, Any]], cut: bool
    ) -> tuple[dict[str, Any], str]:
        """What the environment makes of one turn, and the address that said it."""
        conversation.where = f"environment {self._agent.name}, step"
        turn = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": without_tokens(items),
        }
        body = {**self._row, "response": whole_response(self._row, turn)}
        if self._numbered:
            body["_ng_step_request_id"] = uuid.uuid4().hex
        reply = await self._agent.server.post("/step", body, self._cookies)
        return reply.json(), reply.url

    async def close(self) -> None:
        reply = await self._agent.server.post("/close", {}, self._cookies)
        if not 200 <= reply.status < 300:
            raise reply.error()


def _info(value: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    info = value.get("info") or {}
    if not isinstance(info, Mapping):
        raise InfraError(f"{url}: info is {info!r:.80}; expected an object", cause="bad_reply")
    return info


def _observation(value: Mapping[str, Any], url: str) -> str | None:
    told = value.get("observation")
    if told is not None and not isinstance(told, str):
        raise InfraError(f"{url}: observation is {told!r:.80}; expected text or null", cause="bad_reply")
    return told


def _flag(value: Mapping[str, Any], key: str, url: str) -> bool:
    flag = value.get(key)
    if not isinstance(flag, bool):
        raise InfraError(f"{url}: {key} is {flag!r:.80}; expected true or false", cause="bad_reply")
    return flag


def _tool_outputs(step: Mapping[str, Any], url: str) -> list[tuple[str, str]]:
    outputs = _info(step, url).get("tool_outputs") or []
    good = isinstance(outputs, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("call_id"), str) and isinstance(one.get("output"), str)
        for one in outputs
    )
    if not good:
        raise InfraError(
            f"{url}: info.tool_outputs is {outputs!r:.80}; expected a list of call_id and output", cause="bad_reply"
        )
    return [(one["call_id"], one["output"]) for one in outputs]
