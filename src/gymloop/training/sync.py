"""Weight sync: the policy's weights become the engine's, under a version number, without passing through the driver."""

from __future__ import annotations

from gymloop.cluster.remote import Remote


async def sync_weights(policy: Remote, engine: Remote, version: int, timeout: float) -> None:
    """Move all weights; returns when the engine samples from them.

    Args:
        policy: worker with ``snapshot``.
        engine: worker with ``load_weights``.
        version: number of the new weights.
        timeout: seconds for the whole sync.

    Raises:
        InfraError: a worker died or took too long; the engine kept its old weights.
        ConfigError: the weights do not fit the engine's model.
    """
    await engine.call("load_weights", policy.refer("snapshot"), version, timeout=timeout)
