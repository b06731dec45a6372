"""Reinforcement learning: generate → reward → filter → advantages → train → weight sync, one row of metrics a
step.

DataBuffer ──► generate_batch() ──► advantages ──► forward_backward, optim_step ──► set_weight_version
    ▲                 ▲ waits for the engines              waits for the backend               │
    └── returned      └──────────── sync_weights every config.sync_every steps ◄───────────────┘

With max_staleness = 0 the loop waits for a whole batch, then for the step, then for the engines. Above it,
unless the engine is deterministic, the manager generates all the time, and an update of the engines goes on
while the next step trains: the loop waits for the update before, and until this one needs the trainer's
weights no more (docs/async.md). The metrics of an update are in the row of the step that was the last when it
ended.

Each of `updates_per_batch` passes uses the whole batch, in `minibatches` optimizer steps; together they
advance the weight version once, also when kl_stop left some of them out or kl_limit undid one. A step whose
loss or gradient is not finite, or that is undone, changes nothing and still consumes its batch; a critic
keeps its updates then.

What a critic adds to a step of RL: values before it, updates of its own within it. PPO is the RL loop with
a critic and advantage "gae".

batch ──► critic: V of every trained token ──► gae: advantages, returns ──► critic's updates, policy's updates
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from rollouts.advantages import AdvantageFn
from rollouts.config.schema import RLTrainingConfig
from rollouts.crash_points import reach
from rollouts.errors import ConfigError
from rollouts.kl_control import exceeds_kl_limit
from rollouts.loops.algorithm import (
    Algorithm,
    LoopState,
    choose_algorithm,
    count_updates,
    find_advantages,
    make_kl_control,
    reaches_kl_stop,
    update_loop_state,
)
from rollouts.loops.rl_batch import (
    Score,
    add_advantages,
    add_log_probs,
    check_staleness,
    choose_optim,
    compute_lags,
    find_trajectories,
    plan_updates,
    sum_ref_kl,
)
from rollouts.loops.steps import HELD_STEPS, StepHooks, surround_steps
from rollouts.loops.updates import (
    Update,
    UpdateResult,
    last_pass_metrics,
    measure_kl,
    record_updates,
    train,
    work_metrics,
)
from rollouts.loops.weight_push import BatchSource, WeightPush
from rollouts.metrics.spans import PhaseTimer
from rollouts.metrics.token_shards import UpdateRecord
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import InferenceEngine, LogProbScorer, MetricsLogger, SyncWeights, TrainingBackend
from rollouts.types import (
    FloatArray,
    ForwardBackwardResult,
    LossSpec,
    Max,
    Numbers,
    OptimParams,
    RolloutBatch,
    Total,
    metric_values,
)

if TYPE_CHECKING:
    from rollouts.data.data_buffer import DataBuffer

ComputeLoss = Callable[[RolloutBatch, LossSpec], Awaitable[ForwardBackwardResult]]


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: "DataBuffer",
    rollout_manager: BatchSource,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger,
    *,
    sync_weights: SyncWeights,
    reference: LogProbScorer | None = None,
    advantages: Mapping[str, AdvantageFn] | None = None,
    seed: int = 0,
    state: LoopState | None = None,
    critic: TrainingBackend | None = None,
    teacher: Score | None = None,
    pairs: Callable[..., Awaitable[Any]] | None = None,
    compute_loss: ComputeLoss | None = None,
    completed_steps: int = 0,
    hooks: StepHooks | None = None,
) -> list[Numbers]:
    """The metrics of the newest HELD_STEPS of the steps that ran, `completed_steps` + 1 to config.steps.

    A resumed run passes the `state` that was saved. Raises ConfigError first; others as surround_steps.
    """
    check_complete(config, critic, state, completed_steps, compute_loss)
    functions, control = find_advantages(config, advantages or {}), make_kl_control(config)
    state, hooks = state or LoopState(config.kl_coef), hooks or StepHooks()
    sync, history = partial(sync_weights, backend, inference_engines), deque[Numbers](maxlen=HELD_STEPS)
    async with (
        surround_steps(hooks, config, backend, critic, completed=completed_steps) as steps,
        rollout_manager.generating(),
        open_plain_nursery() as nursery,
    ):
        push = WeightPush(nursery, sync, rollout_manager, config, hooks.stop)
        for step in range(completed_steps + 1, config.steps + 1):
            timer, algorithm = PhaseTimer(), choose_algorithm(config, step, state)
            with timer.phase("generate"):
                batch = await generate_and_log(rollout_manager, push, metrics_logger, config, step)
            with timer.phase("log_probs"):
                batch = await add_log_probs(batch, backend, reference, critic, algorithm.settings, teacher)
            batch, measured = add_advantages(batch, algorithm.settings, functions)
            with timer.phase("train"):
                parts = plan_updates(batch, algorithm.loss, config, seed=seed, step=step)
                valued = [(part, VALUE_LOSS) for part, _ in parts]
                critic_results = await train(critic, valued) if critic else []
                how = {"version": step, "optim": choose_optim(config, batch, state.lr_factor, state.undone)}
                made, results = await train_policy(backend, parts, batch, config, pairs, compute_loss, **how)
            async with steps.completing(step, before_evaluating=push.wait):
                measured |= training_metrics(config, algorithm, batch, results, critic_results, step)
                measured |= update_loop_state(state, algorithm, control, batch, measured)
                with timer.phase("weight_sync"):
                    await push.send(step)
                metrics = metric_values(rollout_manager.batch_metrics()) | measured | push.take_metrics()
                metrics |= {f"data/{name}": value for name, value in data_buffer.statistics().items()}
                metrics |= timer.metrics() | throughput(batch, made, config, timer, rollout_manager)
                told = {"updates": record_rl_updates(made, results, critic_results, algorithm, step)}
                await metrics_logger.log_step("rl", step, step - 1, metrics, **told, spans=timer.spans())
                history.append(metrics)
        await push.wait()
    return list(history)


def check_complete(
    config: RLTrainingConfig,
    critic: TrainingBackend | None,
    state: LoopState | None,
    completed_steps: int,
    compute_loss: ComputeLoss | None,
) -> None:
    """Raises ConfigError where the config needs a critic, the state of the steps before, or a way to measure
    the KL again, and it is not given; or a critic is given for nothing.
    """
    if config.kl_ref_limit and compute_loss is None:
        raise ConfigError("rl.kl_ref_limit needs compute_loss=, the backend's own, to measure the KL again")
    if state is None and completed_steps and config.kl_control != "fixed":
        raise ConfigError(
            f"rl.kl_control={config.kl_control!r} after {completed_steps} steps needs the coefficient it had"
            " come to; pass state="
        )
    if (critic is None) != (config.critic is None):
        raise ConfigError(
            f"rl.critic is {'set' if config.critic else 'not set'}, and critic= is"
            f" {'missing' if config.critic else 'given'}"
        )


async def generate_and_log(
    rollout_manager: BatchSource,
    push: WeightPush,
    metrics_logger: MetricsLogger,
    config: RLTrainingConfig,
    step: int,
) -> RolloutBatch:
    """The next batch. Its samples and those that failed are on disk before anything is done with it, also
    when the failures stop the run. Raises StalenessError for a batch that is too old.
    """
    failed = ()
    try:
        with push.guarding():
            try:
                batch = await rollout_manager.generate_batch()
            finally:
                failed = rollout_manager.failed_samples()  # now: later they may be those of the next batch
        reach("rollout.batch_ready")
        await metrics_logger.log_samples("rl", step, step - 1, batch.samples)
    finally:
        if failed:
            with trio.CancelScope(shield=True):  # a write of a few kilobytes
                await metrics_logger.log_samples("rl", step, step - 1, failed)
    check_staleness(compute_lags(batch, step - 1), max_staleness=config.max_staleness)
    return batch


async def train_policy(
    backend: TrainingBackend,
    updates: Sequence[Update],
    batch: RolloutBatch,
    config: RLTrainingConfig,
    pairs: Callable[..., Awaitable[Any]] | None = None,
    compute_loss: ComputeLoss | None = None,
    *,
    version: int,
    optim: OptimParams | None = None,
) -> tuple[Sequence[Update], list[UpdateResult]]:
    """(the updates that were made, their results): as train, or by `pairs`, which is train_on_pairs of
    rl.pairs; with rl.kl_stop or a limit one after the other, and none after the first that either ends.

    An update that is beyond a limit (measure_update) is undone: its result then says `skipped`. A stop before
    an update is decided cuts the step. Metrics: those of measure_update that are finite, and optim/undone.
    """
    if pairs is not None:
        return await pairs(backend, updates, version=version)
    limited = config.kl_limit or config.kl_ref_limit or config.grad_norm_limit
    if not (config.kl_stop or limited):
        return updates, await train(backend, updates, version=version, optim=optim)
    results, before = [], ()
    if config.kl_limit:
        before = batch.old_log_probs or await backend.forward(batch)
    for update in updates:
        undone = ""
        if limited:
            await backend.hold()
        [(forward, done)] = await train(backend, [update], optim=optim)
        if limited:
            metrics = dict(forward.metrics)
            how = before, update, (forward, done), config, compute_loss
            for name, value, limit in await measure_update(backend, batch, *how):
                metrics |= {name: Max(value)} if math.isfinite(value) else {}
                if exceeds_kl_limit(value, limit=limit):
                    undone = f"undone: {name} is {value:.3g}, above its limit of {limit:g}"
            if undone:
                await backend.revert()
                done = replace(done, skipped=undone)
            forward = replace(forward, metrics={**metrics, "optim/undone": Total(bool(undone))})
        results.append((forward, done))
        if undone or reaches_kl_stop(config, forward):
            break
    await train(backend, (), version=version)
    return updates, results


async def measure_update(
    backend: TrainingBackend,
    batch: RolloutBatch,
    before: Sequence[FloatArray],
    update: Update,
    result: UpdateResult,
    config: RLTrainingConfig,
    compute_loss: ComputeLoss | None,
) -> list[tuple[str, float, float]]:
    """(metric, value, limit) of each limit that is set, NaN where the value is unknown.

    kl/update: KL(before the batch || after the update), nats per token. kl/ref_after: the KL of the policy
    and the reference after it, on its rows, nats per sample, as its loss measures it; one that was above the
    limit before may fall. optim/grad_norm/max: before clipping.
    """
    found, (forward, optim) = [], result
    if config.kl_limit:
        kl = measure_kl(before, await backend.forward(batch), batch.loss_masks)
        found.append(("kl/update", kl, config.kl_limit))
    if config.kl_ref_limit and compute_loss:
        both = forward, await compute_loss(*update)
        first, last = [sum_ref_kl(metric_values(one.metrics), update[0]) for one in both]
        found.append(("kl/ref_after", last, max(config.kl_ref_limit, first)))
    if config.grad_norm_limit and optim.skipped is None:
        norm = math.nan if optim.grad_norm is None else optim.grad_norm
        found.append(("optim/grad_norm/max", norm, config.grad_norm_limit))
    return found


# --- the row ------------------------------------------------------------------------------------------------


def record_rl_updates(
    updates: Sequence[Update],
    results: Sequence[UpdateResult],
    critic_results: Sequence[UpdateResult],
    algorithm: Algorithm,
    step: int,
) -> list[UpdateRecord]:
    """Records of the critic's updates, then of the policy's."""
    batches = [batch for batch, _ in updates]
    kl_coef = algorithm.settings.kl_coef or None
    return [
        *record_updates(f"rl step {step}: critic", batches, critic_results, part="critic"),
        *record_updates(f"rl step {step}", batches, results, kl_coef=kl_coef, contributes=True),
    ]


def training_metrics(
    config: RLTrainingConfig,
    algorithm: Algorithm,
    batch: RolloutBatch,
    results: Sequence[UpdateResult],
    critic_results: Sequence[UpdateResult],
    step: int,
) -> dict[str, float]:
    """What the step trained with, the backends' metrics of the last pass over the batch, and how old the
    batch was. The KL coefficient is there where the reference was asked; kl/ref_per_sample where that pass
    measured the exact KL.
    """
    lags = compute_lags(batch, step - 1)
    critic = last_pass_metrics(critic_results, config.minibatches) if critic_results else {}
    metrics = {
        name if name.startswith(OWN_NAMES) else f"critic/{name}": value for name, value in critic.items()
    }
    trajectories = find_trajectories(batch)
    oldest = np.zeros(trajectories.max() + 1, lags.dtype)
    np.maximum.at(oldest, trajectories, lags)  # none is below 0
    metrics |= {"off_policy/mean": float(oldest.mean()), "off_policy/max": float(lags.max())}
    if results:
        metrics |= last_pass_metrics(results, config.minibatches) | work_metrics([*critic_results, *results])
    elif batch.group_indices is not None:  # without a pair no update is made
        metrics["groups/unpaired"] = float(len(np.unique(batch.group_indices)))
    if "kl/exact" in metrics:
        metrics["kl/ref_per_sample"] = sum_ref_kl(metrics, batch)
    if algorithm.settings.kl_coef or batch.ref_log_probs is not None:
        metrics["kl/coef"] = algorithm.settings.kl_coef
    if config.changes:
        metrics["algorithm/change"] = float(algorithm.change)
    if count_updates(config) > 1:
        metrics["optim/updates"] = float(len(results))
    return metrics


def throughput(
    batch: RolloutBatch,
    updates: Sequence[Update],
    config: RLTrainingConfig,
    timer: PhaseTimer,
    rollout_manager: BatchSource,
) -> dict[str, float]:
    """Response tokens of the batch, and of the updates of one pass over it, over the seconds of the phases
    that made and consumed them. If generation overlaps training, they were made during the whole step.
    """
    generate_s = timer.metrics()["time/step"] if rollout_manager.overlaps else timer.seconds("generate")
    return {
        "perf/generated_tokens_per_s": float(batch.response_lengths.sum()) / generate_s,
        "perf/trained_tokens_per_s": sum(
            float(part.response_lengths.sum()) for part, _ in updates[: config.minibatches]
        )
        / timer.seconds("train"),
    }


# --- the critic, which learns from the same parts of the batch as the policy and in the same order ----------


# a mean over the trained tokens of an update's rows. Updates of a step that move a value further than `clip`,
# in the reward's unit, gain nothing by it
VALUE_LOSS = LossSpec("value", {"clip": 0.2})
# of metrics that only a critic has; the others get the prefix "critic/". value/explained_variance is of the
# values before each part's update
OWN_NAMES = ("value/", "return/", "loss/value")
