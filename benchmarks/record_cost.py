"""What a run's record costs the driver's process: the CPU time of the writer over that of the whole driver,
in the loop of benchmarks.driver_scale.

    python -m benchmarks.record_cost [--sizes 64 512 2048] [--rollouts 4096] [--rounds 3] [--quick]

The loop runs on its stub engines in virtual time, with a logger that keeps what it is told. The same calls
are then made to the real logger in real time, with its thread, and the CPU time of the process is counted:
rows made, encoded and written, and the thread's own cost.

    rows         us a rollout of what goes to the files of rows, and its share of the driver's CPU time, the
                 record included, for each number of samples in flight; the largest is `rows_share`
    arrays       what per-token arrays add, which train.py keeps: bytes for
                 every token of the run
    share        of both together; the largest is `record_share`

Each update is traced, as a trainer's is: log-prob, slope and weight of every token. Peer: the driver's own
work. Targets: <= 0.03 of the driver's CPU time for rows, <= 0.06 for both, at every number in flight.
`--quick`: fewer rollouts, two sizes, two rounds.
"""

import dataclasses
import functools
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import trio

from benchmarks.driver_scale import SAMPLE_ROWS, drive_and_call_stubs
from benchmarks.driver_stubs import Shape
from benchmarks.harness import finish, make_parser
from integration_training.train import COLLECTOR_THRESHOLDS
from rollouts.metrics.spans import Span
from rollouts.metrics.token_shards import UpdateRecord
from rollouts.metrics.writer import JsonlLogger, open_jsonl_logger
from rollouts.run_dir import RunDir
from rollouts.types import Sample, TokenArrays

SIZES = (64, 512, 2048)
CALLS: tuple[str, ...] = ("log_step", "log_samples", "log_evaluation", "log_spans")
ARRAYS_BYTES = 1 << 32
TARGETS = {"record_share": "<= 0.06", "rows_share": "<= 0.03"}
Call = tuple[str, tuple[Any, ...], Mapping[str, Any]]


class KeptCalls:
    """A MetricsLogger that keeps what it is told and costs nothing."""

    def __init__(self, _logger: JsonlLogger) -> None:
        self.calls: list[Call] = []
        self.cpu_s = 0.0

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Mapping[str, float],
        *,
        updates: Sequence[UpdateRecord] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        traced = [add_traces(update) for update in updates]
        self.calls.append(
            ("log_step", (stage, step, policy_version, dict(metrics)), {"updates": traced, "spans": spans})
        )

    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None:
        self.calls.append(("log_samples", (stage, step, policy_version, samples), {}))

    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]
    ) -> None:
        self.calls.append(("log_evaluation", (stage, step, policy_version, name, dict(metrics)), {}))

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        self.calls.append(("log_spans", (stage, step, policy_version, spans), {}))


def add_traces(update: UpdateRecord) -> UpdateRecord:
    """The update with what a trainer says of its tokens: the driver's stub trains nothing."""
    batch = update.batch
    rng = np.random.default_rng(len(batch))
    log_probs = tuple(rng.normal(-1.0, 0.5, len(mask)).astype(np.float32) * mask for mask in batch.loss_masks)
    slopes = tuple(row * np.float32(1e-5) for row in log_probs)
    weights = tuple(mask.astype(np.float32) for mask in batch.loss_masks)
    traced = TokenArrays(log_probs=log_probs, slopes=slopes, weights=weights)
    return update._replace(forward=dataclasses.replace(update.forward, per_token=traced))


class Run(NamedTuple):
    """What the driver did after its first steps, without a record."""

    driver_us: float  # CPU time of a rollout, the stubs' own left out
    rollouts: int
    calls: Sequence[Call]  # what it logged meanwhile


def measure_driver(shape: Shape, *, rollouts: int) -> Run:
    """A run of the loop over at least `rollouts` rollouts."""
    made: list[KeptCalls] = []

    def make_logger(logger: JsonlLogger) -> KeptCalls:
        made.append(KeptCalls(logger))
        return made[0]

    run = drive_and_call_stubs(shape, rollouts=rollouts, make_logger=make_logger)
    driver_us = run.us_per_rollout(run.record.cpu_s) - 1e6 * run.stub_s / run.answered
    return Run(driver_us, run.answered, [call for call in made[0].calls if call[1][1] > run.skipped])


async def replay_calls(calls: Sequence[Call], *, arrays_bytes: int) -> dict[str, float]:
    """CPU seconds of the process that each kind of call took, the writer's thread included."""
    taken = dict.fromkeys(CALLS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        async with open_jsonl_logger(
            RunDir(Path(folder)), attempt=1, samples_per_step=SAMPLE_ROWS, token_arrays_bytes=arrays_bytes
        ) as logger:
            for name, arguments, options in calls:
                log: Callable[..., Awaitable[None]] = getattr(logger, name)
                began = time.process_time()
                await log(*arguments, **options)
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
    shares: dict[str, float] = {"rows_share": 0.0, "record_share": 0.0}
    print(
        f"CPU us a rollout{'driver':>10}{'rows':>8}{'share':>8}{'arrays':>8}{'share':>8}   of rows: step "
        " samples  spans",
        flush=True,
    )
    for size in sizes:
        run = measure_driver(Shape(in_flight=size), rollouts=rollouts)
        costs = measure_record(run, rounds=rounds)
        rows_us = sum(costs.values())
        both_us = max(rows_us, sum(measure_record(run, rounds=rounds, arrays_bytes=ARRAYS_BYTES).values()))
        found = {
            name: us / (run.driver_us + us)
            for name, us in (("rows_share", rows_us), ("record_share", both_us))
        }
        shares = {name: max(share, found[name]) for name, share in shares.items()}
        print(
            f"{size:>6} in"
            f" flight{run.driver_us:10.0f}{rows_us:8.1f}{found['rows_share']:8.2%}{both_us - rows_us:8.1f}"
            f"{found['record_share']:8.2%}"
            f"{costs['log_step']:16.1f}{costs['log_samples']:9.1f}{costs['log_spans']:7.1f}",
            flush=True,
        )
        times = {"driver": run.driver_us, "rows": rows_us, "arrays": both_us - rows_us}
        metrics |= {f"{name}_us_{size}": round(us, 2) for name, us in times.items()}
        metrics |= {f"{name}_{size}": round(share, 4) for name, share in found.items()}
    return metrics | {name: round(share, 4) for name, share in shares.items()}


def main() -> int:
    parser = make_parser(__doc__, quick="two sizes, a quarter of the rollouts, two rounds")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rollouts", type=int, default=4096, help="of each size, at least")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    sizes, rollouts, rounds = (
        ((64, 512), 1024, 2) if options.quick else (options.sizes, options.rollouts, options.rounds)
    )
    measure_driver(Shape(in_flight=sizes[0]), rollouts=256)  # warms up
    return finish(
        "record_cost",
        peer="the driver's own work",
        metrics=measure_shares(sizes, rollouts=rollouts, rounds=rounds),
        targets=TARGETS,
    )


if __name__ == "__main__":
    sys.exit(main())
