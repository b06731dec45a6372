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


def describe(ratio: float, setting: OverlapSetting, report: OverlapReport) -> str:
    """One row of the table."""
    return (
        f"{ratio:5g} {setting.max_staleness:5d} {report.step_s:9.2f} {report.of_limit:9.3f}"
        f" {report.lag_mean:9.2f} {report.lag_max:4d} {report.stale:6g} {report.mixed:6d} {report.cpu_s:7.3f}"
    )


def main() -> int:
    parser = make_parser(__doc__, quick="24 steps, without s = 2 and 4")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    steps = 24 if arguments.quick else arguments.steps
    metrics: dict[str, float | str | None] = {}
    excess, stale = 0, 0.0
    print("ratio     s    step s  of_limit  lag mean  max  stale  mixed   cpu s")
    for ratio in RATIOS:
        name = f"{ratio:g}".replace(".", "_")
        sync = run_overlap(setting := make_setting(ratio, max_staleness=0, steps=steps))
        print(describe(ratio, setting, sync), flush=True)
        longest = math.ceil(sync.longest_s / max(GENERATE_S, GENERATE_S / ratio)) + 1
        for staleness in (1, longest) if arguments.quick else (1, 2, 4, longest):
            report = run_overlap(setting := make_setting(ratio, max_staleness=staleness, steps=steps))
            print(describe(ratio, setting, report), flush=True)
            excess, stale = max(excess, report.lag_max - staleness), stale + report.stale
            metrics[f"speedup_{name}_s{staleness if staleness < longest else '_longest'}"] = round(
                sync.step_s / report.step_s, 3
            )
        metrics[f"of_limit_{name}"] = round(report.of_limit, 4)
        metrics[f"staleness_{name}"] = float(longest)
        metrics[f"cpu_s_{name}"] = round(report.cpu_s, 4)
    metrics |= {"excess": float(excess), "stale": stale}
    targets = {f"of_limit_{ratio:g}".replace(".", "_"): "<= 1.05" for ratio in RATIOS} | {"excess": "<= 0"}
    return finish(
        "async_overlap", peer="the same loop at max_staleness = 0", metrics=metrics, targets=targets
    )


if __name__ == "__main__":
    sys.exit(main())
