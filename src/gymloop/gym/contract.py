"""The words an environment and an agent exchange; the same whether the environment is in-process or behind HTTP.

A row is NeMo Gym's: ``responses_create_params`` (input messages and flat function tools), ``agent_ref``, and fields of
the environment's own. A session is one rollout's private state. Only ``verify`` gives a reward, and a verdict that is
not a finite number is an error, never a reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gymloop.errors import InfraError

Row = Mapping[str, Any]

ROLLOUT_SEED = "_rollout_seed"
"""Key that a collector adds to the row it opens a session with: an integer that is the same whenever this rollout is
made, in whatever order rollouts arrive, and that differs from every other rollout's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The environment's judgement of a finished conversation.

    Attributes:
        reward: finite.
        components: named parts; when given they sum to ``reward`` (relative 1e-5, absolute 1e-6).
        details: what else the environment said of it, such as the answer that it read; JSON values, for the records.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.components}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InfraError(f"verify returned {name} = {value!r}; a finite number was expected", cause="bad_reply")
        if self.components:
            total = math.fsum(self.components.values())
            if not math.isclose(total, self.reward, rel_tol=1e-5, abs_tol=1e-6):
                raise InfraError(
                    f"verify returned reward {self.reward} but its components sum to {total}", cause="bad_reply"
                )


class Session(Protocol):
    """One rollout in one environment. Every call is bounded by the agent's deadline."""

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool and return the text for the model; what the model did wrong is text too.

        Raises:
            InfraError: the environment failed. The call is never repeated within the session.
        """

    async def verify(self, response: Mapping[str, Any]) -> Verdict:
        """Score the conversation; ``response["output"]`` holds its items. Called once."""

    async def close(self) -> None:
        """Free the session; safe to call twice."""


class SessionSource(Protocol):
    """Opens sessions of one environment, by the name that rows carry in ``agent_ref``."""

    @property
    def name(self) -> str:
        """As in ``agent_ref.name``."""

    async def seed_session(self, row: Row) -> Session:
        """Start a session for this row."""
