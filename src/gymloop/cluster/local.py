"""Joins the Ray cluster that ``RAY_ADDRESS`` names, or starts one on this machine and ends it with the run."""

from __future__ import annotations

import logging
import os

from gymloop.errors import InfraError


def connect(*, num_cpus: int) -> str:
    """Connect this process to Ray.

    Args:
        num_cpus: CPUs of a cluster started here; a joined cluster has its own.

    Returns:
        ``started`` or ``joined``.

    Raises:
        InfraError: Ray could not be reached or started.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:
        where = f"join the Ray cluster at {address}" if address else "start Ray on this machine"
        raise InfraError(f"could not {where}: {type(error).__name__}: {error}") from error
    return "joined" if address else "started"


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    import ray

    ray.shutdown()
