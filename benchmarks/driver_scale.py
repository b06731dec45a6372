"""What a rollout costs the driver's process as more of them are in flight. Virtual time: waiting costs
nothing, CPU time is what counts.

    python -m benchmarks.driver_scale [--sizes 64 512 2048 8192] [--rollouts 8192] [--rounds 2]
    [--quick]

The real RL loop with the real manager, fleet, groups, rewards, filter, ledger, advantages and JSONL logger
runs on stub engines, which answer after 300 to 1000 tokens of 30 ms with arrays of tokens, log-probs and
versions, and on a backend without a model. A rollout's cost is the CPU time of the process less that of the
same stub calls made by nothing but a nursery, over the rollouts that came to their end; the first steps are
left out.

    sizes      samples in flight, 64 to 8192, on 8 engines, groups of 8; staleness 0 and 1
    engines    1 to 64, 2048 in flight
    groups     of 4 to 64, 2048 in flight
    logging    CPU time inside log_step and log_samples (16 rows a step) over that of the driver; a row for
               every rollout, beside a writer that dumps the whole record with json and flushes it
    collector  of that cost, what Python's garbage collector takes, set as train.py sets it
    memory     Python's own count: per rollout in flight, and per token of rollouts that are held

Peers: the driver's own smallest size, and that writer. Targets: <= 1.3 times the cost from 64 to 8192 in
flight, <= 0.03 of the CPU time for logging, <= 40 kB a rollout in flight and <= 12 B a token held. `--quick`:
half of the sizes and of the rollouts, one round.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import trio
import trio.testing

from benchmarks.driver_stubs import (
    LONGEST,
    SHORTEST,
    TOKEN_S,
    LetterTokenizer,
    Shape,
    StubEngine,
    TimedLogger,
    call_stubs,
    make_engines,
    watch_collector,
    write_whole_records,
)
from benchmarks.harness import Ratio, compute_ratio, finish, make_parser, take_turns
from integration_training.train import COLLECTOR_THRESHOLDS
from rollouts.config.schema import RLTrainingConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.engines.fleet import Fleet, open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.loops.rl import run_rl_training
from rollouts.metrics.writer import JsonlLogger, open_jsonl_logger
from rollouts.protocols import InferenceEngine, MetricsLogger, TrainingBackend
from rollouts.run_dir import RunDir
from rollouts.testing.fakes import FakeBackend, open_fake_backend
from rollouts.types import Sample, SampleGroup, SamplingParams

SIZES = (64, 512, 2048, 8192)
MIDDLE = 2048  # in flight where something else is varied
SAMPLE_ROWS = 16  # a step, the default of output.samples_per_step
TARGETS = {
    "growth_64_to_8192": "<= 1.3",
    "growth_64_to_8192_staleness_1": "<= 1.3",
    "growth_engines_1_to_64": "<= 1.3",
    "logging_share": "<= 0.03",
    "kb_per_rollout_in_flight": "<= 40",
    "bytes_per_token_held": "<= 12",
}


# --- what is asked of the driver ----------------------------------------------------------------------------


async def score(sample: Sample) -> dict[str, float]:
    """Two named parts."""
    return {"length": len(sample.response) / LONGEST, "letter": float(sample.response.startswith("a"))}


async def keep_most(group: SampleGroup) -> bool:
    return group.group_index % 5 != 0


# --- one run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU us a rollout."""

    total_us: float  # of the process
    stub_us: float  # of the stubs and the clock by themselves
    logging_us: float
    collector_us: float  # of Python's garbage collector, in the driver's run

    @property
    def driver_us(self) -> float:
        return self.total_us - self.stub_us


FIELDS = [one.name for one in fields(Cost)]


@dataclass(slots=True)
class Record:
    """What was seen at the end of each step, the moment before the first included."""

    cpu_s: list[float] = field(default_factory=list)
    logging_s: list[float] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)  # rollouts
    collector_s: list[float] = field(default_factory=list)

    def note(self, *, logging_s: float, answered: int, collector_s: float) -> None:
        self.collector_s.append(collector_s)
        self.cpu_s.append(time.process_time())
        self.logging_s.append(logging_s)
        self.answered.append(answered)


def make_config(shape: Shape, *, steps: int) -> RLTrainingConfig:
    """P * G samples a batch, all of them in flight at once."""
    return RLTrainingConfig.model_validate(
        {
            "data": {"kind": "jsonl", "path": "unused.jsonl"},
            "steps": steps,
            "max_staleness": shape.staleness,
            "rollout": {
                "num_prompts": shape.in_flight // shape.group,
                "samples_per_prompt": shape.group,
                "over_sampling": 1.0,
                "max_new_tokens": 2 * shape.longest,
                "max_attempts": 64,
            },
        }
    )


def make_data_buffer() -> DataBuffer:
    return DataBuffer([{"prompt": f"What is {index} plus {index}?"} for index in range(1 << 14)], seed=0)


def commit_all(fleet: Fleet, engines: Sequence[StubEngine], version: int) -> None:
    """The engines serve `version`: a weight update that takes no time."""
    for engine in engines:
        engine.version = version
        fleet.close_admission(engine)
        fleet.commit(engine, version)
    fleet.publish(version)


async def write_here(logger: JsonlLogger, work: Callable[[], None]) -> None:
    """In place of JsonlLogger.take_turn: under a mock clock no thread may be waited for."""
    await trio.lowlevel.checkpoint()
    work()


class CostedLogger(MetricsLogger, Protocol):
    """A MetricsLogger that knows the CPU time which it took."""

    cpu_s: float


async def drive(
    shape: Shape,
    *,
    steps: int,
    folder: Path,
    make_logger: Callable[[JsonlLogger], CostedLogger] = TimedLogger,
) -> Record:
    """Runs the loop for `steps` steps."""
    engines = make_engines(shape)
    config = make_config(shape, steps=steps)
    record = Record()
    async with AsyncExitStack() as stack:
        watch = stack.enter_context(watch_collector())
        seats = 2 * shape.in_flight  # of each engine, so that nobody waits for a seat
        fleet = await stack.enter_async_context(
            open_fleet([Member(engine) for engine in engines], max_concurrency=seats, warn=print)
        )
        backend = await stack.enter_async_context(open_fake_backend(step_s=0.1))
        stack.enter_context(patch.object(JsonlLogger, "take_turn", write_here))
        jsonl = await stack.enter_async_context(
            open_jsonl_logger(RunDir(folder), attempt=1, samples_per_step=SAMPLE_ROWS)
        )
        logger = make_logger(jsonl)
        commit_all(fleet, engines, 0)
        data_buffer = make_data_buffer()
        manager = make_manager(data_buffer, fleet, config, backend)

        async def sync_weights(
            backend: TrainingBackend,
            engines_: Sequence[InferenceEngine],
            version: int,
            /,
            *,
            released: trio.Event | None = None,
        ) -> Mapping[str, float]:
            await trio.lowlevel.checkpoint()
            if released is not None:
                released.set()
            commit_all(fleet, engines, version)
            assert isinstance(backend, FakeBackend)
            backend.batches.clear()  # a real backend keeps none
            record.note(
                logging_s=logger.cpu_s,
                answered=sum(engine.answered for engine in engines),
                collector_s=watch.cpu_s,
            )
            return {}

        record.note(logging_s=0.0, answered=0, collector_s=watch.cpu_s)
        await run_rl_training(
            backend, data_buffer, manager, [fleet], config, logger, sync_weights=sync_weights
        )
    return record


def make_manager(
    data_buffer: DataBuffer, engine: InferenceEngine, config: RLTrainingConfig, backend: TrainingBackend
) -> AsyncRolloutManager:
    return AsyncRolloutManager(
        data_buffer,
        engine,
        generate=make_chat_generate(LetterTokenizer()),
        config=config.rollout,
        reward=score,
        filters=[keep_most],
        sampling=SamplingParams(max_new_tokens=config.rollout.max_new_tokens),
        seed=0,
        policy_version=lambda: backend.weight_version,
        max_staleness=config.max_staleness,
    )


def run_virtual(main: Any, *arguments: Any, **options: Any) -> Any:
    async def call() -> Any:
        return await main(*arguments, **options)

    return trio.run(call, clock=trio.testing.MockClock(autojump_threshold=0))


class Drive(NamedTuple):
    """A run of the loop, and what its stubs cost without it."""

    record: Record
    skipped: int  # first steps, which are not counted
    answered: int  # rollouts after them
    stub_s: float

    def us_per_rollout(self, totals: Sequence[float]) -> float:
        """Microseconds of a rollout after the first steps, of seconds that were noted at the end of each
        step.
        """
        return 1e6 * (totals[-1] - totals[self.skipped]) / self.answered


def drive_and_call_stubs(
    shape: Shape, *, rollouts: int, make_logger: Callable[[JsonlLogger], CostedLogger] = TimedLogger
) -> Drive:
    """The loop over at least `rollouts` trained rollouts after the first steps, then the same stub calls."""
    steps = max(3, -(-rollouts // shape.in_flight))
    skipped = max(1, steps // 8)
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        record: Record = run_virtual(
            drive, shape, steps=steps + skipped, folder=Path(folder), make_logger=make_logger
        )
    answered = record.answered[-1] - record.answered[skipped]
    gc.collect()
    began = time.process_time()
    run_virtual(call_stubs, shape, answered)
    return Drive(record, skipped, answered, time.process_time() - began)


def measure(shape: Shape, *, rollouts: int) -> Cost:
    """The cost after the first steps, over at least `rollouts` trained rollouts."""
    run = drive_and_call_stubs(shape, rollouts=rollouts)
    return Cost(
        total_us=run.us_per_rollout(run.record.cpu_s),
        stub_us=1e6 * run.stub_s / run.answered,
        logging_us=run.us_per_rollout(run.record.logging_s),
        collector_us=run.us_per_rollout(run.record.collector_s),
    )


# --- logging, and memory ------------------------------------------------------------------------------------


def make_batch(shape: Shape) -> Sequence[Sample]:
    """The samples of one batch."""
    found: list[Sequence[Sample]] = []
    run_virtual(look_at_batch, shape, found.append)
    return found[0]


async def look_at_batch(
    shape: Shape, look: Callable[[Sequence[Sample]], object], *, in_flight: Callable[[], object] | None = None
) -> None:
    """Calls `look` with the samples of one batch, and before that `in_flight` while all of them are
    generated; it is then not waited for.
    """
    engines = make_engines(shape)
    config = make_config(shape, steps=1)
    async with (
        open_fleet(
            [Member(engine) for engine in engines], max_concurrency=shape.in_flight, warn=print
        ) as fleet,
        open_fake_backend() as backend,
    ):
        commit_all(fleet, engines, 0)
        data_buffer = make_data_buffer()
        manager = make_manager(data_buffer, fleet, config, backend)
        async with trio.open_nursery() as nursery:

            async def generate() -> None:
                look((await manager.generate_batch()).samples)

            gc.collect()
            nursery.start_soon(generate)
            if in_flight is not None:
                await trio.sleep(SHORTEST * TOKEN_S / 2)
                assert fleet.statistics()["fleet/queued"] == 0
                in_flight()
                nursery.cancel_scope.cancel()


def measure_in_flight_bytes() -> float:
    """A rollout that is being generated, by the slope between two numbers of them."""

    def count(in_flight: int) -> int:
        seen: list[int] = []
        tracemalloc.start()
        run_virtual(
            look_at_batch,
            Shape(in_flight=in_flight),
            lambda _: None,
            in_flight=lambda: seen.append(tracemalloc.get_traced_memory()[0]),
        )
        tracemalloc.stop()
        return seen[0]

    few, many = 512, 2048
    return (count(many) - count(few)) / (many - few)


def measure_token_bytes() -> float:
    """A token of a rollout that is done and waits to be trained on, by the slope between two lengths."""

    def count(length: int) -> int:
        tracemalloc.start()
        held = make_batch(Shape(in_flight=512, shortest=length, longest=length))
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert sum(sample.response_length for sample in held) == 512 * length
        return size

    return (count(LONGEST) - count(SHORTEST)) / (512 * (LONGEST - SHORTEST))


def measure_rows(samples: Sequence[Sample], *, rounds: int) -> tuple[float, float, Ratio]:
    """CPU us of a sample row of ours and of the peer's, and how many times ours the peer's is."""

    async def log(folder: Path) -> None:
        async with open_jsonl_logger(RunDir(folder), attempt=1, samples_per_step=len(samples)) as logger:
            await logger.log_samples("rl", 1, 0, samples)

    with tempfile.TemporaryDirectory() as name:
        folder, whole = Path(name), Path(name) / "whole.jsonl"
        trio.run(log, folder)
        write_whole_records(whole, samples)
        both = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in (RunDir(folder).samples, whole)
        ]
        assert [[(row["id"], row["response"], row["reward"]) for row in rows] for rows in both] == 2 * [
            [(sample.id, sample.response, sample.reward) for sample in samples]
        ]
        ours, peer = take_turns(
            lambda: trio.run(log, folder), lambda: write_whole_records(whole, samples), rounds=rounds
        )
    ours_s, peer_s = [turn.cpu_s for turn in ours], [turn.cpu_s for turn in peer]
    to_us = 1e6 / len(samples)
    return statistics.median(ours_s) * to_us, statistics.median(peer_s) * to_us, compute_ratio(ours_s, peer_s)


# --- the tables ---------------------------------------------------------------------------------------------


def measure_turns(shapes: Mapping[str, Shape], *, rollouts: int, rounds: int) -> dict[str, Cost]:
    """The mean cost of each, printed; measured forth and back, against a machine that changes its pace."""
    found: dict[str, list[Cost]] = {label: [] for label in shapes}
    for number in range(rounds):
        for label in list(shapes)[:: -1 if number % 2 else 1]:
            found[label].append(measure(shapes[label], rollouts=rollouts))
    means = {
        label: Cost(**{name: statistics.mean(getattr(cost, name) for cost in costs) for name in FIELDS})
        for label, costs in found.items()
    }
    for label, cost in means.items():
        share = cost.logging_us / cost.driver_us
        parts = f"{cost.driver_us:10.0f}{cost.stub_us:8.0f}{cost.collector_us:11.0f}{cost.logging_us:9.1f}"
        print(f"{label:<34}{parts}{share:9.2%}", flush=True)
    return means


def compare_ends(costs: Mapping[str, Cost]) -> float:
    """How many times the first's cost the last's is."""
    first, *_, last = costs.values()
    return round(last.driver_us / first.driver_us, 3)


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="the ends of each range, half of the rollouts, one round")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rollouts", type=int, default=8192, help="of each size and round, at least")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rollouts, options.rounds = (64, 8192), 4096, 1
    return options


def main() -> int:
    options = parse_options()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    sizes, rollouts, rounds = options.sizes, options.rollouts, options.rounds
    metrics: dict[str, float | None] = {}
    print("CPU us a rollout                      driver    stub  collector  logging    share", flush=True)
    measure(Shape(in_flight=sizes[0]), rollouts=512)  # warms up
    share = 0.0
    for staleness, name in ((0, ""), (1, "_staleness_1")):
        shapes = {
            f"{size} in flight, staleness {staleness}": Shape(in_flight=size, staleness=staleness)
            for size in sizes
        }
        costs = measure_turns(shapes, rollouts=rollouts, rounds=rounds)
        for size, cost in zip(sizes, costs.values(), strict=True):
            metrics[f"us_per_rollout_{size}{name}"] = round(cost.driver_us, 1)
            metrics[f"collector_us_{size}{name}"] = round(cost.collector_us, 1)
        metrics[f"growth_{sizes[0]}_to_{sizes[-1]}{name}"] = compare_ends(costs)
        share = max(share, *(cost.logging_us / cost.driver_us for cost in costs.values()))
    engines = {
        f"{count} engines, {MIDDLE} in flight": Shape(in_flight=MIDDLE, engines=count)
        for count in ((1, 64) if options.quick else (1, 8, 64))
    }
    metrics["growth_engines_1_to_64"] = compare_ends(measure_turns(engines, rollouts=rollouts, rounds=rounds))
    groups = {
        f"groups of {size}, {MIDDLE} in flight": Shape(in_flight=MIDDLE, group=size)
        for size in ((4, 64) if options.quick else (4, 16, 64))
    }
    metrics["growth_groups_4_to_64"] = compare_ends(measure_turns(groups, rollouts=rollouts, rounds=rounds))
    metrics["logging_share"] = round(share, 4)
    batch = make_batch(Shape(in_flight=512))
    ours_us, peer_us, ratio = measure_rows(batch, rounds=2 if options.quick else 4)
    print(f"a row: {ours_us:.0f} us; json with arrays, flushed: {peer_us:.0f} us: {ratio} times")
    metrics |= {
        "us_per_sample_row": round(ours_us, 1),
        "us_per_whole_record": round(peer_us, 1),
        "row_times_peer": round(ratio.median, 2),
    }
    kb_in_flight = metrics["kb_per_rollout_in_flight"] = round(measure_in_flight_bytes() / 1000, 2)
    held = metrics["bytes_per_token_held"] = round(measure_token_bytes(), 2)
    print(f"memory: {kb_in_flight} kB a rollout in flight, {held} B a token held", flush=True)
    return finish(
        "driver_scale",
        peer="own smallest size; a json record flushed for each rollout",
        metrics=metrics,
        targets=TARGETS,
    )


if __name__ == "__main__":
    sys.exit(main())
