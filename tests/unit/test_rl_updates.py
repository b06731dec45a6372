"""The optimizer steps of one batch: passes, minibatches, and the hard stop by KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import ConfigError, StepInterrupted
from rollouts.loops.algorithm import ends_updates
from rollouts.loops.hooks import LoopHooks
from rollouts.loops.rl import run_rl_training, update_metrics
from rollouts.loops.rl_batch import make_loss_spec, plan_updates, select_rows
from rollouts.loops.sft import merge_forwards, train_on
from rollouts.loops.stopping import StopControl
from rollouts.testing.fakes import FakeBackend, ScriptedEngine, open_fake_backend
from rollouts.types import ForwardBackwardResult, LossSpec, Mean, OptimStepResult, RolloutBatch, Sample
from tests.unit.test_loops import MemoryLogger, batch_of, make_manager, rl_config

LOSS = LossSpec("ppo_clip")


def rollout(prompts: int) -> dict[str, int]:
    return {"num_prompts": prompts, "samples_per_prompt": 2, "max_new_tokens": 8}


def batch_of_groups(groups: Sequence[int]) -> RolloutBatch:
    """Row i has reward i, so that rows can be told apart."""
    return batch_of([float(row) for row in range(len(groups))], list(groups), [0] * len(groups))


def rows_of(batch: RolloutBatch) -> list[int]:
    assert batch.rewards is not None
    return [int(reward) for reward in batch.rewards]


# --- minibatches --------------------------------------------------------------------------------------------


def test_with_one_part_every_pass_is_the_batch_itself():
    batch = batch_of_groups([3, 3, 4, 4])
    updates = plan_updates(batch, LOSS, rl_config(updates_per_batch=3), seed=1, step=2)
    assert [(part is batch, loss is LOSS) for part, loss in updates] == [(True, True)] * 3


def test_each_pass_has_every_group_once_whole_and_in_the_order_of_its_rows():
    batch = batch_of_groups([9, 9, 4, 7, 4, 7, 2, 2, 2, 1])
    config = rl_config(updates_per_batch=3, minibatches=2, rollout=rollout(5))
    updates = plan_updates(batch, LOSS, config, seed=1, step=2)
    assert len(updates) == 6
    passes = [updates[first : first + 2] for first in (0, 2, 4)]
    for parts in passes:
        assert sorted(row for part, _ in parts for row in rows_of(part)) == list(range(10))
        sizes = [len(np.unique(part.group_indices)) for part, _ in parts if part.group_indices is not None]
        assert sizes == [3, 2]
        for part, _ in parts:
            assert rows_of(part) == sorted(rows_of(part))
            assert part.group_indices is not None and batch.group_indices is not None
            assert all(
                (batch.group_indices == group).sum() == (part.group_indices == group).sum()
                for group in part.group_indices
            )
    assert len({tuple(rows_of(parts[0][0])) for parts in passes}) > 1, "the passes divide it anew"


def test_the_division_is_a_pure_function_of_seed_step_and_pass():
    batch = batch_of_groups([group for group in range(12) for _ in range(2)])
    config = rl_config(updates_per_batch=2, minibatches=3, rollout=rollout(12))

    def divide(seed: int, step: int) -> list[list[int]]:
        return [rows_of(part) for part, _ in plan_updates(batch, LOSS, config, seed=seed, step=step)]

    assert divide(1, 2) == divide(1, 2)
    assert len({str(divide(seed, step)) for seed, step in ((1, 2), (1, 3), (2, 2), (2, 1))}) == 4


def test_a_part_has_its_share_of_a_constant_denominator():
    config = rl_config(minibatches=2, normalise_by="constant", rollout=rollout(3))
    loss = make_loss_spec(config)
    assert loss.constant == 3 * 2 * 8
    updates = plan_updates(batch_of_groups([0, 0, 1, 1, 2, 2]), loss, config, seed=1, step=1)
    assert [part_loss.constant for _, part_loss in updates] == [pytest.approx(32), pytest.approx(16)], (
        "two groups of three, then one"
    )


def test_the_rows_of_a_part_bring_everything_that_is_theirs():
    batch = batch_of_groups([0, 0, 1])
    samples = tuple(Sample(id=f"s{row}", prompt="p", reward=0.0) for row in range(3))
    batch = dataclasses.replace(
        batch, samples=samples, metadata=({"n": 0}, {"n": 1}, {"n": 2}), temperature=0.7
    )
    part = select_rows(batch, np.asarray([2, 0]))
    assert [sample.id for sample in part.samples] == ["s2", "s0"]
    assert (part.metadata, part.temperature, rows_of(part)) == (({"n": 2}, {"n": 0}), 0.7, [2, 0])
    assert part.rollout_log_probs is not None and len(part.rollout_log_probs) == 2
    assert (
        part.old_log_probs is None
        and part.group_indices is not None
        and part.group_indices.tolist() == [1, 0]
    )


def test_the_row_of_metrics_is_that_of_the_whole_last_pass():
    parts = [
        (2.0, 30.0, 6.0),
        (1.0, 10.0, 4.0),
        (0.5, 20.0, 2.0),
        (0.1, 20.0, 8.0),
    ]  # loss, denominator, Σ of a metric
    results = [
        (
            ForwardBackwardResult(
                loss=loss, denominator=count, metrics={"approx_kl/mean": Mean(total, count)}
            ),
            OptimStepResult(step=step, lr=1e-3 * step, grad_norm=float(step), clipped=False),
        )
        for step, (loss, count, total) in enumerate(parts, start=1)
    ]
    config = rl_config(updates_per_batch=2, minibatches=2)
    metrics = update_metrics(config, results)
    assert metrics["loss/total"] == pytest.approx(0.3)
    assert metrics["approx_kl/mean"] == pytest.approx(10.0 / 40.0)
    assert (metrics["optim/lr"], metrics["optim/grad_norm"], metrics["optim/updates"]) == (4e-3, 4.0, 4.0)
    stopped = update_metrics(config, results[:3])
    assert (stopped["loss/total"], stopped["optim/updates"]) == (0.5, 3.0), (
        "of the pass that was not finished"
    )
    assert "optim/updates" not in update_metrics(rl_config(), results[:1])


def test_a_part_without_a_loss_counts_for_nothing():
    bad = ForwardBackwardResult(loss=None, denominator=10.0, metrics={}, skipped="the loss is nan")
    good = ForwardBackwardResult(loss=2.0, denominator=30.0, metrics={"a/mean": Mean(6.0, 3.0)})
    merged = merge_forwards([bad, good])
    assert (merged.loss, merged.denominator, merged.skipped) == (2.0, 30.0, None)
    assert merge_forwards([bad, bad]).skipped == "the loss is nan"
    assert merge_forwards([good]) is good


async def run_on(backend: FakeBackend, **settings: Any) -> list[dict[str, float]]:
    engine, buffer = ScriptedEngine(), DataBuffer([{"prompt": str(number)} for number in range(9)], seed=0)
    config = rl_config(**settings)

    async def sync(backend: Any, engines: Sequence[Any], version: int) -> dict[str, float]:
        assert backend.weight_version == version
        engines[0].set_version(version)
        return {}

    manager = make_manager(engine, buffer, config, lambda: backend.weight_version)
    return await run_rl_training(
        backend, buffer, manager, [engine], config, MemoryLogger(), sync_weights=sync, hooks=LoopHooks()
    )


async def test_the_loop_takes_a_step_on_every_part_of_every_pass(autojump_clock):
    async with open_fake_backend() as backend:
        history = await run_on(backend, updates_per_batch=2, minibatches=2)
    assert len(backend.batches) == 3 * 4
    assert [len(batch) for batch in backend.batches] == [2] * 12, "a group of two samples each"
    assert [row["optim/updates"] for row in history] == [4.0] * 3
    tokens = [float(batch.response_lengths.sum()) for batch in backend.batches]
    assert [row["loss/tokens"] for row in history] == [
        sum(tokens[first : first + 2]) for first in (2, 6, 10)
    ], "of the last pass"


# --- the hard stop ------------------------------------------------------------------------------------------


class MeasuringBackend(FakeBackend):
    """A FakeBackend whose updates measure these values of approx_kl/mean, one after the other; None: the loss
    was not finite.
    """

    def __init__(self, *kls: float | None, step_s: float = 0.0, micro_batch_s: float = 0.0) -> None:
        super().__init__(step_s=step_s, micro_batch_s=micro_batch_s, failures={})
        self._kls = list(kls)

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> Any:
        future = super().forward_backward(batch, loss)
        kl = self._kls.pop(0)
        skipped = "the loss is nan" if kl is None else None
        metrics = {} if kl is None else {"approx_kl/mean": Mean(kl * 4, 4)}
        future._result = ForwardBackwardResult(
            loss=None if skipped else 1.0, denominator=4.0, metrics=metrics, skipped=skipped
        )
        return future


def update(times: int) -> list[tuple[RolloutBatch, LossSpec]]:
    return [(batch_of_groups([0, 0]), LOSS)] * times


STOPS = partial(ends_updates, rl_config(kl_stop=0.02, updates_per_batch=4))


@pytest.mark.parametrize(
    ("kls", "made"),
    [
        ((0.0, 0.01, 0.02, 0.03), 4),  # at the limit is not beyond it
        ((0.0, 0.021, 0.0, 0.0), 2),
        ((0.5, 0.0, 0.0, 0.0), 1),
        ((0.0, float("inf"), 0.0, 0.0), 2),
        ((0.0, float("nan"), 0.0, 0.0), 2),
        ((0.0, None, 0.01, 0.5), 4),  # one that changed nothing ends nothing
    ],
)
async def test_no_update_is_made_after_one_that_measured_more_than_the_limit(kls, made, autojump_clock):
    backend = MeasuringBackend(*kls)
    results = await train_on(backend, update(4), StopControl(), version=7, ends_after=STOPS)
    assert len(results) == len(backend.batches) == made
    assert backend.weight_version == 7, "the step counts as one whatever was left out"
    assert backend.statistics()["submitted"] == 2 * made + 1


async def test_a_loss_that_does_not_measure_the_kl_is_refused(autojump_clock):
    async with open_fake_backend() as backend:
        with pytest.raises(
            ConfigError,
            match=r"rl\.kl_stop=0\.02 with rl\.loss='ppo_clip', which does not measure approx_kl/mean",
        ):
            await train_on(backend, update(2), StopControl(), ends_after=STOPS)


async def test_the_loop_stops_each_batch_by_itself(autojump_clock):
    backend = MeasuringBackend(0.0, 0.3, 0.0, 0.01, 0.0, 0.3)
    history = await run_on(backend, kl_stop=0.02, updates_per_batch=2)
    assert [row["optim/updates"] for row in history] == [2.0, 2.0, 2.0]
    backend = MeasuringBackend(0.3, 0.0, 0.01, 0.5)
    history = await run_on(backend, kl_stop=0.02, updates_per_batch=2)
    assert [row["optim/updates"] for row in history] == [1.0, 2.0, 1.0]
    assert [row["approx_kl/mean"] for row in history] == pytest.approx([0.3, 0.01, 0.5])


async def cut_at(seconds: float, backend: FakeBackend) -> tuple[list[Any], int | None]:
    """What three updates gave, and after how many of them a stop cut them that left no time for more; None:
    it did not.
    """
    stop = StopControl()
    results: list[Any] = []
    updates_done: int | None = None

    async def request() -> None:
        await trio.sleep(seconds)
        stop.request()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request)
        with stop.training():
            try:
                results = await train_on(backend, update(3), stop, version=1, ends_after=STOPS)
            except StepInterrupted as cut:
                updates_done = cut.updates_done
        nursery.cancel_scope.cancel()
    return results, updates_done


@pytest.mark.parametrize(("seconds", "done"), [(5, 0), (15, 1), (25, 1), (35, 2)])
async def test_a_stop_between_updates_that_are_made_one_by_one_says_how_many_were_made(
    seconds, done, autojump_clock
):
    """At 5 s and 25 s it meets a forward pass, which ends; at 15 s and 35 s an optimizer step, which is made,
    and no update after it.
    """
    backend = MeasuringBackend(0.0, 0.0, 0.0, step_s=10.0)
    assert await cut_at(seconds, backend) == ([], done)
    assert (backend.statistics()["steps"], backend.weight_version) == (done, 0)


async def test_a_stop_in_the_last_update_leaves_a_whole_step(autojump_clock):
    backend = MeasuringBackend(0.0, 0.5, step_s=4.0)
    results, updates_done = await cut_at(
        13.0, backend
    )  # in the optimizer step of the second, after which nothing follows
    assert (len(results), updates_done) == (2, None)
    assert backend.weight_version == 1
