"""Values and gradients of policy losses on the fixture of test_losses, and their properties on drawn batches.

Gradients are worked out by hand with respect to lp, in units of A; r = exp(lp - old) = [1.349859, .670320,
1.491825].
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses import LOSSES, LossInputs
from rollouts.losses.reductions import select_top_fraction
from rollouts.losses.rl_losses import (
    clip_cov_loss,
    compute_covariances,
    dppo_loss,
    dro_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    importance_sampling_loss,
    kl_cov_loss,
    ppo_clip_loss,
    reinforce_loss,
    sapo_loss,
)
from rollouts.types import metric_values

OLD, LP, MU = [-1.0, -0.5, -2.0], [-0.7, -0.9, -1.6], [-1.2, -0.4, -2.3]
RATIO = [math.exp(lp - old) for lp, old in zip(LP, OLD, strict=True)]
AGAINST_MU = [math.exp(lp - mu) for lp, mu in zip(LP, MU, strict=True)]
INFINITY = float("inf")
RL_LOSSES = [name for name in LOSSES if name not in ("sft", "value", "linear")]
IN_LOG_PROBS = ("reinforce", "dro", "cispo")  # not finite where lp is not


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def make_inputs(advantage: float, *, mu: bool = False) -> LossInputs:
    """The fixture: ratio against OLD, or against MU."""
    against = {"rollout_log_probs": row(*MU)} if mu else {"old_log_probs": row(*OLD)}
    return LossInputs(
        log_probs=row(*LP).requires_grad_(),
        mask=torch.ones(1, 3, dtype=torch.bool),
        advantages=row(*[advantage] * 3),
        **against,
    )


def run(loss, inputs: LossInputs, **params: Any) -> tuple[float, list[float]]:
    """The loss's sum and its gradient with respect to the first row's log-probs."""
    total = loss(inputs, **params).sum
    (grad,) = torch.autograd.grad(total, [inputs.log_probs])
    return float(total.detach()), grad[0].tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# --- the fixture --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "tau", "values"),
    [(1.0, 1.0, (2.346333, 1.673274, 2.482145)), (-1.0, 1.05, (2.250739, 1.578335, 2.385940))],
)
def test_sapo_gates_softly(advantage, tau, values):
    value, grad = run(sapo_loss, make_inputs(advantage))
    assert value == pytest.approx(-advantage * sum(values), abs=3e-6)
    gates = [sigmoid(tau * (r - 1)) for r in RATIO]
    assert grad == pytest.approx(
        [-advantage * 4 * gate * (1 - gate) * r for gate, r in zip(gates, RATIO, strict=True)]
    )


@pytest.mark.parametrize(("advantage", "kept"), [(1.0, (1, 1, 1)), (-1.0, (1, 0, 1))])
def test_dppo_leaves_out_tokens_whose_probability_moved_too_far(advantage, kept):
    # e^lp - e^mu = .195391, -.263750, .101638; the bound is .2
    value, grad = run(dppo_loss, make_inputs(advantage, mu=True))
    expected = [-advantage * keep * ratio for keep, ratio in zip(kept, AGAINST_MU, strict=True)]
    assert value == pytest.approx(sum(expected))
    assert grad == pytest.approx(expected)
    assert [grad[index] for index in range(3) if not kept[index]] == [0.0] * (3 - sum(kept))
    metrics = metric_values(dppo_loss(make_inputs(advantage, mu=True), tv_high=0.15).metrics)
    assert (metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == pytest.approx(
        (0, 1 / 3) if advantage > 0 else (1 / 3, 0)
    )


@pytest.mark.parametrize(
    ("advantage", "values"), [(1.0, (0.70625, 0.90625, 1.61225)), (-1.0, (-0.69375, -0.89375, -1.58775))]
)
def test_dro_adds_the_squared_gap_to_the_engine(advantage, values):
    value, grad = run(dro_loss, make_inputs(advantage, mu=True))
    assert value == pytest.approx(sum(values))
    assert grad == pytest.approx([-advantage + 0.05 * (lp - mu) for lp, mu in zip(LP, MU, strict=True)])


@pytest.mark.parametrize(("advantage", "clipped", "expected"), [(1.0, 2, -1.086904), (-1.0, 1, 1.123745)])
def test_gmpo_is_the_geometric_mean_of_ratios_clipped_on_one_side(advantage, clipped, expected):
    # lp - old = .3, -.4, .4; A > 0: (.3 - .4 + .35)/3, A < 0: (.3 - .35 + .4)/3
    value, grad = run(gmpo_loss, make_inputs(advantage), clip_low=0.35, clip_high=0.35)
    assert value == pytest.approx(expected, abs=1e-6)
    assert grad == pytest.approx([0.0 if index == clipped else value / 3 for index in range(3)])
    assert grad[clipped] == 0.0
    metrics = metric_values(gmpo_loss(make_inputs(advantage), clip_low=0.35, clip_high=0.35).metrics)
    side = "high" if advantage > 0 else "low"
    assert (metrics[f"clip_ratio/{side}"], metrics["ratio/max"]) == (
        pytest.approx(1 / 3),
        pytest.approx(abs(expected), abs=1e-6),
    )


def test_gspo_token_has_the_value_of_gspo_and_its_gradient_where_advantages_are_equal():
    assert run(gspo_token_loss, make_inputs(1.0)) == (pytest.approx(-1.0004), [0.0] * 3)
    assert run(gspo_token_loss, make_inputs(-1.0)) == (
        pytest.approx(1.105170918),
        pytest.approx([1.105170918 / 3] * 3),
    )
    assert run(gspo_loss, make_inputs(-1.0)) == (
        pytest.approx(1.105170918),
        pytest.approx([1.105170918 / 3] * 3),
    )


def test_gspo_token_gives_each_token_its_own_advantage():
    inputs = replace(make_inputs(1.0), advantages=row(-1.0, -2.0, 0.0))
    _, grad = run(gspo_token_loss, inputs)
    assert grad == pytest.approx([1.105170918 / 3, 2 * 1.105170918 / 3, 0.0])
    _, spread = run(gspo_loss, inputs)  # gspo's is the mean of both, on every token
    assert spread == pytest.approx([1.105170918 * 3 / 9] * 3)


@pytest.mark.parametrize("loss", [importance_sampling_loss, reinforce_loss])
def test_plain_policy_gradients_by_hand(loss):
    value, grad = run(loss, make_inputs(2.0, mu=True))
    weights = AGAINST_MU if loss is importance_sampling_loss else [1.0] * 3
    assert value == pytest.approx(-2 * sum(AGAINST_MU if loss is importance_sampling_loss else LP))
    assert grad == pytest.approx([-2 * weight for weight in weights])


# --- covariance ---------------------------------------------------------------------------------------------


def make_covariance_inputs() -> LossInputs:
    """lp = -1, -3, -1, -3 with A = 2, 2, -2, -2: means -2 and 0, covariances 2, -2, -2, 2. old: r = 1 but on
    the last, e^-.5.
    """
    return LossInputs(
        log_probs=row(-1.0, -3.0, -1.0, -3.0).requires_grad_(),
        old_log_probs=row(-1.0, -3.0, -1.0, -2.5),
        advantages=row(2.0, 2.0, -2.0, -2.0),
        mask=torch.ones(1, 4, dtype=torch.bool),
    )


def test_covariances_by_hand():
    inputs = make_covariance_inputs()
    assert inputs.advantages is not None
    assert compute_covariances(inputs.log_probs, inputs.advantages, inputs.mask).tolist() == [
        [2.0, -2.0, -2.0, 2.0]
    ]
    mask = torch.tensor([[True, True, False, False]])  # means -2 and 2
    assert compute_covariances(inputs.log_probs, inputs.advantages, mask).tolist() == [[0.0, 0.0, 0.0, 0.0]]
    given_means = compute_covariances(
        inputs.log_probs, inputs.advantages, mask, log_prob_mean=0.0, advantage_mean=1.0
    )
    assert given_means.tolist() == [[-1.0, -3.0, 0.0, 0.0]]


def test_clip_cov_takes_the_gradient_of_unclipped_tokens_with_a_large_covariance():
    inputs = make_covariance_inputs()
    value, grad = run(clip_cov_loss, inputs, cov_fraction=0.5)
    # the first is left out; the last has a covariance of 2 as well and is clipped by PPO: r = .6065 below .8,
    # loss .8 · 2
    assert grad == [0.0, -2.0, 2.0, 0.0]
    assert value == pytest.approx(-2.0 + 2.0 + 1.6)
    metrics = metric_values(clip_cov_loss(inputs, cov_fraction=0.5).metrics)
    assert (metrics["clip_ratio"], metrics["clip_ratio/low"], metrics["clip_ratio/cov"]) == (0.25, 0.25, 0.25)
    assert (
        run(clip_cov_loss, inputs, cov_low=2.5)[1] == run(ppo_clip_loss, inputs)[1] == [-2.0, -2.0, 2.0, 0.0]
    )


def test_kl_cov_penalises_the_tokens_of_largest_covariance():
    inputs = make_covariance_inputs()
    last = math.exp(-0.5)  # r of the fourth token
    plain_value, plain = run(
        importance_sampling_loss, replace(inputs, rollout_log_probs=inputs.old_log_probs)
    )
    assert plain == pytest.approx([-2.0, -2.0, 2.0, 2 * last])
    value, grad = run(kl_cov_loss, inputs, cov_fraction=0.5, cov_kl_coef=0.7)
    # |lp - old| is 0 on the first, without gradient, and .5 on the last, where its derivative is -1
    assert value == pytest.approx(plain_value + 0.7 * 0.5)
    assert grad == pytest.approx([-2.0, -2.0, 2.0, 2 * last - 0.7])
    assert run(kl_cov_loss, inputs, cov_fraction=0.25, cov_kl_coef=0.7)[1] == pytest.approx(
        plain
    )  # of equal ones the earlier


def test_of_each_row_the_largest_share_is_selected():
    values = row(3.0, 9.0, 1.0, 5.0, 5.0)
    mask = torch.tensor([[True, False, True, True, True]])
    chosen = [select_top_fraction(values, mask, fraction)[0].tolist() for fraction in (0.25, 0.5, 0.51, 1.0)]
    assert chosen == [
        [False, False, False, True, False],
        [False, False, False, True, True],
        [True, False, False, True, True],
        [True, False, True, True, True],
    ]
    assert not select_top_fraction(values, torch.zeros_like(mask), 0.5).any()


# --- what is not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RL_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_sampled_token_that_the_policy_cannot_give(name, advantage):
    """lp = -inf inside the mask: finite, and no gradient of its own, where the loss is in the ratio; not
    finite where it is in lp itself.
    """
    log_probs = row(-INFINITY, -0.9, -1.6).requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        mask=torch.ones(1, 3, dtype=torch.bool),
        advantages=row(*[advantage] * 3),
        rollout_log_probs=row(*MU),
    )
    out = LOSSES[name](inputs, unit="tokens")
    if name in IN_LOG_PROBS:
        assert not math.isfinite(float(out.sum.detach()))
        return
    assert math.isfinite(float(out.sum.detach()))
    (grad,) = torch.autograd.grad(out.sum, [log_probs])
    assert grad.isfinite().all()
    assert grad[0, 0] == 0.0


@pytest.mark.parametrize("name", RL_LOSSES)
def test_a_token_that_the_engine_says_it_cannot_give_leaves_finite_gradients(name):
    log_probs = row(*LP).requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        mask=torch.ones(1, 3, dtype=torch.bool),
        advantages=row(1.0, 1.0, 1.0),
        rollout_log_probs=row(-INFINITY, -0.4, -2.3),
    )
    out = LOSSES[name](inputs, unit="tokens")
    if name == "dro":
        assert math.isinf(float(out.sum.detach()))
        return
    (grad,) = torch.autograd.grad(out.sum, [log_probs])
    assert grad.isfinite().all()


# --- properties ---------------------------------------------------------------------------------------------


def draw_fields(seed: int, rows: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("log_probs", "old_log_probs", "rollout_log_probs")
    fields = {name: -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3 for name in names}
    fields["advantages"] = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width)
    fields["mask"] = torch.rand(rows, width, generator=generator) < 0.7
    return fields


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    width=st.integers(1, 4),
    unit=st.sampled_from(["tokens", "sequences", "sequence_sums"]),
)
def test_gradients_agree_with_central_differences(seed, rows, width, unit):
    """Of every loss, at every position: in float64, where a step of 1e-6 crosses no clip but by bad luck,
    which the draws do not have.
    """
    fields = draw_fields(seed, rows, width)
    for name in sorted(
        set(RL_LOSSES) - {"cispo", "gspo_token"}
    ):  # they hold part of lp constant: see the tests on the fixture

        def value(log_probs: Tensor, name: str = name) -> Tensor:
            # with the micro-batch's own means two tokens have one covariance, and a step would decide which
            # of them is the larger
            params = (
                {"cov_fraction": 1.0, "cov_low": 0.3, "log_prob_mean": 0.0, "advantage_mean": 0.0}
                if name.endswith("_cov")
                else {}
            )
            return LOSSES[name](LossInputs(**fields | {"log_probs": log_probs}), unit=unit, **params).sum

        log_probs = fields["log_probs"].clone().requires_grad_()
        (grad,) = torch.autograd.grad(value(log_probs), [log_probs])
        for position in range(rows * width):
            step = torch.zeros(rows * width, dtype=torch.float64)
            step[position] = 1e-6
            ends = [value(fields["log_probs"] + sign * step.view(rows, width)) for sign in (1, -1)]
            assert float(grad.flatten()[position]) == pytest.approx(
                float(ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-7
            ), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 4), width=st.integers(1, 6))
def test_at_ratio_one_every_loss_has_the_gradient_of_reinforce(seed, rows, width):
    fields = draw_fields(seed, rows, width)
    fields |= {"old_log_probs": fields["log_probs"].clone(), "rollout_log_probs": fields["log_probs"].clone()}
    mask, advantages = fields["mask"], fields["advantages"]
    lengths = mask.sum(-1, keepdim=True).clamp(min=1).double()
    for name in sorted(set(RL_LOSSES) - {"clip_cov"}):  # which leaves tokens out at any ratio
        for unit, weight in (("tokens", 1.0), ("sequences", 1.0 / lengths)):
            log_probs = fields["log_probs"].clone().requires_grad_()
            (grad,) = torch.autograd.grad(
                LOSSES[name](LossInputs(**fields | {"log_probs": log_probs}), unit=unit).sum, [log_probs]
            )
            expected = torch.where(mask, -advantages * weight, torch.zeros_like(grad))
            torch.testing.assert_close(
                grad, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), clip_low=st.floats(0.05, 0.9), clip_high=st.floats(0.05, 0.9))
def test_clipped_tokens_have_exactly_no_gradient_and_the_metrics_count_them(seed, clip_low, clip_high):
    fields = draw_fields(seed, 3, 5)
    if not fields["mask"].any():
        return
    ratio, advantages, mask = (
        (fields["log_probs"] - fields["old_log_probs"]).exp(),
        fields["advantages"],
        fields["mask"],
    )
    low, high = (
        (advantages < 0) & (ratio < 1 - clip_low) & mask,
        (advantages > 0) & (ratio > 1 + clip_high) & mask,
    )
    log_probs = fields["log_probs"].clone().requires_grad_()
    out = ppo_clip_loss(
        LossInputs(**fields | {"log_probs": log_probs}), clip_low=clip_low, clip_high=clip_high
    )
    (grad,) = torch.autograd.grad(out.sum, [log_probs])
    assert torch.equal(grad == 0, low | high | ~mask)
    metrics, count = metric_values(out.metrics), int(mask.sum())
    assert (metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == pytest.approx(
        (int(low.sum()) / count, int(high.sum()) / count)
    )


# --- rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        ("sapo", {"tau_positive": 0.0}, r"tau_positive=0\.0 must be above 0"),
        ("sapo", {"tau_negative": -1.0}, r"tau_negative=-1\.0 must be above 0"),
        ("dppo", {"tv_low": 0.0}, r"tv_low=0\.0 must be above 0 and at most 1"),
        ("dppo", {"tv_high": 1.5}, r"tv_high=1\.5 must be above 0 and at most 1"),
        ("dro", {"beta": -0.1}, r"beta=-0\.1 must not be negative"),
        ("gmpo", {"clip_low": 0.0}, r"clip_low=0\.0 must be above 0 nats"),
        ("gmpo", {"clip_high": -0.4}, r"clip_high=-0\.4 must be above 0 nats"),
        ("gspo", {"clip_low": 1.5}, r"clip_low=1\.5 must be above 0 and at most 1"),
        ("gspo_token", {"clip_high": 0.0}, r"clip_high=0\.0 must be above 0"),
        ("clip_cov", {"cov_fraction": 0.0}, r"cov_fraction=0\.0 must be above 0 and at most 1"),
        ("clip_cov", {"cov_low": 5.0}, r"cov_low=5\.0, cov_high=5\.0; the rule is cov_low < cov_high"),
        ("kl_cov", {"cov_kl_coef": -1.0}, r"cov_kl_coef=-1\.0 must not be negative"),
    ],
)
def test_numbers_that_break_a_rule_are_refused_by_name(name, params, match):
    with pytest.raises(ConfigError, match=match):
        LOSSES[name](make_inputs(1.0, mu=True), unit="tokens", **params)
