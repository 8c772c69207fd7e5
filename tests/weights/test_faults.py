"""Syncs between real processes that die, stop, do not fit or repeat themselves: named in seconds, nothing is left."""

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.training.sync import SyncSettings, sync_weights
from gymloop.weights.offer import SyncRequest
from sync_processes import Engine, Policy, ProcessRemote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left is read from /proc")

TRANSPORTS = ("shared_memory", "object_store", "broadcast")
BUCKET = 8192
PATIENCE_S = 3.0
SECONDS = 20.0
"""Of one failing sync, on a machine that is busy."""


def settings(transport, stall_s=5.0, checksum="always"):
    return SyncSettings(transport, BUCKET, checksum, stall_s=stall_s, patience_s=PATIENCE_S)


def named_shared_memory(pids) -> set[str]:
    """Names in /dev/shm that any of these processes could have made: libraries put their pid there."""
    own = re.compile("|".join(["gymloop", *(rf"(?<!\d){pid}(?!\d)" for pid in pids)]))
    return {path.name for path in Path("/dev/shm").iterdir() if own.search(path.name)}


@pytest.fixture
def cast(tmp_path):
    """Makes the parties; whatever becomes of them, nothing of theirs is there afterwards."""
    parties = []

    def make(engines=2, **odd):
        parties.append(ProcessRemote("policy", Policy))
        for index in range(engines):
            parties.append(ProcessRemote(f"engine-{index}", Engine, tmp_path, *odd.get(f"engine_{index}", ())))
        return parties[0], parties[1:]

    yield make
    pids = [party.process.pid for party in parties]
    for party in parties:
        party.kill()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not named_shared_memory(pids)


async def until(path):
    for _ in range(3000):
        if path.exists():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path.name} did not appear")


async def expect_failure(sync, error, message):
    began = time.monotonic()
    with pytest.raises(error) as caught:
        await asyncio.wait_for(sync, 60)
    assert time.monotonic() - began < SECONDS
    assert re.search(message, str(caught.value)), str(caught.value)
    return caught.value


async def holds_nothing(*parties):
    """Of a failed sync, where processes are left; a thread that waits for the dead gives up within its limit."""
    for party in parties:
        for _ in range(100):
            held = await party.call("held", timeout=60)
            if not held:
                break
            await asyncio.sleep(0.1)
        assert not held, (party.name, held)


async def weights(*engines):
    return [await engine.call("weights", timeout=60) for engine in engines]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_both_engines_have_the_policys_weights_to_the_last_bit_sync_after_sync(cast, transport):
    policy, engines = cast()
    for version in range(3, 6):
        sums = await policy.call("change", timeout=60)
        metrics = await sync_weights(policy, engines, version, 60, settings(transport))
        assert await weights(*engines) == [sums, sums]
        assert metrics["weights/bytes"] > 80_000
        assert 0 < metrics["weights/sync_s"] < 60
        assert metrics["weights/gb_per_s"] == pytest.approx(metrics["weights/bytes"] / metrics["weights/sync_s"] / 1e9)
        assert 0 < metrics["weights/copy_limit_share"] < 2


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
async def test_a_receiver_killed_half_way_is_named_and_the_other_gets_the_version_on_the_second_attempt(
    cast, tmp_path, transport
):
    policy, engines = cast()
    await sync_weights(policy, engines, 0, 60, settings(transport))
    sums = await policy.call("change", timeout=60)
    await engines[1].call("hold", 2, timeout=60)
    sync = asyncio.ensure_future(sync_weights(policy, engines, 1, 60, settings(transport)))
    await until(tmp_path / "held")
    engines[1].signal(signal.SIGKILL)
    await expect_failure(sync, InfraError, "weight sync to version 1.*engine-1 died during load_weights")
    if transport == "broadcast":
        assert await weights(engines[0]) == ["broken"], "half a sync is not taken for a whole one"
    await holds_nothing(policy, engines[0])
    await sync_weights(policy, engines[:1], 1, 60, settings(transport))
    assert await weights(engines[0]) == [sums]


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
@pytest.mark.slow
async def test_a_receiver_that_stops_half_way_is_named_before_the_deadline(cast, tmp_path, transport):
    policy, engines = cast()
    await engines[1].call("hold", 2, timeout=60)
    sync = asyncio.ensure_future(sync_weights(policy, engines, 0, 60, settings(transport)))
    await until(tmp_path / "held")
    engines[1].stop()
    await expect_failure(sync, InfraError, "engine-1 does not respond: no answer to a heartbeat")
    await holds_nothing(policy, engines[0])


@pytest.mark.slow
async def test_a_receiver_that_stops_before_the_sync_is_named(cast):
    policy, engines = cast()
    await sync_weights(policy, engines, 0, 60, settings("shared_memory"))
    engines[0].stop()
    await expect_failure(
        sync_weights(policy, engines, 1, 60, settings("shared_memory")),
        InfraError,
        "engine-0 did not finish sync_state",
    )


@pytest.mark.slow
async def test_a_receiver_that_answers_and_does_not_get_on_is_ended_by_the_deadline(cast, tmp_path):
    policy, engines = cast()
    await engines[1].call("hold", 2, timeout=60)
    sync = sync_weights(policy, engines, 0, 4, settings("shared_memory"))
    await expect_failure(sync, InfraError, "engine-1 did not take the weights in time")
    (tmp_path / "go").touch()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
async def test_a_policy_that_dies_or_stops_half_way_is_named_and_no_engine_serves_a_part(cast, tmp_path, number):
    policy, engines = cast()
    await sync_weights(policy, engines, 0, 60, settings("broadcast"))
    await policy.call("change", timeout=60)
    for engine in engines:
        await engine.call("hold", 2, timeout=60)
    sync = asyncio.ensure_future(sync_weights(policy, engines, 1, 60, settings("broadcast", stall_s=2.0)))
    await until(tmp_path / "held")
    policy.signal(number)
    (tmp_path / "go").touch()
    await expect_failure(sync, InfraError, "policy (died|does not respond)")
    assert await weights(*engines) == ["broken", "broken"]
    await holds_nothing(*engines)


@pytest.mark.slow
async def test_engines_that_have_mapped_the_weights_of_a_policy_that_is_killed_have_them_whole(cast, tmp_path):
    policy, engines = cast()
    sums = await policy.call("change", timeout=60)
    for engine in engines:
        await engine.call("hold", 2, timeout=60)
    sync = asyncio.ensure_future(sync_weights(policy, engines, 0, 60, settings("shared_memory")))
    for engine in engines:
        await until(tmp_path / f"held-{engine.process.pid}")
    policy.signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    await expect_failure(sync, InfraError, "policy died")
    assert await weights(*engines) == [sums, sums]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_weights_that_do_not_fit_one_engine_change_nothing_there_and_name_the_parameter(cast, transport):
    policy, engines = cast(engine_1=(128,))
    before = await weights(engines[1])
    sync = sync_weights(policy, engines, 0, 60, settings(transport))
    await expect_failure(sync, ConfigError, r"engine-1: the weight snapshot holds '0.weight' with shape \[256, 64\]")
    assert await weights(engines[1]) == before


async def test_a_version_is_taken_once_and_in_order(cast):
    policy, engines = cast(engines=1)
    await sync_weights(policy, engines, 7, 60, settings("shared_memory"))
    for version in (7, 6, 9):
        request = SyncRequest("shared_memory", version, 1, BUCKET, True, 5.0)
        offer = policy.refer("offer_weights", request)
        with pytest.raises(InfraError, match=f"version {version} were offered to an engine that has version 7; 8 was"):
            await engines[0].call("load_weights", offer, version, 1, timeout=60)
    stale = await policy.call("offer_weights", SyncRequest("shared_memory", 6, 1, BUCKET, True, 5.0), timeout=60)
    with pytest.raises(InfraError, match="weights of version 6 were offered in the sync to version 8"):
        await engines[0].call("load_weights", stale, 8, 1, timeout=60)


async def test_an_engine_that_has_the_version_is_not_sent_it_again(cast):
    policy, engines = cast()
    await sync_weights(policy, engines[:1], 0, 60, settings("shared_memory"))
    assert await sync_weights(policy, engines, 0, 60, settings("shared_memory"))
    assert await sync_weights(policy, engines, 0, 60, settings("shared_memory")) == {}
    sums = await policy.call("change", timeout=60)
    await sync_weights(policy, engines, 1, 60, settings("broadcast"))
    assert await weights(*engines) == [sums, sums]
