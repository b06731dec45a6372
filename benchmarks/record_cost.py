"""What a run's record costs the driver's process: the CPU time of the writer over that of the whole driver, in the loop of benchmarks.driver_scale.

    python -m benchmarks.record_cost [--sizes 64 512 2048] [--rollouts 4096] [--rounds 3] [--quick]

The loop runs on its stub engines in virtual time, with a logger that keeps what it is told. The same calls are then made to the real logger in real
time, with its thread, and the CPU time of the process is counted: rows made, encoded and written, and the thread's own cost.

    share        of the driver's CPU time, the record included, for each number of samples in flight; the largest is `record_share`
    by call      us a rollout of log_step, log_samples, log_updates and log_spans
    arrays       the same with per-token arrays kept on disk (output.token_arrays_gib), apart: they are 29 bytes and more for every token of the run

Peer: the driver's own work. Target: <= 0.03 of the driver's CPU time, at every number in flight. `--quick`: fewer rollouts, two sizes, two rounds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from benchmarks.driver_scale import SAMPLE_ROWS, Record, Shape, call_stubs, drive, run_virtual
from benchmarks.harness import finish
from integration_training.train import COLLECTOR_THRESHOLDS
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.spans import Span
from rollouts.metrics.writer import JsonlLogger, open_jsonl_logger
from rollouts.run_dir import RunDir
from rollouts.types import Sample

SIZES = (64, 512, 2048)
CALLS: tuple[str, ...] = ("log_step", "log_samples", "log_evaluation", "log_updates", "log_spans")
ARRAYS_BYTES = 1 << 32
TARGETS = {"record_share": "<= 0.03"}


class KeptCalls:
    """A MetricsLogger that keeps what it is told and costs nothing."""

    def __init__(self, _logger: JsonlLogger) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.cpu_s = 0.0

    async def log_step(self, stage: str, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log_step", (stage, step, policy_version, dict(metrics))))

    async def log_samples(self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]) -> None:
        self.calls.append(("log_samples", (stage, step, policy_version, samples)))

    async def log_evaluation(self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log_evaluation", (stage, step, policy_version, name, dict(metrics))))

    async def log_updates(self, stage: str, step: int, policy_version: int, updates: Sequence[UpdateRecord]) -> None:
        self.calls.append(("log_updates", (stage, step, policy_version, updates)))

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        self.calls.append(("log_spans", (stage, step, policy_version, spans)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the driver did after its first steps, without a record."""

    driver_us: float  # CPU time of a rollout, the stubs' own left out
    rollouts: int
    calls: Sequence[tuple[str, tuple[Any, ...]]]  # what it logged meanwhile


def measure_driver(shape: Shape, *, rollouts: int) -> Run:
    """A run of the loop over at least `rollouts` rollouts."""
    steps = max(3, -(-rollouts // shape.in_flight))
    skipped = max(1, steps // 8)
    made: list[KeptCalls] = []

    def make_logger(logger: JsonlLogger) -> KeptCalls:
        made.append(KeptCalls(logger))
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        record: Record = run_virtual(drive, shape, steps=steps + skipped, folder=Path(folder), make_logger=make_logger)
    answered = record.answered[-1] - record.answered[skipped]
    gc.collect()
    began = time.process_time()
    run_virtual(call_stubs, shape, answered)
    stub_s = time.process_time() - began
    calls = [(name, arguments) for name, arguments in made[0].calls if arguments[1] > skipped]
    return Run(driver_us=1e6 * (record.cpu_s[-1] - record.cpu_s[skipped] - stub_s) / answered, rollouts=answered, calls=calls)


async def replay_calls(calls: Sequence[tuple[str, tuple[Any, ...]]], *, arrays_bytes: int) -> dict[str, float]:
    """CPU seconds of the process that each kind of call took, the writer's thread included."""
    taken = dict.fromkeys(CALLS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        async with open_jsonl_logger(RunDir(Path(folder)), attempt=1, samples_per_step=SAMPLE_ROWS, token_arrays_bytes=arrays_bytes) as logger:
            for name, arguments in calls:
                log: Callable[..., Awaitable[None]] = getattr(logger, name)
                began = time.process_time()
                await log(*arguments)
                taken[name] += time.process_time() - began
    return taken


def measure_record(run: Run, *, rounds: int, arrays_bytes: int = 0) -> dict[str, float]:
    """CPU us a rollout by kind of call, the median of the rounds."""
    replay = functools.partial(replay_calls, run.calls, arrays_bytes=arrays_bytes)
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        gc.collect()
        found.append(trio.run(replay))
    return {name: 1e6 * statistics.median(taken[name] for taken in found) / run.rollouts for name in CALLS}


def measure_shares(sizes: Sequence[int], *, rollouts: int, rounds: int) -> dict[str, float | None]:
    """The metrics of this benchmark, printed as a table."""
    metrics: dict[str, float | None] = {}
    share = 0.0
    print(f"CPU us a rollout{'driver':>10}{'record':>8}{'share':>8}   step  samples  updates  spans  arrays", flush=True)
    for size in sizes:
        run = measure_driver(Shape(in_flight=size), rollouts=rollouts)
        costs = measure_record(run, rounds=rounds)
        arrays = measure_record(run, rounds=rounds, arrays_bytes=ARRAYS_BYTES)
        record_us = sum(costs.values())
        arrays_us = max(0.0, sum(arrays.values()) - record_us)
        own = record_us / (run.driver_us + record_us)
        share = max(share, own)
        print(
            f"{size:>6} in flight{run.driver_us:10.0f}{record_us:8.1f}{own:8.2%}{costs['log_step']:7.1f}{costs['log_samples']:9.1f}"
            f"{costs['log_updates']:9.1f}{costs['log_spans']:7.1f}{arrays_us:8.1f}",
            flush=True,
        )
        metrics |= {f"driver_us_{size}": round(run.driver_us, 1), f"record_us_{size}": round(record_us, 2), f"arrays_us_{size}": round(arrays_us, 1)}
        metrics |= {f"record_share_{size}": round(own, 4)}
    return metrics | {"record_share": round(share, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rollouts", type=int, default=4096, help="of each size, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    sizes, rollouts, rounds = ((64, 512), 1024, 2) if options.quick else (options.sizes, options.rollouts, options.rounds)
    measure_driver(Shape(in_flight=sizes[0]), rollouts=256)  # warms up
    return finish("record_cost", peer="the driver's own work", metrics=measure_shares(sizes, rollouts=rollouts, rounds=rounds), targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
