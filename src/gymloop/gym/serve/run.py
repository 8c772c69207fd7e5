"""``POST /run``: a whole rollout, played here with the ``tool_calling`` agent against one generation server.

The reply is that of NeMo Gym's own agents: the row, ``response`` with the token bundle on the last item of every model
call, ``reward`` and perhaps ``reward_components``. A task in NeMo Gym's second form (``episode_id`` and ``task``) gets
a reply in that form, in which a failure is part of the reply. Nothing that failed has a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymloop.errors import GymloopError, InfraError
from gymloop.gym.agent import Conversation
from gymloop.gym.agents import Terms, ToolCalling
from gymloop.gym.bundle import whole_response
from gymloop.gym.contract import ROLLOUT_SEED, Row, Verdict
from gymloop.gym.model_client import ModelClient
from gymloop.gym.serve.aggregate import REPEAT, TASK
from gymloop.gym.serve.body import check_row
from gymloop.gym.serve.refusal import malformed
from gymloop.gym.session import InProcessSource

READY_S = 600.0
"""How long a model that is being loaded is waited for."""


@dataclass(frozen=True, slots=True)
class Play:
    """How rollouts are played.

    Attributes:
        model_url: of the generation server, such as ``http://127.0.0.1:8000/v1``.
        model_name: that it serves.
        max_turns: model calls of one rollout at most.
        max_tokens: tokens of one model call at most.
        rollout_timeout_s: wall time of one rollout, from when its turn has come; seconds.
        at_once: rollouts that are played at the same time; others wait.
    """

    model_url: str
    model_name: str
    max_turns: int = 16
    max_tokens: int = 1024
    rollout_timeout_s: float = 3600.0
    at_once: int = 1024


class Rollouts:
    """Plays rollouts for one event loop. Use it as an async context manager.

    Args:
        source: the environment.
        play: how.
        call_timeout_s: wall time of one call of the environment; seconds.
    """

    def __init__(self, source: InProcessSource, play: Play, call_timeout_s: float) -> None:
        self._agent = ToolCalling(source)
        self._play = play
        self._call_timeout_s = call_timeout_s
        self._places = asyncio.Semaphore(play.at_once)
        self._model = ModelClient(
            play.model_url,
            play.model_name,
            max_concurrency=play.at_once,
            call_timeout_s=play.rollout_timeout_s,
            ready_timeout_s=READY_S,
        )

    async def __aenter__(self) -> Rollouts:
        await self._model.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._model.close()

    async def run(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            Refusal: 422, the body is no row and no task.
            GymloopError: the rollout failed, and the body has the first form.
        """
        if "episode_id" in body and "task" in body:
            return await self._episode(body)
        check_row(body)
        return await self._rollout(body)

    async def _episode(self, body: Mapping[str, Any]) -> dict[str, Any]:
        task = body["task"]
        for name in ("task_id", "task_input"):
            if not isinstance(task, dict) or not isinstance(task.get(name), dict):
                raise malformed(["task", name], "expected an object", "dict_type")
        check_row(row := task["task_input"], ("task", "task_input"))
        identity = {"episode_id": body["episode_id"], "task_id": task["task_id"]}
        if ROLLOUT_SEED not in row:
            row = {**row, ROLLOUT_SEED: _seed(f"{identity}") if identity["episode_id"] else secrets.randbits(32)}
        try:
            return {**identity, "result": await self._rollout(row)}
        except GymloopError as error:
            failure = {"failure_reason": str(error)[:2000], "terminal": not isinstance(error, InfraError)}
            return {**identity, "failure": failure}

    async def _rollout(self, row: Row) -> dict[str, Any]:
        conversation = Conversation()
        seconds = self._play.rollout_timeout_s
        async with self._places:  # bounded: each of those before it has its own deadline
            try:
                async with asyncio.timeout(seconds) as scope:
                    verdict = await self._agent.play(with_seed(row), self._model, conversation, self._terms(row))
            except TimeoutError as error:
                if not scope.expired():
                    raise
                message = f"the rollout did not end within {seconds:g} s, waiting for {conversation.where}"
                raise InfraError(message, cause="timeout") from error
        response = {**whole_response(row, conversation.response()), "usage": _usage(conversation)}
        return judged({**row, "response": response}, verdict)

    def _terms(self, row: Row) -> Terms:
        index = [str(row[key]) for key in (TASK, REPEAT) if key in row]
        return Terms(
            max_turns=self._play.max_turns,
            max_tokens=self._play.max_tokens,
            call_timeout_s=self._call_timeout_s,
            deadline_s=self._play.rollout_timeout_s,
            rollout_id="/".join(index) if len(index) == 2 else None,
        )


def judged(body: Mapping[str, Any], verdict: Verdict) -> dict[str, Any]:
    """A request to ``/verify`` or ``/run`` with its verdict, as NeMo Gym's servers reply."""
    told: dict[str, Any] = {
        "reward": verdict.reward,
        "mask_sample": False,
        "failure_kind": None,
        "failure_reason": None,
    }
    if verdict.components:
        told["reward_components"] = dict(verdict.components)
    return {**body, **told}


def with_seed(row: Row) -> Row:
    """The row with a seed: its own, else one that follows from its place in the collection, else a random one."""
    if ROLLOUT_SEED in row:
        return row
    place = [row.get(TASK), row.get(REPEAT)]
    return {**row, ROLLOUT_SEED: secrets.randbits(32) if None in place else _seed(f"{place[0]}/{place[1]}")}


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _usage(conversation: Conversation) -> dict[str, Any]:
    read = sum(len(turn.prompt_ids) for turn in conversation.turns)
    said = sum(len(turn.sampled_ids) for turn in conversation.turns)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + said,
    }
