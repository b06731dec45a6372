"""HTTP clients against a stub inference server: CPU of the client for each request, with 16 to 2048 of them
in flight.

    python -m benchmarks.http_client [--quick] [--rounds 3]

One run. A server process takes token ids and answers, after 50 ms, 256 tokens with their log-probs (about 7
KB of JSON). Each client (ours, aiohttp on asyncio, one shared httpx client on trio) runs in a process of
its own, one at each level, in an order that turns round from one round to the next; a ratio is the median
of the rounds'. CPU is user + system time of the client's process per answered and parsed request, between
two moments of steady state: the first when as many requests are answered as are in flight (imports and
connecting are before it), the second `requests` answers later. Targets: at every level <= 1200 us a
request, and at 2048 in flight <= 1.4 times the CPU of 16.
"""

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import msgspec

from benchmarks.harness import finish, make_parser
from rollouts.engines.http import open_http_client

LEVELS = (16, 128, 512, 2048)
CLIENTS = ("ours", "aiohttp", "httpx")
TOKENS = 256
HOLD_S = 0.05
LIMIT_S = 90.0  # for one client at one level
TARGETS = {"highest_cpu_us": "<= 1200", "flatness_2048_to_16": "<= 1.4"}
SLOW = ("httpx",)  # one round, of fewer requests

Ask = Callable[[bytes], Awaitable[bytes]]
"""Posts a body and gives the answer's."""


class Reply(msgspec.Struct):
    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


def allow_many_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# --- the server ---


class StubServer(asyncio.Protocol):
    """Answers every request HOLD_S later with the same bytes; as little work as can be, so that it is never
    the server that is measured.
    """

    body = msgspec.json.encode(
        Reply(
            "0" * 32,
            list(range(100_000, 100_000 + TOKENS)),
            [-0.123456789 - i / 1000 for i in range(TOKENS)],
            "stop",
        )
    )
    answer = (
        b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(rest) >= length:
            self.buffer = rest[length:]
            asyncio.get_running_loop().call_later(HOLD_S, self.transport.write, self.answer)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(StubServer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- the clients ---


class Meter:
    """CPU seconds between answer number `skip` and answer number `skip + count`."""

    def __init__(self, skip: int, count: int, finish: Callable[[], object]) -> None:
        self.skip, self.count, self.finish = skip, count, finish
        self.answered = 0
        self.cpu_s = self.wall_s = 0.0

    def tick(self) -> None:
        self.answered += 1
        if self.answered == self.skip:
            self.cpu_s, self.wall_s = -time.process_time(), -time.perf_counter()
        if self.answered == self.skip + self.count:
            self.cpu_s, self.wall_s = self.cpu_s + time.process_time(), self.wall_s + time.perf_counter()
            self.finish()


async def ask_for_ever(ask: Ask, meter: Meter) -> None:
    while True:
        body = msgspec.json.encode(
            {
                "request_id": "0" * 32,
                "prompt_ids": list(range(50_000, 50_000 + TOKENS)),
                "max_new_tokens": TOKENS,
            }
        )
        reply = msgspec.json.decode(await ask(body), type=Reply)
        assert len(reply.log_probs) == TOKENS
        meter.tick()


async def measure_trio(name: str, port: int, in_flight: int, count: int) -> Meter:
    import trio

    async def run(ask: Ask) -> Meter:
        async with trio.open_nursery() as nursery:
            meter = Meter(in_flight, count, nursery.cancel_scope.cancel)
            for _ in range(in_flight):
                nursery.start_soon(ask_for_ever, ask, meter)
        return meter

    url = f"http://127.0.0.1:{port}"
    if name == "ours":
        async with open_http_client(url) as client:

            async def ask_ours(body: bytes) -> bytes:
                reply = await client.request("POST", "/generate", body=body)
                assert reply.status_code == 200
                return reply.content

            return await run(ask_ours)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60.0, trust_env=False) as client:

        async def ask_httpx(body: bytes) -> bytes:
            reply = await client.post(
                f"{url}/generate", content=body, headers={"content-type": "application/json"}
            )
            assert reply.status_code == 200
            return reply.content

        return await run(ask_httpx)


async def measure_aiohttp(port: int, in_flight: int, count: int) -> Meter:
    import aiohttp

    finished = asyncio.Event()
    meter = Meter(in_flight, count, finished.set)
    url = f"http://127.0.0.1:{port}/generate"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(body: bytes) -> bytes:
            async with session.post(url, data=body, headers={"content-type": "application/json"}) as reply:
                assert reply.status == 200
                return await reply.read()

        async def wait_finished() -> None:
            await finished.wait()
            for task in tasks:
                task.cancel()

        tasks = [asyncio.create_task(ask_for_ever(ask, meter)) for _ in range(in_flight)]
        await wait_finished()
        await asyncio.gather(*tasks, return_exceptions=True)
    return meter


def run_client(name: str, port: int, in_flight: int, count: int) -> None:
    """What a client process does: prints CPU microseconds a request, and requests a second."""
    import trio

    allow_many_files()
    on_asyncio = name == "aiohttp"
    meter = (
        asyncio.run(measure_aiohttp(port, in_flight, count))
        if on_asyncio
        else trio.run(measure_trio, name, port, in_flight, count)
    )
    print(json.dumps({"cpu_us": meter.cpu_s / count * 1e6, "per_s": count / meter.wall_s}))


# --- the run ---


def measure(arguments: argparse.Namespace) -> dict[str, float | None]:
    allow_many_files()
    this = [sys.executable, "-m", "benchmarks.http_client"]
    cpu_us: dict[tuple[str, int], list[float]] = {}
    with subprocess.Popen([*this, "--serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            for number, level, name in plan_measurements(arguments):
                count = min(256, level) if name in SLOW else max(512, 2 * level)
                result = run_process(
                    [*this, "--client", name, "--port", port, "--level", str(level), "--requests", str(count)]
                )
                if result is None:
                    print(
                        f"round {number}: {name:8} {level:5} failed, or not finished within {LIMIT_S:g} s",
                        flush=True,
                    )
                    continue
                cpu_us.setdefault((name, level), []).append(result["cpu_us"])
                print(
                    f"round {number}: {name:8} {level:5} {result['cpu_us']:9.0f} us {result['per_s']:7.0f}/s",
                    flush=True,
                )
        finally:
            server.kill()
    return summarize(cpu_us)


def plan_measurements(arguments: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    """(round, level, client) in the order that they are measured in; the clients of a level in alternating
    order.
    """
    for number in range(arguments.rounds):
        for level in LEVELS:
            for name in CLIENTS if number % 2 == 0 else CLIENTS[::-1]:
                if name not in SLOW or (number == 0 and not arguments.quick):
                    yield number, level, name


def run_process(command: list[str]) -> dict[str, float] | None:
    """What the client measured; None when it was too slow or failed. It is killed from outside: a deadline
    inside did not end httpx.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    return json.loads(done.stdout)


def summarize(cpu_us: dict[tuple[str, int], list[float]]) -> dict[str, float | None]:
    """Medians; a ratio is the median of the ratios of each round, as far as both have it."""

    def ratio(above: tuple[str, int], below: tuple[str, int]) -> float | None:
        pairs = [
            first / second
            for first, second in zip(cpu_us.get(above, []), cpu_us.get(below, []), strict=False)
        ]
        return round(statistics.median(pairs), 3) if pairs else None

    metrics: dict[str, float | None] = {}
    for (name, level), values in sorted(
        cpu_us.items(), key=lambda item: (CLIENTS.index(item[0][0]), item[0][1])
    ):
        metrics[f"{name}_{level}_cpu_us"] = round(statistics.median(values), 1)
    for name in CLIENTS[1:]:
        metrics |= {f"ours_to_{name}_{level}": ratio(("ours", level), (name, level)) for level in LEVELS}
    medians = [statistics.median(cpu_us["ours", level]) for level in LEVELS]
    return metrics | {
        "flatness_2048_to_16": ratio(("ours", 2048), ("ours", 16)),
        "highest_cpu_us": round(max(medians), 1),
        "spread_of_levels": round(max(medians) / min(medians), 3),
    }


def main() -> int:
    parser = make_parser(__doc__, quick="two rounds, without the slow ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--level", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        allow_many_files()
        asyncio.run(serve())
        return 0
    if arguments.client:
        run_client(arguments.client, arguments.port, arguments.level, arguments.requests)
        return 0
    if arguments.quick:
        arguments.rounds = 2
    return finish(
        "http_client",
        peer="aiohttp on asyncio; httpx on trio",
        metrics=measure(arguments),
        targets=TARGETS,
        packages=("aiohttp", "httpx", "msgspec"),
    )


if __name__ == "__main__":
    sys.exit(main())
