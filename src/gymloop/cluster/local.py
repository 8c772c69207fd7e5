"""Joins the Ray cluster that ``RAY_ADDRESS`` names, or starts one on this machine that cannot outlive this process.

Ray asks the kernel to kill its processes when their parent *thread* ends, so one thread starts the cluster, and stays
until ``disconnect``. A cluster that was joined belongs to somebody else: leaving it ends our actors and nothing more.
An address that cannot be joined is told within seconds, while Ray itself would try for minutes.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading

from gymloop.errors import ConfigError, GymloopError, InfraError

START_LIMIT_S = 120.0
JOIN_LIMIT_S = 20.0
ANSWER_LIMIT_S = 5.0
DISCONNECT_LIMIT_S = 20.0
SETTLE_LIMIT_S = 5.0
"""A cluster that is being started when it is to be left is waited for this long."""
ADDRESS = "RAY_ADDRESS"

_inherited: frozenset[str] | None = None


def inherited() -> frozenset[str] | None:
    """Names of this process's environment variables that the processes of the cluster have too.

    None where the cluster was joined: they then have the environment of whoever started it.
    """
    return _inherited


class RayCluster:
    """This process's connection to Ray; there is one at a time, as Ray itself has it.

    Args:
        num_cpus: CPUs of a cluster started here; a joined cluster has its own.
    """

    def __init__(self, *, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._address = os.environ.get(ADDRESS) or "local"
        self._connected = threading.Event()
        self._leave = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._hold, name="ray-cluster", daemon=True)

    @property
    def asked_for(self) -> str:
        """What ``RAY_ADDRESS`` says; ``local`` where it says nothing."""
        return self._address

    @property
    def joins(self) -> bool:
        """Whether the cluster is somebody else's."""
        return self._address != "local"

    @property
    def address(self) -> str:
        """``host:port`` by which other processes join the cluster, once this one is connected."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def connect(self) -> None:
        """Return once workers can be placed.

        Raises:
            ConfigError: ``RAY_ADDRESS`` is no address of a cluster, or that runs another version of Ray or Python.
            InfraError: Ray could not be joined within 20 s or started within 120 s.
        """
        where = f"join the Ray cluster at {ADDRESS}={self._address}" if self.joins else "start Ray on this machine"
        limit = JOIN_LIMIT_S if self.joins else START_LIMIT_S
        if self.joins and self._address != "auto":
            require_answer(self._address)
        self._thread.start()
        if not self._connected.wait(limit):
            self._leave.set()
            raise InfraError(f"could not {where} within {limit:.0f} s")
        if self._failure is not None:
            raise told(self._failure, where) from self._failure

    def disconnect(self) -> None:
        """Leave the cluster; one that was started here ends. Safe to call twice, and from any thread.

        One that is being started cannot be told to stop, and is waited for: Ray holds Python's lock until its head
        process has told its port, so were that process killed before, nothing of this one would run for Ray's 30 s.
        One that is not up after 5 s ends as soon as it is, or with this process.

        Raises:
            InfraError: Ray did not end within 20 s.
        """
        self._leave.set()
        starts = self._thread.is_alive() and not self.joins
        if not self._connected.wait(SETTLE_LIMIT_S if starts else 0):
            return
        self._thread.join(DISCONNECT_LIMIT_S)
        if self._thread.is_alive():
            raise InfraError(f"Ray did not end within {DISCONNECT_LIMIT_S:.0f} s")

    def _hold(self) -> None:
        global _inherited
        # Ray would hide the GPUs from an actor that holds none, run workers at niceness 15, where any other process
        # starves them, start idle workers whose environment no actor of ours has, and report usage over the network.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        try:
            if self.joins:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
                _inherited = None
            else:
                _inherited = frozenset(os.environ)
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


def require_answer(address: str) -> None:
    """Find out that nobody listens at an address sooner than Ray does.

    Raises:
        ConfigError: it is not ``host:port``.
        InfraError: the host has no address, or no connection came about within 5 s.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", address)
    if match is None or not 0 < int(match[3]) < 65536:
        client = (
            "; a driver of gymloop runs on a machine of the cluster, not through Ray's client"
            if "://" in address
            else ""
        )
        raise ConfigError(
            f"{ADDRESS}={address} is no address of a Ray cluster{client}; expected host:port of its head, such as "
            "10.0.0.1:6379, or auto for the one on this machine; unset it to start one"
        )
    host, port = match[1] or match[2], int(match[3])
    try:
        socket.create_connection((host, port), timeout=ANSWER_LIMIT_S).close()
    except OSError as error:
        why = f"no answer within {ANSWER_LIMIT_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror or error
        raise InfraError(
            f"could not join the Ray cluster at {ADDRESS}={address}: {why}; is its head (ray start --head) running "
            "there? Unset it to start a cluster on this machine"
        ) from error


def told(error: Exception, where: str) -> GymloopError:
    """Ray's own words for why it could not, in one line."""
    text = " ".join(str(error).split())
    if text.startswith("Version mismatch: "):
        versions = re.findall(r"(Ray|Python): (\S+)", text)
        if len(versions) == 4:
            theirs, ours = (" and ".join(f"{name} {number}" for name, number in versions[i : i + 2]) for i in (0, 2))
            return ConfigError(f"could not {where}: it runs {theirs}, this process {ours}; expected the same on both")
    if isinstance(error, ConnectionError) and "auto" in where:
        return InfraError(f"could not {where}: no Ray runs on this machine")
    return InfraError(f"could not {where}: {type(error).__name__}: {text[:400]}")
