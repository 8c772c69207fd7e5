"""What every route needs: the one model, what it is served with now, and what a request is checked against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from gymloop.generation.engine import Engine
from gymloop.serving.guard import PROFILE_HEADER, SamplingProfiles
from gymloop.serving.limits import Limits, read_json
from gymloop.serving.metrics import Metrics
from gymloop.serving.refusal import ApiError
from gymloop.serving.turn import Terms

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are served with, once there is something."""

    engine: Engine
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server, as its routes see it.

    Attributes:
        model_name: the one model.
        profiles: what sampling is locked to; None accepts whatever the engine can do.
        limits: of requests.
        default_max_tokens: where a request sets none; None means the rest of the context.
        served: engine and renderer, or the reason why there are none.
        metrics: where replies are counted.
    """

    model_name: str
    profiles: SamplingProfiles | None
    limits: Limits
    default_max_tokens: int | None
    served: Callable[[], Served | ApiError]
    metrics: Metrics

    def now(self) -> Served:
        """Engine and renderer.

        Raises:
            ApiError: 503, there are none.
        """
        served = self.served()
        if isinstance(served, ApiError):
            raise served
        return served

    async def body(self, request: Request) -> Any:
        """The decoded body of a request; errors as ``read_json``."""
        return await read_json(request.scope, request.receive, self.limits)

    def terms(self, request: Request, now: Served) -> Terms:
        """What a request is checked against.

        Raises:
            ApiError: its header names no profile.
        """
        profile = self.profiles.select(request.headers.get(PROFILE_HEADER)) if self.profiles else None
        renderer = now.renderer
        return Terms(self.model_name, profile, renderer.chat_template_kwargs, renderer.vocab_size, self.limits)
