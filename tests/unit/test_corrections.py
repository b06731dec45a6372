"""Corrections on the fixture of test_losses: old = [-1, -.5, -2], mu = [-1.2, -.4, -2.3], so w = exp(old -
mu) = [1.221403, .904837, 1.349859].
"""

from __future__ import annotations

import math
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts.errors import ConfigError, PlugInError
from rollouts.losses import CORRECTIONS, LossInputs, check_loss_params
from rollouts.losses.corrections import (
    combine_corrections,
    compute_loglinear_prox,
    parse_correction,
    renormalise_log_probs,
    token_mask,
    veto,
)
from rollouts.losses.rl_losses import (
    dppo_loss,
    dro_loss,
    gspo_loss,
    importance_sampling_loss,
    ppo_clip_loss,
    reinforce_loss,
)
from rollouts.types import metric_values

OLD, LP, MU = [-1.0, -0.5, -2.0], [-0.7, -0.9, -1.6], [-1.2, -0.4, -2.3]
W = [math.exp(old - mu) for old, mu in zip(OLD, MU, strict=True)]
CURRENT = [math.exp(lp - mu) for lp, mu in zip(LP, MU, strict=True)]
NAN, INFINITY = float("nan"), float("inf")


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def make_inputs(advantage: float = 1.0, **fields: Tensor | None) -> LossInputs:
    given: dict[str, Any] = {
        "log_probs": row(*LP), "old_log_probs": row(*OLD), "rollout_log_probs": row(*MU), "advantages": row(*[advantage] * 3)
    } | fields  # fmt: skip
    given.setdefault("mask", torch.ones(given["log_probs"].shape, dtype=torch.bool))
    return LossInputs(**given)


def weights(text: str, inputs: LossInputs | None = None) -> list[float]:
    return parse_correction(text)(make_inputs() if inputs is None else inputs)[0].tolist()


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token_tis", W),
        ("token_tis(cap=1.2)", [1.2, W[1], 1.2]),
        ("icepop(low=0.5, high=1.3)", [W[0], W[1], 0.0]),
        ("icepop(low=1.0,high=2)", [W[0], 0.0, W[2]]),
        ("sequence_tis", [1.491824698] * 3),  # exp(.2 - .1 + .3)
        ("sequence_tis(cap=1.25)", [1.25] * 3),
        ("token_mask(low=0.95, high=1.3)", [1.0, 0.0, 0.0]),
        ("geometric_mask", [0.0] * 3),  # exp(.4/3) = 1.142630812
        ("geometric_mask(low=0.5, high=1.1426309)", [1.0] * 3),
        ("geometric_mask(low=0.5, high=1.1426308)", [0.0] * 3),
        ("veto", [1.0] * 3),
        ("veto(floor=0.9)", [1.0] * 3),
        ("veto(floor=0.91)", [0.0] * 3),
        ("sequence_k1_mask(limit=0.1334)", [1.0] * 3),  # |-.133333|
        ("sequence_k1_mask(limit=0.1333)", [0.0] * 3),
        ("sequence_k3_mask(limit=0.02537)", [1.0] * 3),  # .025366
        ("sequence_k3_mask(limit=0.02536)", [0.0] * 3),
        ("token_tis(cap=1.2) * token_mask(low=0.95, high=9)", [1.2, 0.0, 1.2]),
        (" token_tis (cap = 1.3)*veto( floor=1e-4 )*sequence_k3_mask(limit=0.1) ", [W[0], W[1], 1.3]),
    ],
)
def test_weights_by_hand(text, expected):
    assert weights(text) == pytest.approx(expected, abs=1e-9)


def test_opsm_drops_bad_rows_that_the_policy_has_left():
    # mean of mu - lp = (-.5 + .5 - .7)/3 = -.233333
    assert weights("opsm", make_inputs(-1.0)) == [1.0] * 3
    left = make_inputs(-1.0, log_probs=row(-2.0, -0.9, -2.5))  # mean of mu - lp = (.8 + .5 + .2)/3 = .5
    assert weights("opsm(delta=0.49)", left) == [0.0] * 3
    assert weights("opsm(delta=0.51)", left) == [1.0] * 3
    assert weights("opsm(delta=0.49)", replace(left, advantages=row(1.0, 0.0, -1.0))) == [1.0, 1.0, 0.0]


def test_rows_are_judged_by_themselves_and_only_by_their_trained_tokens():
    old, mu = (
        torch.tensor([OLD, OLD, OLD], dtype=torch.float64),
        torch.tensor([MU, MU, MU], dtype=torch.float64),
    )
    mu[1, 2] = 20.0  # w = e^-22 on a token of the second row
    mask = torch.tensor([[True] * 3, [True] * 3, [False] * 3])
    inputs = LossInputs(
        log_probs=old, old_log_probs=old, rollout_log_probs=mu, advantages=-torch.ones_like(old), mask=mask
    )
    vetoed, kept, nothing = [0.0] * 3, [1.0] * 3, [1.0] * 3
    assert parse_correction("veto")(inputs).tolist() == [kept, vetoed, nothing]
    unmasked = replace(inputs, mask=torch.tensor([[True] * 3, [True, True, False], [False] * 3]))
    assert parse_correction("veto")(unmasked).tolist() == [kept, kept, nothing]
    for name in ("geometric_mask", "sequence_k1_mask", "sequence_k3_mask", "opsm"):
        assert parse_correction(name)(unmasked)[2].tolist() == nothing, name
    products = [[math.exp(0.4)] * 3, [math.exp(0.1)] * 3, [1.0] * 3]
    assert parse_correction("sequence_tis(cap=9)")(unmasked).tolist() == [
        pytest.approx(product) for product in products
    ]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_nan_is_never_hidden_by_a_mask_and_what_is_infinite_stays_finite(name):
    inputs = make_inputs(-1.0, log_probs=row(NAN, -0.9, -1.6), old_log_probs=row(NAN, -0.5, -2.0))
    assert reinforce_loss(inputs, correction=name).sum.isnan()
    far = make_inputs(-1.0, log_probs=row(-INFINITY, -0.9, -1.6), old_log_probs=row(-INFINITY, -0.5, -2.0))
    assert all(map(math.isfinite, weights(name, far)))


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_nan_of_the_engine_alone_is_not_hidden(name, advantage):
    """The ratio is against old, so mu counts in the correction only."""
    inputs = make_inputs(advantage, rollout_log_probs=row(NAN, *MU[1:]))
    assert ppo_clip_loss(inputs, correction=name).sum.isnan()
    outside = replace(inputs, mask=torch.tensor([[False, True, True]]))
    assert ppo_clip_loss(outside, correction=name).sum.isfinite()


# --- in a loss ----------------------------------------------------------------------------------------------


def test_a_named_correction_takes_the_place_of_the_truncated_weight():
    inputs = make_inputs()
    plain = [-1.2, -math.exp(-0.4), -1.2]
    out = ppo_clip_loss(inputs, importance_cap=1.0, correction="icepop(low=0.5, high=1.3)")
    assert float(out.sum) == pytest.approx(plain[0] * W[0] + plain[1] * W[1])
    out = ppo_clip_loss(inputs, correction=combine_corrections(token_mask, veto))
    assert float(out.sum) == pytest.approx(sum(plain))


def test_dropped_tokens_stay_in_the_denominator_and_are_counted():
    out = ppo_clip_loss(make_inputs(), correction="icepop(low=0.5, high=1.3)", unit="tokens")
    assert out.count == 3.0
    metrics = metric_values(out.metrics)
    assert metrics["importance_weight/dropped"] == pytest.approx(1 / 3)
    assert metrics["importance_weight/mean"] == pytest.approx((W[0] + W[1]) / 3)
    assert metrics["importance_weight/ess"] == pytest.approx(
        (W[0] + W[1]) ** 2 / (3 * (W[0] ** 2 + W[1] ** 2))
    )
    assert "importance_weight/capped" not in metrics


def test_a_dropped_token_is_dropped_whatever_it_holds():
    log_probs = row(-INFINITY, -0.9, -1.6).requires_grad_()
    out = reinforce_loss(make_inputs(log_probs=log_probs), correction="token_mask(low=0.1, high=10)")
    assert float(out.sum.detach()) == pytest.approx(0.9 + 1.6)
    out.sum.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0.0, -1.0, -1.0]]


@pytest.mark.parametrize("loss", [reinforce_loss, dro_loss])
def test_a_loss_without_a_ratio_weighs_the_policy_itself_against_the_engine(loss):
    for old in (row(*OLD), None):  # whether or not there are old log-probs
        log_probs = row(*LP).requires_grad_()
        inputs = make_inputs(log_probs=log_probs, old_log_probs=old)
        params = {"beta": 0.0} if loss is dro_loss else {}
        total = loss(inputs, correction="token_tis(cap=1.6)", **params).sum
        (grad,) = torch.autograd.grad(total, [log_probs])
        assert grad[0].tolist() == pytest.approx([-min(w, 1.6) for w in CURRENT])


def test_without_old_log_probs_masks_judge_the_policy_and_weights_are_refused():
    inputs = make_inputs(old_log_probs=None)
    assert weights("token_mask(low=0.9, high=1.7)", inputs) == [
        1.0,
        0.0,
        0.0,
    ]  # exp(lp - mu) = 1.648721, .606531, 2.013753
    for name in ("token_tis", "icepop", "sequence_tis"):
        for loss in (ppo_clip_loss, gspo_loss):
            with pytest.raises(
                ConfigError,
                match=(
                    rf"{name!r} weighs by exp\(old - mu\) and there are no old log-probs.*rl\.recompute_old"
                ),
            ):
                loss(inputs, correction=name)


@pytest.mark.parametrize("loss", [importance_sampling_loss, dppo_loss])
def test_a_ratio_against_the_engine_is_never_weighted_twice(loss):
    with pytest.raises(ConfigError, match="there are no old log-probs"):
        loss(make_inputs(), correction="token_tis")
    kept = loss(
        make_inputs(),
        correction="token_mask(low=0.9, high=1.7)",
        **({"tv_high": 1.0} if loss is dppo_loss else {}),
    )
    assert float(kept.sum) == pytest.approx(-CURRENT[0])


def test_weights_carry_no_gradient():
    log_probs, old = row(*LP).requires_grad_(), row(*OLD).requires_grad_()
    total = ppo_clip_loss(
        make_inputs(-1.0, log_probs=log_probs, old_log_probs=old), correction="token_tis * opsm(delta=9)"
    ).sum
    total.backward()
    assert old.grad is None
    assert log_probs.grad is not None
    ratio = [math.exp(lp - o) for lp, o in zip(LP, OLD, strict=True)]
    assert log_probs.grad[0].tolist() == pytest.approx([ratio[0] * W[0], 0.0, ratio[2] * W[2]])
    with pytest.raises(
        ConfigError, match=r"weights of shape \(1, 3\), with a gradient; it must give \(1, 3\), detached"
    ):
        ppo_clip_loss(
            make_inputs(log_probs=row(*LP).requires_grad_()), correction=lambda inputs: inputs.log_probs.exp()
        )
    with pytest.raises(ConfigError, match=r"weights of shape \(1, 1\); it must give \(1, 3\)"):
        ppo_clip_loss(make_inputs(), correction=lambda inputs: torch.ones(1, 1))


# --- by name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tis", "'tis' is not known; corrections are token_tis, icepop"),
        ("token_tis(cap)", r"'cap' in 'token_tis\(cap\)' is not name=number"),
        ("token_tis(cap=big)", "is not name=number"),
        ("token_tis(limit=2)", r"takes no 'limit'; it takes cap"),
        ("token_tis +", "is not understood"),
        ("token_tis * ", "'' is not understood"),
        ("token_tis(cap=2) veto", "is not understood"),
    ],
)
def test_a_text_that_is_not_understood_is_refused_before_the_run(text, match):
    with pytest.raises(ConfigError, match=match):
        check_loss_params("ppo_clip", {"correction": text})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("token_tis(cap=0)", r"importance_cap=0\.0 must be above 0"),
        ("sequence_tis(cap=-1)", r"cap=-1\.0 of sequence_tis must be above 0"),
        ("icepop(low=2, high=1)", r"low=2\.0, high=1\.0 of icepop"),
        ("token_mask(low=-1)", r"low=-1\.0, high=2\.0 of token_mask"),
        ("geometric_mask(high=0.5)", r"low=0\.99, high=0\.5 of geometric_mask"),
        ("veto(floor=0)", r"floor=0\.0 of veto must lie between 0 and 1"),
        ("sequence_k1_mask(limit=-1)", r"the limit of sequence_k1_mask is -1\.0 nats"),
        ("sequence_k3_mask(limit=-1)", r"the limit of sequence_k3_mask is -1\.0 nats"),
        ("opsm(delta=-1)", r"the limit of opsm is -1\.0 nats"),
    ],
)
def test_numbers_that_break_a_rule_are_refused_by_name(text, match):
    with pytest.raises(ConfigError, match=match):
        check_loss_params("ppo_clip", {"correction": text})


def test_a_function_of_the_user_is_a_factor(monkeypatch):
    plug_in = types.ModuleType("a_correction")
    plug_in.halve = lambda inputs, *, by=2.0: torch.full_like(inputs.log_probs, 1 / by)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_correction", plug_in)
    assert weights("a_correction:halve(by=4) * token_tis(cap=1)") == pytest.approx([0.25, 0.25 * W[1], 0.25])
    with pytest.raises(PlugInError, match="correction='a_correction:no_such' cannot be imported"):
        weights("a_correction:no_such")


# --- log-probs ----------------------------------------------------------------------------------------------


def test_a_kept_set_is_renormalised_and_equal_models_have_ratio_one():
    """The engine samples from the first two of four tokens, which hold .895 of the mass; the trainer has the
    same weights.
    """
    logits = torch.tensor([0.6, 0.295, 0.08, 0.025], dtype=torch.float64).log().requires_grad_()
    engine = math.log(0.6 / 0.895)
    everything = torch.log_softmax(logits, -1)
    assert float((everything[0].detach() - engine).exp()) == pytest.approx(0.895)
    kept = renormalise_log_probs(everything[:1][None], everything[:2].exp().sum()[None, None])
    assert float((kept.detach() - engine).exp()) == pytest.approx(1.0)
    kept.sum().backward()  # the gradient of a softmax over the kept two alone
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0.295 / 0.895, -0.295 / 0.895, 0.0, 0.0], abs=1e-12)


def test_old_log_probs_between_engine_and_policy_by_version():
    lp = row(*LP).requires_grad_()
    versions = torch.tensor([[1, 1, 1]])
    prox = compute_loglinear_prox(lp, row(*MU), sampled_version=versions, old_version=3, version=4)
    assert prox[0].tolist() == pytest.approx([-0.866667, -0.733333, -1.833333], abs=1e-6)  # alpha = 2/3
    assert not prox.requires_grad
    mixed = compute_loglinear_prox(
        lp, row(*MU), sampled_version=torch.tensor([[3, 4, 2]]), old_version=3, version=4
    )
    assert mixed[0].tolist() == pytest.approx([MU[0], MU[1], (MU[2] + LP[2]) / 2])  # alpha = 0, current, 1/2
    with pytest.raises(ConfigError, match="old_version=5 is above version=4"):
        compute_loglinear_prox(lp, row(*MU), sampled_version=versions, old_version=5, version=4)
