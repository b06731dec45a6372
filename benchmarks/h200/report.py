"""What the parts of the suite found: printed at once, one line a number, so that a run that is cut off has
said what it measured.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.h200.place import Place
from benchmarks.harness import meets


@dataclass(slots=True)
class Report:
    """Numbers of one part. Changes in place while the part runs."""

    targets: Mapping[str, str]
    metrics: dict[str, float | None] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)  # metric to the reason

    def add(self, name: str, value: float) -> None:
        """One number; a target that it misses is printed beside it."""
        self.metrics[name] = float(f"{value:.5g}")
        target = self.targets.get(name)
        verdict = (
            "" if target is None else f"   target {target}: {'met' if meets(value, target) else 'MISSED'}"
        )
        print(f"  {name:<36} {value:>14.5g}{verdict}", flush=True)

    def add_or_leave_out(self, name: str, value: float | None, why: str) -> None:
        """One number, or the reason where it is None."""
        if value is None:
            self.leave_out(name, why)
        else:
            self.add(name, value)

    def leave_out(self, name: str, why: str) -> None:
        """A number that was not measured, and the reason."""
        self.metrics[name] = None
        self.unmeasured[name] = why
        print(f"  {name:<36} {'not measured':>14}   {why}", flush=True)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the suite."""

    name: str
    about: str
    seconds: float  # what it takes on an H200 by estimate; not begun where less is left of the budget
    metrics: tuple[str, ...]  # every metric that it reports or leaves out
    run: Callable[[Place, Report], Awaitable[None]]


async def run_part(
    part: Part, place: Place, targets: Mapping[str, str], *, left_s: float
) -> tuple[Report, str]:
    """The part's report, and why it failed ("" if it did not). Ends with a line of JSON; what a failed part
    held on the device is freed.
    """
    print(f"\n== {part.name}: {part.about}", flush=True)
    report, failure, began = Report(targets), "", time.perf_counter()
    if left_s < part.seconds:
        failure = (
            f"not begun: {left_s:.0f} s of the budget are left, and it takes about {part.seconds:.0f} s"
            " (--budget-s, --parts)"
        )
        print(f"  {failure}", flush=True)
    else:
        try:
            await part.run(place, report)
        except Exception as error:  # whatever a part raises is reported, and the others go on
            traceback.print_exc(file=sys.stderr)
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"  FAILED: {failure}", flush=True)
    for name in part.metrics:
        if name not in report.metrics:
            report.leave_out(name, failure or "the part ended without it")
    unknown = set(report.metrics) - set(part.metrics)
    assert not unknown, f"part {part.name} reported {sorted(unknown)}, which it does not declare"
    if place.device == "cuda":  # pragma: gpu
        torch.compiler.reset()  # compiled programs may hold a model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = round(time.perf_counter() - began, 1)
    line = {
        "part": part.name,
        "seconds": seconds,
        "metrics": report.metrics,
        "unmeasured": report.unmeasured,
        "failure": failure or None,
    }
    print(json.dumps(line, allow_nan=False), flush=True)
    return report, failure
