"""What the loop itself says of a step of RL, beside what its parts measure."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.config.schema import RLTrainingConfig
from rollouts.loops.algorithm import Algorithm, count_updates
from rollouts.loops.rl_batch import begin_last_pass
from rollouts.loops.sft import UpdateResult, merge_forwards, step_metrics
from rollouts.metrics.spans import PhaseTimer
from rollouts.types import RolloutBatch


def algorithm_metrics(
    config: RLTrainingConfig, algorithm: Algorithm, batch: RolloutBatch
) -> dict[str, float]:
    """The KL coefficient of the step where the reference was asked, and which change holds where there are
    any.
    """
    coefficient = {"kl/coef": algorithm.settings.kl_coef} if batch.ref_log_probs is not None else {}
    return coefficient | ({"algorithm/change": float(algorithm.change)} if config.changes else {})


def update_metrics(config: RLTrainingConfig, results: Sequence[UpdateResult]) -> dict[str, float]:
    """What the backend said about the last pass over the batch, and how many updates there were, where there
    may be several.
    """
    last_pass = results[begin_last_pass(len(results), config.minibatches) :]
    metrics = step_metrics(merge_forwards([forward for forward, _ in last_pass]), results[-1][1])
    metrics["optim/skipped_steps"] = float(sum(optim.skipped is not None for _, optim in results))
    return metrics | ({"optim/updates": float(len(results))} if count_updates(config) > 1 else {})


def throughput(batch: RolloutBatch, timer: PhaseTimer, *, ahead: bool) -> dict[str, float]:
    """Response tokens of the batch over the seconds of the phases that made and consumed them; `ahead`: they
    were made during the whole step.
    """
    tokens = float(batch.response_lengths.sum())
    generate_s = timer.metrics()["time/step"] if ahead else timer.seconds("generate")
    return {
        "perf/generated_tokens_per_s": tokens / generate_s,
        "perf/trained_tokens_per_s": tokens / timer.seconds("train"),
    }
