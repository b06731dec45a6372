"""What a critic adds to a step of RL: values before it, their own updates within it. PPO is the RL loop with
a critic and advantage "gae".

batch ──► critic: V of every trained token ──► gae: advantages, returns ──► critic's updates, then the policy's
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rollouts.config.schema import CriticConfig
from rollouts.errors import StepInterrupted
from rollouts.loops.hooks import read_piece_s
from rollouts.loops.rl_batch import Update, begin_last_pass
from rollouts.loops.sft import UpdateResult, merge_forwards, step_metrics, train_on, warn_of_skipped_step
from rollouts.loops.stopping import StopControl
from rollouts.protocols import TrainingBackend
from rollouts.types import LossSpec, RolloutBatch

OWN_NAMES = ("value/", "return/")  # of metrics that only a critic has; the others get "critic/" before them


def make_value_spec(config: CriticConfig) -> LossSpec:
    """The critic's loss: a mean over the trained tokens of an update's rows."""
    return LossSpec("value", {"clip": config.clip} if config.clip else {})


async def add_values(batch: RolloutBatch, critic: TrainingBackend, stop: StopControl) -> RolloutBatch:
    """The batch with the critic's value before each trained token, as of now. Raises StepInterrupted when a
    stop cuts it.
    """
    with stop.phase("values", piece_s=lambda: read_piece_s(critic)):
        return dataclasses.replace(batch, old_values=await critic.forward(batch).result())
    critic.interrupt()
    raise StepInterrupted("the step was cut while its batch was valued")


async def train_critic(
    critic: TrainingBackend, config: CriticConfig, updates: Sequence[Update], stop: StopControl
) -> list[UpdateResult]:
    """What each of the critic's optimizer steps gave, on the same parts of the batch, in the same order, as
    the policy's. Raises as train_on.
    """
    spec = make_value_spec(config)
    results = await train_on(critic, [(batch, spec) for batch, _ in updates], stop, phase="train_critic")
    for _, optim in results:
        warn_of_skipped_step("rl (critic)", optim.step, optim)
    return results


def critic_metrics(results: Sequence[UpdateResult], *, minibatches: int) -> dict[str, float]:
    """What the critic's backend said of the last pass over the batch; value/explained_variance is of the
    values before each part's update.
    """
    last_pass = results[begin_last_pass(len(results), minibatches) :]
    metrics = step_metrics(merge_forwards([forward for forward, _ in last_pass]), results[-1][1])
    metrics["optim/skipped_steps"] = float(sum(optim.skipped is not None for _, optim in results))
    return {
        name if name.startswith(OWN_NAMES) else f"critic/{name}": value for name, value in metrics.items()
    }
