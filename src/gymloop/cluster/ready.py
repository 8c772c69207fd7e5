"""Waits until a Ray cluster has all its nodes, for scripts that start one: names those that are missing.

RAY_ADDRESS=10.0.0.1:6379 python -m gymloop.cluster.ready --nodes 4 --within 300
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from gymloop.cluster.local import RayCluster
from gymloop.errors import ConfigError, GymloopError, InfraError

POLL_S = 2.0


def wait_for_nodes(
    nodes: int,
    within_s: float,
    living: Callable[[], Sequence[str]],
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Return once enough nodes are there.

    Args:
        nodes: wanted, at least.
        within_s: bound of the wait, seconds.
        living: host names of the nodes that are there now.
        say: told whenever their number changes.
        clock: seconds.
        pause: sleeps.

    Raises:
        InfraError: they were not all there in time; the message lists those that were.
    """
    deadline, seen = clock() + within_s, -1
    while True:  # bounded: by the deadline
        there = sorted(living())
        if len(there) != seen:
            seen = len(there)
            say(f"{seen} of {nodes} nodes are there: {', '.join(there)}")
        if seen >= nodes:
            return
        if clock() >= deadline:
            raise InfraError(
                f"only {seen} of {nodes} nodes joined within {within_s:g} s: {', '.join(there)}; "
                "the logs of the others say why"
            )
        pause(POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the cluster that ``RAY_ADDRESS`` names, wait, leave; the exit status is 1 where nodes are missing."""
    parser = argparse.ArgumentParser(prog="python -m gymloop.cluster.ready", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True, help="nodes wanted")
    parser.add_argument("--within", type=float, default=300.0, help="seconds")
    args = parser.parse_args(arguments)
    cluster = RayCluster(num_cpus=1)
    try:
        if not cluster.joins:
            raise ConfigError("RAY_ADDRESS does not name the cluster to wait for; expected host:port")
        _join(cluster, args.within)
        import ray

        def living() -> list[str]:
            return [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]

        wait_for_nodes(args.nodes, args.within, living, lambda text: print(text, flush=True))
    except GymloopError as error:
        print(f"gymloop: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        cluster.disconnect()
    return 0


def _join(cluster: RayCluster, within_s: float) -> None:
    """Join as soon as the head answers.

    Raises:
        InfraError: it does not within ``within_s``, or cannot be joined.
    """
    from gymloop.cluster.local import require_answer

    deadline = time.monotonic() + within_s
    while True:  # bounded: by the deadline
        try:
            require_answer(cluster.asked_for)
            break
        except InfraError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(POLL_S)
    cluster.connect()


if __name__ == "__main__":
    sys.exit(main())
