"""The HTTP client against servers in this process: what is sent and read, which failures mean what, and that
cancelled requests leave nothing behind.
"""

import contextlib
import functools
import random
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
import trio
import trio.testing

from rollouts.engines import http
from rollouts.engines.http import open_http_client
from rollouts.errors import EngineSetupError, EngineSilent, EngineUnreachable, ReplyError
from tests.support.processes import wait_until
from tests.support.text_tables import cases

BODY = b'{"tokens": [1, 2, 3]}'
KEY = "sk-very-secret"
OK = b"HTTP/1.1 200 OK\r\n"
REPLY = OK + b"content-length: 21\r\n\r\n" + BODY
CHUNKED = OK + b'transfer-encoding: chunked\r\n\r\n7\r\n{"token\r\ne;x=y\r\ns": [1, 2, 3]}\r\n0\r\n\r\n'


class Peer:
    """The server's end of one connection; `number`: connections before it."""

    def __init__(self, stream, number, server):
        self.stream, self.number, self.server = stream, number, server
        self.send = stream.send_all

    async def read_request(self):
        """The next request; "" when the client is gone."""
        received, needed = b"", 1
        while len(received) < needed:
            try:
                received += (part := await self.stream.receive_some(1 << 20))
            except trio.BrokenResourceError:
                return ""
            if not part:
                return ""
            head, end, _ = received.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            needed = len(head) + 4 + length if end else len(received) + 1
        self.server.numbers.append(self.number)
        self.server.requests.append(received.decode())
        return received.decode()

    def reset_on_close(self):
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


Handle = Callable[[Peer], Awaitable[None]]


class Server:
    """A server on a socket: `handle` serves each connection."""

    def __init__(self, handle, tls):
        self.handle, self.tls = handle, tls
        self.url = ""
        self.requests, self.numbers = [], []  # and of their connections
        self.accepted = self.open = 0

    async def serve(self, stream):
        if self.tls is not None:
            stream = trio.SSLStream(stream, self.tls, server_side=True, https_compatible=True)
        self.accepted += 1
        self.open += 1
        with contextlib.suppress(trio.BrokenResourceError):
            async with stream:
                await self.handle(Peer(stream, self.accepted - 1, self))
        self.open -= 1


@asynccontextmanager
async def open_both(handle, *, tls=None, **options):
    """A server and a client for it."""
    server = Server(handle, tls)
    async with trio.open_nursery() as nursery:
        serve = functools.partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1", backlog=1024)
        (listener,) = await nursery.start(serve)
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        server.url = f"{'https' if tls else 'http'}://{address}"
        async with open_http_client(server.url, **options) as client:
            yield server, client
        nursery.cancel_scope.cancel()


def always(answer):
    async def handle(peer):
        while await peer.read_request():
            await peer.send(answer)

    return handle


def replying(*answers, hangs=False):
    """One request for each answer; then the connection is closed, unless the server hangs."""

    async def handle(peer):
        for answer in answers:
            await peer.read_request()
            await peer.send(answer)
        if hangs:
            await trio.sleep_forever()

    return handle


async def ask_at_once(client, count):
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(client.request, "GET", "/")


async def test_a_request_names_host_key_type_and_length():
    async with (
        open_both(always(REPLY)) as (server, _),
        open_http_client(f"{server.url}/v1/", api_key=KEY) as client,
    ):
        await client.request("POST", "/generate", body=b'{"a": 1}')
        await client.request("GET", "/health?deep=1")
        await client.request("POST", "/pause")
    post, get, empty = (request.lower().split("\r\n") for request in server.requests)
    assert (post[0], post[-1]) == ("post /v1/generate http/1.1", '{"a": 1}')
    wanted = f"""host: {server.url.removeprefix("http://")}
accept-encoding: identity
authorization: bearer {KEY}
content-type: application/json
content-length: 8"""
    assert {*wanted.splitlines()} <= {*post}
    assert get[0] == "get /v1/health?deep=1 http/1.1"
    assert not any(line.startswith("content-") for line in get)
    assert "content-length: 0" in empty


# --- failures ---


@cases("end: close reset")
@cases("raw", [REPLY, CHUNKED])
async def test_an_answer_cut_at_any_byte_is_an_error(raw, end):
    cut = 0

    async def handle(peer):
        if end == "reset":
            peer.reset_on_close()
        await peer.read_request()
        if cut:
            await peer.send(raw[:cut])

    async with open_both(handle) as (server, client):
        for cut in range(len(raw)):
            with pytest.raises((ReplyError, EngineUnreachable)) as caught:
                await client.request("POST", "/generate", body=b"{}")
            if end == "close" and b"\r\n\r\n" in raw[:cut]:
                assert isinstance(caught.value, ReplyError), (cut, caught.value)
        assert server.accepted == len(raw)  # else a new connection was asked twice


@cases(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x50" * 10 + b"\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"x: " + b"a" * 1_000_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 999999999\r\n\r\n",
    ],
)
async def test_what_is_not_http_or_endless_is_a_reply_error_without_the_key(raw):
    async with open_both(always(raw), api_key=KEY) as (server, client):
        with pytest.raises(ReplyError, match=f"POST {server.url}/generate") as caught:
            await client.request("POST", "/generate", body=b"{}")
        assert KEY not in str(caught.value)
        assert not client._idle


@cases("key", ["", " ", "a\nb", "sk-ü", "tail "])
async def test_a_key_that_no_header_carries_is_refused_unshown(key):
    with pytest.raises(EngineSetupError, match="api_key") as caught:
        async with open_http_client("http://127.0.0.1:1", api_key=key):
            pass
    assert not key.strip() or key not in str(caught.value)


@cases(
    "url",
    "127.0.0.1:80 ftp://h http:// http://h:99999 http://h:0 http://h?x=1 http://h/#f http://ü http://h:x"
    " http://h/a\tb http://[::1 http://a..b http://h/a\x01b http://h/? http://h/v1?key=SECRET"
    f" http://[::1?key=SECRET http://h/#SECRET http://SECRET@[::1 http://h/@?SECRET http://{'a' * 64}.b"
    " http://me:SECRET@host".split(" "),
)
async def test_a_url_that_is_none_or_holds_a_key_is_refused_unshown(url):
    with pytest.raises(EngineSetupError, match=r"url=|api_key") as caught:
        async with open_http_client(url):
            pass
    assert "SECRET" not in str(caught.value)


# --- the stock of clients ---


@cases("headers, used", [(b"connection: close\r\n", [0, 1, 2]), (b"", [0, 0, 0])])
async def test_a_connection_is_used_again_unless_it_is_over(headers, used):
    async with open_both(always(REPLY.replace(OK, OK + headers))) as (server, client):
        for _ in range(3):
            assert (await client.request("GET", "/x")).content == BODY
    assert server.numbers == used


async def test_a_burst_leaves_no_more_than_max_idle_clients_which_leave_by_age(autojump_clock, monkeypatch):
    """In virtual time, over transports instead of sockets."""
    monkeypatch.setattr(http, "MAX_IDLE", 10)

    async def handle(request):
        await trio.sleep(0.01)
        return httpx.Response(200, content=BODY)

    async with open_http_client("http://h", transport=lambda: httpx.MockTransport(handle)) as client:
        await ask_at_once(client, 30)
        assert len(client._idle) == 10
        for _ in range(9):  # each request puts one back and closes one that is too old
            await trio.sleep(http.IDLE_S)
            await client.request("GET", "/")
        assert len(client._idle) == 1


@cases("order: [0,1] [1,0]")
async def test_the_connection_that_was_used_last_is_used_first(order: Any):
    answered = [trio.Event(), trio.Event()]

    async def handle(peer):
        while await peer.read_request():
            await answered[peer.number].wait()
            await peer.send(REPLY)

    async with open_both(handle) as (server, client):
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(client.request, "GET", "/x")
                await wait_until(lambda number=number: len(server.numbers) > number)
            for kept, number in enumerate(order):
                answered[number].set()
                await wait_until(lambda kept=kept: len(client._idle) > kept)
        await client.request("GET", "/x")
    assert server.numbers == [0, 1, order[-1]]


async def test_a_cancelled_request_closes_its_own_connection_only():
    cancelled, scope = trio.Event(), trio.CancelScope()

    async def handle(peer):
        while await peer.read_request():
            if peer.number == 1:
                await cancelled.wait()
                await peer.send(REPLY)

    async def ask_in_scope(client):
        with scope:
            await client.request("GET", "/x")

    async with open_both(handle) as (server, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_in_scope, client)
            await wait_until(lambda: len(server.numbers) == 1)
            nursery.start_soon(client.request, "GET", "/x")
            await wait_until(lambda: len(server.numbers) == 2)
            scope.cancel()
            await wait_until(lambda: server.open == 1)
            cancelled.set()
        await client.request("GET", "/x")
    assert server.numbers == [0, 1, 1]


@cases("end: close reset")
async def test_a_kept_connection_closed_under_the_request_is_replaced_once(end):
    async def handle(peer):
        if end == "reset":
            peer.reset_on_close()
        if peer.number < 2:
            await peer.read_request()
            await peer.send(REPLY)
        await peer.read_request()  # and says nothing

    async with open_both(handle) as (server, client):
        await ask_at_once(client, 2)
        with pytest.raises(EngineUnreachable) as caught:
            await client.request("POST", "/x", body=b"{}")
    assert server.numbers[2:] in ([0, 2], [1, 2])  # one kept, one new
    assert caught.type is EngineUnreachable  # metrics count failures by the name of their class


@cases("beginning", [b"", REPLY[:-1]])
async def test_work_that_may_have_begun_is_not_asked_for_again(beginning, monkeypatch):
    """The answer has begun, or the end comes later than that of a connection that was closed before."""
    monkeypatch.setattr(http, "RESEND_S", 60.0 if beginning else 0.0)
    async with open_both(replying(REPLY, beginning)) as (server, client):
        await client.request("POST", "/x", body=b"{}")
        with pytest.raises((EngineUnreachable, ReplyError)):
            await client.request("POST", "/x", body=b"{}")
    assert len(server.numbers) == 2


@cases("begins", [b"", OK])
async def test_a_server_that_says_nothing_is_silent_and_not_asked_again(begins):
    async with open_both(replying(REPLY, begins, hangs=True)) as (server, client):
        await client.request("GET", "/x")
        with pytest.raises(EngineSilent, match=r"0\.05 s"):
            await client.request("GET", "/x", silence_s=0.05)
        assert not client._idle
        assert len(server.numbers) == 2


async def test_a_server_that_takes_no_bytes_is_silent_and_one_that_takes_no_connection_unreachable(
    monkeypatch,
):
    monkeypatch.setattr(http, "CONNECT_S", 0.05)
    async with open_both(replying(hangs=True)) as (server, client):
        with pytest.raises(EngineSilent):
            await client.request("POST", "/x", body=bytes(1 << 26), silence_s=0.05)
        url = server.url.replace("http:", "https:")  # nobody answers the handshake
        async with open_http_client(url) as other:
            with pytest.raises(EngineUnreachable, match=r"no connection within 0\.05 s"):
                await other.request("GET", "/x")


async def test_cancelled_requests_leave_nothing_behind():
    rng, count = random.Random(4), 1_000
    sent = answered = 0
    body = bytes(100_000)

    async def handle(peer):
        nonlocal sent
        while await peer.read_request():
            sent += 1
            for part in (OK, b"content-length: 100000\r\n\r\n", body[:1000], body[1000:]):
                for _ in range(rng.randrange(8)):
                    await trio.lowlevel.checkpoint()
                await peer.send(part)

    async def cancel_later(scope, rounds):
        for _ in range(rounds):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async def ask_many(client, number):
        nonlocal answered
        for _ in range(number):
            async with trio.open_nursery() as nursery:
                if rng.random() < 0.8:  # the others leave connections to be used again
                    nursery.start_soon(cancel_later, nursery.cancel_scope, rng.randrange(80))
                await client.request("POST", "/generate", body=b"{}")
                answered += 1
                nursery.cancel_scope.cancel()

    files, tasks = psutil.Process().num_fds(), trio.lowlevel.current_statistics().tasks_living
    async with open_both(handle) as (server, client):
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(ask_many, client, count // 64 + 1)
        assert server.open - len(client._idle) <= 64  # else connections belong to nobody
        for _ in range(100):
            assert (await client.request("POST", "/generate", body=b"{}")).content == body
        await client.aclose()
        assert not client._idle
        await wait_until(lambda: not server.open)
    assert count * 0.1 < answered < count * 0.9  # else hardly any was cancelled, or nearly all
    assert answered + count * 0.1 < sent - 100  # else hardly any was cancelled after it was sent
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert psutil.Process().num_fds() == files


async def test_a_server_whose_certificate_nobody_trusts_is_sent_nothing():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")  # anonymous
    async with open_both(always(REPLY), tls=context, api_key=KEY) as (server, client):
        with pytest.raises(EngineUnreachable, match=r"no connection within .*SSL"):
            await client.request("GET", "/x")
    assert server.accepted and not server.numbers
