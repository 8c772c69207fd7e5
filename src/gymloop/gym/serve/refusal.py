"""A request that is not served, said as NeMo Gym's servers say it: a status and ``detail``.

``detail`` is one sentence, or for a body of the wrong form (422) a list with one entry that names the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NO_SESSION = "Session not initialized. Please call seed_session first."
"""As NeMo Gym's servers word it; agents know a lost session by this sentence."""


class Refusal(Exception):
    """Ends a request.

    Attributes:
        status: HTTP status.
        detail: for the client.
        headers: of the reply.
    """

    def __init__(self, status: int, detail: str | list[dict[str, Any]], headers: Mapping[str, str] | None = None):
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


def malformed(place: Sequence[str | int], message: str, kind: str = "value_error") -> Refusal:
    """A body whose ``place`` is not what it should be: 422."""
    return Refusal(422, [{"type": kind, "loc": ["body", *place], "msg": message}])


def busy(message: str, retry_after_s: int = 1) -> Refusal:
    """Nothing was done and nothing is wrong with the request: 429, to be asked again."""
    return Refusal(429, message, {"retry-after": str(retry_after_s)})
