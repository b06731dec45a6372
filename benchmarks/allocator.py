"""Page faults, kernel time and peak memory of our training step on a CPU, under settings of the memory allocator.

    python -m benchmarks.allocator [--rounds 2] [--threads 2]

The step of benchmarks.train_step (SmolLM2-135M, float32), in processes that differ in their environment only, taking turns:

    plain   as glibc comes
    kept    freed memory is never given back to the kernel, blocks up to 32 MiB come from the heap, one arena for all threads
    huge    torch asks for huge pages for blocks of 2 MiB and more
    both    kept and huge

The first step, in which AdamW's moments are made, is apart. Metrics are ratios to `plain` (below 1: better) and plain's own numbers; there is
no target: docs/operations.md says what follows from them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.e2e.children import open_child
from benchmarks.e2e.step_batch import GROUPS, LONGEST, PROMPT_LENGTH, SAMPLES, make_step_batch
from benchmarks.harness import finish
from rollouts.models.load import read_text_config, resolve_model

KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "MALLOC_ARENA_MAX": "1",
}
HUGE = {"THP_MEM_ALLOC_ENABLE": "1"}
ENVIRONMENTS: dict[str, dict[str, str]] = {"plain": {}, "kept": KEPT, "huge": HUGE, "both": {**KEPT, **HUGE}}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float | str | None]:
    model = resolve_model(arguments.model)
    batch = folder / "batch.npz"
    make_step_batch(vocab_size=int(read_text_config(model)["vocab_size"])).save(batch)
    tokens = GROUPS * SAMPLES * (PROMPT_LENGTH + LONGEST)
    command = ["--model", str(model), "--batch", str(batch), "--threads", str(arguments.threads), "--micro-batch-tokens", str(tokens)]
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(
                open_child("benchmarks.e2e.step_ours", [*command, "--share-prefix"], log=folder / f"{name}.log", environment=environment)
            )
            for name, environment in ENVIRONMENTS.items()
        }
        for child in children.values():  # of each, so that all have done the same
            child.ask(do="old_log_probs")
        first = {name: child.ask(do="step") for name, child in children.items()}
        steps: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
        for number in range(arguments.rounds):
            for name in [*children, *reversed(children)]:
                steps[name].append(children[name].ask(do="step"))
            print(f"round {number} of {arguments.rounds} done", flush=True)
        peaks = {name: child.ask(do="memory")["peak_bytes"] for name, child in children.items()}
    metrics: dict[str, float | str | None] = {}
    medians = {name: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]} for name, turns in steps.items()}
    for name, middle in medians.items():
        print(
            f"{name:6} step {middle['wall_s']:.2f} s wall, {middle['cpu_s']:.2f} s CPU, {middle['system_s']:.2f} of it in the kernel, "
            f"{middle['faults']:,.0f} faults; first {first[name]['cpu_s']:.2f} s CPU, {first[name]['faults']:,} faults; "
            f"peak {peaks[name] / 2**30:.2f} GiB"
        )
        if name == "plain":
            metrics |= {
                "plain_cpu_s": round(middle["cpu_s"], 3),
                "plain_system_share": round(middle["system_s"] / middle["cpu_s"], 4),
                "plain_faults": middle["faults"],
                "plain_first_faults": first[name]["faults"],
                "plain_peak_gib": round(peaks[name] / 2**30, 2),
            }
        else:
            metrics |= {
                f"{name}_wall": round(middle["wall_s"] / medians["plain"]["wall_s"], 3),
                f"{name}_cpu": round(middle["cpu_s"] / medians["plain"]["cpu_s"], 3),
                f"{name}_first_cpu": round(first[name]["cpu_s"] / first["plain"]["cpu_s"], 3),
                f"{name}_peak": round(peaks[name] / peaks["plain"], 3),
            }
    return metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of two steps of each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="allocator-") as folder:
        metrics = measure(arguments, Path(folder))
    return finish("allocator", peer="glibc's defaults", metrics=metrics, targets={})


if __name__ == "__main__":
    sys.exit(main())
