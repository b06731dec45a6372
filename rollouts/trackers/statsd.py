"""StatsD and DogStatsD: gauges in datagrams, over UDP or a unix datagram socket.

DogStatsD is spoken where DD_DOGSTATSD_URL (udp://HOST:PORT or unix:///PATH), DD_AGENT_HOST or
DD_DOGSTATSD_PORT is set: run, stage and attempt are tags, and each value has the time of its row, so what is
sent after an outage lands where it belongs, as far back as the service takes it (Datadog: an hour, unless
historical metrics are on). Agents before 7.40 do not know times and refuse such lines.

Otherwise plain StatsD to STATSD_HOST and STATSD_PORT (localhost, 8125): run and stage are in the name. It
knows no times: a value counts when it arrives. Of the rows that are waiting only the newest value of each
metric is sent, so after an outage the gauges are right again and what was between is not there.

Nobody confirms a datagram. An address at which nothing listens is noticed on this machine, and rows wait;
across a network what is lost is lost.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from rollouts.errors import SinkUnavailable, TrackerError
from rollouts.trackers.sinks import RunInfo, TrackedRow

DEFAULT_HOST, DEFAULT_PORT = "localhost", 8125
UDP_BYTES, UNIX_BYTES = (
    1432,
    8192,
)  # of a datagram: what an Ethernet frame holds; what Datadog's agent reads at once
SEND_TIMEOUT_S = 5.0  # of a unix socket whose reader does not read


class Address(NamedTuple):
    """Where datagrams go."""

    dogstatsd: bool
    path: str | None  # of a unix socket; None: UDP
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT

    def describe(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def open_sink(run: RunInfo) -> StatsdSink:
    """The sink of a run. Raises TrackerError for an address that is none, SinkUnavailable where nothing is at
    it.
    """
    return StatsdSink(run, find_address(run.environment))


class StatsdSink:
    """Sends each batch in as few datagrams as it fits into."""

    def __init__(self, run: RunInfo, address: Address) -> None:
        self._run = run
        self._address = address
        try:
            self._socket = connect(address)
        except OSError as error:
            raise SinkUnavailable(f"nothing takes datagrams at {address.describe()} ({error})") from error

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """Returns when the system has taken the datagrams. Raises SinkUnavailable where nothing listens."""
        lines = (
            make_dogstatsd_lines(self._run, rows)
            if self._address.dogstatsd
            else make_plain_lines(self._run, rows)
        )
        try:
            for datagram in pack_lines(lines, UDP_BYTES if self._address.path is None else UNIX_BYTES):
                self._socket.send(datagram)
                failure = self._socket.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ERROR
                )  # of a port of this machine at which nothing listens
                if failure:
                    raise ConnectionRefusedError(failure, "refused")
        except OSError as error:
            raise SinkUnavailable(
                f"nothing takes datagrams at {self._address.describe()} ({error})"
            ) from error

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def connect(address: Address) -> socket.socket:
    """A datagram socket that sends there. Raises OSError."""
    if address.path is None:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_DGRAM
        )[0]
    else:
        family, kind, protocol, place = socket.AF_UNIX, socket.SOCK_DGRAM, 0, address.path
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(SEND_TIMEOUT_S)
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


def find_address(environment: Mapping[str, str]) -> Address:
    """Where the environment says that datagrams go. Raises TrackerError."""
    url = environment.get("DD_DOGSTATSD_URL", "")
    if url:
        try:
            parts, port = urlsplit(url), urlsplit(url).port
        except ValueError:
            parts, port = None, 0
        if parts and parts.scheme == "unix" and parts.path:
            return Address(True, unquote(parts.path))
        if parts is None or parts.scheme != "udp" or not parts.hostname or port == 0:
            raise TrackerError("DD_DOGSTATSD_URL is to be udp://HOST:PORT or unix:///PATH")
        return Address(True, None, parts.hostname, port or DEFAULT_PORT)
    if environment.get("DD_AGENT_HOST") or environment.get("DD_DOGSTATSD_PORT"):
        port = check_port("DD_DOGSTATSD_PORT", environment.get("DD_DOGSTATSD_PORT", ""))
        return Address(True, None, environment.get("DD_AGENT_HOST") or DEFAULT_HOST, port)
    return Address(
        False,
        None,
        environment.get("STATSD_HOST") or DEFAULT_HOST,
        check_port("STATSD_PORT", environment.get("STATSD_PORT", "")),
    )


def check_port(name: str, text: str) -> int:
    """The port, the usual one for an empty text. Raises TrackerError."""
    if not text:
        return DEFAULT_PORT
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise TrackerError(
            f"{name}: {text!r} is no port; give a number from 1 to 65535, or leave it out for {DEFAULT_PORT}"
        )
    return int(text)


# --- lines --------------------------------------------------------------------------------------------------


def make_dogstatsd_lines(run: RunInfo, rows: Iterable[TrackedRow]) -> Iterator[str]:
    """NAME:VALUE|g|#TAGS|TSECONDS for each value; `rollouts.step` says of which step the values of that time
    are.
    """
    for tracked in rows:
        row = tracked.row
        tags = {
            "run": run.name,
            "stage": row["stage"],
            "attempt": row["attempt"],
            **({"evaluation": row["name"]} if "name" in row else {}),
        }
        ends = f"|g|#{','.join(f'{key}:{clean_tag(str(value))}' for key, value in tags.items())}|T{int(row['time_unix'])}"
        for name, value in list_values(tracked).items():
            yield f"{clean_name(name)}:{format_value(value)}{ends}"


def make_plain_lines(run: RunInfo, rows: Iterable[TrackedRow]) -> Iterator[str]:
    """rollouts.RUN.STAGE.NAME:VALUE|g, the newest value of each. A sign means a change of a gauge, so a
    negative value follows a zero.
    """
    newest: dict[str, float] = {}
    for tracked in rows:
        prefix = f"rollouts.{clean_part(run.name)}.{clean_part(str(tracked.row['stage']))}"
        for name, value in list_values(tracked).items():
            newest[f"{prefix}.{clean_name(name).removeprefix('rollouts.')}"] = value
    for name, value in newest.items():
        line = f"{name}:{format_value(value)}|g"
        yield (
            f"{name}:0|g\n{line}" if value < 0 else line
        )  # one item, so that no datagram's end comes between


def list_values(tracked: TrackedRow) -> dict[str, float]:
    """The numbers of a row by the names they are sent under, before these are cleaned."""
    ours = {
        f"rollouts.{name}": value
        for name, value in {"step": tracked.row["step"], **tracked.metrics()}.items()
    }
    return {**ours, **tracked.aliases}


def clean_name(name: str) -> str:
    """A metric's name with dots for slashes and none of the characters that end a name."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", name.replace("/", ".").replace("@", "_at_"))


def clean_part(text: str) -> str:
    """One part of a dotted name."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)


def clean_tag(text: str) -> str:
    """The value of a tag without what ends one."""
    return re.sub(r"[,|#\s]", "_", text)


def format_value(value: float) -> str:
    """A number as a decimal, without an exponent, which some servers do not read."""
    text = repr(float(value))
    return text if "e" not in text else f"{value:.12f}" if abs(value) < 1 else f"{value:.0f}"


def pack_lines(lines: Iterable[str], size: int) -> Iterator[bytes]:
    """The lines in datagrams of at most `size` bytes; a longer line goes alone."""
    held, length = [], 0
    for line in lines:
        data = line.encode()
        if held and length + 1 + len(data) > size:
            yield b"\n".join(held)
            held, length = [], 0
        length += len(data) + (1 if held else 0)
        held.append(data)
    if held:
        yield b"\n".join(held)
