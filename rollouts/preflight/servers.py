"""What the servers of engine.urls answer. Nothing is changed there."""

from __future__ import annotations

import ipaddress

import httpx

from rollouts.config.tables import EngineConfig
from rollouts.engines.open import read_api_key
from rollouts.preflight.findings import Finding

ANSWER_S = 10.0  # for each question
VERSION_PATHS = {"vllm": "/version", "sglang": "/server_info"}
CONTROL_PATHS = {"vllm": "/is_paused", "sglang": "/server_info"}  # read-only, guarded as control calls are


def check_servers(config: EngineConfig, *, transport: httpx.BaseTransport | None = None) -> list[Finding]:
    """A finding for each server that answers or does not, and one for each that strangers may control."""
    if config.kind == "local" or not config.urls:
        return []
    key = read_api_key(config.kind)
    findings: list[Finding] = []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for url in config.urls:
        with httpx.Client(
            base_url=url, timeout=ANSWER_S, trust_env=False, transport=transport, follow_redirects=False
        ) as client:
            try:
                findings.append(check_health(client, config.kind, url, headers))
                if not is_loopback(url) and client.get(CONTROL_PATHS[config.kind]).is_success:
                    findings.append(
                        Finding(
                            "warning",
                            url,
                            f"whoever reaches it controls it: {CONTROL_PATHS[config.kind]} needs no key;"
                            " bind it to 127.0.0.1, or put it behind a firewall",
                        )
                    )
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}; start the server, or take it out of engine.urls"
                findings.append(Finding("error", url, problem))
    return findings


def check_health(client: httpx.Client, kind: str, url: str, headers: dict[str, str]) -> Finding:
    """Whether one server is healthy, takes our key and names its version. Raises httpx.HTTPError."""
    health = client.get("/health", headers=headers).status_code
    if health != 200:
        return Finding(
            "error", url, f"GET /health: {health}; start the server, or take it out of engine.urls"
        )
    answer = client.get(VERSION_PATHS[kind], headers=headers)
    if answer.status_code in (401, 403):
        return Finding(
            "error",
            url,
            f"GET {VERSION_PATHS[kind]}: {answer.status_code}; export its key as {kind.upper()}_API_KEY",
        )
    try:
        version = str(answer.json()["version"])
    except (ValueError, KeyError, TypeError):
        version = "of unknown version"
    return Finding("ok", url, f"{kind} {version[:40]!a}, healthy".replace("'", ""))


def is_loopback(url: str) -> bool:
    """Whether only this machine reaches the address."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
