"""A server that answers with what a run publishes, on one core, alone and beside a training process on the
other.

    python -m benchmarks.serve_beside [--quick] [--rounds 3] [--turn-s 30]

SmolLM2-135M-Instruct, float32. The server (`rollouts serve RUN`) and two clients, which ask for 32 tokens
each time and wait for them, have one core, and torch one thread. A process on the other core holds a backend
of the same model: in the turns "alone" it waits, in the turns "beside" it makes training steps of 4 rows of
128 tokens (forward, backward, AdamW). In the middle of every turn, of both kinds, it publishes its weights,
which the server then loads between two answers. Turns alternate: alone, beside, beside, alone.

Latency is that of a whole answer at the client. Metrics: median and 95th percentile in seconds over all
answers of a kind, their ratios (beside / alone), and the training steps made; CPU seconds of the server for
an answer, loading publications included. No answer may fail. Targets: p50_ratio <= 1.3, p95_ratio <= 1.3:
beyond what two cores share, as caches, memory and the disk under the publications, nothing should slow an
answer down. On a machine with other work training drives that onto the server's core. --quick: one round,
turns of 10 s.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trio

from benchmarks.e2e.children import Child, open_child, read_question, take_stdout
from benchmarks.harness import finish, make_parser

MODEL = "bundled:smollm2-135m-instruct"
PEER = "the same server without training beside it"
TARGETS = {"p50_ratio": "<= 1.3", "p95_ratio": "<= 1.3"}
CLIENTS, TOKENS = 2, 32
ROWS, ROW_TOKENS = 4, 128
SUBJECTS = ("a river", "a long winter", "an old clock", "two brothers", "the sea", "a small town")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


# --- the process that trains --------------------------------------------------------------------------------


async def run_trainer(folder: Path) -> None:
    """Publishes the model as it is, and then takes turns."""
    from rollouts.backends.open import open_pytorch_backend
    from rollouts.checkpoints.follow import open_publisher
    from rollouts.config.tables import OptimConfig
    from rollouts.models.load import resolve_model
    from rollouts.types import LossSpec, OptimParams, RolloutBatch
    from rollouts.weight_sync.snapshots import export_snapshot

    answers, model = take_stdout(), resolve_model(MODEL)
    rng = np.random.default_rng(0)
    rows = tuple(rng.integers(100, 40_000, ROW_TOKENS) for _ in range(ROWS))
    batch = RolloutBatch(tokens=rows, loss_masks=tuple(np.arange(ROW_TOKENS) > 0 for _ in rows))
    publisher = await open_publisher(folder / "published", keep=2, keep_s=0.0)
    async with open_pytorch_backend(
        model, optim=OptimConfig(), total_steps=10**6, autocast="off", threads=1
    ) as backend:

        async def publish() -> int:
            write = partial(export_snapshot, backend, model_dir=model)
            return (await publisher.publish(write, 0)).publication

        async def step() -> None:
            trained = backend.forward_backward(batch, LossSpec("sft"))
            stepped = backend.optim_step(OptimParams(lr=1e-7))  # what is said stays much the same
            await trained.result()
            await stepped.result()

        await publish()
        while (turn := await trio.to_thread.run_sync(read_question)) is not None:
            begin, steps, newest = time.monotonic(), 0, 0
            while (passed := time.monotonic() - begin) < turn["seconds"]:
                if not newest and passed > turn["seconds"] / 2:
                    newest = await publish()
                elif turn["train"]:
                    await step()
                    steps += 1
                else:
                    await trio.sleep(0.02)
            newest = newest or await publish()  # a step may take longer than half of a short turn
            print(json.dumps({"steps": steps, "newest": newest}), file=answers)


# --- the server and its clients -----------------------------------------------------------------------------


@contextmanager
def open_server(run: Path) -> Iterator[tuple[str, int]]:
    """The address and the id of a server's process, on this process's cores."""
    command = [sys.executable, "-m", "rollouts", "serve", str(run), "--port", "0"]
    environment = {**os.environ, **ONE_THREAD}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split(" at ")[1].strip(), process.pid
        finally:
            process.terminate()


def read_cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(client: httpx.AsyncClient, number: int) -> tuple[float, str]:
    """Seconds until the whole answer was there, and who made it. Raises where there is none."""
    said = f"Write a long story about {SUBJECTS[number % len(SUBJECTS)]}."
    body = {"model": "policy", "messages": [{"role": "user", "content": said}], "max_tokens": TOKENS}
    began = time.perf_counter()
    answer = await client.post("/v1/chat/completions", json={**body, "seed": number})
    answer.raise_for_status()
    return time.perf_counter() - began, answer.json()["system_fingerprint"]


async def take_turn(client: httpx.AsyncClient, child: Child, **turn: Any) -> tuple[list[float], int]:
    """Seconds of the answers that began in the turn, and steps that were trained meanwhile. Returns when the
    server has loaded what was published.
    """
    seconds, goes_on = list[float](), True

    async def ask_on(first: int) -> None:
        number = first
        while goes_on:
            seconds.append((await ask(client, number))[0])
            number += CLIENTS

    async with trio.open_nursery() as nursery:
        for first in range(CLIENTS):
            nursery.start_soon(ask_on, first)
        told = await trio.to_thread.run_sync(partial(child.ask, **turn))
        goes_on = False
    while (await ask(client, 0))[1] != f"publication-{told['newest']}":
        pass
    return seconds, told["steps"]


async def measure(url: str, pid: int, child: Child, rounds: int, turn_s: float) -> dict[str, float]:
    """Of both kinds of turns."""
    names, steps = {False: "alone", True: "beside"}, 0
    seconds, cpu_s = {train: list[float]() for train in names}, dict.fromkeys(names, 0.0)
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for number in range(4):  # the first waits for the model
            await ask(client, number)
        for train in (False, True, True, False) * rounds:
            before = read_cpu_s(pid)
            found, made = await take_turn(client, child, train=train, seconds=turn_s)
            cpu_s[train] += read_cpu_s(pid) - before
            seconds[train] += found
            steps += made
            low, high = np.percentile(found, [50, 95])
            print(f"{names[train]}: {len(found)} answers, {low:.2f} {high:.2f} s", flush=True)
    metrics = {"steps": float(steps)}
    for train, name in names.items():
        metrics[f"{name}_answers"] = float(len(seconds[train]))
        metrics[f"{name}_cpu_s"] = cpu_s[train] / len(seconds[train])
        for percent in (50, 95):
            metrics[f"{name}_p{percent}_s"] = float(np.percentile(seconds[train], percent))
    metrics["cpu_ratio"] = metrics["beside_cpu_s"] / metrics["alone_cpu_s"]
    for percent in (50, 95):
        metrics[f"p{percent}_ratio"] = metrics[f"beside_p{percent}_s"] / metrics[f"alone_p{percent}_s"]
    return {name: round(value, 3) for name, value in metrics.items()}


def main() -> int:
    parser = make_parser(__doc__, quick="one round, turns of 10 s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-s", type=float, default=30.0, metavar="S")
    parser.add_argument("--trainer", type=Path, help="for the process that trains: the run's directory")
    arguments = parser.parse_args()
    if arguments.trainer:
        trio.run(run_trainer, arguments.trainer)
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("it takes two cores")
    rounds, turn_s = (1, 10.0) if arguments.quick else (arguments.rounds, arguments.turn_s)
    with tempfile.TemporaryDirectory(prefix="serve-beside-") as name:
        run, place = Path(name) / "run", ["--trainer", str(Path(name) / "run")]
        run.mkdir()
        (run / "config.toml").write_text(f'[model]\nname = "{MODEL}"\n')
        os.sched_setaffinity(0, cores[:1])
        log = Path(name) / "trainer.log"
        with open_child("benchmarks.serve_beside", place, log=log, environment=ONE_THREAD) as child:
            os.sched_setaffinity(0, cores[1:2])
            with open_server(run) as (url, pid):
                metrics = trio.run(measure, url, pid, child, rounds, turn_s)
        os.sched_setaffinity(0, cores)
    return finish("serve_beside", peer=PEER, metrics=metrics, targets=TARGETS, packages=("hypercorn",))


if __name__ == "__main__":
    sys.exit(main())
