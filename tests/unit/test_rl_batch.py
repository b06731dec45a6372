"""What the RL loop does to a batch: log-probs, advantages, a teacher, the loss by name."""

import dataclasses
import functools

import numpy as np
import pytest

from rollouts.advantages import ADVANTAGES
from rollouts.config.schema import DistillationConfig, RunConfig
from rollouts.errors import ConfigError, ModelError, StalenessError, UserFunctionError
from rollouts.loops.algorithm import find_advantages
from rollouts.loops.rl_batch import (
    add_advantages,
    add_log_probs,
    check_staleness,
    compute_lags,
    leave_out_cut,
    make_loss_spec,
)
from rollouts.losses import LOSSES, find_own_unit
from rollouts.preflight.checks import check_loss, check_losses
from rollouts.preflight.findings import Findings
from rollouts.testing.fakes import open_fake_backend
from rollouts.types import LossSpec, RolloutBatch, Sample, Status
from tests.support.made_updates import floats
from tests.support.text_tables import cases
from tests.unit.test_loops import rl_config


def batch_of(rewards, *, groups=None, versions=None):
    """Of the group 7 and of version 0, unless told otherwise."""
    count = len(rewards)
    return RolloutBatch(
        tokens=(np.arange(1, 4),) * count,
        loss_masks=(np.arange(3) > 0,) * count,
        rewards=np.asarray(rewards, np.float32),
        group_indices=np.asarray(groups or [7] * count),
        rollout_log_probs=(-np.arange(3, dtype=np.float32),) * count,
        weight_versions=tuple(np.asarray([-1, version, version + 1]) for version in versions or [0] * count),
    )


def test_the_lag_of_a_row_is_that_of_its_oldest_trained_token():
    batch = batch_of([0, 0], versions=[3, 5])
    np.testing.assert_array_equal(compute_lags(batch, 6), [3, 1])


@cases("""
lags | allowed
0 2  | 1
-1 0 | 1
""")
def test_a_row_outside_the_staleness_window_stops_the_loop(lags: list[float], allowed: int):
    with pytest.raises(StalenessError, match=f"max_staleness={allowed}"):
        check_staleness(np.asarray(lags, np.float32), max_staleness=allowed)


class FixedReference:
    """A LogProbScorer that answers −1.5 for every trained token."""

    async def score(self, batch):
        return tuple(np.where(mask, np.float32(-1.5), np.float32(0)) for mask in batch.loss_masks)


async def test_kl_in_the_reward_is_taken_off_before_the_group_statistics():
    config = rl_config(kl_coef=0.1, advantage="centred")
    async with open_fake_backend() as backend:
        batch = await add_log_probs(batch_of([1.0, 0.0]), backend, FixedReference(), None, config)
    batch, metrics = add_advantages(batch, config)
    # Σ (mu − ref) = (−1 + 1.5) + (−2 + 1.5) = 0, so the rewards stay 1 and 0 and the centred advantages are
    # ±½
    assert metrics["kl/ref_per_sample"] == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose(batch.advantages, np.outer([0.5, -0.5], [0, 1, 1]))


def segmented(*kl):
    """Two trajectories with the rewards 1 and 0, the first of two segments; and of each row the KL from a
    reference in nats, which is not that of the first token, for it does not train.
    """
    ids = ("g7-s0", "g7-s0.1", "g7-s1")
    samples = tuple(Sample(id=id_, prompt="p", reward=0.0, group_index=7) for id_ in ids)
    reference = floats(*([5.0, -1.0 - nats, -2.0] for nats in kl))
    return dataclasses.replace(batch_of([1.0, 1.0, 0.0]), samples=samples, ref_log_probs=reference or None)


def test_all_segments_of_a_truncated_trajectory_are_left_out_of_the_loss():
    batch, _ = add_advantages(segmented(), rl_config(advantage="centred"))
    object.__setattr__(batch.samples[1], "status", Status.TRUNCATED)
    left = leave_out_cut(batch, truncated=True)
    assert left.response_lengths.tolist() == [0, 0, 2]
    assert left.mean_advantages.tolist() == [0.0, 0.0, -0.5]


def test_the_kl_that_is_taken_off_is_that_of_the_whole_trajectory():
    batch, _ = add_advantages(segmented(1.0, 2.0, 5.0), rl_config(advantage="raw", kl_coef=0.1))
    taken = [row[1] for row in batch.advantages]
    np.testing.assert_allclose(taken, [0.7, 0.7, -0.5], rtol=1e-6)  # 1 − .1·(1 + 2), 0 − .1·5


def test_every_advantage_of_the_table_works_by_its_name():
    samples = tuple(
        Sample(id=f"s{row}", prompt="p", reward=0.0, rewards={"right": right, "greedy_reward": 0.25})
        for row, right in enumerate((1.0, 0.0, 1.0))
    )
    rows = dataclasses.replace(batch_of([1.0, 0.0, 0.5]), samples=samples)
    for name in ADVANTAGES.keys() - {"gae"}:  # which needs a critic: below
        batch, metrics = add_advantages(rows, rl_config(advantage=name))
        assert len(batch.advantages) == 3 and metrics["advantage/abs_mean"] > 0
    remax, _ = add_advantages(rows, rl_config(advantage="remax"))
    np.testing.assert_allclose(remax.advantages[0], [0, 0.75, 0.75])


def test_with_a_critic_the_batch_gets_returns_and_the_kl_term_goes_on_each_token():
    # one row: mask 0 1 1, lp −1 and −2, ref −1.5 and −3, β = .1: token rewards −.05 and 1 − .1; V = .5 and
    # .25
    rows = {"ref_log_probs": floats([0, -1.5, -3]), "old_values": floats([9, 0.5, 0.25])}
    batch = dataclasses.replace(batch_of([1.0]), **rows)
    params = {"lam": 0.5, "whiten": False}
    configure = functools.partial(rl_config, critic={}, advantage="gae", advantage_params=params)
    found, metrics = add_advantages(batch, configure(kl_coef=0.1))
    # δ = (−.05 + .25 − .5, .9 − .25) = (−.3, .65); A = (−.3 + .5·.65, .65); returns A + V
    np.testing.assert_allclose(found.advantages[0], [0.0, 0.025, 0.65], rtol=1e-5)
    np.testing.assert_allclose(found.returns[0], [0.0, 0.525, 0.9], rtol=1e-5)
    np.testing.assert_allclose([*found.mean_advantages, metrics["advantage/abs_mean"]], 0.3375, rtol=1e-5)
    assert metrics["kl/ref_per_sample"] == pytest.approx(1.5)
    free, _ = add_advantages(batch, configure())
    np.testing.assert_allclose(free.returns[0], [0.0, 0.5 + (-0.25 + 0.5 * 0.75), 1.0], rtol=1e-5)


def test_reinforce_pp_by_token_answers_for_the_kl_of_a_token_and_of_those_after_it():
    """KL .5 and 1 in the first row, none in the second; without a KL term it is reinforce_pp."""
    references = floats([0, -1.5, -3], [0, -1, -2])
    batch = dataclasses.replace(batch_of([1.0, 0.0]), ref_log_probs=references)
    found, plain, whole = (
        np.asarray(add_advantages(batch, rl_config(advantage=name, kl_coef=beta))[0].advantages)
        for name, beta in (("reinforce_pp_token", 0.1), ("reinforce_pp_token", 0.0), ("reinforce_pp", 0.0))
    )
    returns = np.array([[1 - 0.1 * 1.5, 1 - 0.1], [0.0, 0.0]])
    np.testing.assert_allclose(found[:, 1:], (returns - 0.4375) / returns.std(ddof=1), rtol=1e-5)
    np.testing.assert_allclose(plain, whole, rtol=1e-6)


def test_an_advantage_of_ones_own_may_answer_per_token_and_takes_its_parameters():
    def by_token(inputs, *, scale):
        return [np.asarray([9.0, scale, 2 * scale]) * reward for reward in inputs.rewards]

    config = rl_config(advantage="m:by_token", advantage_params={"scale": 0.5})
    batch, metrics = add_advantages(batch_of([1.0, -1.0]), config, {"m:by_token": by_token})
    np.testing.assert_array_equal(batch.advantages, np.outer([0.5, -0.5], [0, 1, 2]))
    expected = {"advantage/abs_mean": 0.75, "advantage/mean": 0.0, "advantage/std": 0.625**0.5}
    assert metrics == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"'m:by_token' is not one of grpo, .* pass a function of your own"):
        find_advantages(config, {})


def test_rewards_as_large_as_float32_holds_are_advantages_with_finite_metrics():
    _, metrics = add_advantages(batch_of([3e38, 3e38]), rl_config(advantage="raw"))
    expected = {"advantage/abs_mean": 3e38, "advantage/mean": 3e38, "advantage/std": 0.0}
    assert metrics == pytest.approx(expected)


def test_gdpo_is_refused_where_the_kl_term_would_be_lost():
    with pytest.raises(ValueError, match="advantage='gdpo' with kl_in='reward'"):
        rl_config(advantage="gdpo", kl_coef=0.1)
    assert rl_config(advantage="gdpo", kl_coef=0.1, kl_in="loss", kl_estimator="k2").kl_coef == 0.1


def test_an_advantage_that_fails_is_named():
    said = r"rl\.advantage='gdpo' failed: ValueError: advantage 'gdpo' needs named rewards"
    with pytest.raises(UserFunctionError, match=said):
        add_advantages(batch_of([1.0, 0.0]), rl_config(advantage="gdpo"))
    with pytest.raises(UserFunctionError, match=r"rl\.advantage='m:f' failed: ZeroDivisionError"):
        add_advantages(batch_of([1.0]), rl_config(advantage="m:f"), {"m:f": lambda inputs: 1 / 0})


@cases(r"""
changes                                    | message
loss_params = { correction = "token_tis" } | needs old log-probs: the ratio is against the engine already
loss = "vespo", recompute_old = true, loss_params = { correction = "token_tis" } | does not read them\), or
loss_params = { kl_coef = 0.1 } | needs ref_log_probs and the batch has none
loss_params = { kl_coef = 0.1, kl_estimator = "k9" }, kl_coef = 0.1 | 'k9' is not known; did you mean 'k3'
loss_params = { clip_low = -1.0 } | clip_low=-1\.0 is outside its range
loss_params = { entropy_fraction = 7 } | entropy_fraction=7 is outside its range
loss_params = { dual_clip = 0.5 } | dual_clip=0\.5 is outside its range
loss_params = { kl_importance = "false" } | kl_importance='false' must be a boolean
loss = "gspo", loss_params = { clip_low = "wide" } | loss 'gspo' fails with .*'clip_low': 'wide'.*: TypeError
""")
def test_a_loss_that_could_never_take_a_step_is_refused_before_the_run(changes: dict, message):
    config = rl_config(**changes)
    with pytest.raises(ConfigError, match=message):
        check_loss(config)


async def test_a_kl_term_without_a_reference_is_refused():
    async with open_fake_backend() as backend:
        with pytest.raises(ConfigError, match=r"kl_coef=0\.1"):
            await add_log_probs(batch_of([1.0]), backend, None, None, rl_config(kl_coef=0.1))


# settings | parameters of the loss; each also with the KL term in the loss
KL = {"kl_coef": 0.02, "kl_estimator": "k3"}


@cases("""
settings         | params
clip_high = 0.28 | clip_low = 0.2, clip_high = 0.28
loss = "cispo", loss_params = { ratio_high = 4.0 } | ratio_high = 4.0
loss = "clip_cov", clip_high = 0.28 | clip_low = 0.2, clip_high = 0.28
loss = "gspo", loss_params = { kl_importance = true } | kl_importance = true
loss = "gspo" |
""")
@cases("kl", [{}, KL])
def test_the_loss_is_named_with_the_numbers_of_the_config(settings: dict, params: dict, kl):
    kl_in = "loss" if kl else "reward"
    spec = make_loss_spec(rl_config(normalise_by="constant", kl_in=kl_in, **settings, **kl))
    name = settings.get("loss", "ppo_clip")
    assert spec == LossSpec(name, params | kl, unit="constant", constant=2 * 2 * 8)


def test_a_loss_of_sequences_trains_by_sequences_unless_another_unit_is_set_and_that_is_said():
    for name in LOSSES:
        assert make_loss_spec(rl_config(loss=name)).unit == find_own_unit(name)
    by_tokens, findings = rl_config(loss="gspo", normalise_by="tokens"), Findings()
    check_losses(RunConfig(rl=by_tokens), ["rl"], findings)
    check_losses(RunConfig(rl=rl_config(loss="gspo")), ["rl"], findings)
    assert make_loss_spec(by_tokens).unit == "tokens"
    said = "'tokens', where loss 'gspo' is defined by 'sequences'"
    assert findings == [("warning", "rl.normalise_by", said)]


# --- a teacher ----------------------------------------------------------------------------------------------


TEACHER = {"teacher": "unused", "coef": 0.5}


async def test_a_teachers_advantages_are_added_to_the_tasks_token_by_token():
    teacher = DistillationConfig(**TEACHER)
    config = rl_config(advantage="centred").model_copy(update={"distillation": teacher})
    async with open_fake_backend() as backend:
        rows = batch_of([1.0, 0.0])
        batch = await add_log_probs(rows, backend, None, None, config, FixedReference().score)
    batch, metrics = add_advantages(batch, config)
    # the policy's log-probs are −1 and −2, the teacher's −1.5: half of −0.5 and of +0.5
    np.testing.assert_array_equal(batch.advantages, [[0, 0.25, 0.75], [0, -0.75, -0.25]])
    assert metrics["kl/teacher"] == 0.0


def test_without_a_reward_the_teacher_is_all_there_is_and_what_it_rules_out_needs_a_clip():
    teacher = floats([5.0, -1.5, -np.inf], [0.0, -1.0, -2.0])  # of the second row it says nothing
    rows = dataclasses.replace(batch_of([0, 0]), rewards=None, teacher_log_probs=teacher)
    with pytest.raises(ModelError, match=r"advantages\[0\], token 2 is -inf.*rl\.distillation\.clip"):
        add_advantages(rows, rl_config(distillation=TEACHER))
    batch, metrics = add_advantages(rows, rl_config(distillation=TEACHER | {"clip": 0.5}))
    np.testing.assert_array_equal(batch.advantages, [[0, -0.25, -0.5], [0, 0, 0]])
    assert "kl/teacher" not in metrics  # an infinite one is absent


@cases("""
settings
critic = {}
advantage = "rloo"
kl_coef = 0.1
rollout = { filters = ["check_min_reward"] }
""")
def test_without_a_reward_what_is_about_one_is_refused(settings: dict):
    with pytest.raises(ValueError, match="without a reward, which it is about"):
        rl_config(distillation=TEACHER, **settings)
