"""How much of generating, training and updating the engines goes on at once, in virtual time.

    python -m benchmarks.async_overlap [--steps 60] [--quick]

The real loop, manager and rules of staleness (tests.sim.overlap_simulator), with an engine of 128
slots, 16 prompts of 8 samples, lognormal response lengths (sigma 0.8) and a trainer that takes given times.
Generating a batch takes 8 s of a full engine; training takes 16, 8 or 4 s (T_gen/T_train = 0.5, 1, 2); an
update of the weights takes 5 % of that: for 1 % the trainer waits (a copy of its weights), for 1 % the engine
is frozen. The peer is the project's own loop at max_staleness = 0, where each waits for the other.

    of_limit     time of a step / max(generating a batch on a full engine, training + copy); 1 is perfect,
                 target 1.05 at s >= longest response
    excess       largest lag of any batch over max_staleness; target 0; asserted for every batch too
    stale        groups dropped as too old, of all runs; 0: whatever was launched could be trained in time
    cpu          seconds of this process for a step: driver, stub engine and virtual clock together

Deterministic but for the order in which trio runs what is due at one moment; the machine only sets the CPU
seconds.
"""

import math
import sys
import time

from benchmarks.harness import finish, make_parser
from tests.sim.overlap_simulator import OverlapReport, OverlapSetting, run_overlap

GENERATE_S = 8.0  # mean_tokens · token_s, for as many samples as there are slots
RATIOS = (0.5, 1.0, 2.0)


def make_setting(ratio: float, *, max_staleness: int, steps: int) -> OverlapSetting:
    """A run with T_gen/T_train = `ratio`."""
    train_s = GENERATE_S / ratio
    warm_up = steps // 3 if max_staleness else 2
    return OverlapSetting(
        max_staleness=max_staleness,
        train_s=train_s,
        hold_s=0.01 * train_s,
        export_s=0.03 * train_s,
        pause_s=0.01 * train_s,
        steps=steps if max_staleness else max(steps // 3, 5),
        warm_up=warm_up,
    )


def compute_of_limit(report: OverlapReport) -> float:
    """Time of a step over the larger limit: 1 is perfect overlap."""
    return report.step_s / max(report.generate_limit_s, report.train_limit_s)


def run(ratio: float, *, max_staleness: int, steps: int) -> tuple[OverlapReport, float]:
    """What came of a run, printed as a row of the table, and the CPU seconds of a step."""
    setting = make_setting(ratio, max_staleness=max_staleness, steps=steps)
    began = time.process_time()
    report = run_overlap(setting)
    cpu_s = (time.process_time() - began) / setting.steps
    print(
        f"{ratio:5g} {max_staleness:5d} {report.step_s:9.2f} {compute_of_limit(report):9.3f}"
        f" {report.lag_max:8d} {report.stale:6g} {report.mixed:6d} {cpu_s:7.3f}",
        flush=True,
    )
    return report, cpu_s


def main() -> int:
    parser = make_parser(__doc__, quick="24 steps, without s = 2 and 4")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    steps = 24 if arguments.quick else arguments.steps
    metrics: dict[str, float | str | None] = {}
    excess, stale = 0, 0.0
    print("ratio     s    step s  of_limit  lag max  stale  mixed   cpu s")
    for ratio in RATIOS:
        name = f"{ratio:g}".replace(".", "_")
        sync, _ = run(ratio, max_staleness=0, steps=steps)
        longest = math.ceil(sync.longest_s / max(GENERATE_S, GENERATE_S / ratio)) + 1
        for staleness in (1,) if arguments.quick else (1, 2, 4):
            report, _ = run(ratio, max_staleness=staleness, steps=steps)
            excess, stale = max(excess, report.lag_max - staleness), stale + report.stale
            metrics[f"speedup_{name}_s{staleness}"] = round(sync.step_s / report.step_s, 3)
        report, cpu_s = run(ratio, max_staleness=longest, steps=steps)
        excess, stale = max(excess, report.lag_max - longest), stale + report.stale
        metrics |= {
            f"speedup_{name}_s_longest": round(sync.step_s / report.step_s, 3),
            f"of_limit_{name}": round(compute_of_limit(report), 4),
            f"staleness_{name}": float(longest),
            f"cpu_s_{name}": round(cpu_s, 4),
        }
    metrics |= {"excess": float(excess), "stale": stale}
    targets = {f"of_limit_{ratio:g}".replace(".", "_"): "<= 1.05" for ratio in RATIOS} | {"excess": "<= 0"}
    return finish(
        "async_overlap", peer="the same loop at max_staleness = 0", metrics=metrics, targets=targets
    )


if __name__ == "__main__":
    sys.exit(main())
