"""HTTP/1.1 to one server over trio streams: connections kept, each request's cost the same however many are
in flight.

    request() ──► take ──► send ──► read until whole ──► put back, newest on top
                  │ newest idle     │ each wait at most silence_s;      └─ idle for IDLE_S, or more than MAX_IDLE: closed
                  └ else connect    │ then on_silence() decides
                                    └ cancelled, cut, broken: closed at once; the server sees it and aborts

There is no queue and no limit: what limits requests is admission above. A connection belongs to one request
at a time, and nothing but the request's own task touches it, so that a cancelled one cannot leave it in
anybody's hands.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import h11
import trio

from rollouts.errors import EngineClosed, EngineSetupError, EngineSilent, EngineUnreachable, ReplyError

# uvicorn, below vLLM and SGLang, closes after 5 s; a connection that we close first is not closed under a
# request
IDLE_S = 4.0
MAX_IDLE = 1024
MAX_BODY_BYTES = 1 << 28
FIRST_BYTES = 1 << 16  # received at once; a reply that fills them is a long one
MORE_BYTES = 1 << 20
SENT_BYTES = 1 << 18  # sent at once, each piece within silence_s
# a kept connection that the server had closed already says so at once; one that closes later may have done
# work
RESEND_S = 1.0

Connect = Callable[[], Awaitable[trio.abc.Stream]]
"""Makes a connection that is ready for use. Raises OSError and trio.BrokenResourceError."""
OnSilence = Callable[[], Awaitable[bool]]
"""Whether to go on waiting."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole answer, whatever its status."""

    status: int
    headers: Mapping[str, str]  # names in lower case; values of a repeated one joined by ", "
    body: bytes


@dataclass(slots=True, eq=False)
class _Connection:
    stream: trio.abc.Stream
    http: h11.Connection
    idle_since: float = 0.0
    reused: bool = False
    received: int = 0  # bytes of the current answer
    unanswered: bool = False  # it ended before a byte of the current answer


class HttpClient:
    """Requests to one server. Made by open_http_client."""

    def __init__(
        self,
        url: str,
        headers: list[tuple[str, str]],
        prefix: str,
        connect: Connect,
        *,
        connect_s: float,
        max_body_bytes: int,
    ) -> None:
        """`url` is what messages show, `headers` what every request carries, `prefix` what stands before
        every path.
        """
        self.url = url
        self._headers = headers
        self._prefix = prefix
        self._connect = connect
        self._connect_s = connect_s
        self._max_body_bytes = max_body_bytes
        self._connections: set[_Connection] = set()
        self._idle: deque[_Connection] = deque()
        self._opened = 0
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        silence_s: float = 60.0,
        on_silence: OnSilence | None = None,
    ) -> HttpReply:
        """The server's answer, whatever its status; redirects are not followed. A body is sent as
        application/json.

        When nothing came for `silence_s`, `on_silence()` is asked whether to wait as long again. Cancelling
        closes the connection. Sent again once, over a new connection, when a kept one turns out within
        RESEND_S to be closed before a byte of the answer.

        Raises: EngineUnreachable (refused, not connected in time, closed unanswered, or broken before the
        answer was whole), ReplyError (an answer that is cut, is not HTTP, or is larger than max_body_bytes),
        EngineSilent, EngineClosed.
        """
        assert path.startswith("/"), path
        where = f"{method} {self.url}{path}"
        headers = self._headers
        if body is not None:
            headers = [*headers, ("content-type", "application/json"), ("content-length", str(len(body)))]
        elif method != "GET":
            headers = [*headers, ("content-length", "0")]
        head = h11.Request(method=method, target=self._prefix + path, headers=headers)
        exchange = _Exchange(where, head, body or b"", silence_s, on_silence, self._max_body_bytes)
        connection = await self._take(where)
        begun_s = trio.current_time()
        try:
            return await self._run(exchange, connection)
        except EngineUnreachable:
            late = exchange.was_silent or trio.current_time() - begun_s >= RESEND_S
            if late or not (connection.reused and connection.unanswered):
                raise
        return await self._run(exchange, await self._open(where))

    async def _run(self, exchange: _Exchange, connection: _Connection) -> HttpReply:
        try:
            reply = await exchange.run(connection)
        except BaseException as error:
            await self._drop(connection)
            if isinstance(error, trio.ClosedResourceError):
                raise EngineClosed(
                    f"{exchange.where}: the client was closed before the answer was whole"
                ) from error
            raise
        if self._closed or exchange.sent_in_part or not _begin_next_cycle(connection.http):
            await self._drop(connection)
        else:
            await self._put_back(connection)
        return reply

    # --- connections ----------------------------------------------------------------------------------------

    async def _take(self, where: str) -> _Connection:
        """The connection that was used last, if it still stands, or a new one."""
        oldest_s = trio.current_time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest_s and not _is_readable(connection.stream):
                connection.reused = True
                connection.received = 0
                return connection
            await self._drop(connection)
        return await self._open(where)

    async def _open(self, where: str) -> _Connection:
        self._check_open(where)
        try:
            with trio.fail_after(self._connect_s):
                stream = await self._connect()
        except trio.TooSlowError as error:
            raise EngineUnreachable(f"{where}: no connection within {self._connect_s:g} s") from error
        except (OSError, trio.BrokenResourceError) as error:
            raise EngineUnreachable(f"{where}: no connection: {_describe(error)}") from error
        connection = _Connection(stream, h11.Connection(our_role=h11.CLIENT))
        self._connections.add(connection)
        self._opened += 1
        if self._closed:
            await self._drop(connection)
        self._check_open(where)
        return connection

    async def _put_back(self, connection: _Connection) -> None:
        connection.idle_since = trio.current_time()
        self._idle.append(connection)
        oldest = self._idle[0]
        if (
            len(self._idle) > MAX_IDLE or oldest.idle_since < connection.idle_since - IDLE_S
        ):  # one for each put back keeps up
            self._idle.popleft()
            await self._drop(oldest)

    async def _drop(self, connection: _Connection) -> None:
        """Closes it now: no goodbye, no wait, and no exception of its own."""
        self._connections.discard(connection)
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(connection.stream)

    async def aclose(self) -> None:
        """Closes every connection. Who waits for an answer gets EngineClosed, and so does every later
        request.
        """
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._connections):
            await self._drop(connection)

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise EngineClosed(f"{where}: the client is closed; use it inside its `async with`")

    def statistics(self) -> dict[str, float]:
        """connections open now, how many of them idle, and how many were ever opened."""
        return {
            "connections": float(len(self._connections)),
            "idle": float(len(self._idle)),
            "opened": float(self._opened),
        }


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request and its answer."""

    where: str
    head: h11.Request
    body: bytes
    silence_s: float
    on_silence: OnSilence | None
    max_body_bytes: int
    sent_in_part: bool = False
    was_silent: bool = False  # for silence_s, at least once

    async def run(self, connection: _Connection) -> HttpReply:
        """The answer. Raises trio.ClosedResourceError if someone else closed the connection."""
        await self._send(connection)
        try:
            return await self._read(connection)
        except h11.RemoteProtocolError as error:
            raise ReplyError(
                f"{self.where}: the answer is cut or not HTTP after {connection.received} bytes: {error}"
            ) from error

    async def _send(self, connection: _Connection) -> None:
        http = connection.http
        pieces = [
            http.send(self.head),
            http.send(h11.Data(data=self.body)) if self.body else b"",
            http.send(h11.EndOfMessage()),
        ]
        sent = memoryview(b"".join(piece for piece in pieces if piece))
        try:
            for start in range(0, len(sent), SENT_BYTES):
                with trio.move_on_after(self.silence_s) as silence:
                    await connection.stream.send_all(sent[start : start + SENT_BYTES])
                if silence.cancelled_caught:
                    raise EngineSilent(
                        f"{self.where}: the server did not take the request for {self.silence_s:g} s"
                    )
        except trio.BrokenResourceError:
            self.sent_in_part = (
                True  # a server may refuse a request before it has read it; the answer tells, or its absence
            )

    async def _read(self, connection: _Connection) -> HttpReply:
        head: h11.Response | None = None
        parts: list[bytes] = []
        size = 0
        wanted = FIRST_BYTES
        while True:
            event = connection.http.next_event()
            if event is h11.NEED_DATA:
                data = await self._receive(connection, wanted)
                connection.http.receive_data(data)
                if len(data) == wanted:
                    wanted = MORE_BYTES
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
                if size > self.max_body_bytes:
                    raise ReplyError(
                        f"{self.where}: the answer is larger than max_body_bytes={self.max_body_bytes}"
                    )
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return HttpReply(
                    head.status_code, _join_headers(head), parts[0] if len(parts) == 1 else b"".join(parts)
                )
            elif isinstance(event, h11.Response):
                head = event
            elif not isinstance(event, h11.InformationalResponse):
                raise ReplyError(f"{self.where}: the server changed the protocol: {event!r}")

    async def _receive(self, connection: _Connection, wanted: int) -> bytes:
        """At least one byte, or b"" at an end after some. Raises EngineUnreachable and EngineSilent."""
        while True:
            try:
                with trio.move_on_after(self.silence_s):
                    data = await connection.stream.receive_some(wanted)
                    break
            except trio.BrokenResourceError as error:
                connection.unanswered = not connection.received
                raise EngineUnreachable(
                    f"{self.where}: the connection broke after {connection.received} bytes of the answer:"
                    f" {_describe(error)}"
                ) from error
            self.was_silent = True
            if self.on_silence is None or not await self.on_silence():
                raise EngineSilent(
                    f"{self.where}: nothing came for {self.silence_s:g} s, after {connection.received} bytes"
                    " of the answer"
                )
        if not data and not connection.received:
            connection.unanswered = True
            raise EngineUnreachable(f"{self.where}: the server closed the connection without an answer")
        connection.received += len(data)
        return bytes(data)


@asynccontextmanager
async def open_http_client(
    url: str,
    *,
    api_key: str | None = None,
    connect_s: float = 5.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    ssl_context: ssl.SSLContext | None = None,
    connect: Connect | None = None,
) -> AsyncIterator[HttpClient]:
    """A client for the server at `url`, http or https, with or without a path before all others. Connects
    when it is first asked to.

    `api_key` goes into every request and into no message. `connect_s`: seconds that a connection, TLS
    included, may take. `connect` replaces the TCP connection, for tests. Raises EngineSetupError for a url or
    a key that cannot be used.
    """
    parts = split_url(url)
    check_key(api_key, where=url)
    if connect is None:
        tls = (ssl_context or ssl.create_default_context()) if parts.scheme == "https" else None
        connect = make_connect(
            parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), tls
        )
    headers = [("host", parts.netloc), ("accept-encoding", "identity")]
    if api_key is not None:
        headers.append(("authorization", f"Bearer {api_key}"))
    prefix = parts.path.rstrip("/")
    shown = f"{parts.scheme}://{parts.netloc}{prefix}"
    client = HttpClient(shown, headers, prefix, connect, connect_s=connect_s, max_body_bytes=max_body_bytes)
    try:
        yield client
    finally:
        await client.aclose()


def split_url(url: str) -> SplitResult:
    """The parts of the url of a server, its host and port good for connecting. Raises EngineSetupError, which
    shows no query and no password: either may be a key.
    """
    shown = url.split("?")[0].split("#")[0]
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # what connecting does: it refuses empty and endless labels
    except ValueError:  # UnicodeError is one
        parts, host, port = None, "", 0
    if "@" in url:
        raise EngineSetupError(
            f"the url of {host or 'a server'} carries a user name or password; give the key as api_key"
        )
    wrong = (
        parts is None
        or parts.scheme not in ("http", "https")
        or not host
        or port == 0
        or "?" in url
        or "#" in url
    )
    if parts is None or wrong or not url.isascii() or not url.isprintable() or " " in url:
        raise EngineSetupError(
            f"url={shown!r} is not http(s)://host[:port][/prefix]; it may have no query, and the key goes"
            " into api_key"
        )
    return parts


def check_key(key: str | None, *, where: str, name: str = "api_key") -> None:
    """Raises EngineSetupError, without showing it, for a key that no header can carry."""
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() != ""):
        raise EngineSetupError(
            f"the {name} for {where} is empty or holds a character that no header may carry (a line break?)"
        )


def make_connect(host: str, port: int, tls: ssl.SSLContext | None) -> Connect:
    """Connects over TCP, and TLS if there is a context, which also decides whose certificate will do."""

    async def connect() -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(host, port)
        if tls is None:
            return stream
        secured = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
        try:
            await secured.do_handshake()
        except BaseException:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
            raise
        return secured

    return connect


def _begin_next_cycle(http: h11.Connection) -> bool:
    """Whether the connection may carry another request: both sides are done and nothing came that nobody
    asked for.
    """
    if (
        http.our_state is not h11.DONE
        or http.their_state is not h11.DONE
        or http.trailing_data != (b"", False)
    ):
        return False
    http.start_next_cycle()
    return True


def _is_readable(stream: trio.abc.Stream) -> bool:
    """An idle connection has nothing to say, unless it is over."""
    if isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    return isinstance(stream, trio.SocketStream) and stream.socket.is_readable()


def _join_headers(head: h11.Response) -> dict[str, str]:
    joined: dict[str, str] = {}
    for raw_name, raw_value in head.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def _describe(error: BaseException) -> str:
    """The system's own words: the last cause that has any."""
    while True:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if cause is None or not str(cause):
            return str(error) or type(error).__name__
        error = cause
