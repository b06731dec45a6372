"""The RL stage: prompts, rollouts, rewards and the reference around run_rl_training."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from integration_training.opening import Run, Stage, open_reward, open_scorers
from integration_training.reports import surround
from rollouts.checkpoints.load import load_trainer_state
from rollouts.crash_points import reach
from rollouts.data.curriculum import (
    SourceStatistics,
    call_curriculum,
    decode_statistics,
    encode_statistics,
    update_statistics,
)
from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import CheckpointError
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.collector import REPLAYED
from rollouts.loops.algorithm import LoopState, decode_loop_state
from rollouts.loops.pairs import train_on_pairs
from rollouts.loops.rl import run_rl_training
from rollouts.loops.steps import EncodeState, on_thread
from rollouts.losses.row_losses import make_pair_loss
from rollouts.metrics.record import select_evenly
from rollouts.protocols import RewardFn
from rollouts.types import RolloutBatch


async def train_rl(run: Run, opened: Stage) -> int:
    """How many steps were made. The model that the stage starts from stays the reference."""
    config, backend, newest = opened.section, opened.backend, opened.newest
    assert opened.engine is not None and opened.sync_weights is not None
    async with open_reward(run, opened) as reward, open_scorers(run, opened) as (reference, teacher):
        buffer = DataBuffer(run.rows.training["rl"], seed=run.config.seed)
        manager = make_manager(run, opened, buffer, reward)
        batches, loop = CurriculumBatches(run, opened, buffer, manager), LoopState(config.kl_coef)
        if newest is not None:
            state = load_trainer_state(newest)
            try:
                buffer.load_state_dict(state["data_buffer"])
                manager.load_state_dict(state["rollout_manager"])
                reach("resume.state_loaded")
                batches.statistics = decode_statistics(state["curriculum"], buffer.weights)
                loop = decode_loop_state(state["loop"])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{newest}: the state of its RL loop does not read ({error!r}); another version of"
                    f" rollouts saved it: resume with that one, or begin a new run with --model.name {newest}"
                ) from error

        def hold_state() -> EncodeState:
            drawn, rollouts = buffer.state_dict(), manager.snapshot()
            learned, looped = batches.statistics, asdict(loop)
            return lambda: {
                "data_buffer": drawn,
                "rollout_manager": rollouts(),
                "curriculum": encode_statistics(learned),
                "loop": looped,
            }

        pairs = run.functions.pairs and partial(
            train_on_pairs,
            select=run.functions.pairs,
            find_loss=lambda spec: on_thread(
                backend.device_thread.submit, make_pair_loss(spec.name, spec.params)
            ),
            reference=reference,
        )
        history = await run_rl_training(
            backend,
            buffer,
            batches,
            [opened.engine],
            config,
            sync_weights=opened.sync_weights,
            reference=reference,
            advantages=run.functions.advantages,
            state=loop,
            critic=opened.critic,
            teacher=teacher,
            pairs=pairs,
            **surround(run, opened, hold_state=hold_state, reference=reference),
        )
    return len(history)


def make_manager(run: Run, opened: Stage, buffer: DataBuffer, reward: RewardFn | None) -> AsyncRolloutManager:
    """What generates and scores the batches of RL."""
    config = opened.section
    assert opened.engine is not None
    return AsyncRolloutManager(
        buffer,
        opened.engine,
        generate=run.choose_generate(),
        config=config.rollout,
        reward=reward,
        group_reward=run.functions.group_reward,
        filters=run.functions.filters,
        ranker=run.functions.ranker,
        sampling=run.choose_sampling(config.rollout),
        seed=run.config.seed,
        policy_version=lambda: opened.backend.weight_version,
        max_staleness=config.max_staleness,
        needs_reward=config.rollout.is_scored,
        spans=run.spans,
    )


@dataclass
class CurriculumBatches:
    """The manager's batches, whose prompts are drawn by the weights of the curriculum, which learns from each
    batch. Of the samples that are logged, the spans are kept.
    """

    run: Run
    opened: Stage
    buffer: DataBuffer
    manager: AsyncRolloutManager

    def __post_init__(self) -> None:
        manager = self.manager
        self.statistics: Any = {name: SourceStatistics() for name in self.buffer.weights}
        self.generating = manager.generating
        self.overlaps = manager.overlaps
        self.engines_updated = manager.engines_updated
        self.batch_metrics = manager.batch_metrics
        self.failed_samples = manager.failed_samples

    async def generate_batch(self) -> RolloutBatch:
        """The manager's next batch."""
        run, buffer, step = self.run, self.buffer, self.opened.backend.weight_version + 1
        if curriculum := run.functions.curriculum:
            name = self.opened.section.curriculum
            buffer.set_weights(call_curriculum(curriculum, step, self.statistics, function=name))
        batch = await self.manager.generate_batch()
        self.statistics = update_statistics(
            self.statistics,
            [sample for sample in batch.samples if REPLAYED not in sample.metadata],
            step=step,
            drawn=buffer.drawn_by_source(),
        )
        for logged in (batch.samples, self.failed_samples()):
            chosen = select_evenly(len(logged), run.config.output.samples_per_step)
            run.spans.keep(logged[index].id for index in chosen)
        return batch
