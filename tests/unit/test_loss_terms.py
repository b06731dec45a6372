"""What every policy loss can add to its own term, KL estimators, and the value loss. The fixture is that of
test_losses.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts.errors import ConfigError, PlugInError
from rollouts.losses import (
    KL_ESTIMATORS,
    LOSSES,
    LossInputs,
    LossOutput,
    check_loss_params,
    wants_entropy_gradient,
)
from rollouts.losses.distillation import compute_divergence
from rollouts.losses.kl import (
    compute_exact_kl,
    compute_kl_penalty,
    kl_k2,
    make_truncated_kl,
    make_weighted_kl,
)
from rollouts.losses.rl_losses import ppo_clip_loss, reinforce_loss
from rollouts.losses.value_loss import value_loss
from rollouts.types import EffectiveShare, ExplainedVariance, merge_metrics, metric_values

OLD, LP, MU, REF = [-1.0, -0.5, -2.0], [-0.7, -0.9, -1.6], [-1.2, -0.4, -2.3], [-1.1, -0.6, -1.5]
NAN, INFINITY = float("nan"), float("inf")
P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
KL_FROM_MU = 0.276154  # Σ exp(lp − mu)·(lp − ref) = .4·e^.5 − .3·e^−.5 − .1·e^.7
RL_LOSSES = [name for name in LOSSES if name not in ("sft", "value", "linear")]


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def make_inputs(advantage: float = 1.0, **fields: Tensor | None) -> LossInputs:
    given: dict[str, Any] = {
        "log_probs": row(*LP).requires_grad_(),
        "old_log_probs": row(*OLD),
        "advantages": row(*[advantage] * 3),
    } | fields
    given.setdefault("mask", torch.ones(given["log_probs"].shape, dtype=torch.bool))
    return LossInputs(**given)


def grad_of(out: LossOutput, tensor: Tensor) -> list[float]:
    (grad,) = torch.autograd.grad(out.sum, [tensor], retain_graph=True)
    return grad[0].tolist()


# --- KL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_off_policy_estimates_are_unbiased_and_have_the_right_gradient(name):
    """Tokens drawn by mu, not by p: the mean over mu of ratio · k is KL(p || q) for k1 and k3, and its
    gradient p·(log p/q − KL).
    """
    mu = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logits = P.log().clone().requires_grad_()
    terms = compute_kl_penalty(torch.log_softmax(logits, 0), Q.log(), name, sampler_log_probs=mu.log())
    mean = (mu * terms).sum()
    (grad,) = torch.autograd.grad(mean, [logits])
    if name == "k2":  # biased in value; with the gradient through both factors it is not KL's either
        assert float(mean.detach()) == pytest.approx(0.024862407)
        return
    assert float(mean.detach()) == pytest.approx(0.025267154)
    assert grad.tolist() == pytest.approx([0.098938, -0.093885, -0.005053], abs=1e-6)


def test_kl_importance_reaches_every_loss():
    ref = row(*REF)
    for name in RL_LOSSES:
        inputs = make_inputs(0.0, ref_log_probs=ref, rollout_log_probs=row(*MU))
        found = LOSSES[name](
            inputs,
            unit="tokens",
            kl_coef=0.5,
            kl_estimator="k1",
            kl_importance=True,
            **({"beta": 0.0} if name == "dro" else {}),
        )
        # with A = 0 the KL term is all there is: (lp − ref)·exp(lp − mu), where the ratio is against old by
        # way of the weight exp(old − mu)
        assert float(found.sum.detach()) == pytest.approx(0.5 * KL_FROM_MU), name


@pytest.mark.parametrize("old", [None, row(*OLD)])
@pytest.mark.parametrize("name", ["reinforce", "dro"])
def test_a_weight_does_not_count_the_gap_again_in_a_kl_term_with_importance(name, old):
    """The weight of a loss without a ratio is exp(lp − mu), and the KL term has that factor already."""
    inputs = make_inputs(0.0, old_log_probs=old, ref_log_probs=row(*REF), rollout_log_probs=row(*MU))
    params: dict[str, Any] = {"kl_coef": 1.0, "kl_estimator": "k1", "kl_importance": True} | (
        {"beta": 0.0} if name == "dro" else {}
    )
    found = LOSSES[name](inputs, unit="tokens", correction="token_tis(cap=100)", **params)
    assert float(found.sum.detach()) == pytest.approx(KL_FROM_MU)
    slopes = [math.exp(lp - mu) * (1 + lp - q) for lp, mu, q in zip(LP, MU, REF, strict=True)]
    assert grad_of(found, inputs.log_probs) == pytest.approx(slopes)
    # exp(lp − mu) = 1.65, .61, 2.01: a dropped token has no KL term either
    found = LOSSES[name](inputs, unit="tokens", correction="token_mask(low=0.5, high=1.8)", **params)
    assert float(found.sum.detach()) == pytest.approx(KL_FROM_MU + 0.1 * math.exp(0.7))
    # without kl_importance the weight is the only factor: lp − ref = .4, −.3, −.1
    found = LOSSES[name](
        inputs,
        unit="tokens",
        correction="token_tis(cap=100)",
        **params | {"kl_importance": False, "kl_estimator": "k2"},
    )
    assert float(found.sum.detach()) == pytest.approx(
        0.08 * math.exp(0.5) + 0.045 * math.exp(-0.5) + 0.005 * math.exp(0.7)
    )


def test_kl_importance_is_true_or_false():
    with pytest.raises(ConfigError, match="kl_importance='false' must be true or false"):
        reinforce_loss(make_inputs(), kl_importance="false")  # type: ignore[arg-type]


def test_a_kl_estimator_may_be_a_function():
    inputs = make_inputs(0.0, ref_log_probs=row(*REF))
    out = ppo_clip_loss(inputs, kl_coef=2.0, kl_estimator=make_truncated_kl(kl_k2, 0.06))
    assert float(out.sum.detach()) == pytest.approx(2 * (0.06 + 0.045 + 0.005))  # k2 = .08, .045, .005
    assert grad_of(out, inputs.log_probs) == pytest.approx([0.0, 2 * -0.3, 2 * -0.1])
    out = ppo_clip_loss(
        inputs, kl_coef=1.0, kl_estimator=make_weighted_kl(kl_k2, lambda policy, ref: ref.exp())
    )
    assert float(out.sum.detach()) == pytest.approx(
        sum(math.exp(q) * k for q, k in zip(REF, (0.08, 0.045, 0.005), strict=True))
    )
    assert grad_of(out, inputs.log_probs) == pytest.approx(
        [math.exp(q) * (lp - q) for lp, q in zip(LP, REF, strict=True)]
    )
    by_name = ppo_clip_loss(inputs, kl_coef=1.0, kl_estimator="rollouts.losses.kl:kl_k2")
    assert float(by_name.sum.detach()) == pytest.approx(0.13)
    with pytest.raises(PlugInError, match=r"kl_estimator='rollouts\.losses\.kl:nothing' cannot be imported"):
        ppo_clip_loss(inputs, kl_coef=1.0, kl_estimator="rollouts.losses.kl:nothing")
    with pytest.raises(ConfigError, match=r"cap=0\.0 of a truncated KL"):
        make_truncated_kl(kl_k2, 0.0)


def test_exact_kl_and_its_gradients():
    policy, ref = (torch.stack([one.log(), one.log() + 7.0]).requires_grad_() for one in (P, Q))
    found = compute_exact_kl(policy, ref)
    assert found.tolist() == pytest.approx([0.025267154] * 2)
    grads = torch.autograd.grad(found[0], [policy, ref])
    assert grads[0][0].tolist() == pytest.approx(
        [0.098938, -0.093885, -0.005053], abs=1e-6
    )  # p·(log p/q − KL)
    assert grads[1][0].tolist() == pytest.approx((Q - P).tolist())
    assert compute_exact_kl(policy * 2.0, ref * 2.0, temperature=2.0).tolist() == pytest.approx(
        [0.025267154] * 2
    )
    assert torch.autograd.gradcheck(compute_exact_kl, (policy, ref))


def test_exact_kl_over_the_reference_s_largest_tokens():
    def top_two(policy: Tensor, ref: Tensor) -> Tensor:
        return (ref >= ref.topk(2, dim=-1).values[..., -1:]).to(ref.dtype)

    found = compute_exact_kl(P.log()[None], Q.log()[None], weigh=top_two)
    assert found.tolist() == pytest.approx([0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)])


def test_tokens_that_a_model_cannot_give():
    policy = row(0.0, 0.0, -INFINITY).requires_grad_()
    found = compute_exact_kl(policy, row(0.0, 0.0, 0.0))
    assert found.tolist() == pytest.approx([math.log(3 / 2)])  # Σ ½ log(½ / ⅓)
    found.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [[pytest.approx(0.0, abs=1e-15)] * 3]
    assert compute_exact_kl(row(0.0, 0.0), row(0.0, -INFINITY)).tolist() == [INFINITY]
    assert compute_exact_kl(row(0.0, -INFINITY), row(0.0, -INFINITY)).tolist() == [0.0]
    assert compute_exact_kl(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)


def test_a_term_of_weight_zero_adds_nothing_even_where_it_is_infinite():
    policy, ref = row(1.0, 0.5, 0.0).requires_grad_(), row(1.0, 1.0, -INFINITY)
    found = compute_exact_kl(policy, ref, weigh=lambda policy, ref: (ref > -INFINITY).to(ref.dtype))
    total = math.e + math.exp(0.5) + 1.0
    first, second = math.e / total, math.exp(0.5) / total
    gaps = math.log(first / 0.5), math.log(second / 0.5)
    assert found.tolist() == pytest.approx([first * gaps[0] + second * gaps[1]])  # -.1431
    found.sum().backward()
    slopes = first * (1 + gaps[0]), second * (1 + gaps[1])  # of p·(log p − log q) by log p
    assert policy.grad is not None
    shares = first, second, 1 / total
    assert policy.grad[0].tolist() == pytest.approx(
        [slope - p * sum(slopes) for slope, p in zip((*slopes, 0.0), shares, strict=True)]
    )


@pytest.mark.parametrize("logit", [-50.0, -200.0])
def test_a_token_that_only_the_policy_can_give_makes_the_kl_infinite_however_rare_it_is(logit):
    policy, ref = (
        torch.tensor([[10.0, 9.0, logit]]),
        torch.tensor([[10.0, 9.0, -INFINITY]]),
    )  # float32: e^-210 is 0 there
    assert compute_exact_kl(policy, ref).tolist() == [INFINITY]
    assert compute_divergence(policy, ref, beta=1.0).tolist() == [INFINITY]
    assert compute_divergence(ref, policy, beta=0.0).tolist() == [INFINITY]


def test_a_nan_among_the_logits_is_not_taken_for_a_token_without_probability():
    assert compute_exact_kl(row(0.0, NAN), row(0.0, 0.0)).isnan().all()
    assert compute_exact_kl(row(0.0, 0.0), row(NAN, 0.0)).isnan().all()


# --- entropy ------------------------------------------------------------------------------------------------


def make_entropy_inputs() -> tuple[LossInputs, Tensor]:
    entropy = torch.tensor([[0.5, 2.0, 1.0, 1.5], [9.0, 0.1, NAN, NAN]], dtype=torch.float64).requires_grad_()
    log_probs = -torch.ones(2, 4, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[True] * 4, [False, True, False, False]])
    return LossInputs(
        log_probs=log_probs, mask=mask, entropy=entropy, advantages=torch.ones_like(log_probs)
    ), entropy


def test_the_entropy_bonus_is_minus_coefficient_times_entropy():
    inputs, entropy = make_entropy_inputs()
    out = reinforce_loss(inputs, entropy_coef=0.1)
    assert float(out.sum.detach()) == pytest.approx(5 - 0.1 * 5.1)
    (grad,) = torch.autograd.grad(out.sum, [entropy])
    assert grad.tolist() == [[-0.1] * 4, [0.0, -0.1, 0.0, 0.0]]
    assert metric_values(out.metrics)["entropy/mean"] == pytest.approx(5.1 / 5)
    by_rows = reinforce_loss(inputs, entropy_coef=0.1, unit="sequences")
    assert float(by_rows.sum.detach()) == pytest.approx(2 - 0.1 * (5.0 / 4 + 0.1))


def test_only_tokens_of_high_entropy_get_the_bonus_or_the_policy_term():
    inputs, entropy = make_entropy_inputs()
    bonus = reinforce_loss(inputs, entropy_coef=0.1, entropy_fraction=0.5)
    (grad,) = torch.autograd.grad(bonus.sum, [entropy])
    assert grad.tolist() == [[0.0, -0.1, 0.0, -0.1], [0.0, -0.1, 0.0, 0.0]]
    forking = reinforce_loss(inputs, policy_entropy_fraction=0.5)
    (grad,) = torch.autograd.grad(forking.sum, [inputs.log_probs])
    assert grad.tolist() == [[0.0, -1.0, 0.0, -1.0], [0.0, -1.0, 0.0, 0.0]]
    assert forking.count == 5.0


def test_an_entropy_bonus_that_could_not_train_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"entropy_coef=0\.1 needs LossInputs\.entropy with a gradient; .* entropy_gradient=True",
    ):
        ppo_clip_loss(make_inputs(entropy=row(1.0, 1.0, 1.0)), entropy_coef=0.1)
    with pytest.raises(ConfigError, match=r"entropy_coef=0\.1 needs the entropy of each position"):
        ppo_clip_loss(make_inputs(), entropy_coef=0.1)
    with pytest.raises(ConfigError, match=r"policy_entropy_fraction=0\.5 needs the entropy of each position"):
        ppo_clip_loss(make_inputs(), policy_entropy_fraction=0.5)
    for name in ("entropy_fraction", "policy_entropy_fraction"):
        with pytest.raises(ConfigError, match=rf"{name}=1\.5 must be above 0 and at most 1"):
            LOSSES["ppo_clip"](make_inputs(), **{name: 1.5})


def test_a_loss_asks_for_the_entropy_s_gradient_by_its_parameter():
    assert wants_entropy_gradient("ppo_clip", {"entropy_coef": 0.01})
    assert wants_entropy_gradient("ppo_clip", {"entropy_coef": -0.01})
    assert not wants_entropy_gradient("ppo_clip", {"entropy_coef": 0.0})
    assert not wants_entropy_gradient("ppo_clip", {"clip_low": 0.1})
    assert not wants_entropy_gradient("sft", {})
    assert wants_entropy_gradient(f"{__name__}:loss_with_entropy", {})
    assert not wants_entropy_gradient(f"{__name__}:loss_with_entropy", {"entropy_coef": 0})


def loss_with_entropy(inputs: LossInputs, *, unit: str, entropy_coef: float = 0.5) -> LossOutput:
    """A function of the user that has an entropy bonus by default."""
    return LossOutput(inputs.log_probs.sum(), 1.0, {})


# --- the others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RL_LOSSES)
def test_the_squared_gap_to_the_engine_is_added_to_every_loss(name):
    inputs = make_inputs(rollout_log_probs=row(*MU))
    plain, more = (
        LOSSES[name](inputs, unit="tokens"),
        LOSSES[name](inputs, unit="tokens", mu_penalty_coef=1.0),
    )
    assert float((more.sum - plain.sum).detach()) == pytest.approx(0.25 + 0.25 + 0.49)
    with pytest.raises(ConfigError, match=r"mu_penalty_coef=-1\.0 must not be negative"):
        LOSSES[name](inputs, unit="tokens", mu_penalty_coef=-1.0)


@pytest.mark.parametrize("name", RL_LOSSES)
def test_shared_parameters_are_known_before_the_run(name):
    check_loss_params(
        name, {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": "veto", "mu_penalty_coef": 1e-3}
    )
    with pytest.raises(ConfigError, match="no parameter 'entropy_coeff'; did you mean 'entropy_coef'"):
        check_loss_params(name, {"entropy_coeff": 0.1})
    if name in (
        "reinforce",
        "importance_sampling",
        "dppo",
        "dro",
    ):  # no ratio against old log-probs, so no cap
        with pytest.raises(ConfigError, match="no parameter 'importance_cap'"):
            check_loss_params(name, {"importance_cap": 2.0})
    else:
        check_loss_params(name, {"importance_cap": 2.0})


def test_effective_sample_sizes_and_chi_squared_merge_exactly():
    w = [math.exp(old - mu) for old, mu in zip(OLD, MU, strict=True)]
    inputs = make_inputs(rollout_log_probs=row(*MU))
    parts = [
        ppo_clip_loss(make_inputs(rollout_log_probs=row(*MU), mask=torch.tensor([mask])))
        for mask in ([True, False, False], [False, True, True], [False] * 3)
    ]
    whole, merged = (
        metric_values(ppo_clip_loss(inputs).metrics),
        metric_values(merge_metrics([part.metrics for part in parts])),
    )
    assert merged == pytest.approx(whole)
    assert whole["mismatch/ess"] == pytest.approx(0.974612193)
    assert whole["mismatch/chi2"] == pytest.approx(sum(x * x for x in w) / 3 - 1)
    assert EffectiveShare(0.0, 0.0, 0.0).value is None


# --- critic -------------------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    values, returns, old = row(0.9, 0.2).requires_grad_(), row(1.0, 0.0), row(0.5, 0.5)
    mask = torch.tensor([[True, True]])
    plain, clipped = (
        value_loss(values, returns, mask),
        value_loss(values, returns, mask, old_values=old, clip=0.2),
    )
    assert (float(plain.sum.detach()) / plain.count, float(clipped.sum.detach()) / clipped.count) == (
        pytest.approx(0.0125),
        pytest.approx(0.045),
    )
    assert grad_of(plain, values) == pytest.approx([-0.1, 0.2])
    assert grad_of(clipped, values) == [0.0, 0.0]  # .7 and .3 are farther from the returns than .9 and .2
    assert metric_values(clipped.metrics)["value/clip_ratio"] == 1.0
    inside = value_loss(values, returns, mask, old_values=row(0.8, 0.9), clip=0.2)
    assert grad_of(inside, values) == pytest.approx(
        [-0.1, 0.0]
    )  # the first is within .2 of .8; the second is held at .7
    assert "value/clip_ratio" not in plain.metrics


def test_explained_variance_of_the_critic_merges():
    values, returns = (
        torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 7.0]], dtype=torch.float64),
        torch.tensor([[1.5, 2.0, 3.0], [1.0, 0.0, 7.0]]),
    )
    mask = torch.tensor([[True, True, True], [True, True, False]])
    target, error = [1.5, 2.0, 3.0, 1.0, 0.0], [0.5, 0.0, -1.0, 1.0, -1.0]

    def variance(numbers: list[float]) -> float:
        mean = sum(numbers) / len(numbers)
        return sum((number - mean) ** 2 for number in numbers) / len(numbers)

    whole = value_loss(values, returns, mask).metrics
    parts = merge_metrics(
        [value_loss(values[rows], returns[rows], mask[rows]).metrics for rows in (slice(0, 1), slice(1, 2))]
    )
    expected = 1 - variance(error) / variance(target)
    assert metric_values(whole)["value/explained_variance"] == pytest.approx(expected)
    assert metric_values(parts) == pytest.approx(metric_values(whole))
    assert ExplainedVariance(2.0, 2.0, 2.0, 0.0, 0.0).value is None  # targets 1 and 1
    assert ExplainedVariance(0.0, 0.0, 0.0, 0.0, 0.0).value is None


@pytest.mark.parametrize("unit", ["tokens", "sequences", "sequence_sums", "constant"])
def test_value_loss_splits_exactly_and_leaves_garbage_alone(unit):
    generator = torch.Generator().manual_seed(3)
    values, returns, old = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(5, 4, generator=generator) < 0.6
    mask[2] = False
    values, returns, old = (
        torch.where(mask, tensor, torch.full_like(tensor, NAN)) for tensor in (values, returns, old)
    )
    values.requires_grad_()

    def run(rows: slice) -> LossOutput:
        return value_loss(values[rows], returns[rows], mask[rows], old_values=old[rows], clip=0.3, unit=unit)

    whole = run(slice(0, 5))
    parts = [run(slice(start, end)) for start, end in itertools.pairwise((0, 2, 3, 5))]
    total = torch.stack([part.sum for part in parts]).sum()
    grads = [torch.autograd.grad(one, [values])[0] for one in (whole.sum, total)]
    assert float(total.detach()) == pytest.approx(float(whole.sum.detach()), rel=1e-10)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=0)
    assert grads[0][~mask].tolist() == [0.0] * int((~mask).sum())
    assert sum(part.count for part in parts) == whole.count
    empty = run(slice(2, 3))
    assert (float(empty.sum.detach()), empty.count, empty.metrics) == (0.0, 0.0, {})


def test_value_loss_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(5)
    values, returns, old = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(3, 4, generator=generator) < 0.8
    for params in ({}, {"old_values": old, "clip": 0.4}):
        assert torch.autograd.gradcheck(
            lambda v, params=params: value_loss(v, returns, mask, **params).sum,
            (values.clone().requires_grad_(),),
        )


def test_value_loss_names_what_is_wrong():
    values, mask = row(1.0, 2.0), torch.tensor([[True, True]])
    with pytest.raises(ConfigError, match=r"clip=0\.0 of the value loss must be above 0"):
        value_loss(values, values, mask, old_values=values, clip=0.0)
    with pytest.raises(ConfigError, match=r"clip=0\.2 of the value loss needs old_values"):
        value_loss(values, values, mask, clip=0.2)
    with pytest.raises(
        ValueError, match=r"returns have shape \(1, 1\); it must be that of the mask, \(1, 2\)"
    ):
        value_loss(values, row(1.0), mask)
