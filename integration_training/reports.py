"""What a run says of itself: evaluations of its weights, and the summary at its end.

What every stage hands to its loop: the record, and hooks that save and evaluate.
"""

import json
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trio

from integration_training.opening import HELD_OUT, Run, Stage, accuracy_key, say, scorer_options
from rollouts import __version__
from rollouts.checkpoints.writer import WriteModel, write_into
from rollouts.config.load import EVALUATE, stage_config
from rollouts.crash_points import reach
from rollouts.evaluation.evaluate import evaluate
from rollouts.evaluation.policy_metrics import measure_responses
from rollouts.generation.samples import convert_to_batch
from rollouts.loops.steps import EncodeState, StepHooks
from rollouts.metrics.jsonl import drop_outdated, newest_attempts, read_rows
from rollouts.models.devices import describe_device
from rollouts.protocols import LogProbScorer
from rollouts.reference.moving import REFERENCE, MovingReference
from rollouts.reference.score import open_frozen_reference
from rollouts.run_dir import replace_file
from rollouts.types import Sample
from rollouts.weight_sync.engine_weights import hold_engine_weights

PAIRS = "pairs"  # the evaluation of held-out preferences
LABELS = {"base": "base model", "sft": "after SFT", "preference": "after preferences", "rl": "after RL"}


def is_evaluated(run: Run, stage: str, step: int, name: str = HELD_OUT) -> bool:
    """Whether evaluations.jsonl has the row of this name already, of these weights: not of ones that were
    lost, after which an older checkpoint was taken and the step trained again. True when there is nothing to
    evaluate on.
    """
    if not (run.prepared.list_held_out(stage) if name == PAIRS else run.rows.held_out):
        return True
    rows = drop_outdated(read_rows(run.run_dir.evaluations), read_rows(run.run_dir.metrics))
    return any((row["stage"], row["step"], row.get("name", HELD_OUT)) == (stage, step, name) for row in rows)


async def evaluate_pairs_once(
    run: Run, opened: Stage, step: int, measure: Callable[[], Awaitable[Mapping[str, float]]]
) -> None:
    """Evaluates the stage's held-out preferences after `step` by `measure`, unless the record has it."""
    if not is_evaluated(run, opened.name, step, PAIRS):
        with run.spans.measure("evaluate"):
            metrics = await measure()
        await run.logger.log_evaluation(opened.name, step, opened.backend.weight_version, PAIRS, metrics)


async def evaluate_once(run: Run, opened: Stage, stage: str, step: int) -> None:
    """Evaluates the weights of `stage` after `step` on the held-out prompts, unless the record has it. RL
    brings its engine to them after each step; here every other stage does.
    """
    config, engine, reward = run.config.eval, opened.engine, run.functions.eval_reward
    scores = reward is not None or run.config.rollout.is_scored
    if config is None or engine is None or not scores or is_evaluated(run, stage, step):
        return
    if opened.name != "rl" and opened.sync_weights is not None:
        await opened.sync_weights(opened.backend, [engine], opened.backend.weight_version)
    with run.spans.measure("evaluate"):
        result = await evaluate(
            run.rows.held_out,
            engine,
            generate=run.choose_generate(),
            reward=reward,
            sampling=run.choose_sampling(config),
            samples_per_prompt=config.samples_per_prompt,
            seed=run.config.seed,
            reward_timeout_s=run.config.rollout.reward_timeout_s,
        )
        metrics = result.metrics(HELD_OUT)
        if config.policy_metrics or opened.name == EVALUATE:
            metrics |= await measure_policy(run, opened, result.scored)
    weights = await engine.weight_version()
    await run.logger.log_samples(f"eval-{stage}", step, weights, result.samples)
    await run.logger.log_evaluation(stage, step, weights, HELD_OUT, metrics)


async def measure_policy(run: Run, opened: Stage, samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of the policy that gave the samples, under the trainer's weights and at the temperature of RL,
    however the evaluation sampled. None where no sample has tokens.
    """
    samples = [sample for sample in samples if sample.response_length]
    if not samples:
        return {}
    batch = convert_to_batch(samples, temperature=run.config.rollout.temperature)
    scores = await opened.backend.forward_with_entropy(batch).result()
    if run.against:
        async with open_frozen_reference(run.against, **scorer_options(run, opened)) as other:
            scores.append(await other.score(batch))
    found = await trio.to_thread.run_sync(measure_responses, batch, scores)
    return {f"eval/{HELD_OUT}/{name}": value for name, value in found.items()}


# --- the end ------------------------------------------------------------------------------------------------


def write_summary(run: Run, stages: Sequence[str], wall_s: float) -> dict[str, Any]:
    """What summary.json holds, read back from the files that the run left. `wall_s` is of the attempt that
    finished.
    """
    evaluations = newest_attempts(read_rows(run.run_dir.evaluations))
    accuracy = {
        row["stage"]: row[accuracy_key(run.config)] for row in evaluations if row.get("name") == HELD_OUT
    }
    ranked = f"eval/{PAIRS}/accuracy"
    pairs = {row["stage"]: row[ranked] for row in evaluations if ranked in row}
    steps = newest_attempts(read_rows(run.run_dir.metrics))
    rewards = [row["reward/mean"] for row in steps if row["stage"] == "rl" and "reward/mean" in row]
    summary = {
        "mode": "+".join(stages) or EVALUATE,
        "steps": sum(stage_config(run.config, stage).steps for stage in stages),
        "accuracy": {
            stage: accuracy.get(stage) for stage in LABELS if stage in accuracy or stage != "preference"
        },
        **({"pair_accuracy": pairs} if pairs else {}),
        "reward": {"first": rewards[0] if rewards else None, "last": rewards[-1] if rewards else None},
        "wall_s": round(wall_s, 1),
        "peak_rss_gib": round(read_peak_rss_gib(), 3),
        "device": describe_device(run.device),
        "seed": run.config.seed,
        "versions": {
            "rollouts-rl": __version__,
            **{name: version(name) for name in ("torch", "transformers", "trio", "numpy")},
        },
    }
    write_atomically(run.run_dir.summary, json.dumps(summary, indent=1) + "\n")
    return summary


def read_peak_rss_gib() -> float:
    """Most memory this process ever held, in GiB. Reward workers are not in it: a child's peak, as the kernel
    tells it, begins with its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss counts what the process was before exec; VmHWM does not
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # bytes on macOS


def print_report(run: Run, summary: dict[str, Any]) -> None:
    """Accuracy before and after each stage, three transcripts, and where the files are."""
    lines = [""]
    known = {LABELS[stage]: share for stage, share in summary["accuracy"].items() if share is not None}
    width = max([11, *(len(label) + 1 for label in known)])
    for label, accuracy in known.items():
        lines.append(
            f"held-out accuracy, {label:<{width}}{100 * accuracy:5.1f} %  "
            f" ({len(run.rows.held_out)} problems)"
        )
    evaluated = read_rows(run.run_dir.evaluations)[-1:] if summary["mode"] == EVALUATE else []
    lines += [f"{name} {value}" for row in evaluated for name, value in row.items() if "/" in name]
    last_stage = f"eval-{summary['mode'].split('+')[-1]}"
    for stage, accuracy in summary.get("pair_accuracy", {}).items():
        count = len(run.prepared.list_held_out(stage))  # 0: of an attempt with another --mode
        pairs = f"   ({count} pairs)" if count else ""
        lines.append(f"held-out pairs ranked right, {stage} {100 * accuracy:5.1f} %{pairs}")
    rows = [row for row in read_rows(run.run_dir.samples) if evaluated or row["stage"] == last_stage]
    for row in [row for row in rows if row["step"] == rows[-1]["step"]][:3]:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        reward = row.get("reward", "none: the sample failed")
        lines.append(f"\n  prompt    {prompt}\n  response  {row['response']}\n  reward    {reward}")
    lines += [
        f"\n{summary['wall_s']:.0f} s, peak memory {summary['peak_rss_gib']:.2f} GiB",
        f"everything is in {run.run_dir.root}",
        f"look at it with: python -m rollouts inspect {run.run_dir.root}",
    ]
    say("\n".join(lines), sys.stdout)


def write_atomically(path: Path, text: str) -> None:
    """The whole text under this name, on disk when this returns. Raises StorageError."""

    def chunks() -> Iterator[bytes]:
        yield text.encode()
        reach("files.partial")

    replace_file(path, chunks(), way_out="free space and go on with --resume")


def surround(
    run: Run,
    opened: Stage,
    *,
    evaluate: Callable[[int], Awaitable[None]] | None = None,
    hold_state: Callable[[], EncodeState] = lambda: dict,
    reference: LogProbScorer | None = None,
) -> dict[str, Any]:
    """The arguments that all loops share. The hooks save the stage's backends with the state of `hold_state`,
    a reference that moves and, between two updates of the engine, its weights; the last save ends before the
    loop does, others beside training.
    """

    async def save(step: int, encode: EncodeState) -> None:
        write_more: list[WriteModel] = []
        if opened.name == "rl" and step % opened.section.sync_every:
            assert opened.engine is not None
            write_engine = await hold_engine_weights(opened.engine, step)
            write_more += [write_engine] if write_engine else []
        if isinstance(reference, MovingReference):
            write_more.append(write_into(REFERENCE, await reference.hold()))
        last = step == opened.section.steps or run.stop.is_requested()
        await opened.checkpoints.save(step, encode(), last=last, write_more=write_more)

    return {
        "metrics_logger": StageLogger(run, opened, reference),
        "seed": run.config.seed,
        "completed_steps": opened.completed,
        "hooks": StepHooks(
            stop=run.stop,
            hold_state=hold_state,
            save=save,
            is_saved=opened.checkpoints.is_saved,
            checkpoint_every=run.config.output.checkpoint_every,
            evaluate=evaluate or partial(evaluate_once, run, opened, opened.name),
        ),
    }


@dataclass
class StageLogger:
    """The run's record. The row of a step also has the metrics of saves and of a reference that moves, and
    the spans of what went on beside the loop.
    """

    run: Run
    opened: Stage
    reference: LogProbScorer | None

    def __post_init__(self) -> None:
        self.log_samples = self.run.logger.log_samples
        self.log_evaluation = self.run.logger.log_evaluation
        self.log_spans = self.run.logger.log_spans

    async def log_step(
        self, stage: str, step: int, policy_version: int, metrics: Mapping[str, float], **more: Any
    ) -> None:
        """The run's log_step, with what is known beside the loop."""
        beside = {**self.opened.checkpoints.take_metrics(), **getattr(self.reference, "metrics", {})}
        more["spans"] = [*more.get("spans", ()), *self.run.spans.take()]
        await self.run.logger.log_step(stage, step, policy_version, {**metrics, **beside}, **more)
