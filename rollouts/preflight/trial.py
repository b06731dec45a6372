"""One call of every function that a config names, on a made-up sample: what it answers, or how it fails,
before anything is generated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollouts.config.schema import RunConfig
from rollouts.config.tables import RolloutConfig
from rollouts.data.curriculum import call_curriculum, start_statistics
from rollouts.data.datasets import Row, name_sources
from rollouts.errors import RolloutsError
from rollouts.preflight.findings import Finding, reporting
from rollouts.preflight.functions import Functions, load_functions, open_functions
from rollouts.rewards.call import call_filter, call_group_reward, call_reward
from rollouts.rewards.check import apply_reward, function_name
from rollouts.types import RewardResult, Sample, SampleGroup, Status

WRONG_ANSWER = "(a made-up response)"


async def call_functions(
    config: RunConfig, stages: Sequence[str], rows: Mapping[str, Sequence[Row]], *, base_dir: Path
) -> list[Finding]:
    """A finding per function: what it made of a sample of the first row. Sync rewards run in a worker
    process, as in training.

    The row's answer is the response of the first sample of the group, something else that of the second.
    `generate` is not called: it needs an engine. Raises: never for what functions do.
    """
    findings: list[Finding] = []
    try:
        functions = load_functions(config, stages, base_dir=base_dir)
        async with open_functions(
            config, functions, base_dir=base_dir, warn=lambda text: _warn(text, findings), num_workers=1
        ) as running:
            if rows.get("rl"):
                await _call_rollout(
                    running, config.rl.rollout if config.rl else RolloutConfig(), rows["rl"][0], findings
                )
            if rows.get("eval") and config.eval and config.eval.reward:
                await _call_reward(
                    running.eval_reward,
                    make_trial_samples(rows["eval"][0])[0],
                    config,
                    "eval.reward",
                    findings,
                )
            if running.curriculum and config.rl:
                _call_curriculum(running.curriculum, config, findings)
    except* RolloutsError as group:
        findings += [Finding("error", "--call", str(error)) for error in group.exceptions]
    return findings


def _warn(text: str, findings: list[Finding]) -> None:
    findings.append(Finding("warning", "--call", text))


def make_trial_samples(row: Row) -> list[Sample]:
    """Two samples of a row: one whose response is its answer, and one with something else."""
    answer = row.get("answer")
    metadata = {
        **{key: value for key, value in row.items() if key != "prompt"},
        "prompt_id": "row-0",
        "epoch": 0,
    }
    responses = (str(answer) if isinstance(answer, str | int | float) else WRONG_ANSWER, WRONG_ANSWER)
    return [
        Sample(
            id=f"trial-s{index:03d}",
            prompt=row["prompt"],
            response=response,
            group_index=0,
            status=Status.COMPLETED,
            metadata=copy.deepcopy(
                metadata
            ),  # as in a run: what a function changes in one sample is not in the other
        )
        for index, response in enumerate(responses)
    ]


async def _call_rollout(
    functions: Functions, rollout: RolloutConfig, row: Row, findings: list[Finding]
) -> None:
    samples = make_trial_samples(row)
    results: list[RewardResult] = []
    if functions.group_reward:
        with reporting(findings, "rl.rollout.group_reward"):
            results = list(
                await call_group_reward(functions.group_reward, samples, timeout_s=rollout.reward_timeout_s)
            )
            findings.append(
                Finding(
                    "ok",
                    "rl.rollout.group_reward",
                    f"called with {_responses(samples)}: {', '.join(map(_describe, results))}",
                )
            )
    elif functions.reward:
        with reporting(findings, "rl.rollout.reward"):
            results = [
                await call_reward(functions.reward, sample, timeout_s=rollout.reward_timeout_s)
                for sample in samples
            ]
            findings.append(
                Finding(
                    "ok",
                    "rl.rollout.reward",
                    f"called with {_responses(samples)}: {', '.join(map(_describe, results))}",
                )
            )
    if functions.generate:
        findings.append(Finding("ok", "rl.rollout.generate", "not called: it needs a model"))
    scored = [apply_reward(sample, result) for sample, result in zip(samples, results, strict=False)]
    for filter_ in functions.filters if len(scored) == len(samples) else ():
        with reporting(findings, "rl.rollout.filters"):
            group = SampleGroup(0, "row-0", tuple(replace(sample) for sample in scored))
            decision = await call_filter(filter_, group, timeout_s=rollout.reward_timeout_s)
            verdict = "keeps" if decision.keep else f"drops ({decision.reason})"
            findings.append(
                Finding(
                    "ok", "rl.rollout.filters", f"{function_name(filter_)} {verdict} a group of these two"
                )
            )


async def _call_reward(
    reward: Any, sample: Sample, config: RunConfig, key: str, findings: list[Finding]
) -> None:
    timeout_s = config.rl.rollout.reward_timeout_s if config.rl else RolloutConfig().reward_timeout_s
    with reporting(findings, key):
        result = await call_reward(reward, sample, timeout_s=timeout_s)
        findings.append(Finding("ok", key, f"called with {_responses([sample])}: {_describe(result)}"))


def _call_curriculum(curriculum: Any, config: RunConfig, findings: list[Finding]) -> None:
    assert config.rl is not None
    names = name_sources(config.rl.data)
    with reporting(findings, "rl.curriculum"):
        weights = call_curriculum(curriculum, 1, start_statistics(names), function=config.rl.curriculum)
        findings.append(
            Finding(
                "ok",
                "rl.curriculum",
                "step 1: " + ", ".join(f"{name} {weight:g}" for name, weight in weights.items()),
            )
        )


def _responses(samples: Sequence[Sample]) -> str:
    return " and ".join(f"the response {_shorten(sample.response)}" for sample in samples)


def _describe(result: RewardResult) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in result.parts.items())
    return f"{result.reward:g}" + (f" ({parts})" if parts else "")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
