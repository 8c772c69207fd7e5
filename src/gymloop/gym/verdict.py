"""What an environment server says about a conversation becomes a ``Verdict``, or an error that says what was wrong.

No number is made of anything but a number: a missing reward, ``null`` (what NaN becomes in JSON), true, or text is an
error. A server that marks its own reward as no measurement (``mask_sample``) has failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gymloop.errors import InfraError
from gymloop.gym.contract import Row, Verdict

_KNOWN = {"reward", "reward_components", "response", "mask_sample", "failure_kind", "failure_reason"}
"""Fields of a reply that are no details."""


def read_verdict(value: Mapping[str, Any], url: str, row: Row) -> Verdict:
    """The verdict in a reply of ``/verify`` or ``/run``.

    Args:
        value: the reply.
        url: for messages.
        row: that was asked about; its fields come back in the reply and are no details.

    Raises:
        InfraError: there is no finite reward, the components do not sum to it, or the server says that it failed.
    """
    masked = value.get("mask_sample")
    if masked is not None and not isinstance(masked, bool):
        raise InfraError(f"{url}: mask_sample is {_shown(masked)}; expected true or false", cause="bad_reply")
    if masked:
        kind, reason = value.get("failure_kind") or "no failure_kind", value.get("failure_reason") or "no reason given"
        raise InfraError(f"{url}: the reward is no measurement (mask_sample): {kind}: {reason}", cause="server_error")
    reward = read_number(value, "reward", url)
    parts = value.get("reward_components") or {}
    if not isinstance(parts, Mapping):
        raise InfraError(f"{url}: reward_components is {_shown(parts)}; expected an object", cause="bad_reply")
    components = {name: read_number(parts, name, f"{url}: reward_components") for name in parts}
    known = _KNOWN | row.keys()
    try:
        return Verdict(reward, components, {key: said for key, said in value.items() if key not in known})
    except InfraError as error:
        raise InfraError(f"{url}: {error}", cause=error.cause) from error


def read_number(value: Mapping[str, Any], key: str, where: str) -> float:
    """A finite number.

    Raises:
        InfraError: it is missing or something else.
    """
    if key not in value:
        raise InfraError(f"{where}: the reply has no {key}", cause="bad_reply")
    number = value[key]
    if type(number) not in (int, float) or not math.isfinite(number):
        raise InfraError(f"{where}: {key} is {_shown(number)}; expected a finite number", cause="bad_reply")
    return float(number)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
