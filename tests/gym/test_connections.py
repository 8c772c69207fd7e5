"""The client of environments and models, against servers that answer byte by byte as a test says."""

from __future__ import annotations

import asyncio
import base64
import contextlib

import pytest

from gymloop.gym.connections import Connections, LostConnection, NoConnection, TooLarge

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Scripted:
    """Answers the n-th request of any connection with ``script[n]``: bytes, pauses, ``None`` closes."""

    def __init__(self, script: list) -> None:
        self.script = list(script)
        self.requests: list[bytes] = []
        self.connections = 0
        self.most = 0
        self._now = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.script.pop(0) if self.script else [OK]:
                    if piece is None:
                        return
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                    else:
                        writer.write(piece)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._now -= 1
            writer.close()


async def asked(served: Scripted) -> None:
    async with asyncio.timeout(10):
        while not served.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def against(*script, limit: int = 4, path: str = "", user: str = "", **named):
    served = Scripted(list(script))
    server = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connections = Connections(f"http://{user}127.0.0.1:{port}{path}", limit=limit, **named)
    try:
        yield connections, served
    finally:
        await connections.close()
        server.close()


async def test_a_request_is_what_http_says_and_the_connection_is_kept():
    async with against(path="/root/", user="me:a%20b@") as (client, served):
        first = await client.post("/x?y=1", b"{}", 5.0, [("cookie", "a=b")])
        await client.request("GET", "/models", b"", 5.0)
        assert (first.status, first.body, first.content_type, first.set_cookies) == (200, b"hi", "", ())
        assert served.connections == client.open == 1
        head, _, body = served.requests[0].partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /root/x?y=1 HTTP/1.1"
        assert body == b"{}"
        pair = base64.b64encode(b"me:a b").decode()
        assert {"content-type: application/json", "content-length: 2", "cookie: a=b"} < set(lines)
        assert f"authorization: Basic {pair}" in lines
        assert not any("@" in line for line in lines)
        assert served.requests[1].startswith(b"GET /root/models HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"], b"abc"),
        ([OK[:9], OK[9:30], OK[30:]], b"hi"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK], b"hi"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        ([b"HTTP/1.1 200 OK\r\n\r\nto the", b" end", None], b"to the end"),
        ([b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx", None], b"x"),
    ],
    ids=["chunked", "in pieces", "a word before", "no content", "until it closes", "1.0"],
)
async def test_an_answer_is_whole_however_it_is_framed(pieces, body):
    async with against(pieces) as (client, _):
        assert (await client.post("/", b"", 5.0)).body == body
        assert (await client.post("/", b"", 5.0)).body == b"hi"


async def test_headers_are_read_as_they_are_meant():
    head = (
        b"HTTP/1.1 429 Busy\r\nContent-Type: Application/JSON; charset=utf-8\r\nRetry-After: 2\r\n"
        b'Set-Cookie: a="x=="; Path=/\r\nset-cookie: b=2\r\ncontent-length: 0\r\n\r\n'
    )
    async with against([head]) as (client, _):
        answer = await client.post("/", b"", 5.0)
    assert (answer.status, answer.content_type, answer.retry_after) == (429, "application/json", "2")
    assert answer.set_cookies == ('a="x=="; Path=/', "b=2")


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [OK[:-1], None],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", None],
        [b"SSH-2.0-OpenSSH\r\n"],
    ],
    ids=["no answer", "half a body", "half a chunk", "not HTTP"],
)
async def test_less_than_an_answer_is_a_lost_connection_and_nothing_is_sent_again(pieces):
    async with against(pieces) as (client, served):
        with pytest.raises(LostConnection):
            await client.post("/", b"", 5.0)
        assert len(served.requests) == 1
        assert client.open == 0


async def test_nobody_there_is_told_apart_from_a_lost_connection():
    client = Connections("http://127.0.0.1:9", limit=1)
    with pytest.raises(NoConnection, match=r"cannot connect to 127\.0\.0\.1:9"):
        await client.post("/", b"", 5.0)
    client = Connections("http://no.such.host.invalid:80", limit=1)
    with pytest.raises(NoConnection, match=r"cannot connect to no\.such\.host\.invalid:80"):
        await client.post("/", b"", 30.0)


async def test_a_call_that_is_over_its_time_closes_its_connection():
    async with against([5.0]) as (client, served):
        with pytest.raises(TimeoutError):
            await client.post("/", b"", 0.1)
        assert client.open == 0
        assert (await client.post("/", b"", 5.0)).body == b"hi"
        assert served.connections == 2


async def test_a_call_that_is_cancelled_closes_its_connection_and_frees_its_place():
    async with against([5.0], limit=1) as (client, served):
        call = asyncio.create_task(client.post("/", b"", 5.0))
        await asked(served)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.open == 0
        assert (await client.post("/", b"", 5.0)).body == b"hi"


async def test_more_calls_than_places_wait_their_turn_and_their_time_runs():
    async with against([0.2, OK], [0.2, OK], limit=2) as (client, served):
        answers = await asyncio.gather(*(client.post(f"/{n}", b"", 5.0) for n in range(20)))
        assert {answer.body for answer in answers} == {b"hi"}
        assert served.most <= 2
        assert [request.split()[1] for request in served.requests][:3] == [b"/0", b"/1", b"/2"]
        served.script = [[1.0, OK], [1.0, OK]]
        calls = [asyncio.create_task(client.post("/", b"", seconds)) for seconds in (5.0, 5.0, 0.1)]
        with pytest.raises(TimeoutError):
            await calls[2]
        await asyncio.gather(*calls[:2])
        assert (await client.post("/", b"", 5.0)).body == b"hi"  # no place was lost


async def test_an_answer_over_the_bound_is_not_read_on():
    async with against(
        [b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n" + b"x" * 2000, 5.0], max_answer_bytes=1000
    ) as (
        client,
        _,
    ):
        with pytest.raises(TooLarge, match="over 1000 bytes"):
            await client.post("/", b"", 5.0)
        assert client.open == 0


async def test_headers_without_end_are_not_read_on():
    many = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(100))
    async with against([b"HTTP/1.1 200 OK\r\n" + many, 5.0]) as (client, _):
        with pytest.raises(TooLarge, match="headers have over 65536 bytes"):
            await client.post("/", b"", 5.0)
        assert client.open == 0


async def test_headers_that_stop_half_way_are_waited_for_no_longer_than_the_call_has():
    async with against([b"HTTP/1.1 200 OK\r\ncontent-le", 20.0]) as (client, _):
        with pytest.raises(TimeoutError):
            await client.post("/", b"", 0.3)
        assert client.open == 0


async def test_a_connection_the_server_closed_or_spoke_on_is_not_used_again():
    async with against([OK, 0.05, None], [OK, 0.05, b"HTTP/1.1 408 Late\r\n\r\n"]) as (client, served):
        for _ in range(3):
            assert (await client.post("/", b"", 5.0)).body == b"hi"
            await asyncio.sleep(1.0)
        assert served.connections == 3


async def test_the_connection_of_a_server_that_is_far_behind_is_not_used_again():
    async with against([2.7, OK]) as (client, served):
        for _ in range(3):
            await client.post("/", b"", 5.0)
        assert served.connections == 2, "a new one after the slow answer, and then that one again"


async def test_closing_ends_calls_in_progress_and_refuses_later_ones():
    async with against([5.0]) as (client, served):
        call = asyncio.create_task(client.post("/", b"", 5.0))
        await asked(served)
        await client.close()
        with pytest.raises(LostConnection):
            await call
        with pytest.raises(LostConnection, match="the client is closed"):
            await client.post("/", b"", 5.0)
        assert client.open == 0
