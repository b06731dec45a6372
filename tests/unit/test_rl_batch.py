"""What the RL loop does to a batch: log-probs, advantages, the loss by name, and the updates made of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.advantages import ADVANTAGES
from rollouts.config.schema import CriticConfig, DistillationConfig, RunConfig
from rollouts.errors import ConfigError, ModelError, StalenessError, UserFunctionError
from rollouts.loops.algorithm import find_advantages
from rollouts.loops.rl import train_policy
from rollouts.loops.rl_batch import (
    add_advantages,
    add_log_probs,
    check_staleness,
    compute_lags,
    leave_out_truncated,
    make_loss_spec,
    plan_updates,
)
from rollouts.loops.updates import measure_kl, merge_forwards
from rollouts.losses import LOSSES, find_own_unit
from rollouts.preflight.checks import check_loss, check_losses
from rollouts.preflight.findings import Findings
from rollouts.testing.fakes import FakeBackend, open_fake_backend
from rollouts.types import (
    FloatArray,
    ForwardBackwardResult,
    LossSpec,
    Mean,
    RolloutBatch,
    Sample,
    Status,
)
from tests.support.text_tables import read_cells, read_params
from tests.unit.test_loops import rl_config


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
        batch = await add_log_probs(
            batch_of([1.0, 0.0], [7, 7], [0, 0]), backend, FixedReference(), None, config
        )
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


def test_all_segments_of_a_truncated_trajectory_are_left_out_of_the_loss():
    rows = segmented(batch_of([1.0, 1.0, 0.0], [7, 7, 7], [0, 0, 0]), "g7-s0", "g7-s0.1", "g7-s1")
    batch, _ = add_advantages(rows, rl_config(advantage="centred"))
    object.__setattr__(batch.samples[1], "status", Status.TRUNCATED)
    left = leave_out_truncated(batch)
    assert left.response_lengths.tolist() == [0, 0, 2]
    assert left.mean_advantages is not None and left.mean_advantages.tolist() == [0.0, 0.0, -0.5]


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
    assert found.mean_advantages is not None
    np.testing.assert_allclose(found.mean_advantages, [0.3375], rtol=1e-5)
    assert metrics["kl/ref_per_sample"] == pytest.approx(1.5)
    assert metrics["advantage/abs_mean"] == pytest.approx(0.3375, rel=1e-5)
    free, _ = add_advantages(
        batch, rl_config(critic=critic, advantage="gae", advantage_params={"lam": 0.5, "whiten": False})
    )
    assert free.returns is not None
    np.testing.assert_allclose(free.returns[0], [0.0, 0.5 + (-0.25 + 0.5 * 0.75), 1.0], rtol=1e-5)


def test_reinforce_pp_by_token_answers_for_the_kl_of_a_token_and_of_those_after_it():
    """KL .5 and 1 in the first row, none in the second; without a KL term it is reinforce_pp."""
    references = tuple(np.asarray(row, np.float32) for row in ([0, -1.5, -3], [0, -1, -2]))
    batch = dataclasses.replace(batch_of([1.0, 0.0], [0, 0], [0, 0]), ref_log_probs=references)
    found, plain, whole = (
        np.asarray(add_advantages(batch, rl_config(advantage=name, kl_coef=beta))[0].advantages)
        for name, beta in (("reinforce_pp_token", 0.1), ("reinforce_pp_token", 0.0), ("reinforce_pp", 0.0))
    )
    returns = np.array([[1 - 0.1 * 1.5, 1 - 0.1], [0.0, 0.0]])
    np.testing.assert_allclose(found[:, 1:], (returns - 0.4375) / returns.std(ddof=1), rtol=1e-5)
    np.testing.assert_allclose(plain, whole, rtol=1e-6)


def test_an_advantage_of_ones_own_may_answer_per_token_and_takes_its_parameters():
    def by_token(inputs, *, scale: float):
        return [np.asarray([9.0, scale, 2 * scale]) * reward for reward in inputs.rewards]

    config = rl_config(advantage="m:by_token", advantage_params={"scale": 0.5})
    batch, metrics = add_advantages(batch_of([1.0, -1.0], [7, 7], [0, 0]), config, by_token)
    assert batch.advantages is not None
    assert [row.tolist() for row in batch.advantages] == [[0.0, 0.5, 1.0], [0.0, -0.5, -1.0]]
    expected = {"advantage/abs_mean": 0.75, "advantage/mean": 0.0, "advantage/std": 0.625**0.5}
    assert metrics == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"'m:by_token' is not one of grpo, .* pass a function of your own"):
        find_advantages(config, {})


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


NO_STEP = r"""
loss_params = { correction = "token_tis" } | needs old log-probs: the ratio is against the engine already
loss_params = { kl_coef = 0.1 } | needs ref_log_probs and the batch has none
loss_params = { kl_coef = 0.1, kl_estimator = "k9" }, kl_coef = 0.1 | 'k9' is not known; did you mean 'k3'
loss_params = { clip_low = -1.0 } | clip_low=-1\.0 is outside its range
loss_params = { entropy_fraction = 7 } | entropy_fraction=7 is outside its range
loss_params = { dual_clip = 0.5 } | dual_clip=0\.5 is outside its range
loss_params = { kl_importance = "false" } | kl_importance='false' must be a boolean
loss = "gspo", loss_params = { clip_low = "wide" } | loss 'gspo' fails with .*'clip_low': 'wide'.*: TypeError
"""


@pytest.mark.parametrize(("changes", "message"), read_cells(NO_STEP))
def test_a_loss_that_could_never_take_a_step_is_refused_before_the_run(changes: str, message: str):
    config = rl_config(**read_params(changes))
    with pytest.raises(ConfigError, match=message):
        check_loss(config)


async def test_a_kl_term_without_a_reference_is_refused():
    async with open_fake_backend() as backend:
        with pytest.raises(ConfigError, match=r"kl_coef=0\.1"):
            await add_log_probs(batch_of([1.0], [0], [0]), backend, None, None, rl_config(kl_coef=0.1))


# settings | parameters of the loss; each also with the KL term in the loss
NUMBERS = """
clip_high = 0.28 | clip_low = 0.2, clip_high = 0.28
loss = "cispo", loss_params = { ratio_high = 4.0 } | ratio_high = 4.0
loss = "clip_cov", clip_high = 0.28 | clip_low = 0.2, clip_high = 0.28
loss = "gspo", loss_params = { kl_importance = true } | kl_importance = true
loss = "gspo" |
"""
KL = {"kl_coef": 0.02, "kl_estimator": "k3"}


@pytest.mark.parametrize(("settings", "params"), read_cells(NUMBERS))
@pytest.mark.parametrize("kl", [{}, KL])
def test_the_loss_is_named_with_the_numbers_of_the_config(settings: str, params: str, kl: dict[str, Any]):
    changes = read_params(settings)
    spec = make_loss_spec(
        rl_config(normalise_by="constant", **changes, **kl, **({"kl_in": "loss"} if kl else {}))
    )
    assert (spec.name, spec.params) == (changes.get("loss", "ppo_clip"), read_params(params) | kl)
    assert (spec.unit, spec.constant) == ("constant", 2 * 2 * 8)


def test_a_loss_of_sequences_trains_by_sequences_unless_another_unit_is_set_and_that_is_said():
    for name in LOSSES:
        assert make_loss_spec(rl_config(loss=name)).unit == find_own_unit(name)
    by_tokens, findings = rl_config(loss="gspo", normalise_by="tokens"), Findings()
    check_losses(RunConfig(rl=by_tokens), ["rl"], findings)
    check_losses(RunConfig(rl=rl_config(loss="gspo")), ["rl"], findings)
    assert make_loss_spec(by_tokens).unit == "tokens"
    said = "'tokens', where loss 'gspo' is defined by 'sequences'"
    assert findings == [("warning", "rl.normalise_by", said)]


# --- updates ------------------------------------------------------------------------------------------------

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
    assert [part is batch for part, _ in updates] == [True] * 3


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


def test_a_part_has_its_share_of_a_constant_denominator():
    config = rl_config(minibatches=2, normalise_by="constant", rollout=rollout(3))
    loss = make_loss_spec(config)
    assert loss.constant == 3 * 2 * 8
    updates = plan_updates(batch_of_groups([0, 0, 1, 1, 2, 2]), loss, config, seed=1, step=1)
    assert [part_loss.constant for _, part_loss in updates] == [pytest.approx(32), pytest.approx(16)], (
        "two groups of three, then one"
    )


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

    def __init__(self, *kls: float | None, step_s: float = 0.0, nats: float = 0.0) -> None:
        super().__init__(step_s=step_s, failures={})
        self._kls, self._nats = list(kls), nats

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> Any:
        future = super().forward_backward(batch, loss)
        kl = self._kls.pop(0)
        skipped = "the loss is nan" if kl is None else None
        metrics = {} if kl is None else {"approx_kl/mean": Mean(kl * 4, 4)}
        future._result = ForwardBackwardResult(
            loss=None if skipped else 1.0, denominator=4.0, metrics=metrics, skipped=skipped
        )
        return future

    def forward(self, batch: RolloutBatch) -> Any:
        moved = np.float32(-self._nats * self._state["weight"])
        return self._submit(lambda: tuple(mask * moved for mask in batch.loss_masks), has_pieces=True)


def train_times(times: int, backend: FakeBackend, **limits: float) -> Any:
    batch = batch_of_groups([0, 0])
    limits = limits or {"kl_stop": 0.02}
    return train_policy(
        backend, [(batch, LOSS)] * times, batch, rl_config(updates_per_batch=4, **limits), version=7
    )


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
    results = await train_times(4, backend)
    assert len(results) == len(backend.batches) == made
    assert backend.weight_version == 7, "the step counts as one whatever was left out"
    assert backend.statistics()["submitted"] == 2 * made + 1


async def test_a_loss_that_does_not_measure_the_kl_is_refused(autojump_clock):
    async with open_fake_backend() as backend:
        with pytest.raises(
            ConfigError,
            match=r"rl\.kl_stop=0\.02 with rl\.loss='ppo_clip', which does not measure approx_kl/mean",
        ):
            await train_times(2, backend)


@pytest.mark.parametrize(
    ("seconds", "made", "steps"), [(5, 0, 0), (15, 0, 1), (25, 0, 1), (35, 2, 2), (45, 2, 2)]
)
async def test_a_cancelled_step_is_whole_only_if_nothing_was_left_to_compute(
    seconds: float, made: int, steps: int, autojump_clock
):
    """At 5 s and 25 s a forward pass is cut; at 15 s and 35 s an optimizer step ends, at 35 s the last."""
    backend = MeasuringBackend(0.0, 0.5, step_s=10.0)
    results: list[Any] = []
    with trio.move_on_after(seconds):
        results = await train_times(3, backend)
    assert (len(results), backend.statistics()["steps"]) == (made, steps)
    assert backend.weight_version == 7 * (made > 0)


# --- the hard limit -----------------------------------------------------------------------------------------


def test_the_kl_of_an_update_is_k3_over_the_trained_tokens():
    mask = np.asarray([False, True, True])
    before, after = np.asarray([9, -1, -2], np.float32), np.asarray([0, -1.5, -1], np.float32)
    # r = -0.5 and 1: (e^-0.5 - 1 + 0.5) + (e - 1 - 1) + 0 + 0, over 4 tokens
    kl = measure_kl((before, before), (after, before), (mask, mask))
    assert kl == pytest.approx((0.1065306597 + 0.7182818285) / 4)
    assert measure_kl((before,), (after + 1e4,), (mask,)) == np.inf


# k3 after n updates of 0.1 nats, e^-r - 1 + r with r = 0.1 n: 0.0048, 0.0187, 0.0408, 0.0703
@pytest.mark.parametrize(
    ("nats", "limit", "made", "kept"),
    [(0.1, 0.1, 4, 4), (0.1, 0.02, 3, 2), (0.1, 0.004, 1, 0), (-1e4, 0.1, 1, 0), (np.nan, 0.1, 1, 0)],
)
async def test_the_update_beyond_the_limit_is_undone_and_is_the_last(nats, limit, made, kept, autojump_clock):
    backend = MeasuringBackend(0, 0, 0, 0, nats=nats)
    results = await train_times(4, backend, kl_limit=limit)
    assert (len(results), backend._state["weight"], backend.weight_version) == (made, kept, 7)
    assert [bool(optim.skipped) for _, optim in results] == [False] * kept + [True] * (made - kept)


@pytest.mark.parametrize(("seconds", "steps", "version"), [(45, 1, 0), (105, 2, 7)])
async def test_a_step_that_is_cut_before_an_update_is_decided_has_no_version(
    seconds, steps, version, autojump_clock
):
    """Everything takes 10 s: an update is measured from 40 s to 50 s, the next one is undone by 100 s."""
    backend = MeasuringBackend(0, 0, step_s=10.0, nats=0.1)
    with trio.move_on_after(seconds):
        await train_times(4, backend, kl_limit=0.01)
    assert (backend.statistics()["steps"], backend.weight_version) == (steps, version)


# --- a teacher ----------------------------------------------------------------------------------------------


TEACHER = {"teacher": "unused", "coef": 0.5}


async def test_a_teachers_advantages_are_added_to_the_tasks_token_by_token():
    config, rows = rl_config(advantage="centred"), batch_of([1.0, 0.0], [7, 7], [0, 0])
    config = config.model_copy(update={"distillation": DistillationConfig(teacher="unused", coef=0.5)})
    async with open_fake_backend() as backend:
        batch = await add_log_probs(rows, backend, None, None, config, FixedReference())
    batch, metrics = add_advantages(batch, config)
    # the policy's log-probs are −1 and −2, the teacher's −1.5: half of −0.5 and of +0.5
    assert batch.advantages is not None
    assert [row.tolist() for row in batch.advantages] == [[0.0, 0.25, 0.75], [0.0, -0.75, -0.25]]
    assert metrics["kl/teacher"] == 0.0


def test_without_a_reward_the_teacher_is_all_there_is_and_what_it_rules_out_needs_a_clip():
    teacher = [[5.0, -1.5, -np.inf], [0.0, -1.0, -2.0]]  # of the second row it says nothing
    rows = dataclasses.replace(
        batch_of([0, 0], [7, 7], [0, 0]),
        rewards=None,
        teacher_log_probs=tuple(np.asarray(row, np.float32) for row in teacher),
    )
    with pytest.raises(ModelError, match=r"advantages\[0\], token 2 is -inf.*rl\.distillation\.clip"):
        add_advantages(rows, rl_config(distillation=TEACHER))
    batch, metrics = add_advantages(rows, rl_config(distillation=TEACHER | {"clip": 0.5}))
    assert batch.advantages is not None
    assert [row.tolist() for row in batch.advantages] == [[0.0, -0.25, -0.5], [0.0, 0.0, 0.0]]
    assert "kl/teacher" not in metrics, "an infinite one is absent"


@pytest.mark.parametrize(
    "settings",
    [{"critic": {}}, {"advantage": "rloo"}, {"kl_coef": 0.1}, {"rollout": {"filters": ["check_min_reward"]}}],
)
def test_without_a_reward_what_is_about_one_is_refused(settings: Mapping[str, Any]):
    with pytest.raises(ValueError, match="without a reward, which it is about"):
        rl_config(distillation=TEACHER, **settings)
