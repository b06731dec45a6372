from __future__ import annotations

import contextlib
import functools
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from rollouts.engines import http
from rollouts.engines.http import Connect, HttpReply, open_http_client
from rollouts.errors import (
    EngineClosed,
    EngineSetupError,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
    ReplyError,
)

BODY = b'{"tokens": [1, 2, 3]}'
KEY = "sk-very-secret"


def reply(body: bytes = BODY, *, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


CHUNKED = (
    b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\n{"token\r\ne;x=y\r\ns": [1, 2,'
    b" 3]}\r\n0\r\n\r\n"
)
UNTIL_END = b"HTTP/1.1 200 OK\r\nserver: old\r\n\r\n" + BODY

# --- servers ---

Handler = Callable[["Peer"], Awaitable[None]]


@dataclass(eq=False)
class Peer:
    """The server's end of one connection."""

    stream: trio.abc.Stream
    number: int  # connections before it
    log: list[tuple[int, bytes]]  # (connection, request) of all connections of the server
    buffered: bytes = b""

    async def read_request(self) -> bytes:
        """Head and body of the next request; b"" when the client is gone."""
        try:
            while b"\r\n\r\n" not in self.buffered:
                await self._fill()
            head, rest = self.buffered.split(b"\r\n\r\n", 1)
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                ),
                0,
            )
            while len(rest) < length:
                self.buffered = b""
                await self._fill()
                rest += self.buffered
        except (EOFError, trio.BrokenResourceError):
            return b""
        self.buffered = rest[length:]
        self.log.append((self.number, head + b"\r\n\r\n" + rest[:length]))
        return self.log[-1][1]

    async def _fill(self) -> None:
        received = await self.stream.receive_some(65536)
        if not received:
            raise EOFError
        self.buffered += bytes(received)

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(trio.BrokenResourceError):  # the client may have left
            await self.stream.send_all(data)

    def reset_on_close(self) -> None:
        assert isinstance(self.stream, trio.SocketStream)
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def always(*answers: bytes) -> Handler:
    """Answers the n-th request of a connection with the n-th answer, and then closes; the last one is for all
    that follow.
    """

    async def handle(peer: Peer) -> None:
        count = 0
        while await peer.read_request():
            await peer.send(answers[min(count, len(answers) - 1)])
            count += 1

    return handle


@dataclass
class Server:
    log: list[tuple[int, bytes]] = field(default_factory=list)
    accepted: int = 0
    open: int = 0
    changed: trio.Event = field(default_factory=trio.Event)

    async def serve(self, handler: Handler, stream: trio.abc.Stream) -> None:
        peer = Peer(stream, self.accepted, self.log)
        self.accepted += 1
        self.open += 1
        try:
            async with stream:
                await handler(peer)
        finally:
            self.open -= 1
            self.changed.set()
            self.changed = trio.Event()

    async def wait_empty(self) -> None:
        with trio.fail_after(10):
            while self.open:
                await self.changed.wait()


@dataclass
class TcpServer(Server):
    url: str = ""


@asynccontextmanager
async def open_server(
    handler: Handler, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[TcpServer]:
    server = TcpServer()

    async def serve(stream: trio.SocketStream) -> None:
        await server.serve(
            handler, trio.SSLStream(stream, tls, server_side=True, https_compatible=True) if tls else stream
        )

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(functools.partial(trio.serve_tcp, serve, 0, host=host, backlog=1024))
        shown = f"[{host}]" if ":" in host else host
        server.url = f"{'https' if tls else 'http'}://{shown}:{listeners[0].socket.getsockname()[1]}"
        yield server
        nursery.cancel_scope.cancel()


@dataclass
class MemoryServer(Server):
    connect: Connect = None  # type: ignore[assignment]  # set where it is made


@asynccontextmanager
async def open_memory_server(handler: Handler) -> AsyncIterator[MemoryServer]:
    """For virtual time, where no socket may be awaited."""
    server = MemoryServer()
    async with trio.open_nursery() as nursery:

        async def connect() -> trio.abc.Stream:
            client, end = trio.testing.memory_stream_pair()
            nursery.start_soon(server.serve, handler, end)
            return client

        server.connect = connect
        yield server
        nursery.cancel_scope.cancel()


async def ask(handler: Handler, *, max_body_bytes: int = 1 << 28) -> HttpReply:
    """One POST to a new server by a new client."""
    async with (
        open_server(handler) as server,
        open_http_client(server.url, max_body_bytes=max_body_bytes) as client,
    ):
        return await client.request("POST", "/generate", body=b"{}")


# --- what is sent ---


async def test_a_request_names_host_key_type_and_length():
    async with (
        open_server(always(reply())) as server,
        open_http_client(f"{server.url}/v1/", api_key=KEY) as client,
    ):
        await client.request("POST", "/generate", body=b'{"a": 1}')
        await client.request("GET", "/health?deep=1")
        await client.request("POST", "/pause")
    post, get, empty = (request.decode().split("\r\n") for _, request in server.log)
    host = server.url.removeprefix("http://")
    assert post[0] == "POST /v1/generate HTTP/1.1"
    assert sorted(line.lower() for line in post[1:-2]) == sorted([
        f"host: {host}", "accept-encoding: identity", f"authorization: bearer {KEY}", "content-type: application/json",
        "content-length: 8",
    ])  # fmt: skip
    assert post[-1] == '{"a": 1}'
    assert get[0] == "GET /v1/health?deep=1 HTTP/1.1"
    assert not any(line.lower().startswith("content-") for line in get)
    assert "content-length: 0" in [line.lower() for line in empty]


async def test_a_long_body_arrives_whole_in_both_directions():
    sent, returned = random.Random(0).randbytes(3_000_000), random.Random(1).randbytes(20_000_000)
    async with open_server(always(reply(returned))) as server, open_http_client(server.url) as client:
        answer = await client.request("POST", "/x", body=sent)
    assert answer.body == returned
    assert server.log[0][1].endswith(sent)


async def test_ipv6_hosts_are_reached_and_named_with_brackets():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    async with open_server(always(reply()), host="::1") as server, open_http_client(server.url) as client:
        assert (await client.request("GET", "/")).body == BODY
    assert f"host: {server.url.removeprefix('http://')}".encode() in server.log[0][1].lower()


# --- what comes back ---


@pytest.mark.parametrize(
    "raw", [reply(), CHUNKED, UNTIL_END], ids=["content-length", "chunked", "until the end"]
)
async def test_a_body_is_read_however_its_end_is_told(raw: bytes):
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(raw)

    answer = await ask(handle)
    assert (answer.status, answer.body) == (200, BODY)


async def test_a_reply_in_single_bytes_is_the_same_reply():
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        for index in range(len(CHUNKED)):
            await peer.send(CHUNKED[index : index + 1])

    assert (await ask(handle)).body == BODY


@pytest.mark.parametrize(
    "status",
    ["204 No Content", "307 Temporary Redirect", "404 Not Found", "429 Too Many Requests", "500 Oops"],
)
async def test_a_status_is_returned_and_never_raised(status: str):
    body = b"" if status.startswith("204") else BODY
    answer = await ask(always(reply(body, status=status, headers="Retry-After: 3\r\nVia: a\r\nvia: b\r\n")))
    assert (answer.status, answer.body) == (int(status[:3]), body)
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["via"] == "a, b"


async def test_informational_replies_come_before_the_answer():
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    assert (await ask(always(hints + reply()))).body == BODY


async def test_a_refusal_that_comes_before_the_body_was_read_is_seen():
    async def handle(peer: Peer) -> None:
        await peer.stream.receive_some(1000)
        await peer.send(reply(b"too large", status="413 Content Too Large", headers="connection: close\r\n"))
        while await peer.stream.receive_some(65536):
            pass

    async with open_server(handle) as server, open_http_client(server.url) as client:
        assert (await client.request("POST", "/x", body=bytes(30_000_000))).status == 413


# --- failures ---


async def ask_and_fail(handler: Handler, *, max_body_bytes: int = 1 << 28) -> InfrastructureError:
    async with (
        open_server(handler) as server,
        open_http_client(server.url, api_key=KEY, max_body_bytes=max_body_bytes) as client,
    ):
        with pytest.raises(InfrastructureError) as caught:
            await client.request("POST", "/generate", body=b"{}")
        assert client.statistics()["connections"] == 0
    assert f"POST {server.url}/generate" in str(caught.value)
    assert KEY not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize(
    "raw",
    [reply(), CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + reply()],
    ids=["content-length", "chunked", "after 100"],
)
async def test_an_answer_cut_at_any_byte_is_an_error(raw: bytes, end: str):
    cut = 0

    async def handle(peer: Peer) -> None:
        if end == "reset":
            peer.reset_on_close()
        await peer.read_request()
        if cut:
            await peer.send(raw[:cut])

    async with open_server(handle) as server, open_http_client(server.url) as client:
        for cut in range(len(raw)):
            expected = ReplyError if end == "close" and cut else EngineUnreachable
            with pytest.raises(InfrastructureError) as caught:
                await client.request("POST", "/generate", body=b"{}")
            assert type(caught.value) is expected, (cut, caught.value)
        assert server.accepted == len(raw), "a new connection was asked twice"
        cut = len(raw)
        if end == "close":
            assert (await client.request("POST", "/generate", body=b"{}")).body == BODY


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x50" * 10 + b"\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1_000_000,
    ],
)
async def test_what_is_not_http_is_a_reply_error(raw: bytes):
    assert type(await ask_and_fail(always(raw))) is ReplyError


async def test_nobody_listening_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with open_http_client(f"http://127.0.0.1:{port}", api_key=KEY) as client:
        with pytest.raises(
            EngineUnreachable, match=rf"^GET http://127.0.0.1:{port}/health: no connection: .*refused"
        ) as caught:
            await client.request("GET", "/health")
        assert KEY not in str(caught.value)
        assert client.statistics() == {"connections": 0, "idle": 0, "opened": 0}


@pytest.mark.parametrize(
    "raw", [reply(bytes(5001)), b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5001)], ids=["declared", "until the end"]
)
async def test_a_body_beyond_the_bound_is_a_reply_error(raw: bytes):
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(raw)

    error = await ask_and_fail(handle, max_body_bytes=5000)
    assert type(error) is ReplyError
    assert "larger than max_body_bytes=5000" in str(error)
    assert len((await ask(handle, max_body_bytes=5001)).body) == 5001


@pytest.mark.parametrize("key", ["", " ", "a\nb", "sk-ü", "tail "])
async def test_a_key_that_no_header_carries_is_refused_unshown(key: str):
    with pytest.raises(EngineSetupError, match="api_key") as caught:
        async with open_http_client("http://127.0.0.1:1", api_key=key):
            pass
    assert not key.strip() or key not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "127.0.0.1:80",
            "ftp://h",
            "http://",
            "http://h:99999",
            "http://h:0",
            "http://h?x=1",
            "http://h/#f",
            "http://ü",
            "http://h:x",
        ),
        *(
            "http://h/a b",
            "http://[::1",
            "http://a..b",
            "http://h/a\nb",
            "http://" + "a" * 64 + ".b",
            "http://h/?",
        ),
    ],
)
async def test_a_url_that_is_none_is_refused(url: str):
    with pytest.raises(EngineSetupError, match="url="):
        async with open_http_client(url):
            pass


@pytest.mark.parametrize(
    "url",
    [
        "http://h/v1?key=SECRET",
        "http://[::1?key=SECRET",
        "http://h/#SECRET",
        "http://SECRET@[::1",
        "http://h/@?SECRET",
    ],
)
async def test_a_key_in_the_url_is_refused_unshown(url: str):
    with pytest.raises(EngineSetupError, match="api_key") as caught:
        async with open_http_client(url):
            pass
    assert "SECRET" not in str(caught.value)


async def test_a_password_in_the_url_is_refused_unshown():
    with pytest.raises(EngineSetupError, match="api_key") as caught:
        async with open_http_client("http://me:hunter2@host"):
            pass
    assert "hunter2" not in str(caught.value)


# --- connections ---


async def test_requests_one_after_another_share_a_connection():
    async with open_server(always(reply(), CHUNKED)) as server, open_http_client(server.url) as client:
        for _ in range(5):
            assert (await client.request("POST", "/x", body=b"{}")).body == BODY
        assert client.statistics() == {"connections": 1, "idle": 1, "opened": 1}
    assert [number for number, _ in server.log] == [0] * 5
    assert client.statistics()["connections"] == 0


@pytest.mark.parametrize(
    "raw",
    [
        reply(headers="Connection: close\r\n"),
        reply().replace(b"HTTP/1.1", b"HTTP/1.0"),
        reply() + b"more",
        UNTIL_END,
    ],
    ids=["says close", "1.0", "more than was asked for", "until the end"],
)
async def test_a_connection_that_is_over_is_not_kept(raw: bytes):
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(raw)

    async with open_server(handle) as server, open_http_client(server.url) as client:
        for _ in range(3):
            assert (await client.request("GET", "/x")).body == BODY
            assert client.statistics()["connections"] == 0
    assert [number for number, _ in server.log] == [0, 1, 2]


async def ask_at_once(client: http.HttpClient, count: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(client.request, "GET", "/")


async def test_as_many_connections_as_requests_in_flight():
    async with open_server(always(reply())) as server, open_http_client(server.url) as client:
        await ask_at_once(client, 200)
        assert client.statistics() == {"connections": 200, "idle": 200, "opened": 200}
        await ask_at_once(client, 200)
        assert client.statistics()["opened"] == 200
    await server.wait_empty()


async def test_the_connection_used_last_is_used_next(autojump_clock: trio.testing.MockClock):
    async def handle(peer: Peer) -> None:
        while await peer.read_request():
            await trio.sleep(peer.number)  # so that the third is put back last
            await peer.send(reply())

    async with (
        open_memory_server(handle) as server,
        open_http_client("http://h", connect=server.connect) as client,
    ):
        await ask_at_once(client, 3)
        for _ in range(2):
            await client.request("GET", "/")
    assert [number for number, _ in server.log][3:] == [2, 2]


async def test_an_idle_connection_is_left_before_the_server_leaves_it(autojump_clock: trio.testing.MockClock):
    async with (
        open_memory_server(always(reply())) as server,
        open_http_client("http://h", connect=server.connect) as client,
    ):
        await ask_at_once(client, 3)
        await trio.sleep(http.IDLE_S - 0.1)
        await client.request("GET", "/")
        assert client.statistics() == {"connections": 3, "idle": 3, "opened": 3}
        await trio.sleep(1)
        await client.request("GET", "/")  # puts the newest back, closes the oldest
        assert client.statistics() == {"connections": 2, "idle": 2, "opened": 3}
        await trio.sleep(http.IDLE_S + 0.1)
        await client.request("GET", "/")
        assert client.statistics() == {"connections": 1, "idle": 1, "opened": 4}


async def test_the_idle_ones_are_bounded(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "MAX_IDLE", 10)
    async with (
        open_memory_server(always(reply())) as server,
        open_http_client("http://h", connect=server.connect) as client,
    ):
        await ask_at_once(client, 30)
        assert client.statistics() == {"connections": 10, "idle": 10, "opened": 30}
        await trio.testing.wait_all_tasks_blocked()
        assert server.open == 10


async def test_a_kept_connection_that_the_server_closed_is_noticed():
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(reply())

    async with open_server(handle) as server, open_http_client(server.url) as client:
        for _ in range(3):
            await client.request("POST", "/x", body=b"{}")
            await server.wait_empty()
    assert [number for number, _ in server.log] == [0, 1, 2]


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_kept_connection_closed_under_the_request_is_replaced_once(end: str):
    async def handle(peer: Peer) -> None:
        if end == "reset":
            peer.reset_on_close()
        if peer.number < 2:
            await peer.read_request()
            await peer.send(reply())
        await peer.read_request()  # and says nothing

    async with open_server(handle) as server, open_http_client(server.url) as client:
        await ask_at_once(client, 2)
        with pytest.raises(EngineUnreachable):
            await client.request("POST", "/x", body=b"{}")
    assert [number for number, _ in server.log][2:] in (
        [0, 2],
        [1, 2],
    )  # one kept, one new, and not the other kept one


@pytest.mark.parametrize(("silence_s", "closes_after_s"), [(60.0, 3.0), (0.2, 0.5)])
async def test_work_that_may_have_begun_is_not_asked_for_again(
    autojump_clock: trio.testing.MockClock, silence_s: float, closes_after_s: float
):
    asked: list[int] = []

    async def connect() -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(answer_once_then_close, theirs)
        return ours

    async def answer_once_then_close(stream: trio.abc.Stream) -> None:
        peer = Peer(stream, len(asked), [])
        await peer.read_request()
        asked.append(peer.number)
        await peer.send(reply())
        if await peer.read_request():
            asked.append(peer.number)
            await trio.sleep(closes_after_s)
        await stream.aclose()

    async def bear() -> bool:
        return True

    async with trio.open_nursery() as nursery, open_http_client("http://h", connect=connect) as client:
        await client.request("POST", "/generate", body=b"{}")
        with pytest.raises(EngineUnreachable):
            await client.request("POST", "/generate", body=b"{}", silence_s=silence_s, on_silence=bear)
    assert asked == [0, 0]


async def test_a_kept_connection_closed_within_the_answer_is_not_asked_again():
    async with (
        open_server(once_then(b"HTTP/1.1 200 OK\r\n")) as server,
        open_http_client(server.url) as client,
    ):
        await client.request("POST", "/x", body=b"{}")
        with pytest.raises(ReplyError):
            await client.request("POST", "/x", body=b"{}")
    assert len(server.log) == 2


def once_then(beginning: bytes) -> Handler:
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(reply())
        await peer.read_request()
        await peer.send(beginning)

    return handle


async def test_closing_the_client_ends_what_waits():
    asked = trio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_request()
        asked.set()
        await trio.sleep_forever()

    async def wait_closed(client: http.HttpClient) -> None:
        with pytest.raises(EngineClosed):
            await client.request("GET", "/x")

    async with open_server(handle) as server, trio.open_nursery() as nursery:
        async with open_http_client(server.url) as client:
            nursery.start_soon(wait_closed, client)
            await asked.wait()
        await wait_closed(client)


# --- silence ---


async def test_silence_is_an_error_after_so_many_seconds(autojump_clock: trio.testing.MockClock):
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(b"HTTP/1.1 200 OK\r\n")
        await trio.sleep(25)
        await peer.send(b"content-length: 5\r\n")
        await trio.sleep_forever()

    async with (
        open_memory_server(handle) as server,
        open_http_client("http://h", connect=server.connect) as client,
    ):
        with pytest.raises(EngineSilent, match=r"POST http://h/x: nothing came for 30 s, after 36 bytes"):
            await client.request("POST", "/x", body=b"{}", silence_s=30)
        assert trio.current_time() == pytest.approx(25 + 30, abs=1e-6)
        assert client.statistics()["connections"] == 0


async def test_silence_is_borne_while_it_is_said_to_be_worth_it(autojump_clock: trio.testing.MockClock):
    asked_at: list[float] = []
    began = trio.current_time()

    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await trio.sleep(95)
        await peer.send(reply())
        await peer.read_request()
        await trio.sleep_forever()

    async def on_silence() -> bool:
        asked_at.append(round(trio.current_time() - began, 6))
        return len(asked_at) < 6

    async with (
        open_memory_server(handle) as server,
        open_http_client("http://h", connect=server.connect) as client,
    ):
        assert (
            await client.request("POST", "/x", body=b"{}", silence_s=30, on_silence=on_silence)
        ).body == BODY
        assert asked_at == [30, 60, 90]
        with pytest.raises(EngineSilent):
            await client.request("POST", "/x", body=b"{}", silence_s=30, on_silence=on_silence)
        assert asked_at == [30, 60, 90, 125, 155, 185]
        assert server.accepted == 1, "a silent request was sent twice"


async def test_what_on_silence_raises_is_raised_and_sends_nothing_again(
    autojump_clock: trio.testing.MockClock,
):
    async def on_silence() -> bool:
        raise EngineUnreachable("the question itself found nobody")

    async with (
        open_memory_server(once_then_silent) as server,
        open_http_client("http://h", connect=server.connect) as client,
    ):
        await client.request("GET", "/")
        with pytest.raises(EngineUnreachable, match="found nobody"):
            await client.request("GET", "/", on_silence=on_silence)
        assert client.statistics()["connections"] == 0
        assert len(server.log) == 2


async def once_then_silent(peer: Peer) -> None:
    await peer.read_request()
    await peer.send(reply())
    await peer.read_request()
    await trio.sleep_forever()


async def test_a_server_that_takes_no_bytes_is_silent(autojump_clock: trio.testing.MockClock):
    async def connect() -> trio.abc.Stream:
        client, _ = trio.testing.lockstep_stream_pair()  # nothing is taken before it is read
        return client

    async with open_http_client("http://h", connect=connect) as client:
        with pytest.raises(EngineSilent, match="did not take the request for 30 s"):
            await client.request("POST", "/x", body=b"{}", silence_s=30)
        assert client.statistics()["connections"] == 0


async def test_a_connection_that_takes_too_long_is_unreachable(autojump_clock: trio.testing.MockClock):
    async def connect() -> trio.abc.Stream:
        await trio.sleep(7)
        raise AssertionError("waited for longer than connect_s")

    async with open_http_client("http://h", connect=connect, connect_s=6.0) as client:
        with pytest.raises(EngineUnreachable, match="GET http://h/x: no connection within 6 s"):
            await client.request("GET", "/x")


# --- cancelling ---


async def test_cancelling_closes_that_connection_and_no_other():
    asked = trio.Event()

    async def handle(peer: Peer) -> None:
        while request := await peer.read_request():
            if b"/slow" not in request:
                await peer.send(reply())
                continue
            asked.set()
            assert not await peer.read_request()

    async with (
        open_server(handle) as server,
        open_http_client(server.url) as client,
        trio.open_nursery() as nursery,
    ):
        await ask_at_once(client, 3)
        nursery.start_soon(client.request, "POST", "/slow")
        await asked.wait()
        assert (server.open, client.statistics()["connections"]) == (3, 3)
        nursery.cancel_scope.cancel()
    assert client.statistics()["opened"] == 3


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_cancelled_requests_leave_nothing_behind(count: int):
    rng = random.Random(4)
    seen = {"sent": 0, "answered": 0}
    body = bytes(100_000)

    async def handle(peer: Peer) -> None:
        while await peer.read_request():
            peer.log.clear()
            seen["sent"] += 1
            for part in (b"HTTP/1.1 200 OK\r\n", b"content-length: 100000\r\n\r\n", body[:1000], body[1000:]):
                for _ in range(rng.randrange(8)):
                    await trio.lowlevel.checkpoint()
                await peer.send(part)

    async def cancel_later(scope: trio.CancelScope, rounds: int) -> None:
        for _ in range(rounds):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async def ask_many(client: http.HttpClient, number: int) -> None:
        for _ in range(number):
            async with trio.open_nursery() as nursery:
                if rng.random() < 0.8:  # the others leave connections to be used again
                    nursery.start_soon(cancel_later, nursery.cancel_scope, rng.randrange(80))
                await client.request("POST", "/generate", body=b"{}")
                seen["answered"] += 1
                nursery.cancel_scope.cancel()

    def count_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    files, tasks = count_files(), trio.lowlevel.current_statistics().tasks_living
    async with open_server(handle) as server:
        async with open_http_client(server.url) as client:
            async with trio.open_nursery() as nursery:
                for _ in range(64):
                    nursery.start_soon(ask_many, client, count // 64 + 1)
            statistics = client.statistics()
            assert statistics["connections"] == statistics["idle"], "a connection belongs to nobody"
            for _ in range(100):
                assert (await client.request("POST", "/generate", body=b"{}")).body == body
        await server.wait_empty()
        assert client.statistics()["connections"] == 0
    assert count * 0.1 < seen["answered"] < count * 0.9, "hardly any was cancelled, or nearly all"
    assert seen["answered"] + count * 0.1 < seen["sent"] - 100, "hardly any was cancelled after it was sent"
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert count_files() == files


# --- TLS ---


def make_tls(kind: int) -> ssl.SSLContext:
    """A context without certificates, both sides anonymous: enough to see the bytes go through TLS."""
    context = ssl.SSLContext(kind)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
    return context


async def test_https_is_spoken_and_connections_are_kept():
    async with (
        open_server(always(reply()), tls=make_tls(ssl.PROTOCOL_TLS_SERVER)) as server,
        open_http_client(server.url, api_key=KEY, ssl_context=make_tls(ssl.PROTOCOL_TLS_CLIENT)) as client,
    ):
        for _ in range(3):
            assert (await client.request("POST", "/x", body=b"{}")).body == BODY
        assert client.statistics() == {"connections": 1, "idle": 1, "opened": 1}
        await ask_at_once(client, 5)
    await server.wait_empty()


async def test_a_server_without_a_trusted_certificate_is_unreachable():
    async def handle(peer: Peer) -> None:
        assert not await peer.read_request()

    async with (
        open_server(handle, tls=make_tls(ssl.PROTOCOL_TLS_SERVER)) as server,
        open_http_client(server.url, api_key=KEY) as client,
    ):
        with pytest.raises(EngineUnreachable, match=r"no connection: .*SSL"):
            await client.request("GET", "/x")
        assert client.statistics()["connections"] == 0
    assert not server.log
