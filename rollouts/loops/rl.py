"""Reinforcement learning: generate → reward → filter → advantages → train → weight sync, one row of metrics a
step.

DataBuffer ──► rollout_manager.generate_batch() ──► advantages ──► forward_backward, optim_step ──► set_weight_version
    ▲                      ▲ waits for the engines                     waits for the backend                │
    └── returned prompts   └──────────────────── sync_weights every config.sync_every steps ◄───────────────┘

With max_staleness ≥ 1 generation, training and the update of the engines go on side by side: docs/async.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import trio

from rollouts.advantages import AdvantageFn
from rollouts.config.schema import RLTrainingConfig
from rollouts.crash_points import reach
from rollouts.errors import (
    ConfigError,
    FleetDown,
    NotEnoughSamples,
    StepInterrupted,
    UserFunctionError,
    WeightSyncError,
)
from rollouts.kl_control import KLControl
from rollouts.loops.algorithm import (
    Algorithm,
    LoopState,
    choose_algorithm,
    describe_algorithm,
    ends_updates,
    find_advantages,
    make_kl_control,
    start_loop_state,
    update_loop_state,
)
from rollouts.loops.contributions import list_updates
from rollouts.loops.hooks import LoopHooks, read_piece_s, run_hooks, save_after_cut
from rollouts.loops.ppo import add_values, critic_metrics, train_critic
from rollouts.loops.rl_batch import (
    Update,
    add_advantages,
    add_log_probs,
    check_staleness,
    compute_lags,
    find_trajectories,
    plan_updates,
)
from rollouts.loops.rl_metrics import algorithm_metrics, throughput, update_metrics
from rollouts.loops.sft import UpdateResult, train_on, warn_of_skipped_step
from rollouts.loops.stopping import StopControl
from rollouts.loops.weight_push import WeightPush, open_weight_push
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.spans import PhaseTimer, Span
from rollouts.protocols import InferenceEngine, LogProbScorer, MetricsLogger, SyncWeights, TrainingBackend
from rollouts.types import FloatArray, Metric, RolloutBatch, Sample, metric_values


class BatchSource(Protocol):
    """What the loop needs of an AsyncRolloutManager."""

    async def generate_batch(self) -> RolloutBatch: ...
    def generating_ahead(self, *, engines_follow: bool = ...) -> AbstractAsyncContextManager[None]: ...
    @property
    def is_ahead(self) -> bool: ...
    def engines_updated(self, version: int) -> None: ...
    async def hold(self) -> None: ...
    def batch_metrics(self) -> Mapping[str, Metric]: ...
    def failed_samples(self) -> Sequence[Sample]: ...


class PromptSource(Protocol):
    """What the loop needs of a DataBuffer."""

    def statistics(self) -> Mapping[str, float]: ...


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: PromptSource,
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
    completed_steps: int = 0,
    hooks: LoopHooks | None = None,
    per_token: bool = True,
) -> list[dict[str, float]]:
    """The metrics of every step that ran, `completed_steps` + 1 to `config.steps`.

    Consumes prompts through `rollout_manager`; produces weights inside `backend` and pushes them to the
    engines every `sync_every` steps. With max_staleness = 0 the loop waits for a whole batch, then for the
    step, then for the engines. Above it, unless the engine is deterministic, the manager generates all the
    time, and an update of the engines goes on while the next step trains: the loop waits for the update
    before, and until this one needs the trainer's weights no more. The metrics of an update are in the row of
    the step that was the last when it ended. What a step does is `choose_algorithm`'s to say. Each of
    `updates_per_batch` passes uses the whole batch, in `minibatches` optimizer steps; together they advance
    the weight version once, also when kl_stop left some of them out. A step whose loss or gradient is not
    finite changes nothing and still consumes its batch. When the manager's budget of failures or attempts is
    spent, or no engine serves, the steps that are complete are saved before NotEnoughSamples, FleetDown or
    what a filter raised leaves; when no engine could be brought to the new weights, that step is logged and
    saved before WeightSyncError leaves; so it is when an evaluation fails. A stop that leaves no time for the
    step under way cuts it: the step before it is saved as it was before the batch was begun. `advantages` has
    the functions that config.advantage and config.changes name; one of ADVANTAGES need not be given. `seed`
    decides how batches fall into minibatches. `state` changes in place when the updates of a step are done,
    so that at every save it is what the next step begins with; a resumed run is given the one that was saved
    with its weights. `critic`: the backend, with a scalar head, of config.critic; it values each batch and
    trains on the same parts of it as the policy, before that. Who saves must save both. `per_token`: ask the
    backend for what the loss saw of each token, without which the record knows neither weights nor shares of
    the samples. Raises ConfigError, before anything else, for what is missing or does not fit.
    """
    functions = find_advantages(config, advantages or {})
    control = make_kl_control(config)
    check_complete(config, critic=critic, state=state, completed_steps=completed_steps)
    loop = RLLoop(
        backend=backend,
        critic=critic,
        reference=reference,
        data_buffer=data_buffer,
        rollout_manager=rollout_manager,
        metrics_logger=metrics_logger,
        config=config,
        functions=functions,
        control=control,
        state=state or start_loop_state(config),
        hooks=hooks or LoopHooks(),
        seed=seed,
        per_token=per_token,
    )
    history: list[dict[str, float]] = []

    async def update_engines(version: int, released: trio.Event | None) -> Mapping[str, float]:
        options = {} if released is None else {"released": released}
        return await sync_weights(backend, inference_engines, version, **options)

    async with (
        rollout_manager.generating_ahead(engines_follow=True),
        open_weight_push(
            update_engines, beside=rollout_manager.is_ahead, on_updated=rollout_manager.engines_updated
        ) as push,
    ):
        for step in range(completed_steps + 1, config.steps + 1):
            done = await run_step(loop, push, step, first=step == completed_steps + 1)
            if done is None:
                break
            await metrics_logger.log_step(
                "rl", step, step - 1, done.metrics, updates=done.updates, spans=done.spans
            )
            history.append(done.metrics)
            if await finish_step(loop, push, step, done.unsynced):
                break
    return history


def check_complete(
    config: RLTrainingConfig, *, critic: TrainingBackend | None, state: LoopState | None, completed_steps: int
) -> None:
    """Raises ConfigError where the config needs a critic, or the state of the steps before, and it is not
    given; or a critic is given for nothing.
    """
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


# --- a step -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RLLoop:
    """What every step works with."""

    backend: TrainingBackend
    critic: TrainingBackend | None
    reference: LogProbScorer | None
    data_buffer: PromptSource
    rollout_manager: BatchSource
    metrics_logger: MetricsLogger
    config: RLTrainingConfig
    functions: Mapping[str, AdvantageFn]  # by name: of every piece of the config
    control: KLControl
    state: LoopState  # changes in place
    hooks: LoopHooks
    seed: int
    per_token: bool


class Trained(NamedTuple):
    """What training on a batch gave."""

    batch: RolloutBatch  # with log-probs and advantages
    lags: FloatArray  # [B] steps
    advantage_metrics: Mapping[str, float]
    updates: Sequence[Update]  # planned; kl_stop may have left out the last ones
    results: Sequence[UpdateResult]
    critic_results: Sequence[UpdateResult]


class StepDone(NamedTuple):
    """A complete step."""

    metrics: dict[str, float]  # its row
    updates: Sequence[UpdateRecord]  # of the critic, then of the policy
    spans: Sequence[Span]  # of its phases, and of what went on beside the loop
    unsynced: WeightSyncError | FleetDown | None  # to be raised when the step is in the record


async def run_step(loop: RLLoop, push: WeightPush, step: int, *, first: bool) -> StepDone | None:
    """Makes a batch, trains on it and sends the weights on their way. None when a stop has cut it: the step
    before it is saved then.

    `first`: of those that this run makes. Raises as run_rl_training.
    """
    config, hooks, timer = loop.config, loop.hooks, PhaseTimer()
    algorithm = choose_algorithm(config, step, loop.state)
    say_change(config, algorithm, step, first=first)
    hooks.before_batch(step)
    saved = first or hooks.saves_after(step - 1)
    batch: RolloutBatch | None = None
    try:
        async with saving_first(hooks, step - 1, saved=saved):
            with timer.phase("generate"):
                batch = await generate_and_log(
                    loop.rollout_manager, push, loop.metrics_logger, step, hooks.stop
                )
        trained = await train_on_batch(loop, algorithm, batch, timer, step)
    except StepInterrupted as cut:
        if loop.critic is not None:
            loop.critic.reset()
        await save_after_cut(
            hooks if batch is not None else await hold_ahead(hooks, loop.rollout_manager),
            loop.backend,
            cut,
            step - 1,
            saved=saved,
        )
        return None
    for _, optim in trained.results:
        warn_of_skipped_step("rl", step, optim)
    kl, num_samples = (
        trained.advantage_metrics.get("kl/ref_per_sample", math.nan),
        int(find_trajectories(trained.batch).max()) + 1,
    )
    update_loop_state(loop.state, algorithm, loop.control, kl=kl, num_samples=num_samples)
    with timer.phase("weight_sync"):
        unsynced = await push_weights(push, hooks.stop, config, step)
    batches = [batch for batch, _ in trained.updates]
    critic_updates = list_updates(batches, trained.critic_results, part="critic")
    policy_updates = list_updates(
        batches, trained.results, kl_coef=algorithm.settings.kl_coef, contributes=True
    )
    metrics, spans = (
        collect_metrics(loop, push, algorithm, trained, timer),
        [*timer.spans(), *hooks.take_spans()],
    )
    return StepDone(metrics, [*critic_updates, *policy_updates], spans, unsynced)


async def finish_step(
    loop: RLLoop, push: WeightPush, step: int, unsynced: WeightSyncError | FleetDown | None
) -> bool:
    """Saves and evaluates after a step that is in the record, where that is due. Whether the run ends here.

    Raises `unsynced`, if not None; the step is saved before that, or before an evaluation's error, leaves.
    """
    config, hooks = loop.config, loop.hooks
    async with saving_first(hooks, step, saved=unsynced is None and hooks.saves_after(step)):
        if unsynced is not None:
            raise unsynced
        hooks = settling(hooks, push, loop.rollout_manager)
        return await run_hooks(
            hooks, step, last_step=config.steps, eval_every=config.eval_every, stop_every=config.sync_every
        )


async def train_on_batch(
    loop: RLLoop, algorithm: Algorithm, batch: RolloutBatch, timer: PhaseTimer, step: int
) -> Trained:
    """Scores the batch and makes its updates, the critic's first. Raises StepInterrupted when a stop cuts it."""
    config, critic, stop = loop.config, loop.critic, loop.hooks.stop
    loop.hooks.after_batch(step, batch.samples)
    lags = compute_lags(batch, step - 1)
    check_staleness(lags, max_staleness=config.max_staleness)
    with timer.phase("log_probs"):
        batch = await score(batch, loop.backend, loop.reference, algorithm.settings, stop)
        batch = batch if critic is None else await add_values(batch, critic, stop)
    batch, advantage_metrics = add_advantages(
        batch, algorithm.settings, loop.functions[algorithm.settings.advantage]
    )
    ends_after = partial(ends_updates, config) if config.kl_stop else None
    with timer.phase("train"):
        updates = plan_updates(
            batch, replace(algorithm.loss, per_token=loop.per_token), config, seed=loop.seed, step=step
        )
        critic_results = (
            await train_critic(critic, config.critic, updates, stop) if critic and config.critic else []
        )
        with counting_updates(critic_results):
            results = await train_on(loop.backend, updates, stop, version=step, ends_after=ends_after)
    return Trained(batch, lags, advantage_metrics, updates, results, critic_results)


def collect_metrics(
    loop: RLLoop, push: WeightPush, algorithm: Algorithm, trained: Trained, timer: PhaseTimer
) -> dict[str, float]:
    """The metrics of a complete step's row; those of the push and the hooks are taken."""
    config, manager, critic_results = loop.config, loop.rollout_manager, trained.critic_results
    return {
        **metric_values(manager.batch_metrics()),
        **trained.advantage_metrics,
        **algorithm_metrics(config, algorithm, trained.batch),
        **update_metrics(config, trained.results),
        **(critic_metrics(critic_results, minibatches=config.minibatches) if critic_results else {}),
        "off_policy/mean": float(trained.lags.mean()),
        "off_policy/max": float(trained.lags.max()),
        **{f"data/{name}": value for name, value in loop.data_buffer.statistics().items()},
        **push.take_metrics(),
        **timer.metrics(),
        **throughput(trained.batch, timer, ahead=manager.is_ahead),
        **loop.hooks.take_metrics(),
    }


async def push_weights(
    push: WeightPush, stop: StopControl, config: RLTrainingConfig, step: int
) -> WeightSyncError | FleetDown | None:
    """Sends the weights of a complete step on their way, where they are due; what that came to is raised when
    the step is in the record.

    Those of the last step have arrived when this returns, so that what is evaluated at the end is the end.
    """
    last = step == config.steps
    if step % config.sync_every != 0 and not last:
        return None
    try:
        with stop.phase("weight_sync"):  # cut or not, the step is complete
            await push.start(step)
            if last:
                await push.wait()
    except (WeightSyncError, FleetDown) as error:
        return error
    return None


async def hold_ahead(hooks: LoopHooks, rollout_manager: BatchSource) -> LoopHooks:
    """What to save by where generation runs ahead and no batch was taken: the state of now, with the tokens
    of what was being generated.
    """
    if not rollout_manager.is_ahead:
        return hooks
    with hooks.stop.until_save():
        await rollout_manager.hold()
    return replace(hooks, save_before_batch=None)


def settling(hooks: LoopHooks, push: WeightPush, rollout_manager: BatchSource) -> LoopHooks:
    """The hooks, so that engines are at the weights that were sent when they are evaluated, and what runs is
    held by a save that ends the loop.
    """

    async def evaluate(step: int) -> None:
        await push.wait()
        await hooks.evaluate(step)

    async def prepare_end(step: int) -> None:
        with hooks.stop.until_save():
            await rollout_manager.hold()
        await hooks.prepare_end(step)

    return replace(hooks, evaluate=evaluate, prepare_end=prepare_end)


@contextmanager
def counting_updates(done: Sequence[UpdateResult]) -> Iterator[None]:
    """A step that is cut in the block has these updates behind it too: weights that nobody may save as those
    of the step before.
    """
    try:
        yield
    except StepInterrupted as cut:
        if not done:
            raise
        raise StepInterrupted(str(cut), updates_done=cut.updates_done + len(done)) from cut


@asynccontextmanager
async def saving_first(hooks: LoopHooks, step: int, *, saved: bool) -> AsyncIterator[None]:
    """Saves `step`, unless a save of it was due (`saved`) and is in place, before what ends a run through no
    fault of the trainer's leaves.
    """
    try:
        yield
    except (NotEnoughSamples, UserFunctionError, WeightSyncError, FleetDown):
        if not (saved and await hooks.is_saved(step)):
            await hooks.save_checkpoint(step)
        raise


async def generate_and_log(
    rollout_manager: BatchSource,
    push: WeightPush,
    metrics_logger: MetricsLogger,
    step: int,
    stop: StopControl,
) -> RolloutBatch:
    """The batch; its samples and those that failed are on disk before anything is done with it, also when the
    failures stop the run.

    Raises StepInterrupted when a stop cuts it.
    """
    with stop.phase("generate"):
        failed: Sequence[Sample] | None = None
        try:
            # and nothing more: a batch that has left the manager is trained on, or its prompts would be lost
            with push.guarding():
                batch = await rollout_manager.generate_batch()
                failed = rollout_manager.failed_samples()  # of this batch: later it may be of the next
            reach("rollout.batch_ready")
            await metrics_logger.log_samples("rl", step, step - 1, batch.samples)
        finally:
            if failed is None:
                failed = rollout_manager.failed_samples()
            if failed:
                with trio.CancelScope(shield=True):  # a write of a few kilobytes
                    await metrics_logger.log_samples("rl", step, step - 1, failed)
        return batch
    raise StepInterrupted(f"step {step} was cut while its batch was made")


async def score(
    batch: RolloutBatch,
    backend: TrainingBackend,
    reference: LogProbScorer | None,
    config: RLTrainingConfig,
    stop: StopControl,
) -> RolloutBatch:
    """The batch with the log-probs that `config` wants. Raises StepInterrupted when a stop cuts it."""
    with stop.phase("log_probs", piece_s=lambda: read_piece_s(backend)):
        return await add_log_probs(batch, backend, reference, config)
    backend.interrupt()
    raise StepInterrupted("the step was cut while its batch was scored")


def say_change(config: RLTrainingConfig, algorithm: Algorithm, step: int, *, first: bool) -> None:
    """Names the algorithm in the log, where it may change: in the first step of a run, and in that of each
    change.
    """
    if config.changes and (first or any(change.from_step == step for change in config.changes)):
        logging.getLogger("rollouts").warning("rl from step %d on: %s", step, describe_algorithm(algorithm))
