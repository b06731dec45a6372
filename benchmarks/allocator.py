"""Time, page faults, kernel time and peak memory of our training step on a CPU, under settings of the memory
allocator and of OpenMP.

    python -m benchmarks.allocator [--rounds 2] [--threads 2] [--quick]

The step of benchmarks.train_step (SmolLM2-135M, float32), in processes that differ in their environment only,
taking turns:

    plain   as glibc comes
    kept    freed memory is never given back to the kernel, blocks up to 32 MiB come from the heap, one arena
            for all threads
    huge    torch asks for huge pages for blocks of 2 MiB and more
    both    kept and huge

    passive   OpenMP's threads sleep as soon as they have nothing to do, instead of waiting for more at full
              speed
    bound     each of them stays on one core
    alone     the step on one thread

The first step, in which AdamW's moments are made, is apart: what warming up costs. Metrics are ratios to
`plain` (below 1: better) and plain's own numbers; there is no target: docs/operations.md says what follows
from them.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.e2e.children import open_child
from benchmarks.e2e.step_batch import GROUPS, LONGEST, PROMPT_LENGTH, SAMPLES, make_step_batch
from benchmarks.harness import finish, make_parser
from rollouts.models.load import read_text_config, resolve_model

KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "MALLOC_ARENA_MAX": "1",
}
HUGE = {"THP_MEM_ALLOC_ENABLE": "1"}
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "plain": {},
    "kept": KEPT,
    "huge": HUGE,
    "both": {**KEPT, **HUGE},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "bound": {"OMP_PROC_BIND": "TRUE"},
    "alone": {},
}
SETS = (
    ("plain", "kept", "huge", "both"),
    ("plain", "passive", "bound", "alone"),
)  # that take turns; more would not fit into memory


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float | str | None]:
    model = resolve_model(arguments.model)
    batch = folder / "batch.npz"
    make_step_batch(vocab_size=int(read_text_config(model)["vocab_size"])).save(batch)
    tokens = GROUPS * SAMPLES * (PROMPT_LENGTH + LONGEST)
    command = [
        "--model",
        str(model),
        "--batch",
        str(batch),
        "--micro-batch-tokens",
        str(tokens),
        "--share-prefix",
    ]
    metrics: dict[str, float | str | None] = {}
    for number, names in enumerate(SETS[:1] if arguments.quick else SETS):
        turns, peaks = take_turns(names, command, folder, rounds=arguments.rounds, threads=arguments.threads)
        plain, *others = names
        if number == 0:
            metrics |= describe_plain(turns[plain], peaks[plain])
        for name in others:
            metrics |= compare_with_plain(name, turns, peaks)
    return metrics


def take_turns(
    names: Sequence[str], command: Sequence[str], folder: Path, *, rounds: int, threads: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Steps of each, the first one first, and peak memory in bytes."""
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(
                open_child(
                    "benchmarks.e2e.step_ours",
                    [*command, "--threads", str(1 if name == "alone" else threads)],
                    log=folder / f"{name}.log",
                    environment=ENVIRONMENTS[name],
                )
            )
            for name in names
        }
        for child in children.values():  # of each, so that all have done the same
            child.ask(do="old_log_probs")
        turns = {name: [child.ask(do="step")] for name, child in children.items()}
        for number in range(rounds):
            for name in [*children, *reversed(children)]:
                turns[name].append(children[name].ask(do="step"))
            print(f"round {number} of {rounds} done", flush=True)
        return turns, {name: child.ask(do="memory")["peak_bytes"] for name, child in children.items()}


def take_medians(turns: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of every step but the first."""
    return {key: statistics.median(turn[key] for turn in turns[1:]) for key in turns[0]}


def describe_plain(turns: Sequence[dict[str, Any]], peak: float) -> dict[str, float]:
    """The numbers that the others are compared with."""
    middle = take_medians(turns)
    return {
        "plain_cpu_s": round(middle["cpu_s"], 3),
        "plain_system_share": round(middle["system_s"] / middle["cpu_s"], 4),
        "plain_faults": middle["faults"],
        "plain_first_faults": turns[0]["faults"],
        "plain_first_cpu": round(turns[0]["cpu_s"] / middle["cpu_s"], 3),
        "plain_peak_gib": round(peak / 2**30, 2),
    }


def compare_with_plain(
    name: str, turns: dict[str, list[dict[str, Any]]], peaks: dict[str, float]
) -> dict[str, float]:
    """Ratios of one to `plain`, of the same turns."""
    middle, plain = take_medians(turns[name]), take_medians(turns["plain"])
    print(
        f"{name:7} step {middle['wall_s']:.2f} s wall (plain {plain['wall_s']:.2f}), {middle['cpu_s']:.2f} s"
        f" CPU, {middle['system_s']:.2f} of it in the kernel, {middle['faults']:,.0f} faults; first"
        f" {turns[name][0]['cpu_s']:.2f} s CPU; peak {peaks[name] / 2**30:.2f} GiB",
        flush=True,
    )
    return {
        f"{name}_wall": round(middle["wall_s"] / plain["wall_s"], 3),
        f"{name}_cpu": round(middle["cpu_s"] / plain["cpu_s"], 3),
        f"{name}_first_cpu": round(turns[name][0]["cpu_s"] / turns["plain"][0]["cpu_s"], 3),
        f"{name}_peak": round(peaks[name] / peaks["plain"], 3),
    }


def main() -> int:
    parser = make_parser(__doc__, quick="one round of the allocator's settings")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of two steps of each")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    with tempfile.TemporaryDirectory(prefix="allocator-") as folder:
        metrics = measure(arguments, Path(folder))
    return finish("allocator", peer="glibc's defaults", metrics=metrics, targets={})


if __name__ == "__main__":
    sys.exit(main())
