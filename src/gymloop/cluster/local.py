"""Joins the Ray cluster that ``RAY_ADDRESS`` names, or starts one on this machine that cannot outlive this process.

Ray asks the kernel to kill its processes when their parent *thread* ends, so one thread starts the cluster, and stays
until ``disconnect``.
"""

from __future__ import annotations

import logging
import os
import threading

from gymloop.errors import InfraError

CONNECT_LIMIT_S = 120.0
DISCONNECT_LIMIT_S = 20.0


class RayCluster:
    """This process's connection to Ray; there is one at a time, as Ray itself has it.

    Args:
        num_cpus: CPUs of a cluster started here; a joined cluster has its own.
    """

    def __init__(self, *, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._connected = threading.Event()
        self._leave = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._hold, name="ray-cluster", daemon=True)

    def connect(self) -> None:
        """Return once workers can be placed.

        Raises:
            InfraError: Ray could not be reached or started within 120 s.
        """
        address = os.environ.get("RAY_ADDRESS")
        where = f"join the Ray cluster at {address}" if address else "start Ray on this machine"
        self._thread.start()
        if not self._connected.wait(CONNECT_LIMIT_S):
            self._leave.set()
            raise InfraError(f"could not {where} within {CONNECT_LIMIT_S:.0f} s")
        if self._failure is not None:
            raise InfraError(f"could not {where}: {type(self._failure).__name__}: {self._failure}") from self._failure

    def disconnect(self) -> None:
        """Leave the cluster; one that was started here ends. Safe to call twice, and from any thread.

        One that is still being started cannot be told to stop: it ends as soon as it is up, or with this process.

        Raises:
            InfraError: Ray did not end within 20 s.
        """
        self._leave.set()
        if not self._connected.is_set():
            return
        self._thread.join(DISCONNECT_LIMIT_S)
        if self._thread.is_alive():
            raise InfraError(f"Ray did not end within {DISCONNECT_LIMIT_S:.0f} s")

    def _hold(self) -> None:
        # Ray would hide the GPUs from an actor that holds none, run workers at niceness 15, where any other process
        # starves them, start idle workers whose environment no actor of ours has, and report usage over the network.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        try:
            if address := os.environ.get("RAY_ADDRESS"):
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            else:
                ray.init(
                    address="local",
                    num_cpus=self._num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except Exception as error:  # noqa: BLE001  (not swallowed: connect raises it under a name)
            self._failure = error
            self._connected.set()
            return
        self._connected.set()
        while not self._leave.wait(timeout=3600):
            pass
        ray.shutdown()
