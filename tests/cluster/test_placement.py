"""Reservations on a real cluster: what is not there or not free is told, and all of it is given back."""

import threading
import time

import pytest

from gymloop.cluster.actor import RayRemote
from gymloop.cluster.local import RayCluster
from gymloop.cluster.placement import reserve, supply_of
from gymloop.config.placement import Placement, Share
from gymloop.errors import InfraError


class Worker:
    def where(self):
        import ray

        return ray.get_runtime_context().get_assigned_resources(), ray.util.get_current_placement_group() is not None

    def close(self):
        pass


def cpus(*bundles):
    shares = (Share("policy", 0, 0.5), *(Share(f"engine-{i}", i, 1.0 if i else 0.5) for i in range(len(bundles))))
    return Placement("CPU", bundles, (0,) * len(bundles), True, 1, 0, 0, shares)


def free(wanted=4):
    """What is free once Ray has settled; which takes a moment, also after a reservation was made."""
    for _ in range(400):
        if (now := supply_of("CPU").free) == wanted:
            break
        time.sleep(0.1)
    return now


@pytest.fixture(scope="module")
def cluster():
    made = RayCluster(num_cpus=4)
    made.connect()
    yield made
    made.disconnect()


def nothing(*_):
    pass


async def test_workers_go_into_their_bundles_and_hold_their_shares_and_all_is_given_back(cluster, tmp_path):
    placement = cpus(1, 1)
    reservation = reserve(placement, 10, nothing, nothing)
    assert supply_of("CPU").total.keys()
    remotes = []
    for share in placement.shares:
        place = reservation.place(share)
        remotes.append(
            RayRemote(
                share.worker, Worker, env={}, log_file=tmp_path / f"{share.worker}.log",
                num_cpus=place.num_cpus, num_gpus=place.num_gpus, strategy=place.strategy,
            )
        )  # fmt: skip
    held = [await remote.call("where", timeout=60) for remote in remotes]
    amounts = [sum(value for name, value in got.items() if name == "CPU") for got, _ in held]
    assert amounts == [0.5, 0.5, 1.0]
    assert all(inside for _, inside in held)
    assert free(2) == 2
    for remote in remotes:
        remote.kill()
    reservation.release()
    reservation.release()
    assert free() == 4


def test_what_the_cluster_does_not_have_is_refused_at_once_with_demand_and_supply(cluster):
    began = time.monotonic()
    with pytest.raises(InfraError, match=r"^the 5 engine replicas .* need 5 CPUs; the cluster has 4 CPUs, 4 free$"):
        reserve(cpus(1, 1, 1, 1, 1), 60, nothing, nothing)
    assert time.monotonic() - began < 20


def test_what_others_hold_is_waited_for_within_the_bound_and_then_told(cluster):
    other = reserve(cpus(1, 1), 10, nothing, nothing)
    assert free(2) == 2
    told = []
    began = time.monotonic()
    with pytest.raises(
        InfraError,
        match=r"^the 3 engine replicas .* need 3 CPUs; the cluster has 4 CPUs, 2 free, and none became free within 1 s "
        r"\(cluster\.placement_timeout_s\)$",
    ):
        reserve(cpus(1, 1, 1), 1, told.append, nothing)
    assert 1 <= time.monotonic() - began < 15
    assert told[0].endswith("need 3 CPUs; the cluster has 4 CPUs, 2 free"), "the startup table says what it waits for"
    other.release()
    assert free() == 4, "the attempt left nothing reserved"


def test_what_becomes_free_in_time_is_taken(cluster):
    other = reserve(cpus(1, 1), 10, nothing, nothing)
    threading.Timer(1.5, other.release).start()
    mine = reserve(cpus(1, 1, 1), 20, nothing, nothing)
    assert free(1) == 1
    mine.release()
    assert free() == 4


def test_a_reservation_that_is_torn_down_while_it_is_made_holds_nothing(cluster):
    with pytest.raises(InfraError, match="released while it was made"):
        reserve(cpus(1, 1), 10, nothing, lambda reservation: reservation.release())
    assert free() == 4
