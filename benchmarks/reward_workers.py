"""Reward workers before and after a storm: calls per second of a cheap reward, then many hostile calls, then
the cheap reward again.

    python -m benchmarks.reward_workers [--quick] [--workers 2] [--rounds 5]

One run. The storm is an infinite loop, a segfault, an exit, a fork, endless output, an allocation of 10 GB
and a child that leaves its session, each killed in its own way. A second pool that no storm hits says what
the reward takes "before": it is measured in turns with the one after its storms, A B B A, so that what else
the machine does falls on both. The ratio is the median of the turns'. Also measured: how long a replacement
takes to answer, and that no process is left. The last line is JSON.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks.harness import finish, make_parser
from rollouts.errors import RewardCrashed, RewardTimeout, UserFunctionError
from rollouts.protocols import RewardFn
from rollouts.rewards.call import call_reward
from rollouts.rewards.workers import Workers, open_workers
from rollouts.types import Sample

TARGETS = {"ratio": ">= 0.95", "hostile_other": "<= 0", "processes_left": "<= 0"}
TIMEOUT_S = 0.5
TOKENS = 512
CHEAP = "rollouts.rewards.exact:exact_match"
SAMPLE = Sample(
    id="g0-s0",
    prompt="1 + 1?",
    response="2",
    tokens=np.arange(TOKENS),
    rollout_log_probs=np.full(TOKENS, -0.5),
    metadata={"answer": "2"},
)


# --- what the workers call ---


def loop(sample: Sample) -> float:
    while True:
        pass


def segfault(sample: Sample) -> float:
    return float(len(ctypes.string_at(0)))


def leave(sample: Sample) -> float:
    os._exit(3)


def fork(sample: Sample) -> float:
    return float(os.fork())


def shout(sample: Sample) -> float:
    while True:
        print("x" * 1000)


def allocate(sample: Sample) -> float:
    return float(np.ones(10 << 30, np.uint8).sum())


def start_session(sample: Sample) -> float:
    subprocess.Popen(["sleep", "1000000"], start_new_session=True)
    return 1.0


HOSTILE = ("loop", "segfault", "leave", "fork", "shout", "allocate", "start_session")


# --- measuring ---


async def measure_calls_per_s(reward: RewardFn, *, calls: int, at_once: int) -> float:
    """Calls per second with `at_once` of them in flight."""
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for index in range(at_once):
            nursery.start_soon(call_many, reward, calls // at_once + (index < calls % at_once))
    return calls / (time.perf_counter() - started)


async def call_many(reward: RewardFn, count: int) -> None:
    for _ in range(count):
        assert (await call_reward(reward, SAMPLE)).reward == 1.0


async def storm(workers: Workers, *, rounds: int) -> dict[str, int]:
    """How many hostile calls ended in which way; every one must fail."""
    ends = {"timeouts": 0, "crashes": 0, "other": 0}

    async def expect_failure(name: str) -> None:
        try:
            await call_reward(named(workers, name), SAMPLE)
        except UserFunctionError as error:
            ends[
                (
                    "timeouts"
                    if isinstance(error, RewardTimeout)
                    else "crashes"
                    if isinstance(error, RewardCrashed)
                    else "other"
                )
            ] += 1
            return
        raise AssertionError(f"{name} gave a reward")

    async with trio.open_nursery() as nursery:
        for _ in range(rounds):
            for name in HOSTILE:
                nursery.start_soon(expect_failure, name)
    return ends


def named(workers: Workers, name: str) -> RewardFn:
    return workers.reward(f"{Path(__file__).name}:{name}", Path(__file__).parent)


def find_descendants() -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            )
        except (OSError, ValueError):
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    before: list[float] = []
    after: list[float] = []
    ends: dict[str, int] = {}
    pool: dict[str, Any] = {
        "count": arguments.workers,
        "timeout_s": TIMEOUT_S,
        "memory_bytes": 1 << 30,
        "output_bytes": 1 << 16,
    }
    options: dict[str, Any] = {"calls": arguments.calls, "at_once": 2 * arguments.workers}
    async with open_workers(**pool) as calm, open_workers(**pool) as workers:
        calm_reward, reward = (each.reward(CHEAP, Path.cwd()) for each in (calm, workers))
        await measure_calls_per_s(calm_reward, **options)  # warm up
        for number in range(arguments.rounds):
            for name, count in (await storm(workers, rounds=arguments.storm)).items():
                ends[name] = ends.get(name, 0) + count
            await call_many(reward, 4 * arguments.workers)  # every new worker imports its function once
            turns = ((before, calm_reward), (after, reward))
            for measured, each in (*turns, *reversed(turns)):
                measured.append(await measure_calls_per_s(each, **options))
            print(
                f"round {number}: before {before[-2]:.0f} {before[-1]:.0f}, after {after[-2]:.0f}"
                f" {after[-1]:.0f} calls/s",
                flush=True,
            )
        counters = workers.statistics()
        closing = time.perf_counter()
    close_ms = (time.perf_counter() - closing) * 1000
    replacement_ms = await measure_replacement_ms(arguments.rounds)
    ratios = [second / first for first, second in zip(before, after, strict=True)]
    return {
        "calls_per_s_before": round(statistics.median(before), 1),
        "calls_per_s_after": round(statistics.median(after), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "hostile_calls": sum(ends.values()),
        **{f"hostile_{name}": count for name, count in ends.items()},
        "workers_started": counters["workers_started"],
        "replacement_ms": round(replacement_ms, 1),
        "close_ms": round(close_ms, 1),
        "processes_left": len(find_descendants()),
    }


async def measure_replacement_ms(rounds: int) -> float:
    """Median time from the end of the only worker's hostile call, cancelled, to the answer of its successor,
    import included.
    """
    taken: list[float] = []
    async with open_workers(count=1, timeout_s=TIMEOUT_S, memory_bytes=1 << 30) as workers:
        reward = workers.reward(CHEAP, Path.cwd())
        for _ in range(rounds):
            await call_many(reward, 1)
            with trio.move_on_after(0.3):
                await call_reward(named(workers, "loop"), SAMPLE)
            started = time.perf_counter()
            await call_many(reward, 1)
            taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken)


def main() -> int:
    parser = make_parser(__doc__, quick="200 calls, two rounds, small storms")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--calls", type=int, default=1000, help="of the cheap reward, per measurement")
    parser.add_argument("--rounds", type=int, default=5, help="storms, each with four measurements after it")
    parser.add_argument(
        "--storm",
        type=int,
        default=3,
        help=f"calls of each of the {len(HOSTILE)} hostile functions in one storm",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.calls, arguments.rounds, arguments.storm = 200, 2, 1
    return finish(
        "reward_workers",
        peer="a second pool that no storm hits",
        metrics=trio.run(measure, arguments),
        targets=TARGETS,
    )


if __name__ == "__main__":
    sys.exit(main())
