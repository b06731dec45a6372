"""The updates of a step of RL: how a batch is divided into them, where they end, which of them is undone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.errors import ConfigError
from rollouts.loops.rl import train_policy
from rollouts.loops.rl_batch import make_loss_spec, plan_updates
from rollouts.loops.updates import measure_kl, merge_forwards, record_updates
from rollouts.testing.fakes import FakeBackend, open_fake_backend
from rollouts.types import ForwardBackwardResult, LossSpec, Mean, RolloutBatch, metric_values
from tests.support.made_updates import floats
from tests.support.text_tables import cases
from tests.unit.test_loops import rl_config
from tests.unit.test_rl_batch import batch_of

LOSS = LossSpec("ppo_clip")
ROLLOUT = {"samples_per_prompt": 2, "max_new_tokens": 8}


def batch_of_groups(groups: Sequence[int]) -> RolloutBatch:
    """Row i has reward i, so that rows can be told apart."""
    return batch_of([float(row) for row in range(len(groups))], groups=groups)


def rows_of(batch: RolloutBatch) -> list[int]:
    return [int(reward) for reward in batch.rewards]


# --- minibatches --------------------------------------------------------------------------------------------


def test_with_one_part_every_pass_is_the_batch_itself():
    batch = batch_of_groups([3, 3, 4, 4])
    updates = plan_updates(batch, LOSS, rl_config(updates_per_batch=3), seed=1, step=2)
    assert [part is batch for part, _ in updates] == [True] * 3


def test_each_pass_has_every_group_once_whole_and_in_the_order_of_its_rows():
    batch = batch_of_groups([9, 9, 4, 7, 4, 7, 2, 2, 2, 1])
    config = rl_config(updates_per_batch=3, minibatches=2, rollout={**ROLLOUT, "num_prompts": 5})
    updates = plan_updates(batch, LOSS, config, seed=1, step=2)
    parts = [part for part, _ in updates]
    passes = [*zip(parts[::2], parts[1::2], strict=True)]
    assert len(passes) == 3
    for first, second in passes:
        assert sorted(rows_of(first) + rows_of(second)) == list(range(10))
        assert [len(np.unique(part.group_indices)) for part in (first, second)] == [3, 2]
        for part in (first, second):
            assert rows_of(part) == sorted(rows_of(part))
        assert not {*first.group_indices} & {*second.group_indices}, "a group is whole"
    assert len({tuple(rows_of(first)) for first, _ in passes}) > 1, "the passes divide it anew"


def test_a_part_has_its_share_of_a_constant_denominator():
    config = rl_config(minibatches=2, normalise_by="constant", rollout={**ROLLOUT, "num_prompts": 3})
    loss = make_loss_spec(config)
    assert loss.constant == 3 * 2 * 8
    updates = plan_updates(batch_of_groups([0, 0, 1, 1, 2, 2]), loss, config, seed=1, step=1)
    # two groups of three, then one
    assert [part_loss.constant for _, part_loss in updates] == pytest.approx([32, 16])


def test_a_part_without_a_loss_counts_for_nothing():
    bad = ForwardBackwardResult(loss=None, denominator=10.0, metrics={}, skipped="the loss is nan")
    good = ForwardBackwardResult(loss=2.0, denominator=30.0, metrics={"a/mean": Mean(6.0, 3.0)})
    merged = merge_forwards([bad, good])
    assert (merged.loss, merged.denominator, merged.skipped) == (2.0, 30.0, None)
    assert merge_forwards([bad, bad]).skipped == "the loss is nan"
    assert merge_forwards([good]) is good


# --- the hard stop ------------------------------------------------------------------------------------------


class MeasuringBackend(FakeBackend):
    """A FakeBackend whose updates measure these values of approx_kl/mean, one after the other; None: the loss
    was not finite. With every optimizer step its log-probs fall by `nats`.
    """

    def __init__(self, *kls: float | None, step_s: float = 0.0, nats: float = 0.0):
        super().__init__(step_s, 0.0, {})
        self._kls, self._nats = list(kls), nats

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec):
        future = super().forward_backward(batch, loss)
        kl = self._kls.pop(0)
        outcome = {"loss": None, "metrics": {}, "skipped": "the loss is nan"}
        if kl is not None:
            outcome = {"loss": 1.0, "metrics": {"approx_kl/mean": Mean(kl * 4, 4)}}
        future._result = ForwardBackwardResult(denominator=4.0, **outcome)
        return future

    def forward(self, batch: RolloutBatch):
        moved = np.float32(-self._nats * self._state["weight"])
        return self._submit(lambda: tuple(mask * moved for mask in batch.loss_masks), has_pieces=True)


async def train_times(times: int, backend: FakeBackend, **limits: float):
    batch = batch_of_groups([0, 0])
    config = rl_config(updates_per_batch=4, **(limits or {"kl_stop": 0.02}))
    _, results = await train_policy(backend, [(batch, LOSS)] * times, batch, config, version=7)
    return results


@cases("""
kls                  | made | …
[0, 0.01, 0.02, 0.03] | 4 | at the limit is not beyond it
[0, 0.021, 0, 0]      | 2
[0.5, 0, 0, 0]        | 1
[0, Infinity, 0, 0]   | 2
[0, NaN, 0, 0]        | 2
[0, null, 0.01, 0.5]  | 4 | one that changed nothing ends nothing
""")
async def test_no_update_is_made_after_one_that_measured_more_than_the_limit(
    kls: Any, made: int, autojump_clock
):
    backend = MeasuringBackend(*kls)
    results = await train_times(4, backend)
    assert len(results) == len(backend.batches) == made
    assert backend.weight_version == 7, "the step counts as one whatever was left out"
    assert backend.statistics()["submitted"] == 2 * made + 1


async def test_a_loss_that_does_not_measure_the_kl_is_refused(autojump_clock):
    async with open_fake_backend() as backend:
        said = r"rl\.kl_stop=0\.02 with rl\.loss='ppo_clip', which does not measure approx_kl/mean"
        with pytest.raises(ConfigError, match=said):
            await train_times(2, backend)


@cases("""
seconds | made | steps
5       | 0    | 0
15      | 0    | 1
25      | 0    | 1
35      | 2    | 2
45      | 2    | 2
""")
async def test_a_cancelled_step_is_whole_only_if_nothing_was_left_to_compute(
    seconds: float, made: int, steps: int, autojump_clock
):
    """At 5 s and 25 s a forward pass is cut; at 15 s and 35 s an optimizer step ends, at 35 s the last."""
    backend = MeasuringBackend(0.0, 0.5, step_s=10.0)
    results = []
    with trio.move_on_after(seconds):
        results = await train_times(3, backend)
    assert (len(results), backend.statistics()["steps"]) == (made, steps)
    assert backend.weight_version == 7 * (made > 0)


# --- the hard limit -----------------------------------------------------------------------------------------


def test_the_kl_of_an_update_is_k3_over_the_trained_tokens():
    mask = np.arange(3) > 0
    before, after = floats([9, -1, -2], [0, -1.5, -1])
    # r = -0.5 and 1: (e^-0.5 - 1 + 0.5) + (e - 1 - 1) + 0 + 0, over 4 tokens
    kl = measure_kl((before, before), (after, before), (mask, mask))
    assert kl == pytest.approx((0.1065306597 + 0.7182818285) / 4)
    assert measure_kl((before,), (after + 1e4,), (mask,)) == np.inf


# k3 after n updates of 0.1 nats, e^-r - 1 + r with r = 0.1 n: 0.0048, 0.0187, 0.0408, 0.0703
@cases("""
nats | limit | made | kept
0.1  | 0.1   | 4    | 4
0.1  | 0.02  | 3    | 2
0.1  | 0.004 | 1    | 0
-1e4 | 0.1   | 1    | 0
nan  | 0.1   | 1    | 0
""")
async def test_the_update_beyond_the_limit_is_undone_and_is_the_last(
    nats: float, limit: float, made: int, kept: int, autojump_clock
):
    backend = MeasuringBackend(0, 0, 0, 0, nats=nats)
    results = await train_times(4, backend, kl_limit=limit)
    assert (len(results), backend._state["weight"], backend.weight_version) == (made, kept, 7)
    assert [bool(optim.skipped) for _, optim in results] == [False] * kept + [True] * (made - kept)


async def test_a_step_whose_last_update_was_undone_is_not_said_to_have_changed_nothing(
    autojump_clock, caplog
):
    results = await train_times(4, MeasuringBackend(0, 0, 0, 0, nats=0.1), kl_limit=0.02)
    record_updates("rl step 7", [batch_of_groups([0, 0])] * 4, results)
    [message] = caplog.messages
    said = "rl step 7: update 2 changed nothing: undone: kl/update is 0.0408, above its limit of 0.02"
    assert message == said


# each update adds `nats` to the KL of each token of a sample, which is at `first` before
@cases("""
nats | first | limit | made | kept | metric | …
0.1  | 0     | 1.0   | 4    | 4    | kl/ref
0.1  | 0     | 0.25  | 3    | 2    | kl/ref
0.1  | 0     | 0.05  | 1    | 0    | kl/ref
nan  | 0     | 9.0   | 1    | 0    | kl/ref
0.1  | 0     | 0.25  | 3    | 2    | kl/exact
nan  | 0     | 9.0   | 1    | 0    | kl/exact
0.1  | 0.3   | 0.25  | 1    | 0    | kl/exact
-0.1 | 0.6   | 0.05  | 4    | 4    | kl/exact | one that is too far may come back
""")
async def test_an_update_that_leads_too_far_from_the_reference_is_undone(
    nats: float, first: float, limit: float, made: int, kept: int, metric: str, autojump_clock
):
    def measure() -> ForwardBackwardResult:
        kl = Mean((first + nats * backend._state["weight"]) * 4, 4)
        return ForwardBackwardResult(loss=1.0, denominator=4.0, metrics={metric: kl})

    class Backend(FakeBackend):
        def forward_backward(self, batch: RolloutBatch, loss: LossSpec):
            return self._submit(measure, has_pieces=True)

        async def compute_loss(self, batch: RolloutBatch, loss: LossSpec):
            return await self._submit(measure)

    backend, batch = Backend(), batch_of_groups([0, 0])
    tokens = batch.response_lengths.tolist()
    assert len(set(tokens)) == 1
    config = rl_config(updates_per_batch=4, kl_ref_limit=limit * tokens[0], kl_coef=0.1)
    how = {"version": 7, "compute_loss": backend.compute_loss}
    _, results = await train_policy(backend, [(batch, LOSS)] * 4, batch, config, **how)
    assert (len(results), backend._state["weight"]) == (made, kept)
    if kept:
        values = [metric_values(forward.metrics)["kl/ref_after"] for forward, _ in results]
        assert values == pytest.approx([(first + nats * n) * tokens[0] for n in range(1, made + 1)])


async def test_an_update_with_too_large_a_gradient_is_undone(autojump_clock):
    backend = MeasuringBackend(0)
    norm = 1.0  # of a FakeBackend's steps
    for limit, kept in ((norm + 1, 1), (norm / 2, 0)):
        backend = MeasuringBackend(0)
        [(_, optim)] = await train_times(1, backend, grad_norm_limit=limit)
        assert optim.grad_norm == norm and backend._state["weight"] == kept
        assert bool(optim.skipped) == (not kept)


@cases("""
seconds | steps | version
45      | 1     | 0
105     | 2     | 7
""")
async def test_a_step_that_is_cut_before_an_update_is_decided_has_no_version(
    seconds: int, steps: int, version: int, autojump_clock
):
    """Everything takes 10 s: an update is measured from 40 s to 50 s, the next one is undone by 100 s."""
    backend = MeasuringBackend(0, 0, step_s=10.0, nats=0.1)
    with trio.move_on_after(seconds):
        await train_times(4, backend, kl_limit=0.01)
    assert (backend.statistics()["steps"], backend.weight_version) == (steps, version)
