"""The training service over HTTP: what a future costs, what pipelining brings, and eight users on one base.

    python -m benchmarks.service [--quick] [--model NAME] [--rounds 5]

A server in a process of its own (`rollouts serve`, SmolLM2-135M-Instruct, float32, two cores), clients
here: httpx and trio, the bytes of Tinker's protocol, no SDK. The clients' work shares the two cores with
the server's.

Overhead: a forward of no datum, submitted and then collected by a long poll, one after the other; the
median in milliseconds. It is what a future costs beside the computing: two requests of HTTP, the record in
the store, the queue of the model.

Pipelining: steps of forward_backward (one row of 64 tokens) and optim_step of a rank-8 adapter, over a
network with a latency of 20 ms: each request and each answer arrives that much later. One side awaits the
result of each request before it sends the next, the other has up to eight steps in flight. Sides take turns;
`pipelining` is the ratio of their steps per second. What it saves is four round trips a step, whatever the
step computes.

Eight users: eight sessions with a rank-8 adapter each train on 4 rows of 64 tokens a step, pipelined two
steps deep; the peer is one session with all 32 rows in a step. Sides take turns; `eight_clients` is the
ratio of trained tokens per second.

Targets: future_ms <= 10, pipelining >= 1.2, eight_clients >= 0.8. --quick: one round, few steps.
"""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trio

from benchmarks.harness import finish, make_parser
from rollouts.models.load import resolve_model
from rollouts.serve.wire import FLOAT32, INT64, MESSAGES

PEER = "one user with the whole batch; each request awaited"
TARGETS = {"future_ms": "<= 10", "pipelining": ">= 1.2", "eight_clients": ">= 0.8"}
KEY = "tml-" + secrets.token_hex(8)
LATENCY_S = 0.02
TOKENS, ROWS, USERS, RANK = 64, 4, 8, 8
PIPELINE = 8  # steps in flight
VOCAB = 250  # ids are drawn below this


# --- a server and its clients -------------------------------------------------------------------------------


@contextmanager
def open_server(model: str, folder: Path) -> Iterator[str]:
    """The address of a server of its own."""
    config = folder / "serve.toml"
    config.write_text(
        f'[model]\nname = "{model}"\nautocast = "off"\n'
        f'[output]\ndir = "{folder / "run"}"\n[serve]\nport = 0\n'
    )
    command = [sys.executable, "-m", "rollouts", "serve", str(config)]
    environment = {**os.environ, "ROLLOUTS_API_KEY": KEY}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("serving "):
                    yield line.split(" at ")[1].split()[0]
                    return
            raise RuntimeError("the server did not start")
        finally:
            process.terminate()


class User:
    """A session with one model; latency_s: of its network, each way."""

    def __init__(self, client: httpx.AsyncClient, latency_s: float = 0.0) -> None:
        self.client, self.latency_s, self.seq, self.model = client, latency_s, 0, ""

    async def post(self, path: str, content: bytes | None = None, **fields: Any) -> httpx.Response:
        await trio.sleep(self.latency_s)
        body: dict[str, Any] = {"json": fields} if content is None else {"content": content}
        answer = await self.client.post(f"/api/v1/{path}", **body)
        await trio.sleep(self.latency_s)
        return answer

    async def begin(self, model: str) -> None:
        session = (await self.post("create_session")).json()["session_id"]
        lora = {"rank": RANK, "seed": 1}
        asked = await self.post(
            "create_model", session_id=session, model_seq_id=0, base_model=model, lora_config=lora
        )
        self.model = asked.json()["model_id"]
        await self.collect(asked.json()["request_id"])

    async def collect(self, name: str) -> httpx.Response:
        """The result of a request."""
        while (answer := await self.post("retrieve_future", request_id=name)).status_code == 408:
            pass
        assert answer.is_success and b'"error"' not in answer.content[:200], answer.text
        return answer

    async def train(self, data: bytes, *, forward_only: bool = False) -> str:
        """The id of a forward_backward. data: the encoded datums of a request."""
        self.seq += 1
        head = MESSAGES["Train"](
            model_id=self.model, seq_id=self.seq, loss_fn="cross_entropy", forward_only=forward_only
        )
        answer = await self.post("forward_backward", head.SerializeToString() + data)
        return answer.json()["request_id"]

    async def step(self) -> str:
        """The id of an optim_step."""
        self.seq += 1
        adam = {"learning_rate": 1e-5}
        answer = await self.post("optim_step", model_id=self.model, seq_id=self.seq, adam_params=adam)
        return answer.json()["request_id"]


def make_data(rows: int, seed: int) -> bytes:
    """Datums of random tokens, encoded: protobuf joins what follows a message to its fields."""
    rng, message = np.random.default_rng(seed), MESSAGES["Train"]()
    for _ in range(rows):
        ids, datum = rng.integers(0, VOCAB, TOKENS + 1), message.data.add()
        datum.chunks.add().text.tokens = ids[:-1].astype("<i4").tobytes()
        for name, values, dtype in (
            ("target_tokens", ids[1:].astype("<i8"), INT64),
            ("weights", np.ones(TOKENS, "<f4"), FLOAT32),
        ):
            tensor = datum.inputs.add(key=name).value
            tensor.dense, tensor.dtype = values.tobytes(), dtype
            tensor.shape.append(TOKENS)
    return message.SerializeToString()


async def run_steps(user: User, data: bytes, steps: int, depth: int) -> None:
    """Steps of one user, sent one after the other; of those sent at most `depth` have not been collected. 0:
    each request is collected before the next is sent.
    """
    places = trio.Semaphore(max(depth, 1))

    async def finish_step(names: Sequence[str]) -> None:
        for name in names:
            await user.collect(name)
        places.release()

    async with trio.open_nursery() as nursery:
        for _ in range(steps):
            await places.acquire()
            if depth:
                nursery.start_soon(finish_step, [await user.train(data), await user.step()])
            else:
                await user.collect(await user.train(data))
                await finish_step([await user.step()])


# --- measurements -------------------------------------------------------------------------------------------


async def time_it(work: Callable[[], Awaitable[object]]) -> float:
    """Wall seconds."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def measure_overhead(user: User, count: int) -> float:
    """Milliseconds, the median."""

    async def ask() -> None:
        await user.collect(await user.train(b"", forward_only=True))

    return 1000 * statistics.median([await time_it(ask) for _ in range(count)])


async def measure_turns(rounds: int, ours: Any, peer: Any) -> tuple[float, float, float]:
    """peer's seconds / ours: the median of rounds, the least and the greatest. The first round warms up."""
    ratios: list[float] = []
    for number in range(rounds + 1):
        own, other = await time_it(ours), await time_it(peer)
        if number:
            ratios.append(other / own)
    return statistics.median(ratios), min(ratios), max(ratios)


async def measure(url: str, model: str, arguments: argparse.Namespace) -> dict[str, float]:
    steps, rounds = (4, 1) if arguments.quick else (16, arguments.rounds)
    metrics: dict[str, float] = {}
    async with httpx.AsyncClient(
        base_url=url, headers={"x-api-key": KEY}, timeout=None, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def begin(latency_s: float = 0.0) -> User:
            user = User(client, latency_s)
            await user.begin(model)
            return user

        metrics["future_ms"] = await measure_overhead(await begin(), 20 if arguments.quick else 300)
        print(f"a future: {metrics['future_ms']:.2f} ms", flush=True)
        one_row, deep, shallow = make_data(1, 0), await begin(LATENCY_S), await begin(LATENCY_S)
        found = await measure_turns(
            rounds,
            partial(run_steps, deep, one_row, steps, PIPELINE),
            partial(run_steps, shallow, one_row, steps, 0),
        )
        metrics |= dict(zip(("pipelining", "pipelining_min", "pipelining_max"), found, strict=True))
        print("pipelining: {:.2f} ({:.2f} to {:.2f})".format(*found), flush=True)
        users, alone = [await begin() for _ in range(USERS)], await begin()
        parts = [make_data(ROWS, number) for number in range(USERS)]

        async def train_apart() -> None:
            async with trio.open_nursery() as nursery:
                for user, data in zip(users, parts, strict=True):
                    nursery.start_soon(run_steps, user, data, steps // 4, 2)

        whole = partial(run_steps, alone, b"".join(parts), steps // 4, 2)
        found = await measure_turns(rounds, train_apart, whole)
        names = ("eight_clients", "eight_clients_min", "eight_clients_max")
        metrics |= dict(zip(names, found, strict=True))
        print("eight users: {:.2f} ({:.2f} to {:.2f})".format(*found), flush=True)
    return {name: round(value, 3) for name, value in metrics.items()}


def main() -> int:
    parser = make_parser(__doc__, quick="one round of few steps")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = str(resolve_model(arguments.model))
    with tempfile.TemporaryDirectory(prefix="service-") as folder, open_server(model, Path(folder)) as url:
        metrics = trio.run(measure, url, model, arguments)
    return finish("service", peer=PEER, metrics=metrics, targets=TARGETS, packages=("httpx", "hypercorn"))


if __name__ == "__main__":
    sys.exit(main())
