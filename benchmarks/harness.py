"""What every benchmark here shares: turns of ours and the peer, ceilings of the machine, and the JSON object
that a benchmark ends with.

{"benchmark": name, "peer": what it is compared with, "metrics": {name: number}, "targets": {metric: ">=
2.0"},
 "met": {metric: true, or null where it was not measured}, "machine": {...}, "versions": {...}}
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "numpy", "trio", "trl", "vllm")


def make_parser(documentation: str | None, *, quick: str = "") -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it is written and, if `quick` says what it leaves out, has
    the option --quick.
    """
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of one side cost this process."""

    wall_s: float
    cpu_s: float  # user and system, of all threads


def take_turn(work: Callable[[], object]) -> Turn:
    """Runs `work` once, in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Turn(time.perf_counter() - wall, time.process_time() - cpu)


def take_turns(
    ours: Callable[[], object], peer: Callable[[], object], *, rounds: int
) -> tuple[list[Turn], list[Turn]]:
    """`rounds` times A B B A: turns of ours and of the peer, of which the n-th of each stand side by side."""
    first: list[Turn] = []
    second: list[Turn] = []
    for _ in range(rounds):
        first.append(take_turn(ours))
        second.append(take_turn(peer))
        second.append(take_turn(peer))
        first.append(take_turn(ours))
    return first, second


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long one side takes as the other: the median of the pairs, and their range."""

    median: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


def compute_ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    """peer / ours of each pair of turns."""
    pairs = [theirs / own for own, theirs in zip(ours, peer, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


# --- the machine --------------------------------------------------------------------------------------------


def read_status_bytes(field: str, pid: int | str = "self") -> int:
    """VmRSS, VmHWM or another size of a process, in bytes; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{field}:")), 0
    )


def restart_peak() -> None:
    """From here on VmHWM of this process counts from what is resident now. Raises OSError where Linux does
    not allow it.
    """
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def measure_gemm_rate(side: int) -> float:
    """Operations a second of a float32 product of square matrices, the best of five."""
    import torch

    left, right, out = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    seconds: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds)


def measure_copy_rate(size: int) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes, both counted, the best of five."""
    import torch

    source, target = torch.ones(size // 4), torch.empty(size // 4)
    seconds: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return 2 * size / min(seconds)


def read_cpu_name() -> str:
    """What the CPU calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_machine() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, load at this moment and, where torch is loaded and sees
    one, the GPU.
    """
    machine: dict[str, Any] = {
        "cpu": read_cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():  # pragma: gpu
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def read_versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the packages that are installed here."""
    versions = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


# --- the end ------------------------------------------------------------------------------------------------


def meets(value: float | None, target: str) -> bool | None:
    """Whether `value` meets ">= 2.0" or "<= 0.6"; None where there is no value."""
    relation, _, bound = target.partition(" ")
    assert relation in (">=", "<="), target
    if value is None:
        return None
    return value >= float(bound) if relation == ">=" else value <= float(bound)


def finish(
    benchmark: str,
    *,
    peer: str,
    metrics: Mapping[str, float | str | None],
    targets: Mapping[str, str],
    packages: Sequence[str] = (),
    unmeasured: Mapping[str, str] | None = None,
    failures: Mapping[str, str] | None = None,
) -> int:
    """Prints the JSON object as the last line; exit status: 1 if a target that was measured is missed.

    `targets`: metric to ">= 2.0" or "<= 0.6"; a metric that is absent or None was not measured. Where given,
    the object also says why, by metric (`unmeasured`), and which parts of the benchmark failed and why
    (`failures`).
    """
    met: dict[str, bool | None] = {}
    for name, target in targets.items():
        value = metrics.get(name)
        assert value is None or isinstance(value, int | float), (name, value)
        met[name] = meets(value, target)
    result = {
        "benchmark": benchmark,
        "peer": peer,
        "metrics": dict(metrics),
        "targets": dict(targets),
        "met": met,
        "machine": describe_machine(),
        "versions": read_versions(*packages),
        **{
            name: dict(reasons)
            for name, reasons in (("unmeasured", unmeasured), ("failures", failures))
            if reasons
        },
    }
    print(json.dumps(result, allow_nan=False), flush=True)
    return 1 if False in met.values() else 0
