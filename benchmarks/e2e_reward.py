"""Time to reward, end to end: our run of train.py against TRL's GRPOTrainer.train(), with the same settings
and the same prompts in order.

    python -m benchmarks.e2e_reward [--quick] [--tasks digits sums] [--seeds 1] [--steps 12]
        [--precision bfloat16] [--continuous]

SmolLM2-135M-Instruct, 8 prompts x 8 samples a step, at most 16 new tokens, temperature 1, GRPO with clip 0.2,
no KL, one update a batch, the loss's mean over all tokens, AdamW at a constant rate, gradients clipped to 1,
2 threads, no evaluation; in float32, or with --precision bfloat16 both sides multiply in that, TRL by its own
bf16. benchmarks/e2e/tasks.py has the tasks. Ours is the ordinary program with its embedded engine; TRL
generates with model.generate, with --continuous by transformers' continuous batching. TRL's micro-batch is
its whole batch (--micro-batch-rows), ours as many tokens.

Both sides are programs of their own, one after the other, in turns by seed and task. A run's time to reward
is the seconds of its steps until the mean reward of the last five reaches a threshold that both reach: nine
tenths of the lower of the two best such means, above where they began. Start-up is reported apart. Both sides
sample anew, so that their curves are compared, not their tokens: `reward_gap` is the mean difference of
rewards by step (ours - TRL's).

Metrics, the median over runs: `time_ratio`, TRL's time to reward / ours; `step_ratio`, the same of a median
step; `memory_ratio`, ours / TRL's peak of the process tree; seconds of a step by part; tied groups. Targets:
time_ratio >= 5.0, memory_ratio <= 0.45. --quick: three steps of one task and no threshold, so that time_ratio
is that of steps.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.e2e.runs import RunResult, Setting, run_ours, run_trl
from benchmarks.harness import finish, make_parser
from rollouts.models.load import resolve_model

PEER = "trl GRPOTrainer"
TARGETS = {"time_ratio": ">= 5.0", "memory_ratio": "<= 0.45"}
WINDOW = 5  # steps of the rolling mean
SHARE_OF_BEST = 0.9  # of the way from the first mean to the best one that both reach
LEARNING_RATES = {"digits": 2e-5, "sums": 2e-5}


def rolling_means(rewards: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of the last `window` values, or of as many as there are, at each step."""
    return [statistics.fmean(rewards[max(step + 1 - window, 0) : step + 1]) for step in range(len(rewards))]


def find_threshold(ours: Sequence[float], peer: Sequence[float]) -> float:
    """A reward that both rolling means reach: from the higher of their starts, SHARE_OF_BEST of the way to
    the lower of their best.
    """
    curves = rolling_means(ours), rolling_means(peer)
    start, best = max(curve[0] for curve in curves), min(max(curve) for curve in curves)
    return best if best <= start else start + SHARE_OF_BEST * (best - start)


def time_to(result: RunResult, threshold: float) -> float:
    """Seconds of the steps up to the first whose rolling mean reaches the threshold."""
    total = 0.0
    for step, mean in zip(result.steps, rolling_means([step.reward for step in result.steps]), strict=True):
        total += step.wall_s
        if mean >= threshold:
            return total
    raise AssertionError(f"the threshold {threshold} was to be one that is reached")


def median_step(result: RunResult, part: str = "wall_s") -> float:
    """Of all steps but the first, which warms up."""
    return statistics.median(getattr(step, part) for step in result.steps[1:])


def describe(name: str, result: RunResult) -> None:
    rewards = [step.reward for step in result.steps]
    wall, generate = median_step(result), median_step(result, "generate_s")
    print(
        f"{name}: start-up {result.startup_s:.1f} s, step {wall:.2f} s (generate {generate:.2f}, rest"
        f" {wall - generate:.2f}), peak {result.peak_bytes / 2**30:.2f} GiB, tied"
        f" {statistics.fmean(step.tied for step in result.steps):.2f}, reward"
        f" {' '.join(f'{reward:.2f}' for reward in rewards)}",
        flush=True,
    )


def run_pair(setting: Setting, folder: Path, *, ours_first: bool) -> tuple[RunResult, RunResult | None]:
    """Ours and TRL's; None where it is not installed."""
    ours = run_ours(setting, folder / "ours") if ours_first else None
    peer = None
    if find_spec("trl") is not None:
        peer = run_trl(setting, folder / "trl")
    ours = ours or run_ours(setting, folder / "ours")
    if peer is not None:
        assert ours.prompt_ids == peer.prompt_ids, "the prompts differ"
        assert ours.stop_ids == peer.stop_ids, (ours.stop_ids, peer.stop_ids)
    return ours, peer


def compare(ours: RunResult, peer: RunResult, *, quick: bool) -> dict[str, float]:
    """The metrics of one pair of runs."""
    rewards = [step.reward for step in ours.steps], [step.reward for step in peer.steps]
    step_ratio = median_step(peer) / median_step(ours)
    found = {
        "time_ratio": step_ratio,
        "step_ratio": step_ratio,
        "generate_ratio": median_step(peer, "generate_s") / median_step(ours, "generate_s"),
        "rest_ratio": (
            (median_step(peer) - median_step(peer, "generate_s"))
            / (median_step(ours) - median_step(ours, "generate_s"))
        ),
        "memory_ratio": ours.peak_bytes / peer.peak_bytes,
        "startup_ratio": peer.startup_s / ours.startup_s,
        "reward_gap": statistics.fmean(own - other for own, other in zip(*rewards, strict=True)),
    }
    if not quick:
        threshold = find_threshold(*rewards)
        found |= {"threshold": threshold, "time_ratio": time_to(peer, threshold) / time_to(ours, threshold)}
    return found


def describe_side(name: str, results: Sequence[RunResult]) -> dict[str, float]:
    """Medians over the runs of one side."""
    return {
        f"{name}_step_s": statistics.median(median_step(result) for result in results),
        f"{name}_generate_s": statistics.median(median_step(result, "generate_s") for result in results),
        f"{name}_startup_s": statistics.median(result.startup_s for result in results),
        f"{name}_peak_gib": statistics.median(result.peak_bytes for result in results) / 2**30,
        f"{name}_tied": statistics.fmean(step.tied for result in results for step in result.steps),
        f"{name}_last_reward": statistics.fmean(
            rolling_means([step.reward for step in result.steps])[-1] for result in results
        ),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float | str | None]:
    model = str(resolve_model(arguments.model))
    ours: list[RunResult] = []
    peers: list[RunResult] = []
    pairs: list[dict[str, float]] = []
    by_task: dict[str, float | str | None] = {}
    turns = [(task, seed) for seed in range(arguments.seeds) for task in arguments.tasks]
    for number, (task, seed) in enumerate(turns):
        lr = arguments.lr or LEARNING_RATES[task]
        setting = Setting(
            task,
            model,
            arguments.steps,
            lr,
            seed,
            arguments.threads,
            arguments.micro_batch_rows,
            precision=arguments.precision,
            continuous=arguments.continuous,
        )
        place = folder / f"{task}-{seed}"
        place.mkdir()
        own, peer = run_pair(setting, place, ours_first=number % 2 == 0)
        describe(f"{task}, seed {seed}, ours", own)
        ours.append(own)
        if peer is None:
            print("trl is not installed: only our own run is measured")
            continue
        describe(f"{task}, seed {seed}, trl ", peer)
        peers.append(peer)
        pairs.append(compare(own, peer, quick=arguments.quick))
        print(f"   {', '.join(f'{name} {value:.3g}' for name, value in pairs[-1].items())}", flush=True)
    for task in arguments.tasks:
        found = [pair["time_ratio"] for pair, (name, _) in zip(pairs, turns, strict=False) if name == task]
        by_task[f"time_ratio_{task}"] = round(statistics.median(found), 3) if found else None
    names = list(pairs[0]) if pairs else list(TARGETS)
    return {
        **{
            name: round(statistics.median(pair[name] for pair in pairs), 3) if pairs else None
            for name in names
        },
        **by_task,
        **{name: round(value, 3) for name, value in describe_side("ours", ours).items()},
        **({name: round(value, 3) for name, value in describe_side("trl", peers).items()} if peers else {}),
        "precision": arguments.precision,
        "trl_generates_by": "continuous batching" if arguments.continuous else "model.generate",
        "micro_batch_rows": arguments.micro_batch_rows,
        "steps": arguments.steps,
        "seeds": arguments.seeds,
    }


def main() -> int:
    parser = make_parser(__doc__, quick="three steps of one task")
    parser.add_argument("--tasks", nargs="+", choices=tuple(LEARNING_RATES), default=list(LEARNING_RATES))
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.0, help="in place of the task's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--continuous", action="store_true", help="TRL's generation")
    parser.add_argument("--micro-batch-rows", type=int, default=64, help="of TRL's; a divisor of 64")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tasks, arguments.seeds, arguments.steps = ["sums"], 1, 3
    with tempfile.TemporaryDirectory(prefix="e2e_reward-") as folder:
        metrics = measure(arguments, Path(folder))
    return finish(
        "e2e_reward", peer=PEER, metrics=metrics, targets=TARGETS, packages=("accelerate", "datasets")
    )


if __name__ == "__main__":
    sys.exit(main())
