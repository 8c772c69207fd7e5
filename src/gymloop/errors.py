"""Every failure has one of four kinds, and the kind decides who acts.

``InfraError`` is retried within a budget, ``DataError`` costs its row, ``PolicyError`` is the model's own doing and is
scored by the environment, ``ConfigError`` stops the run. Messages are one sentence: what, where, what was expected.
"""

from __future__ import annotations

from typing import Literal

Cause = Literal[
    "timeout", "disconnect", "server_error", "busy", "bad_reply", "aborted", "raised", "refused", "too_long", "other"
]
"""What a party did, as far as the caller could see: it did not answer in time, closed the connection, answered 5xx, 429
or 503 for too long, with a body that is not what was asked for, ended the request, raised an exception in this process,
refused this request, or found it longer than the context."""


class GymloopError(Exception):
    """Base of every error that gymloop raises on purpose; the command line prints it without a traceback.

    Attributes:
        cause: see ``Cause``; for the record of a failed rollout.
    """

    kind = "internal"

    def __init__(self, *args: object, cause: Cause = "other") -> None:
        super().__init__(*args)
        self.cause: Cause = cause


class ConfigError(GymloopError):
    """The recipe, the command line or the machine does not fit the run: stop and say why."""

    kind = "config"


class InfraError(GymloopError):
    """A process, socket or machine failed; the same work may succeed elsewhere or later."""

    kind = "infra"


class DataError(GymloopError):
    """One row cannot be used; other rows are unaffected."""

    kind = "data"


class PolicyError(GymloopError):
    """The model did something that has no defined continuation; the environment scores it."""

    kind = "policy"
