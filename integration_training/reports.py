"""What a run says of itself: evaluations of its weights, and the summary at its end."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from integration_training.opening import HELD_OUT, Run, Stage
from rollouts import __version__
from rollouts.config.modes import stage_config
from rollouts.crash_points import reach
from rollouts.errors import StorageError
from rollouts.models.directories import fsync_path
from rollouts.types import SamplingParams

PAIRS = "pairs"  # the evaluation of held-out preferences


def evaluated(run: Run, stage: str, step: int) -> bool:
    """Whether evaluations.jsonl has the row of the held-out prompts already; see has_evaluation. True for a
    reward model, which generates nothing.
    """
    return stage == "reward_model" or has_evaluation(run, stage, step, HELD_OUT)


def has_evaluation(run: Run, stage: str, step: int, name: str) -> bool:
    """Whether evaluations.jsonl has the row of this name already, of these weights: not of ones that were
    lost, after which an older checkpoint was taken and the step trained again. True when there is nothing to
    evaluate on.
    """
    from rollouts.metrics.jsonl import drop_outdated, read_rows

    held_out = (
        run.preferences[stage].held_out
        if name == PAIRS and stage in run.preferences
        else run.rows.held_out
        if name == HELD_OUT
        else ()
    )
    if not held_out:
        return True
    rows = drop_outdated(read_rows(run.run_dir.evaluations), read_rows(run.run_dir.metrics))
    return any(
        row["stage"] == stage and row["step"] == step and row.get("name", HELD_OUT) == name for row in rows
    )


async def evaluate_once(run: Run, opened: Stage, stage: str, step: int) -> None:
    """Evaluates the engine's weights unless this (stage, step) has a row from the same weights."""
    if not evaluated(run, stage, step):
        await evaluate_now(run, opened, stage, step)


async def sync_for_evaluation(opened: Stage) -> None:
    """Brings an engine with weights of its own to the trainer's. RL does it after its steps."""
    if opened.engine is not None:
        await opened.sync_weights(opened.backend, [opened.engine], opened.backend.weight_version)


async def evaluate_now(run: Run, opened: Stage, stage: str, step: int) -> None:
    """Evaluates the engine's weights on the held-out prompts and logs it. A row of an earlier attempt may be
    of weights that were lost.
    """
    from rollouts.evaluation.evaluate import evaluate
    from rollouts.generation.generate import make_chat_generate

    config, engine = run.config.eval, opened.engine
    if config is None or engine is None or run.functions.eval_reward is None:
        return
    with run.spans.measure("evaluate"):
        result = await evaluate(
            run.rows.held_out,
            engine,
            generate=run.functions.generate or make_chat_generate(run.tokenizer, options=run.template),
            reward=run.functions.eval_reward,
            sampling=SamplingParams(
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                stop_token_ids=run.stop_ids,
            ),
            samples_per_prompt=config.samples_per_prompt,
            seed=run.config.seed,
            reward_timeout_s=run.config.rl.rollout.reward_timeout_s if run.config.rl else 30.0,
        )
    version = await engine.weight_version()
    await run.logger.log_samples(f"eval-{stage}", step, version, result.samples)
    await run.logger.log_evaluation(stage, step, version, HELD_OUT, result.metrics(HELD_OUT))


def write_summary(run: Run, stages: Sequence[str], wall_s: float) -> dict[str, Any]:
    """What summary.json holds, read back from the files that the run left. `wall_s` is of the attempt that
    finished.
    """
    from rollouts.metrics.jsonl import newest_attempts, read_rows
    from rollouts.models.devices import describe_device

    evaluations = (
        newest_attempts(read_rows(run.run_dir.evaluations)) if run.run_dir.evaluations.exists() else []
    )
    key = f"eval/{HELD_OUT}/avg@{run.config.eval.samples_per_prompt}" if run.config.eval else ""
    measured: dict[str, float] = {
        row["stage"]: row[key] for row in evaluations if row.get("name") == HELD_OUT
    }
    order = [
        stage for stage in ("base", "sft", "preference", "rl") if stage in measured or stage != "preference"
    ]
    pairs = {
        row["stage"]: row[f"eval/{PAIRS}/accuracy"] for row in evaluations if f"eval/{PAIRS}/accuracy" in row
    }
    rewards = [
        row["reward/mean"]
        for row in newest_attempts(read_rows(run.run_dir.metrics))
        if row["stage"] == "rl" and "reward/mean" in row
    ]
    summary = {
        "mode": "+".join(stages),
        "steps": sum(stage_config(run.config, stage).steps for stage in stages),
        "accuracy": {stage: measured.get(stage) for stage in order},
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
        return (
            next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            / 2**20
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def print_report(run: Run, summary: dict[str, Any], console: Console) -> None:
    """Accuracy before and after each stage, three transcripts, and where the files are."""
    from rollouts.metrics.jsonl import read_rows

    console.print()
    labels = {"base": "base model", "sft": "after SFT", "preference": "after preferences", "rl": "after RL"}
    known = {
        labels[name]: summary["accuracy"][name]
        for name in labels
        if summary["accuracy"].get(name) is not None
    }
    width = max([11, *(len(label) + 1 for label in known)])
    for label, accuracy in known.items():
        console.print(
            f"held-out accuracy, {label:<{width}}{100 * accuracy:5.1f} %   ({len(run.rows.held_out)}"
            " problems)",
            highlight=False,
        )
    for stage, accuracy in summary.get("pair_accuracy", {}).items():
        pairs = (
            f"   ({len(run.preferences[stage].held_out)} pairs)" if stage in run.preferences else ""
        )  # of an attempt with another --mode
        console.print(f"held-out pairs ranked right, {stage} {100 * accuracy:5.1f} %{pairs}", highlight=False)
    last_stage = f"eval-{summary['mode'].split('+')[-1]}"
    transcripts = (
        [row for row in read_rows(run.run_dir.samples) if row["stage"] == last_stage][:3]
        if run.run_dir.samples.exists()
        else []
    )
    for row in transcripts:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        console.print(
            f"\n  prompt    {prompt}\n  response  {row['response']}\n  reward    {row['reward']}",
            highlight=False,
            markup=False,
        )
    console.print(
        f"\n{summary['wall_s']:.0f} s, peak memory {summary['peak_rss_gib']:.2f} GiB", highlight=False
    )
    console.print(f"everything is in {run.run_dir.root}", highlight=False, soft_wrap=True)
    console.print(
        f"look at it with: python -m rollouts inspect {run.run_dir.root}", highlight=False, soft_wrap=True
    )


def write_atomically(path: Path, text: str) -> None:
    """The whole text under this name, on disk when this returns; or, after a power cut too, what was there
    before.
    """
    partial = path.with_name(f".tmp-{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        reach("files.partial")
        fsync_path(partial)
        partial.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written ({error}); free space and go on with --resume"
        ) from error
