"""An agent plays one rollout from its row to its verdict; the collector picks it by the row's ``agent_ref.name``.

| agent | what it does | where the turns come from |
| --- | --- | --- |
| ``ToolCalling`` | seeds a session, calls the model and the tools it asks for, verifies | the model's replies |
| ``Gymnasium`` | resets, gives the server each of the model's turns as a step, sums the rewards | the model's replies |
| ``RemoteAgent`` | posts the row to an agent server, which does all of this itself | bundles on its output items |

Each writes what happened into the ``Conversation`` as it happens, frees what it holds when it is cancelled, and raises
as ``gymloop.errors`` says. None repeats an attempt: that is the collector's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, cast

from gymloop.errors import DataError, InfraError, PolicyError
from gymloop.gym.agent import Conversation, tool_calling
from gymloop.gym.contract import ROLLOUT_SEED, Row, SessionSource, Verdict
from gymloop.gym.deadline import within
from gymloop.gym.model_client import ModelClient, Profile

_CLOSE_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for one rollout.

    Attributes:
        max_turns: model calls at most.
        max_tokens: tokens per model call at most.
        call_timeout_s: wall time of one call of the environment; seconds.
        deadline_s: wall time of the rollout; seconds.
        profile: sampling profile.
        rollout_id: ``<group>/<sample>``; names the noise of the draws.
        seed: of the environment's session; None where the environment draws its own.
    """

    max_turns: int
    max_tokens: int
    call_timeout_s: float
    deadline_s: float
    profile: Profile = "train"
    rollout_id: str | None = None
    seed: int | None = None


class Agent(Protocol):
    """Plays rollouts of one environment."""

    @property
    def name(self) -> str:
        """As in ``agent_ref.name``."""

    async def play(self, row: Row, model: ModelClient, conversation: Conversation, terms: Terms) -> Verdict:
        """Play one rollout, writing it into ``conversation``, which is empty.

        Raises:
            InfraError: model or environment failed.
            DataError: the row cannot be used.
            ConfigError: nothing will work.
        """


class ToolCalling:
    """The ``tool_calling`` agent in sessions of one source; see ``gym.agent``."""

    def __init__(self, source: SessionSource) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """The source's."""
        return self._source.name

    async def play(self, row: Row, model: ModelClient, conversation: Conversation, terms: Terms) -> Verdict:
        """See ``Agent``."""
        party = f"environment {self.name}"
        conversation.where = where = f"{party}, seed_session"
        session = await within(terms.call_timeout_s, where, self._source.seed_session(seeded(row, terms)))
        async with freeing(f"{party}, close", session.close):
            await tool_calling(
                row,
                session,
                model,
                conversation,
                environment=self.name,
                max_turns=terms.max_turns,
                max_tokens=terms.max_tokens,
                call_timeout_s=terms.call_timeout_s,
                profile=terms.profile,
                rollout_id=terms.rollout_id,
            )
            conversation.where = where = f"{party}, verify"
            return await within(terms.call_timeout_s, where, session.verify(conversation.response()))


class Limited:
    """An agent that may call the model fewer times than the run allows, as its own configuration says.

    Args:
        agent: who plays.
        max_turns: model calls at most.
    """

    def __init__(self, agent: Agent, max_turns: int) -> None:
        self._agent = agent
        self._max_turns = max_turns

    @property
    def name(self) -> str:
        """As in ``agent_ref.name``."""
        return self._agent.name

    async def play(self, row: Row, model: ModelClient, conversation: Conversation, terms: Terms) -> Verdict:
        """See ``Agent``."""
        limited = replace(terms, max_turns=min(terms.max_turns, self._max_turns))
        return await self._agent.play(row, model, conversation, limited)


def agent_of(source: SessionSource | Agent) -> Agent:
    """An agent as it is; an environment's sessions are played by ``ToolCalling``."""
    return cast(Agent, source) if hasattr(source, "play") else ToolCalling(source)


def seeded(row: Row, terms: Terms) -> Row:
    """The row as a session is opened with it."""
    return row if terms.seed is None else {**row, ROLLOUT_SEED: terms.seed}


@contextlib.asynccontextmanager
async def freeing(where: str, close: Callable[[], Awaitable[object]]) -> AsyncGenerator[None, None]:
    """Close at the end. The rollout is decided by then: a failure to close is told and changes nothing."""
    try:
        yield
    finally:
        try:
            await within(_CLOSE_S, where, close())
        except (InfraError, DataError, PolicyError) as error:
            log.warning("%s", error)
