"""Where OTLP goes, as OpenTelemetry's environment variables say. Exactly these are read, and an empty one is
as none:

    OTEL_EXPORTER_OTLP_ENDPOINT                    the collector (default http://localhost:4318); /v1/metrics and /v1/traces are added to its path
    OTEL_EXPORTER_OTLP_{METRICS,TRACES}_ENDPOINT   whole addresses, taken as they are
    OTEL_EXPORTER_OTLP_HEADERS                     name=value,… with percent-encoded values: keys go here
    OTEL_EXPORTER_OTLP_TIMEOUT                     milliseconds for one request (default 10000)
    OTEL_EXPORTER_OTLP_PROTOCOL                    http/protobuf is all that is spoken
    OTEL_SERVICE_NAME                              service.name (default rollouts)
    OTEL_RESOURCE_ATTRIBUTES                       name=value,… as for headers; its service.name yields to OTEL_SERVICE_NAME

HEADERS, TIMEOUT and PROTOCOL may be given for one signal too, as OTEL_EXPORTER_OTLP_METRICS_HEADERS, which
takes the place of the common one. Messages name a variable and never a value that may be a secret.

Sources: opentelemetry.io/docs/specs/otel/protocol/exporter and …/configuration/sdk-environment-variables.
Where these would ignore a setting that cannot be read, it is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import httpx2

from rollouts.errors import TrackerError
from rollouts.trackers.sinks import RunInfo

Signal = Literal["metrics", "traces"]
SIGNALS: tuple[Signal, ...] = ("metrics", "traces")
PREFIX = "OTEL_EXPORTER_OTLP_"
DEFAULT_ENDPOINT = "http://localhost:4318"
DEFAULT_TIMEOUT_S = 10.0
PROTOCOL = "http/protobuf"
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110, 5.6.2
HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")  # of its 5.5, what every server reads alike


class Route(NamedTuple):
    """How one signal is posted."""

    url: str
    host: str  # with its port, and without what else an address may hold: for messages
    headers: dict[str, str]
    timeout_s: float


def read_route(environment: Mapping[str, str], signal: Signal) -> Route:
    """The route of a signal. Raises TrackerError for a setting that cannot be used, by its variable's name."""
    name, protocol = find_setting(environment, signal, "PROTOCOL")
    if protocol and protocol != PROTOCOL:
        raise TrackerError(
            f"{name}={protocol!r} is not spoken; set it to {PROTOCOL}, and the endpoint to the collector's"
            " port for that, often 4318"
        )
    url = find_url(environment, signal)
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    headers = {**read_headers(environment, signal), "content-type": "application/x-protobuf"}
    return Route(url, host, headers, read_timeout_s(environment, signal))


def find_setting(environment: Mapping[str, str], signal: Signal, name: str) -> tuple[str, str]:
    """(variable, value) of a setting: the signal's own, else the common one; an empty value where there is
    neither.
    """
    own = f"{PREFIX}{signal.upper()}_{name}"
    variable = own if environment.get(own, "").strip() else f"{PREFIX}{name}"
    return variable, environment.get(variable, "").strip()


def find_url(environment: Mapping[str, str], signal: Signal) -> str:
    """Where a signal is posted to. Raises TrackerError for what is no http address."""
    name, text = find_setting(environment, signal, "ENDPOINT")
    parts = split_url(text or DEFAULT_ENDPOINT)
    if parts is None:
        raise TrackerError(
            f"{name} is no http address; set it to one like"
            f" {DEFAULT_ENDPOINT}{f'/v1/{signal}' if signal.upper() in name else ''}"
        )
    if name == f"{PREFIX}ENDPOINT":
        parts = parts._replace(path=f"{parts.path.rstrip('/')}/v1/{signal}")
    return parts._replace(fragment="").geturl()


def split_url(text: str) -> SplitResult | None:
    """The parts of an http address, None for another text."""
    try:
        parts = urlsplit(text)
        httpx2.URL(text)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (
        ValueError,
        httpx2.InvalidURL,
    ):  # a port that is no number: what is said of it could be a part of a password
        return None
    return parts if whole else None


def read_headers(environment: Mapping[str, str], signal: Signal) -> dict[str, str]:
    """The headers of a signal's requests. Raises TrackerError, without the values, for what cannot be a
    header.
    """
    name, text = find_setting(environment, signal, "HEADERS")
    headers = {key: value.strip(" \t") for key, value in parse_pairs(name, text).items()}
    for key, value in headers.items():
        if not HEADER_NAME.fullmatch(key):
            raise TrackerError(
                f"{name} has a name that no header can have; names are letters, digits and -, as in"
                " x-api-key=value"
            )
        if not HEADER_VALUE.fullmatch(
            value
        ):  # not even the header's name is said: where a comma is not encoded, it is a part of a value
            raise TrackerError(
                f"{name} has a value with a character that no header can have, as a line's end or é; give it"
                " in printable ASCII"
            )
    return headers


def parse_pairs(name: str, text: str) -> dict[str, str]:
    """name=value,… as OpenTelemetry writes it. Raises TrackerError, without the value, for another text."""
    pairs: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise TrackerError(
                f"{name} is to be name=value,name=value with percent-encoded values; one of its parts is not"
            )
        pairs[key.strip()] = unquote(value.strip())
    return pairs


def read_timeout_s(environment: Mapping[str, str], signal: Signal) -> float:
    """Seconds for one request. Raises TrackerError."""
    name, text = find_setting(environment, signal, "TIMEOUT")
    if not text:
        return DEFAULT_TIMEOUT_S
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) == 0:
        raise TrackerError(
            f"{name}={text!r} is to be a whole number of milliseconds above 0, for example 10000"
        )
    return int(text) / 1000


def read_resource(run: RunInfo) -> dict[str, str]:
    """What names the run in the service. Raises TrackerError for attributes that cannot be read."""
    pairs = parse_pairs("OTEL_RESOURCE_ATTRIBUTES", run.environment.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    name = run.environment.get("OTEL_SERVICE_NAME", "").strip() or pairs.get("service.name", "") or "rollouts"
    return {**pairs, "service.name": name, "service.instance.id": run.id, "rollouts.run": run.name}
