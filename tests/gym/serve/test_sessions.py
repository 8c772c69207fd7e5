"""Sessions are bounded in number and in silence, end once, and none of those who play is ended for another."""

import time

import pytest

from gymloop.gym.serve.refusal import NO_SESSION, Refusal
from gymloop.gym.serve.sessions import Sessions
from gymloop.gym.session import InProcessSource

from .served import ROW, Odd, in_background, seeded, serving, until, verify


def test_at_the_bound_a_new_session_is_asked_to_come_back_and_old_ones_play_on():
    with serving(max_sessions=2) as served, served.client() as one, served.client() as two, served.client() as three:
        seeded(one)
        seeded(two)
        reply = three.post("/seed_session", json=ROW)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["detail"].startswith("2 sessions are open")
        assert one.post("/add", json={}).text == two.post("/add", json={}).text == "1"
        one.post("/close_session", json={})
        assert three.post("/seed_session", json=ROW).status_code == 200
        verify(two)
        assert one.post("/seed_session", json=ROW).status_code == 200, "a verdict frees a place"
        assert len(served.app.sessions) == 2


def test_sessions_that_are_being_opened_count():
    with serving(max_sessions=1) as served, served.client() as slow, served.client() as other:
        opening = in_background(lambda: slow.post("/seed_session", json={**ROW, "seed_s": 2.0}))
        until(lambda: served.log)
        assert other.post("/seed_session", json=ROW).status_code == 429
        opening.join(10)
        assert slow.post("/add", json={}).text == "1"


def test_a_failed_seed_frees_its_place():
    with serving(max_sessions=1) as served, served.client() as client:
        for _ in range(3):
            assert client.post("/seed_session", json={**ROW, "broken": True}).status_code == 500
        seeded(client)


def test_silence_ends_a_session_and_a_running_call_is_no_silence():
    with serving(session_idle_s=1.5) as served, served.client() as silent, served.client() as busy:
        seeded(silent, name="silent")
        seeded(busy, name="busy")
        working = in_background(lambda: busy.post("/wait", json={"seconds": 3.0}))
        until(lambda: ("close", "silent") in served.log)
        assert silent.post("/add", json={}).json() == {"detail": NO_SESSION}
        working.join(10)
        assert busy.post("/add", json={}).text == "1"
        until(lambda: len(served.app.sessions) == 0)


def test_seeding_again_under_a_cookie_ends_what_was_open_under_it():
    with serving() as served, served.client() as client:
        seeded(client, name="first")
        client.post("/add", json={"by": 5})
        seeded(client, name="second")
        assert ("close", "first") in served.log
        assert client.post("/add", json={}).text == "1"
        assert len(served.app.sessions) == 1


def test_the_servers_end_closes_every_session_and_lets_a_call_finish():
    replies = []
    with serving() as served, served.client() as one, served.client() as two:
        seeded(one, name="one")
        seeded(two, name="two")
        in_background(lambda: replies.append(two.post("/wait", json={"seconds": 0.5}).text))
        until(lambda: ("waits", 0.5) in served.log)
        served.server.close()
        assert {("close", "one"), ("close", "two")} <= set(served.log)
        until(lambda: replies == ["waited"])


def test_after_a_restart_the_old_cookie_is_a_lost_session_and_play_can_begin_again():
    with serving() as before, before.client() as client:
        seeded(client)
        before.server.close()
        with serving(port=before.port):
            assert client.post("/add", json={}).json() == {"detail": NO_SESSION}
            assert seeded(client).post("/add", json={}).text == "1"


async def test_a_call_that_waits_for_one_that_does_not_end_gives_up():
    sessions = Sessions(InProcessSource("odd", Odd), most=1, idle_s=60, call_timeout_s=0.5)
    token = await sessions.open(ROW, None)
    async with sessions.playing(token):
        began = time.monotonic()
        with pytest.raises(Exception, match="an earlier call of this session has not ended"):
            async with sessions.playing(token):
                pass
        assert time.monotonic() - began < 5
    async with sessions.playing(token):
        await sessions.close(token)
    with pytest.raises(Refusal):
        async with sessions.playing(token):
            pass


async def test_a_thousand_sessions_that_nobody_ends_are_swept():
    now = [0.0]
    log: list = []
    source = InProcessSource("odd", Odd, {"log": log})
    sessions = Sessions(source, most=1000, idle_s=60, call_timeout_s=5, clock=lambda: now[0])
    for _ in range(1000):
        await sessions.open(ROW, None)
    with pytest.raises(Refusal) as caught:
        await sessions.open(ROW, None)
    assert caught.value.status == 429
    now[0] = 61.0
    await sessions.open(ROW, None)
    assert len(sessions) == 1
    assert sum(event[0] == "close" for event in log) == 1000
    await sessions.close_all()
    assert len(sessions) == 0
