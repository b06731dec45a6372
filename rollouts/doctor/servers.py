"""Findings about servers that a config names: whether they answer, what they are, and who else may control
them. Nothing is changed there.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from rollouts.config.schema import EngineConfig
from rollouts.engines.http import HttpClient, open_http_client, split_url
from rollouts.engines.open import check_engine_config, read_admin_key, read_api_key
from rollouts.errors import ConfigError, RolloutsError
from rollouts.preflight.findings import Finding

ANSWER_S = 10.0  # for each question
VERSION_PATHS = {"vllm": "/version", "sglang": "/server_info"}
ADMIN_PATHS = {"vllm": "/is_paused", "sglang": "/server_info"}  # read-only, guarded as control calls are

OpenClient = Callable[..., AbstractAsyncContextManager[HttpClient]]


async def examine_servers(config: EngineConfig, open_client: OpenClient = open_http_client) -> list[Finding]:
    """What can be said of the servers in `urls`, or of how servers would be started."""
    try:
        check_engine_config(config)
        key = None if config.kind == "local" else read_admin_key(config) or read_api_key(config)
    except ConfigError as error:
        return [Finding("error", "engine", str(error))]
    if config.kind == "local":
        return [Finding("ok", "engine", "local: in the training process")]
    if not config.urls:
        return [Finding("ok", "engine", f"{config.kind}: the run starts {config.count} on this machine")]
    return [
        finding for url in config.urls for finding in await examine_server(config.kind, url, key, open_client)
    ]


async def examine_server(kind: str, url: str, key: str | None, open_client: OpenClient) -> list[Finding]:
    """Health and version of one server, and whether it can be controlled without a key from another machine."""
    try:
        async with open_client(url, api_key=key) as client:
            health = await ask(client, "/health")
            if health[0] != 200:
                return [
                    Finding(
                        "error",
                        url,
                        f"GET /health: {health[0]}; start the server, or take it out of engine.urls",
                    )
                ]
            status, body = await ask(client, VERSION_PATHS[kind])
        findings = [Finding("ok", url, f"{kind} {read_version(body) or 'of unknown version'}, healthy")]
        if status in (401, 403):
            findings = [
                Finding(
                    "error",
                    url,
                    f"GET {VERSION_PATHS[kind]}: {status}; name the variable with its key in"
                    " engine.api_key_env",
                )
            ]
        if not is_loopback(url):
            async with open_client(url, api_key=None) as stranger:
                opened = (await ask(stranger, ADMIN_PATHS[kind]))[0] == 200
            if opened:
                way_out = "bind it to 127.0.0.1, put it behind a firewall" + (
                    ", or start it with --api-key" if kind == "sglang" else ""
                )
                findings.append(
                    Finding(
                        "warning",
                        url,
                        f"whoever reaches it controls it: GET {ADMIN_PATHS[kind]} answers without a key;"
                        f" {way_out}",
                    )
                )
        return findings
    except RolloutsError as error:
        return [Finding("error", url, f"{error}; start the server, or take it out of engine.urls")]


async def ask(client: HttpClient, path: str) -> tuple[int, bytes]:
    """Status and body; 0 if nothing came in time. Raises as HttpClient.request."""
    with trio.move_on_after(ANSWER_S):
        reply = await client.request("GET", path, silence_s=ANSWER_S)
        return reply.status, reply.body
    return 0, b""


def read_version(body: bytes) -> str:
    """The version in an answer, "" if there is none."""
    try:
        said = json.loads(body)
    except ValueError:
        return ""
    version = said.get("version") if isinstance(said, dict) else None
    return version if isinstance(version, str) and version.isprintable() else ""


def is_loopback(url: str) -> bool:
    """Whether only this machine reaches the address."""
    host = split_url(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
