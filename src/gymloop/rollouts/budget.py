"""How many rollouts of a step may fail for good; beyond that the run ends, naming the party that failed most often."""

from __future__ import annotations

from collections import Counter

from gymloop.errors import InfraError
from gymloop.rollouts.trajectory import Failure, Rollout


class FailureBudget:
    """Counts the failures of one step.

    Args:
        limit: failures at most; None sets no limit.
        step: as the message calls it, such as ``step 3``.
    """

    def __init__(self, limit: int | None, step: str) -> None:
        self._limit = limit
        self._step = step
        self._failures: list[Failure] = []

    def spend(self, rollout: Rollout) -> None:
        """Take note of a record.

        Raises:
            InfraError: it is one failure too many.
        """
        if not isinstance(rollout, Failure):
            return
        self._failures.append(rollout)
        if self._limit is not None and len(self._failures) > self._limit:
            raise InfraError(
                f"{self._step}: {len(self._failures)} rollouts failed for good, more than "
                f"rollouts.max_failed_rollouts_per_step = {self._limit}; {worst(self._failures)}"
            )


def worst(failures: list[Failure]) -> str:
    """The party with the most failures, what they were, and one of them in full; of equals the first by name."""
    counts = Counter(failure.party for failure in failures)
    party = min(counts, key=lambda name: (-counts[name], name))
    its = [failure for failure in failures if failure.party == party]
    causes = Counter(failure.cause for failure in its)
    listed = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items(), key=lambda item: (-item[1], item)))
    example = min(its, key=lambda failure: (failure.group_id, failure.sample_id))
    return (
        f"worst: {party} with {len(its)} ({listed}), such as rollout {example.group_id}/{example.sample_id}: {example}"
    )
