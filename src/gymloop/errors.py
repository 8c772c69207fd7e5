"""Every failure has one of four kinds, and the kind decides who acts.

``InfraError`` is retried within a budget, ``DataError`` costs its row, ``PolicyError`` is the model's own doing and is
scored by the environment, ``ConfigError`` stops the run. Messages are one sentence: what, where, what was expected.
"""

from __future__ import annotations


class GymloopError(Exception):
    """Base of every error that gymloop raises on purpose; the command line prints it without a traceback."""

    kind = "internal"


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
