"""The loops on fakes, in virtual time: what they log, in which order they wait, when they save and stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.advantages import ADVANTAGES, AdvantageInputs
from rollouts.cli import check_loss
from rollouts.config.schema import (
    CriticConfig,
    DataSourceConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts.data.data_buffer import DataBuffer
from rollouts.data.sft import SFTSample
from rollouts.errors import (
    ConfigError,
    FleetDown,
    NotEnoughSamples,
    RolloutsError,
    StalenessError,
    UserFunctionError,
    WeightSyncError,
)
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.loops.hooks import LoopHooks
from rollouts.loops.rl import run_rl_training
from rollouts.loops.rl_batch import (
    add_advantages,
    add_log_probs,
    check_staleness,
    compute_lags,
    make_loss_spec,
)
from rollouts.loops.sft import run_sft_training
from rollouts.losses import LOSSES
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.spans import Span
from rollouts.testing.fakes import FakeTokenizer, ScriptedEngine, ScriptedReply, open_fake_backend
from rollouts.types import FloatArray, GenerateRequest, RolloutBatch, Sample, SamplingParams

DATA = DataSourceConfig(kind="jsonl", path="unused.jsonl")


class MemoryLogger:
    """A MetricsLogger that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int, Mapping[str, float]]] = []
        self.samples: list[tuple[str, int, int]] = []
        self.updates: list[tuple[str, int, UpdateRecord]] = []
        self.spans: list[tuple[str, int, Span]] = []

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Mapping[str, float],
        *,
        updates: Sequence[UpdateRecord] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        self.steps.append((stage, step, policy_version, metrics))
        self.updates += [(stage, step, update) for update in updates]
        self.spans += [(stage, step, span) for span in spans]

    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None:
        self.samples.append((stage, step, len(samples)))

    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]
    ) -> None:
        raise AssertionError("loops do not evaluate by themselves")

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        self.spans += [(stage, step, span) for span in spans]


class Diary:
    """Hooks that write down when they were called."""

    def __init__(self, *, stop_after: int | None = None, checkpoint_every: int = 0) -> None:
        self.entries: list[tuple[str, int]] = []
        self._stop_after = stop_after
        self.hooks = LoopHooks(self.evaluate, self.save, self.stop_requested, checkpoint_every)
        self._asked = 0

    async def evaluate(self, step: int) -> None:
        self.entries.append(("evaluate", step))

    async def save(self, step: int) -> None:
        self.entries.append(("save", step))

    def stop_requested(self) -> bool:
        self._asked += 1
        return self._asked == self._stop_after


def sft_samples(count: int) -> list[SFTSample]:
    mask = np.asarray([False, True, True])
    return [SFTSample(np.asarray([row, 1, 2]), mask, row) for row in range(count)]


async def test_sft_logs_every_step_and_trains_the_rows_of_its_step():
    logger, diary = MemoryLogger(), Diary(checkpoint_every=2)
    async with open_fake_backend() as backend:
        config = SFTTrainingConfig(data=DATA, steps=3, batch_size=2, eval_every=1)
        history = await run_sft_training(backend, sft_samples(6), config, logger, hooks=diary.hooks)
    assert [(stage, step, version) for stage, step, version, _ in logger.steps] == [
        ("sft", 1, 0),
        ("sft", 2, 1),
        ("sft", 3, 2),
    ]
    assert [row["loss/total"] for row in history] == [1.0, 0.5, pytest.approx(1 / 3)]
    rows = [int(tokens[0]) for batch in backend.batches for tokens in batch.tokens]
    assert sorted(rows) == list(range(6)), "an epoch has every row once"
    assert diary.entries == [("evaluate", 1), ("save", 2), ("evaluate", 2), ("save", 3)]


async def test_sft_goes_on_after_the_completed_steps_with_the_rows_it_would_have_had():
    config = SFTTrainingConfig(data=DATA, steps=4, batch_size=2)
    async with open_fake_backend() as whole, open_fake_backend() as rest:
        await run_sft_training(whole, sft_samples(5), config, MemoryLogger(), seed=3)
        await run_sft_training(rest, sft_samples(5), config, MemoryLogger(), seed=3, completed_steps=2)
    first = [[tokens.tolist() for tokens in batch.tokens] for batch in whole.batches]
    assert [[tokens.tolist() for tokens in batch.tokens] for batch in rest.batches] == first[2:]


async def test_a_stop_request_saves_and_ends_after_the_step():
    diary = Diary(stop_after=2)
    async with open_fake_backend() as backend:
        history = await run_sft_training(
            backend,
            sft_samples(4),
            SFTTrainingConfig(data=DATA, steps=9, batch_size=1, eval_every=1),
            MemoryLogger(),
            hooks=diary.hooks,
        )
    assert len(history) == 2
    assert diary.entries == [("evaluate", 1), ("save", 2)]


def rl_config(**changes: object) -> RLTrainingConfig:
    rollout = RolloutConfig(num_prompts=2, samples_per_prompt=2, max_new_tokens=8)
    return RLTrainingConfig.model_validate({"data": DATA, "steps": 3, "rollout": rollout, **changes})


async def first_is_right(sample: Sample) -> float:
    return float(sample.id.endswith("s000"))


def make_manager(
    engine: ScriptedEngine, buffer: DataBuffer, config: RLTrainingConfig, version, reward=first_is_right
) -> AsyncRolloutManager:
    return AsyncRolloutManager(
        buffer,
        engine,
        generate=make_chat_generate(FakeTokenizer()),
        config=config.rollout,
        reward=reward,
        filters=(),
        sampling=SamplingParams(max_new_tokens=8, stop_token_ids=(257,)),
        seed=0,
        policy_version=version,
        max_staleness=config.max_staleness,
    )


async def test_rl_trains_syncs_and_logs_once_per_step(autojump_clock):
    engine = ScriptedEngine(lambda request: ScriptedReply(token_s=0.5))
    buffer = DataBuffer([{"prompt": str(n)} for n in range(5)], seed=0)
    logger, diary, synced = MemoryLogger(), Diary(), []
    config = rl_config(updates_per_batch=2, eval_every=2)

    async def sync(backend, engines, version):
        synced.append((version, backend.weight_version, trio.current_time()))
        engines[0].set_version(version)
        return {"weight_sync/made_up": 1.0}

    async with open_fake_backend(step_s=10.0) as backend:
        manager = make_manager(engine, buffer, config, lambda: backend.weight_version)
        history = await run_rl_training(
            backend, buffer, manager, [engine], config, logger, sync_weights=sync, hooks=diary.hooks
        )
    assert [(step, version) for _, step, version, _ in logger.steps] == [(1, 0), (2, 1), (3, 2)]
    assert [(version, trainer) for version, trainer, _ in synced] == [(1, 1), (2, 2), (3, 3)]
    assert len(backend.batches) == 6, "each batch is used updates_per_batch times"
    assert [size for _, _, size in logger.samples] == [
        4,
        4,
        4,
    ], "the trained samples of each step; none failed"
    assert diary.entries == [("evaluate", 2), ("save", 3)]
    row = history[0]
    assert row["reward/mean"] == 0.5
    assert row["off_policy/max"] == 0.0
    assert row["weight_sync/made_up"] == 1.0
    np.testing.assert_allclose(
        np.unique(np.concatenate(backend.batches[0].advantages)), [-0.70710578, 0.0, 0.70710578], atol=1e-5
    )


@pytest.mark.parametrize(("checkpoint_every", "saved"), [(0, [("save", 2)]), (1, [("save", 1), ("save", 2)])])
async def test_a_run_whose_rewards_keep_failing_stops_with_its_complete_steps_saved(
    autojump_clock, checkpoint_every, saved
):
    engine, buffer, config = (
        ScriptedEngine(),
        DataBuffer([{"prompt": str(n)} for n in range(9)], seed=0),
        rl_config(),
    )
    logger, diary = MemoryLogger(), Diary(checkpoint_every=checkpoint_every)
    asked = 0

    async def reward(sample: Sample) -> float:
        nonlocal asked
        asked += 1
        if asked > 8:  # from the third step on
            raise RuntimeError("the grader is gone")
        return float(sample.id.endswith("s000"))

    async def sync(backend, engines, version):
        engines[0].set_version(version)
        return {}

    async with open_fake_backend() as backend:
        manager = make_manager(engine, buffer, config, lambda: backend.weight_version, reward)
        with pytest.raises(NotEnoughSamples, match="the grader is gone"):
            await run_rl_training(
                backend, buffer, manager, [engine], config, logger, sync_weights=sync, hooks=diary.hooks
            )
    assert diary.entries == saved
    assert logger.samples[-1][1] == 3 and logger.samples[-1][2] > 0, "what failed is in the record"
    assert buffer.statistics()["returned"] > 0, "the prompts of the batch that failed are back"


@pytest.mark.parametrize("error", [WeightSyncError("a keeps the old weights"), FleetDown("nobody serves")])
async def test_a_step_whose_weights_reach_no_engine_is_logged_and_saved_before_the_run_stops(
    autojump_clock, error: RolloutsError
):
    engine, buffer, config = (
        ScriptedEngine(),
        DataBuffer([{"prompt": str(n)} for n in range(9)], seed=0),
        rl_config(),
    )
    logger, diary = MemoryLogger(), Diary()

    async def sync(backend, engines, version):
        if version == 2:
            raise error
        engines[0].set_version(version)
        return {}

    async with open_fake_backend() as backend:
        manager = make_manager(engine, buffer, config, lambda: backend.weight_version)
        with pytest.raises(type(error), match=str(error)):
            await run_rl_training(
                backend, buffer, manager, [engine], config, logger, sync_weights=sync, hooks=diary.hooks
            )
        assert len(backend.batches) == 2, "nothing trains after it"
    assert diary.entries == [("save", 2)]
    assert [row[1] for row in logger.steps] == [1, 2]


async def test_a_fleet_that_goes_down_while_a_batch_is_made_leaves_the_complete_steps_saved(autojump_clock):
    def script(request: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(error=FleetDown("nobody serves") if len(engine.requests) >= 8 else None)

    engine, buffer, config = (
        ScriptedEngine(script),
        DataBuffer([{"prompt": str(n)} for n in range(9)], seed=0),
        rl_config(),
    )
    diary = Diary()

    async def sync(backend, engines, version):
        engines[0].set_version(version)
        return {}

    async with open_fake_backend() as backend:
        manager = make_manager(engine, buffer, config, lambda: backend.weight_version)
        with pytest.raises(FleetDown):
            await run_rl_training(
                backend,
                buffer,
                manager,
                [engine],
                config,
                MemoryLogger(),
                sync_weights=sync,
                hooks=diary.hooks,
            )
    assert diary.entries == [("save", 2)]
    assert buffer.statistics()["returned"] > 0


async def test_a_step_is_saved_when_its_evaluation_fails(autojump_clock):
    engine, buffer, config = (
        ScriptedEngine(),
        DataBuffer([{"prompt": str(n)} for n in range(9)], seed=0),
        rl_config(eval_every=1),
    )
    saved: list[int] = []

    async def save(step: int) -> None:
        saved.append(step)

    async def evaluate(step: int) -> None:
        raise FleetDown("nobody serves")

    async def sync(backend, engines, version):
        engines[0].set_version(version)
        return {}

    async with open_fake_backend() as backend:
        manager = make_manager(engine, buffer, config, lambda: backend.weight_version)
        with pytest.raises(FleetDown):
            await run_rl_training(
                backend,
                buffer,
                manager,
                [engine],
                config,
                MemoryLogger(),
                sync_weights=sync,
                hooks=LoopHooks(evaluate, save),
            )
    assert saved == [1]


async def test_with_sync_every_2_the_engine_lags_by_one_step_and_no_more(autojump_clock):
    engine = ScriptedEngine()
    buffer = DataBuffer([{"prompt": str(n)} for n in range(5)], seed=0)
    config = rl_config(steps=4, sync_every=2, max_staleness=1)
    synced: list[int] = []

    async def sync(backend, engines, version, *, released=None):
        synced.append(version)
        engines[0].set_version(version)
        return {}

    async with open_fake_backend() as backend:
        manager = make_manager(engine, buffer, config, lambda: backend.weight_version)
        history = await run_rl_training(
            backend, buffer, manager, [engine], config, MemoryLogger(), sync_weights=sync
        )
    assert synced == [2, 4]
    assert [row["off_policy/max"] for row in history] == [0.0, 1.0, 0.0, 1.0]


def batch_of(rewards: list[float], groups: list[int], versions: list[int]) -> RolloutBatch:
    count = len(rewards)
    mask = np.asarray([False, True, True])
    return RolloutBatch(
        tokens=tuple(np.asarray([1, 2, 3]) for _ in range(count)),
        loss_masks=(mask,) * count,
        rewards=np.asarray(rewards, np.float32),
        group_indices=np.asarray(groups),
        rollout_log_probs=tuple(np.asarray([0.0, -1.0, -2.0], np.float32) for _ in range(count)),
        weight_versions=tuple(np.asarray([-1, version, version + 1]) for version in versions),
    )


def test_the_lag_of_a_row_is_that_of_its_oldest_trained_token():
    batch = batch_of([0, 0], [0, 0], [3, 5])
    np.testing.assert_array_equal(compute_lags(batch, 6), [3, 1])


@pytest.mark.parametrize(("lags", "allowed"), [([0, 2], 1), ([-1, 0], 1)])
def test_a_row_outside_the_staleness_window_stops_the_loop(lags: list[float], allowed: int):
    with pytest.raises(StalenessError, match=f"max_staleness={allowed}"):
        check_staleness(np.asarray(lags, np.float32), max_staleness=allowed)


class FixedReference:
    """A LogProbScorer that answers −1.5 for every trained token."""

    async def score(self, batch: RolloutBatch):
        return tuple(np.where(mask, np.float32(-1.5), np.float32(0)) for mask in batch.loss_masks)


async def test_kl_in_the_reward_is_taken_off_before_the_group_statistics():
    config = rl_config(kl_coef=0.1, advantage="centred")
    async with open_fake_backend() as backend:
        batch = await add_log_probs(batch_of([1.0, 0.0], [7, 7], [0, 0]), backend, FixedReference(), config)
    batch, metrics = add_advantages(batch, config)
    # Σ (mu − ref) = (−1 + 1.5) + (−2 + 1.5) = 0, so the rewards stay 1 and 0 and the centred advantages are
    # ±½
    assert metrics["kl/ref_per_sample"] == pytest.approx(0.0, abs=1e-6)
    assert batch.advantages is not None
    np.testing.assert_allclose(batch.advantages[0], [0, 0.5, 0.5])
    np.testing.assert_allclose(batch.advantages[1], [0, -0.5, -0.5])


def segmented(batch: RolloutBatch, *ids: str) -> RolloutBatch:
    return dataclasses.replace(
        batch, samples=tuple(Sample(id=id_, prompt="p", reward=0.0, group_index=7) for id_ in ids)
    )


def test_segments_of_one_trajectory_count_once_in_the_advantages_of_a_batch():
    rows = segmented(batch_of([1.0, 1.0, 0.0], [7, 7, 7], [0, 0, 0]), "g7-s0", "g7-s0.1", "g7-s1")
    batch, _ = add_advantages(rows, rl_config(advantage="rloo"))
    assert batch.advantages is not None
    assert [row.tolist() for row in batch.advantages] == [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, -1.0, -1.0]]
    assert batch.mean_advantages is not None
    assert batch.mean_advantages.tolist() == [1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    "answer", [[0.5, -2.0], [[9.0, 0.25, 0.75], [9.0, 9.0, 9.0]]], ids=["per row", "per token"]
)
def test_a_rows_mean_advantage_is_over_the_tokens_that_train(answer: Any):
    rows = batch_of([1.0, 0.0], [7, 7], [0, 0])
    rows = dataclasses.replace(rows, loss_masks=(rows.loss_masks[0], np.zeros(3, np.bool_)))
    batch, _ = add_advantages(
        rows, rl_config(advantage="mine:grade"), lambda _: [np.asarray(row) for row in answer]
    )
    assert batch.mean_advantages is not None
    assert batch.mean_advantages.tolist() == [0.5, 0.0], "0 of a row without any"


def test_the_kl_that_is_taken_off_is_that_of_the_whole_trajectory():
    reference = tuple(
        np.asarray([0.0, -1.0 - kl, -2.0], np.float32) for kl in (1.0, 2.0, 5.0)
    )  # KL of each row in nats
    rows = segmented(batch_of([1.0, 1.0, 0.0], [7, 7, 7], [0, 0, 0]), "g7-s0", "g7-s0.1", "g7-s1")
    batch, metrics = add_advantages(
        dataclasses.replace(rows, ref_log_probs=reference), rl_config(advantage="raw", kl_coef=0.1)
    )
    assert batch.advantages is not None
    np.testing.assert_allclose(
        [row[1] for row in batch.advantages], [0.7, 0.7, -0.5], rtol=1e-6
    )  # 1 − .1·(1 + 2), 0 − .1·5
    assert metrics["kl/ref_per_sample"] == pytest.approx(4.0), "the mean of 3 and 5: over trajectories"


def with_parts(batch: RolloutBatch, *parts: Mapping[str, float]) -> RolloutBatch:
    samples = tuple(
        Sample(id=f"s{row}", prompt="p", reward=0.0, rewards=part) for row, part in enumerate(parts)
    )
    return dataclasses.replace(batch, samples=samples)


def test_every_advantage_of_the_table_works_by_its_name():
    parts = [{"right": right, "greedy_reward": 0.25} for right in (1.0, 0.0, 1.0)]
    rows = with_parts(batch_of([1.0, 0.0, 0.5], [7, 7, 7], [0, 0, 0]), *parts)
    for name in ADVANTAGES.keys() - {"gae"}:  # which needs a critic: below
        batch, metrics = add_advantages(rows, rl_config(advantage=name))
        assert batch.advantages is not None and len(batch.advantages) == 3
        assert metrics["advantage/abs_mean"] > 0
    remax, _ = add_advantages(rows, rl_config(advantage="remax"))
    assert remax.advantages is not None
    np.testing.assert_allclose(remax.advantages[0], [0, 0.75, 0.75])


def test_with_a_critic_the_batch_gets_returns_and_the_kl_term_goes_on_each_token():
    # one row: mask 0 1 1, lp −1 and −2, ref −1.5 and −3, β = .1: token rewards −.05 and 1 − .1; V = .5 and
    # .25
    def row(*values: float) -> tuple[FloatArray, ...]:
        return (np.asarray(values, np.float32),)

    batch = dataclasses.replace(
        batch_of([1.0], [0], [0]),
        rollout_log_probs=row(0, -1, -2),
        ref_log_probs=row(0, -1.5, -3),
        old_values=row(9, 0.5, 0.25),
    )
    critic = CriticConfig()
    found, metrics = add_advantages(
        batch,
        rl_config(
            critic=critic, advantage="gae", kl_coef=0.1, advantage_params={"lam": 0.5, "whiten": False}
        ),
    )
    # δ = (−.05 + .25 − .5, .9 − .25) = (−.3, .65); A = (−.3 + .5·.65, .65); returns A + V
    assert found.advantages is not None and found.returns is not None
    np.testing.assert_allclose(found.advantages[0], [0.0, 0.025, 0.65], rtol=1e-5)
    np.testing.assert_allclose(found.returns[0], [0.0, 0.525, 0.9], rtol=1e-5)
    np.testing.assert_allclose(found.mean_advantages, [0.3375], rtol=1e-5)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert metrics["kl/ref_per_sample"] == pytest.approx(1.5)
    assert metrics["advantage/abs_mean"] == pytest.approx(0.3375, rel=1e-5)
    free, _ = add_advantages(
        batch, rl_config(critic=critic, advantage="gae", advantage_params={"lam": 0.5, "whiten": False})
    )
    np.testing.assert_allclose(free.returns[0], [0.0, 0.5 + (-0.25 + 0.5 * 0.75), 1.0], rtol=1e-5)  # pyright: ignore[reportOptionalSubscript]


def test_an_advantage_function_that_writes_into_its_lengths_changes_nothing_of_the_batch():
    def spoil(inputs: AdvantageInputs) -> list[float]:
        assert inputs.lengths is not None
        inputs.lengths[:] = 99
        return [1.0, 2.0]

    batch, _ = add_advantages(batch_of([1.0, 0.0], [7, 7], [0, 0]), rl_config(advantage="mine:spoil"), spoil)
    assert batch.response_lengths.tolist() == [2, 2]


def test_an_advantage_without_returns_is_no_use_to_a_critic():
    batch = dataclasses.replace(batch_of([1.0], [0], [0]), old_values=(np.zeros(3, np.float32),))
    with pytest.raises(UserFunctionError, match="gives no returns, which the critic is trained on"):
        add_advantages(batch, rl_config(critic=CriticConfig(), advantage="mine:grade"), lambda _: [1.0])
    with pytest.raises(ConfigError, match="needs a critic's values"):
        add_advantages(batch_of([1.0], [0], [0]), rl_config(critic=CriticConfig(), advantage="gae"))


def test_gdpo_weighs_by_the_weights_of_the_reward():
    rows = with_parts(
        batch_of([0.0, 0.0], [7, 7], [0, 0]),
        {"right": 1.0, "style": 0.0},
        {"right": 0.0, "style": 1.0, "extra": 1.0},
    )
    even, _ = add_advantages(rows, rl_config(advantage="gdpo"))
    weights = RolloutConfig(num_prompts=1, samples_per_prompt=2, reward_weights={"right": 3.0, "style": 1.0})
    tilted, _ = add_advantages(rows, rl_config(advantage="gdpo", rollout=weights))
    assert even.advantages is not None and tilted.advantages is not None
    np.testing.assert_array_equal(even.advantages[0], [0, 0, 0])
    np.testing.assert_allclose(
        tilted.advantages[0], [0, 0.70710678, 0.70710678], rtol=1e-5
    )  # over the batch (1, -1)/sqrt(2)


def test_an_advantage_of_ones_own_may_answer_per_token_and_takes_its_parameters():
    def by_token(inputs, *, scale: float):
        return [np.asarray([9.0, scale, 2 * scale]) * reward for reward in inputs.rewards]

    config = rl_config(advantage="m:by_token", advantage_params={"scale": 0.5})
    batch, metrics = add_advantages(batch_of([1.0, -1.0], [7, 7], [0, 0]), config, by_token)
    assert batch.advantages is not None
    assert [row.tolist() for row in batch.advantages] == [[0.0, 0.5, 1.0], [0.0, -0.5, -1.0]]
    assert metrics["advantage/abs_mean"] == 0.75
    with pytest.raises(
        ConfigError,
        match=r"rl\.advantage='m:by_token' is not one of grpo, .* pass a function of your own as advantage=",
    ):
        add_advantages(batch_of([1.0], [7], [0]), config)


def test_gdpo_is_refused_where_the_kl_term_would_be_lost():
    with pytest.raises(ValueError, match="advantage='gdpo' with kl_in='reward'"):
        rl_config(advantage="gdpo", kl_coef=0.1)
    assert rl_config(advantage="gdpo", kl_coef=0.1, kl_in="loss", kl_estimator="k2").kl_coef == 0.1


def test_an_advantage_that_fails_is_named():
    with pytest.raises(
        UserFunctionError,
        match=r"rl\.advantage='gdpo' failed: ValueError: advantage 'gdpo' needs named rewards",
    ):
        add_advantages(batch_of([1.0, 0.0], [7, 7], [0, 0]), rl_config(advantage="gdpo"))
    with pytest.raises(UserFunctionError, match=r"rl\.advantage='m:f' failed: ZeroDivisionError"):
        add_advantages(batch_of([1.0], [7], [0]), rl_config(advantage="m:f"), lambda inputs: 1 / 0)


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "cispo", "m:f"])
def test_a_clip_that_the_loss_does_not_read_is_refused(loss: str):
    with pytest.raises(
        ValueError,
        match=(
            rf"clip_high=0\.28 with loss='{loss}'; it is read by ppo_clip and clip_cov only: .* in"
            r" loss_params"
        ),
    ):
        rl_config(loss=loss, clip_high=0.28)
    with pytest.raises(ValueError, match=r"clip_low=0\.1 with loss="):
        rl_config(loss=loss, clip_low=0.1)
    rl_config(loss=loss, clip_low=0.2, clip_high=0.2)  # as a resolved config has them


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss_params": {"correction": "token_tis"}},
            "there are no old log-probs: the ratio is against the engine already",
        ),
        ({"loss_params": {"kl_coef": 0.1}}, r"kl_coef=0\.1 needs ref_log_probs and the batch has none"),
        (
            {"loss_params": {"kl_coef": 0.1, "kl_estimator": "k9"}, "kl_coef": 0.1},
            "kl_estimator='k9' is not known",
        ),
        ({"loss_params": {"clip_low": -1.0}}, r"clip_low=-1\.0 must be above 0"),
        ({"loss_params": {"entropy_fraction": 7}}, "entropy_fraction=7 must be above 0 and at most 1"),
        ({"loss_params": {"dual_clip": 0.5}}, r"dual_clip=0\.5 must be above 1"),
        ({"loss_params": {"kl_importance": "false"}}, "kl_importance='false' must be true or false"),
        (
            {"loss": "gspo", "loss_params": {"clip_low": "wide"}},
            "loss 'gspo' fails with clip_low='wide': TypeError",
        ),
    ],
)
def test_a_loss_that_could_never_take_a_step_is_refused_before_the_run(changes, message):
    config = rl_config(**changes)
    with pytest.raises(ConfigError, match=message):
        check_loss(config)


def test_a_loss_that_will_find_what_it_needs_is_not_refused():
    check_loss(
        rl_config(
            recompute_old=True,
            loss_params={
                "correction": "token_tis * veto",
                "entropy_coef": 0.01,
                "policy_entropy_fraction": 0.2,
            },
        )
    )
    check_loss(
        rl_config(
            kl_coef=0.1,
            kl_in="loss",
            kl_estimator="k1",
            loss_params={"kl_importance": True},
            normalise_by="constant",
        )
    )
    for name in LOSSES:
        check_loss(rl_config(loss=name))


def test_a_cap_beside_a_correction_is_refused():
    """The correction takes the place of the capped weight, so the cap would be dropped."""
    message = "with correction='icepop'; a correction takes the place of the capped weight"
    with pytest.raises(ValueError, match=rf"importance_cap=3\.0 {message}"):
        rl_config(recompute_old=True, importance_cap=3.0, loss_params={"correction": "icepop"})
    with pytest.raises(ValueError, match=rf"importance_cap=4\.0 {message}"):
        rl_config(recompute_old=True, loss_params={"correction": "icepop", "importance_cap": 4.0})
    resolved = rl_config(recompute_old=True, loss_params={"correction": "icepop"}).model_dump()
    assert RLTrainingConfig.model_validate(resolved).importance_cap == 2.0


async def test_recompute_old_asks_the_trainer():
    async with open_fake_backend() as backend:
        batch = await add_log_probs(batch_of([1.0], [0], [0]), backend, None, rl_config(recompute_old=True))
    assert batch.old_log_probs is not None
    np.testing.assert_array_equal(batch.old_log_probs[0], [0, -1, -1])


async def test_a_kl_term_without_a_reference_is_refused():
    async with open_fake_backend() as backend:
        with pytest.raises(ConfigError, match=r"kl_coef=0\.1"):
            await add_log_probs(batch_of([1.0], [0], [0]), backend, None, rl_config(kl_coef=0.1))


def test_the_loss_is_named_with_the_numbers_of_the_config():
    spec = make_loss_spec(
        rl_config(clip_high=0.28, kl_coef=0.02, kl_in="loss", kl_estimator="k3", normalise_by="constant")
    )
    assert spec.name == "ppo_clip"
    assert spec.params == {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "importance_cap": 2.0,
        "kl_coef": 0.02,
        "kl_estimator": "k3",
    }
    assert (spec.unit, spec.constant) == ("constant", 2 * 2 * 8)
    assert make_loss_spec(rl_config(loss="cispo", loss_params={"ratio_high": 4.0})).params == {
        "ratio_high": 4.0
    }
    assert make_loss_spec(rl_config(loss="cispo", recompute_old=True, importance_cap=3.0)).params == {
        "importance_cap": 3.0
    }
    assert make_loss_spec(rl_config(loss="clip_cov", clip_high=0.28)).params == {
        "clip_low": 0.2,
        "clip_high": 0.28,
    }
    with_importance = rl_config(
        loss_params={"kl_importance": True}, kl_coef=0.1, kl_in="loss", kl_estimator="k1"
    )
    assert (
        make_loss_spec(with_importance).params.items()
        >= {
            "kl_estimator": "k1",
            "kl_importance": True,
        }.items()
    )
    with_kl = make_loss_spec(rl_config(loss="gspo", kl_coef=0.02, kl_in="loss", kl_estimator="k2"))
    assert with_kl.params == {"kl_coef": 0.02, "kl_estimator": "k2"}
