"""The routes that sample nothing: is the server alive and ready, its numbers, its model, what a text's tokens are."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gymloop.errors import InfraError
from gymloop.serving import metrics as numbers
from gymloop.serving.refusal import ApiError
from gymloop.serving.reply import json_reply
from gymloop.serving.state import ServerState
from gymloop.serving.tokenize import detokenize, tokenize


class ServiceRoutes:
    """Each method serves one route, and may raise what ``refusal_of`` understands."""

    def __init__(self, state: ServerState):
        self._state = state
        self._started_at = int(time.time())

    async def livez(self, request: Request) -> Response:
        """200 as soon as the socket is bound."""
        return json_reply({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 when requests are served; before the engine is there no route is reached."""
        try:
            self._state.now().engine.require_serving()
        except InfraError as error:  # not logged each time that somebody asks, as an error of a request is
            raise ApiError(503, "engine_failed", str(error)) from error
        return json_reply({"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        """In Prometheus's text format."""
        return Response(self._state.metrics.text(), media_type=numbers.CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """The one model."""
        return json_reply({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        asked = request.path_params["model_id"]
        if asked != self._state.model_name:
            message = f"model {asked!r} is not served; {self._state.model_name!r} is"
            raise ApiError(404, "model_not_found", message, "model")
        return json_reply(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        engine = self._state.now().engine
        return {
            "id": self._state.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "gymloop",
            "max_model_len": engine.max_model_len,
            "weight_version": engine.weight_version,
        }

    async def tokenize(self, request: Request) -> Response:
        """The ids that a conversation or a text becomes."""
        now, body = self._state.now(), await self._state.body(request)
        return json_reply(tokenize(body, self._state.terms(request, now), now.renderer, now.engine.max_model_len))

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        now, body = self._state.now(), await self._state.body(request)
        return json_reply(detokenize(body, self._state.terms(request, now), now.renderer))
