"""The HTTP client against servers in this process: what is sent and read, which failures mean what, and that
cancelled requests leave nothing behind.
"""

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
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from rollouts.engines import http
from rollouts.engines.http import open_http_client
from rollouts.errors import (
    EngineSetupError,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
    ReplyError,
)

BODY = b'{"tokens": [1, 2, 3]}'
KEY = "sk-very-secret"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b'transfer-encoding: chunked\r\n\r\n7\r\n{"token\r\ne;x=y\r\ns": [1, 2, 3]}\r\n0\r\n\r\n'


def reply(body: bytes = BODY, *, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


# --- a server on a socket ---


@dataclass(eq=False)
class Peer:
    """The server's end of one connection."""

    stream: trio.abc.Stream
    number: int  # connections before it
    log: list[tuple[int, bytes]]  # (connection, request) of all connections of the server
    buffered: bytes = b""

    async def read_request(self) -> bytes:
        """Head and body of the next request; b"" when the client is gone."""
        with contextlib.suppress(EOFError, trio.BrokenResourceError):
            while b"\r\n\r\n" not in self.buffered:
                await self._fill()
            head = self.buffered.partition(b"\r\n\r\n")[0].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            while len(self.buffered) < len(head) + 4 + length:
                await self._fill()
            request, self.buffered = self.buffered, b""
            self.log.append((self.number, request))
            return request
        return b""

    async def _fill(self) -> None:
        received = await self.stream.receive_some(1 << 20)
        if not received:
            raise EOFError
        self.buffered += bytes(received)

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(trio.BrokenResourceError):  # the client may have left
            await self.stream.send_all(data)

    def reset_on_close(self) -> None:
        assert isinstance(self.stream, trio.SocketStream)
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


Handler = Callable[[Peer], Awaitable[None]]


@dataclass
class Server:
    url: str = ""
    log: list[tuple[int, bytes]] = field(default_factory=list)
    accepted: int = 0
    open: int = 0
    changed: trio.Event = field(default_factory=trio.Event)

    async def wait_empty(self) -> None:
        with trio.fail_after(60):
            while self.open:
                await self.changed.wait()


@asynccontextmanager
async def open_server(handler: Handler, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()

    async def serve(stream: trio.abc.Stream) -> None:
        if tls is not None:
            tcp: Any = stream
            stream = trio.SSLStream(tcp, tls, server_side=True, https_compatible=True)
        peer = Peer(stream, server.accepted, server.log)
        server.accepted += 1
        server.open += 1
        try:
            async with stream:
                await handler(peer)
        finally:
            server.open -= 1
            server.changed.set()
            server.changed = trio.Event()

    async with trio.open_nursery() as nursery:
        opened = functools.partial(trio.serve_tcp, serve, 0, host="127.0.0.1", backlog=1024)
        listeners = await nursery.start(opened)
        port = listeners[0].socket.getsockname()[1]
        server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        yield server
        nursery.cancel_scope.cancel()


def always(answer: bytes) -> Handler:
    async def handle(peer: Peer) -> None:
        while await peer.read_request():
            await peer.send(answer)

    return handle


def once(answer: bytes) -> Handler:
    """One answer, then the end of the connection."""

    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(answer)

    return handle


async def ask(handler: Handler) -> httpx.Response | InfrastructureError:
    """The answer to one POST, or the error; an error leaves no connection and does not show the key."""
    async with (
        open_server(handler) as server,
        open_http_client(server.url, api_key=KEY) as client,
    ):
        try:
            return await client.request("POST", "/generate", body=b"{}")
        except InfrastructureError as error:
            failure = error
        assert f"POST {server.url}/generate" in str(failure)
        assert KEY not in str(failure)
        assert not client._idle
        return failure


async def get_body(handler: Handler) -> bytes:
    answer = await ask(handler)
    assert isinstance(answer, httpx.Response)
    return answer.content


async def ask_at_once(client: http.HttpClient, count: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(client.request, "GET", "/")


# --- what is sent and read ---


async def test_a_request_names_host_key_type_and_length():
    async with (
        open_server(always(reply())) as server,
        open_http_client(f"{server.url}/v1/", api_key=KEY) as client,
    ):
        await client.request("POST", "/generate", body=b'{"a": 1}')
        await client.request("GET", "/health?deep=1")
        await client.request("POST", "/pause")
    post, get, empty = (request.decode().lower().split("\r\n") for _, request in server.log)
    assert (post[0], post[-1]) == ("post /v1/generate http/1.1", '{"a": 1}')
    needed = {
        f"host: {server.url.removeprefix('http://')}",
        "accept-encoding: identity",
        f"authorization: bearer {KEY}",
        "content-type: application/json",
        "content-length: 8",
    }
    assert needed <= set(post)
    assert get[0] == "get /v1/health?deep=1 http/1.1"
    assert not any(line.startswith("content-") for line in get)
    assert "content-length: 0" in empty


# --- failures ---


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("raw", [reply(), CHUNKED])
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
            with pytest.raises((ReplyError, EngineUnreachable)) as caught:
                await client.request("POST", "/generate", body=b"{}")
            if end == "close" and b"\r\n\r\n" in raw[:cut]:
                assert isinstance(caught.value, ReplyError), (cut, caught.value)
        assert server.accepted == len(raw), "a new connection was asked twice"


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x50" * 10 + b"\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        OK + b"content-length: many\r\n\r\n",
        OK + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"x: " + b"a" * 1_000_000,
    ],
)
async def test_what_is_not_http_is_a_reply_error(raw: bytes):
    assert isinstance(await ask(always(raw)), ReplyError)


@pytest.mark.parametrize("key", ["", " ", "a\nb", "sk-ü", "tail "])
async def test_a_key_that_no_header_carries_is_refused_unshown(key: str):
    with pytest.raises(EngineSetupError, match="api_key") as caught:
        async with open_http_client("http://127.0.0.1:1", api_key=key):
            pass
    assert not key.strip() or key not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    (
        "127.0.0.1:80 ftp://h http:// http://h:99999 http://h:0 http://h?x=1 http://h/#f http://ü http://h:x"
        " http://h/a%b http://[::1 http://a..b http://h/a\x01b http://h/? http://h/v1?key=SECRET"
        f" http://[::1?key=SECRET http://h/#SECRET http://SECRET@[::1 http://h/@?SECRET http://{'a' * 64}.b"
        " http://me:SECRET@host"
    )
    .replace("a%b", "a\tb")
    .split(" "),
)
async def test_a_url_that_is_none_or_holds_a_key_is_refused_unshown(url: str):
    with pytest.raises(EngineSetupError, match=r"url=|api_key") as caught:
        async with open_http_client(url):
            pass
    assert "SECRET" not in str(caught.value)


# --- the stock of clients ---


@pytest.mark.parametrize("headers", ["connection: close\r\n", ""])
async def test_a_connection_is_used_again_unless_it_is_over(headers: str):
    async with (
        open_server(always(reply(headers=headers))) as server,
        open_http_client(server.url) as client,
    ):
        for _ in range(3):
            assert (await client.request("GET", "/x")).content == BODY
    assert [number for number, _ in server.log] == ([0, 1, 2] if headers else [0, 0, 0])


async def test_idle_clients_are_used_last_in_first_out_and_leave_by_age_and_number(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
):
    """In virtual time, over transports instead of sockets."""
    monkeypatch.setattr(http, "MAX_IDLE", 10)
    used: list[int] = []

    def make_transport() -> httpx.MockTransport:
        number = len(used)

        async def handle(request: httpx.Request) -> httpx.Response:
            used.append(number)
            await trio.sleep(0.01 * (number % 100))  # a later one is put back later
            return httpx.Response(200, content=BODY)

        return httpx.MockTransport(handle)

    async with open_http_client("http://h", transport=make_transport) as client:
        await ask_at_once(client, 30)
        assert len(client._idle) == 10
        newest = used[-1]
        for _ in range(3):
            await client.request("GET", "/")
        assert used[-3:] == [newest] * 3
        for _ in range(9):  # each request puts one back and closes one that is too old
            await trio.sleep(http.IDLE_S)
            await client.request("GET", "/")
        assert len(client._idle) == 1


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
    assert [number for number, _ in server.log][2:] in ([0, 2], [1, 2])  # one kept, one new


@pytest.mark.parametrize("beginning", [b"", reply()[:-1]])
async def test_work_that_may_have_begun_is_not_asked_for_again(
    beginning: bytes, monkeypatch: pytest.MonkeyPatch
):
    """The answer has begun, or the end comes later than that of a connection that was closed before."""
    monkeypatch.setattr(http, "RESEND_S", 60.0 if beginning else 0.0)

    async def handle(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(reply())
        await peer.read_request()
        await peer.send(beginning)

    async with open_server(handle) as server, open_http_client(server.url) as client:
        await client.request("POST", "/x", body=b"{}")
        with pytest.raises((EngineUnreachable, ReplyError)):
            await client.request("POST", "/x", body=b"{}")
    assert len(server.log) == 2


@pytest.mark.parametrize("begins", [b"", OK])
async def test_a_server_that_says_nothing_is_silent_and_not_asked_again(begins: bytes):
    async def handle(peer: Peer) -> None:
        if peer.number == 0 and await peer.read_request():
            await peer.send(reply())
        await peer.read_request()
        await peer.send(begins)
        await trio.sleep_forever()

    async with open_server(handle) as server, open_http_client(server.url) as client:
        await client.request("GET", "/x")
        with pytest.raises(EngineSilent, match=r"0\.05 s"):
            await client.request("GET", "/x", silence_s=0.05)
        assert not client._idle
        assert len(server.log) == 2


async def test_a_server_that_takes_no_bytes_is_silent_and_one_that_takes_no_connection_unreachable(
    monkeypatch,
):
    monkeypatch.setattr("rollouts.engines.http.CONNECT_S", 0.05)

    async def handle(peer: Peer) -> None:
        await trio.sleep_forever()

    async with open_server(handle) as server:
        async with open_http_client(server.url) as client:
            with pytest.raises(EngineSilent):
                await client.request("POST", "/x", body=bytes(1 << 26), silence_s=0.05)
        url = server.url.replace("http:", "https:")  # nobody answers the handshake
        async with open_http_client(url) as client:
            with pytest.raises(EngineUnreachable, match=r"no connection within 0\.05 s"):
                await client.request("GET", "/x")


async def test_an_endless_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr("rollouts.engines.http.MAX_BYTES", 1000)
    async with open_server(once(reply(b"x" * 1001))) as server, open_http_client(server.url) as client:
        with pytest.raises(ReplyError, match="more than MAX_BYTES=1000"):
            await client.request("GET", "/x")
        assert not client._idle


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
        assert (server.open, len(client._idle)) == (3, 2)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_cancelled_requests_leave_nothing_behind(count: int):
    rng = random.Random(4)
    seen = {"sent": 0, "answered": 0}
    body = bytes(100_000)

    async def handle(peer: Peer) -> None:
        while await peer.read_request():
            peer.log.clear()
            seen["sent"] += 1
            for part in (OK, b"content-length: 100000\r\n\r\n", body[:1000], body[1000:]):
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
            assert server.open - len(client._idle) <= 64, "connections belong to nobody"
            for _ in range(100):
                assert (await client.request("POST", "/generate", body=b"{}")).content == body
        await server.wait_empty()
        assert not client._idle
    assert count * 0.1 < seen["answered"] < count * 0.9, "hardly any was cancelled, or nearly all"
    assert seen["answered"] + count * 0.1 < seen["sent"] - 100, "hardly any was cancelled after it was sent"
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert count_files() == files


def make_tls(kind: int) -> ssl.SSLContext:
    """A context without certificates, both sides anonymous: enough to see the bytes go through TLS."""
    context = ssl.SSLContext(kind)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
    return context


async def test_https_is_spoken_and_only_with_a_trusted_server(monkeypatch):
    ours = make_tls(ssl.PROTOCOL_TLS_CLIENT)
    async with open_server(always(reply()), tls=make_tls(ssl.PROTOCOL_TLS_SERVER)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(ssl, "create_default_context", lambda: ours)
            async with open_http_client(server.url, api_key=KEY) as client:
                for _ in range(3):
                    assert (await client.request("POST", "/x", body=b"{}")).content == BODY
                assert server.accepted == 1
                await ask_at_once(client, 5)
        await server.wait_empty()
        seen = len(server.log)
    assert seen == 8

    async def handle(peer: Peer) -> None:
        assert not await peer.read_request()

    async with (
        open_server(handle, tls=make_tls(ssl.PROTOCOL_TLS_SERVER)) as server,
        open_http_client(server.url, api_key=KEY) as client,
    ):
        with pytest.raises(EngineUnreachable, match=r"no connection: .*SSL"):
            await client.request("GET", "/x")
    assert not server.log
