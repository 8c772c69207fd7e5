"""Makes the policy's worker where it runs: only there is torch imported, and nothing else is on the way to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymloop.policy.spec import PolicySpec
    from gymloop.policy.worker import PolicyWorker


def build_policy(spec: PolicySpec) -> PolicyWorker:
    """The worker, its model not yet loaded."""
    from gymloop.policy.worker import PolicyWorker

    return PolicyWorker(spec)
