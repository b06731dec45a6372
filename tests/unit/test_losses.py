"""Losses against numbers worked by hand, slow float64 versions beside them, and what their gradients must do.

Fixture: old = [-1, -.5, -2], lp = [-.7, -.9, -1.6], mu = [-1.2, -.4, -2.3], ref = [-1.1, -.6, -1.5],
so r = exp(lp - old) = [1.349859, .670320, 1.491825] and w = exp(old - mu) = [1.221403, .904837, 1.349859].
"""

from __future__ import annotations

import itertools
import math
import sys
import types

import pytest
import torch
from torch import Tensor

from rollouts.errors import ConfigError, PlugInError
from rollouts.losses import KL_ESTIMATORS, LOSSES, LossInputs, LossOutput, check_loss_params, resolve_loss
from rollouts.losses.corrections import compute_ess_fraction, compute_truncated_weights
from rollouts.losses.kl import compute_kl_penalty
from rollouts.losses.ratios import compute_sequence_ratio, compute_token_ratio
from rollouts.losses.reductions import collect_token_metrics, reduce_loss
from rollouts.losses.rl_losses import (
    cispo_loss,
    gspo_loss,
    importance_sampling_loss,
    ppo_clip_loss,
    reinforce_loss,
)
from rollouts.losses.sft import sft_loss
from rollouts.types import merge_metrics, metric_values

OLD, LP, MU, REF = [-1.0, -0.5, -2.0], [-0.7, -0.9, -1.6], [-1.2, -0.4, -2.3], [-1.1, -0.6, -1.5]
RL_LOSSES = [name for name in LOSSES if name not in ("sft", "value", "linear")]
WHOLE_BATCH = {  # the choice of tokens by covariance does not depend on the micro-batch
    "clip_cov": {"cov_fraction": 1.0, "cov_low": 0.1, "log_prob_mean": 0.0, "advantage_mean": 0.0},
    "kl_cov": {"cov_fraction": 1.0, "cov_low": 0.1, "log_prob_mean": 0.0, "advantage_mean": 0.0},
}
NAN = float("nan")


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def make_inputs(advantage: float = 1.0, **fields: Tensor | None) -> LossInputs:
    """Three trained tokens of the fixture, ratio against `old_log_probs`; a field given as None is left out."""
    given: dict = {
        "log_probs": row(*LP),
        "advantages": torch.full((1, 3), advantage, dtype=torch.float64),
        "old_log_probs": row(*OLD),
    } | fields
    given.setdefault("mask", torch.ones_like(given["log_probs"], dtype=torch.bool))
    return LossInputs(**given)


def token_values(loss, inputs: LossInputs, **params) -> list[float]:
    """The loss of each token alone, by masking all others out."""
    values = []
    for position in range(inputs.mask.shape[1]):
        mask = torch.zeros_like(inputs.mask)
        mask[:, position] = True
        fields = {
            name: getattr(inputs, name)
            for name in ("log_probs", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")
        }
        values.append(float(loss(LossInputs(mask=mask, **fields), unit="tokens", **params).sum))
    return values


def gradient(loss, inputs: LossInputs, **params) -> list[float]:
    log_probs = inputs.log_probs.clone().requires_grad_()
    fields = {
        name: getattr(inputs, name)
        for name in ("mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy")
    }
    loss(LossInputs(log_probs=log_probs, **fields), **({"unit": "tokens"} | params)).sum.backward()
    assert log_probs.grad is not None
    return log_probs.grad[0].tolist()


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "params", "advantage", "expected"),
    [
        (reinforce_loss, {}, 1.0, [0.7, 0.9, 1.6]),
        (reinforce_loss, {}, -1.0, [-0.7, -0.9, -1.6]),
        (ppo_clip_loss, {"clip_high": 0.28}, 1.0, [-1.28, -0.670320046, -1.28]),
        (ppo_clip_loss, {"clip_high": 0.28}, -1.0, [1.349858808, 0.8, 1.491824698]),
        (cispo_loss, {}, 1.0, [0.944901165, 0.603288041, 2.386919516]),
        (cispo_loss, {"ratio_high": 1.28}, 1.0, [0.896, 0.603288041, 2.048]),
        (cispo_loss, {}, -1.0, [-0.944901165, -0.603288041, -2.386919516]),
    ],
)
def test_token_losses_match_the_numbers_worked_by_hand(loss, params, advantage, expected):
    assert token_values(loss, make_inputs(advantage), **params) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_importance_sampling_is_against_the_engine_even_when_old_log_probs_are_given(sign):
    inputs = make_inputs(sign, rollout_log_probs=row(*MU))
    expected = [-sign * math.exp(lp - mu) for lp, mu in zip(LP, MU, strict=True)]
    assert expected == pytest.approx([-sign * 1.648721271, -sign * 0.606530660, -sign * 2.013752707])
    assert token_values(importance_sampling_loss, inputs) == pytest.approx(expected)


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_takes_its_gradient():
    inputs = make_inputs(-1.0, log_probs=row(math.log(4.0), 0.0, 0.0), old_log_probs=row(0.0, 0.0, 0.0))
    assert token_values(ppo_clip_loss, inputs) == pytest.approx([4.0, 1.0, 1.0])
    assert token_values(ppo_clip_loss, inputs, dual_clip=3.0) == pytest.approx([3.0, 1.0, 1.0])
    assert gradient(ppo_clip_loss, inputs, dual_clip=3.0) == pytest.approx([0.0, 1.0, 1.0])
    assert metric_values(ppo_clip_loss(inputs, dual_clip=3.0).metrics)["clip_ratio/dual"] == pytest.approx(
        1 / 3
    )


def test_gspo_clips_one_ratio_per_sequence():
    # s = exp((.3 - .4 + .4) / 3) = exp(.1) = 1.105170918
    assert float(gspo_loss(make_inputs(1.0)).sum) == pytest.approx(-1.0004)
    assert float(gspo_loss(make_inputs(-1.0)).sum) == pytest.approx(1.105170918)
    assert float(gspo_loss(make_inputs(-1.0), unit="tokens").sum) == pytest.approx(3 * 1.105170918)


def test_sft_is_the_negative_log_likelihood():
    out = sft_loss(make_inputs())
    assert (float(out.sum), out.count) == (pytest.approx(3.2), 3.0)
    nll = metric_values(out.metrics)["loss/nll"]
    assert math.exp(nll) == pytest.approx(2.905677747)
    assert gradient(sft_loss, make_inputs()) == [-1.0, -1.0, -1.0]


def test_truncated_weights_multiply_the_loss_when_old_and_engine_log_probs_are_both_there():
    inputs = make_inputs(1.0, rollout_log_probs=row(*MU))
    assert token_values(ppo_clip_loss, inputs, clip_high=0.28) == pytest.approx(
        [-1.563396, -0.606531, -1.727819], abs=1e-6
    )
    assert token_values(ppo_clip_loss, inputs, clip_high=0.28, importance_cap=1.2)[0] == pytest.approx(
        -1.28 * 1.2
    )


def test_without_old_log_probs_the_ratio_is_against_the_engine_and_no_weight_is_taken():
    against_engine = make_inputs(1.0, old_log_probs=None, rollout_log_probs=row(*OLD))
    out = ppo_clip_loss(against_engine)
    assert float(out.sum) == float(ppo_clip_loss(make_inputs(1.0)).sum)
    assert not any(name.startswith("importance_weight") for name in out.metrics)


@pytest.mark.parametrize(
    ("estimator", "kl"), [("k2", [0.08, 0.045, 0.005]), ("k3", [0.070320046, 0.049858808, 0.005170918])]
)
def test_the_kl_term_is_added_per_token(estimator, kl):
    plain, with_kl = make_inputs(), make_inputs(ref_log_probs=row(*REF))
    difference = [
        b - a
        for a, b in zip(
            token_values(ppo_clip_loss, plain),
            token_values(ppo_clip_loss, with_kl, kl_coef=0.5, kl_estimator=estimator),
            strict=True,
        )
    ]
    assert difference == pytest.approx([0.5 * value for value in kl], abs=1e-8)


def slow_loss(name: str, lp: list, old: list, mu: list, advantage: list, mask: list) -> float:
    """Token sum over all rows, one number at a time; old and mu both given."""
    total = 0.0
    for lps, olds, mus, advs, keep in zip(lp, old, mu, advantage, mask, strict=True):
        kept = [t for t in range(len(lps)) if keep[t]]
        mean = sum(lps[t] - olds[t] for t in kept) / max(len(kept), 1)
        geometric = {
            True: math.exp(sum(min(lps[t] - olds[t], 0.4) for t in kept) / max(len(kept), 1)),
            False: math.exp(sum(max(lps[t] - olds[t], -0.4) for t in kept) / max(len(kept), 1)),
        }
        for t in kept:
            r, s, a, w = (
                math.exp(lps[t] - olds[t]),
                math.exp(mean),
                advs[t],
                min(math.exp(olds[t] - mus[t]), 2.0),
            )
            tau, cov, moved = (1.0 if a > 0 else 1.05), lps[t] * a, math.exp(lps[t]) - math.exp(mus[t])
            ppo = -min(r * a, min(max(r, 0.8), 1.2) * a)
            total += {
                "ppo_clip": ppo * w,
                "importance_sampling": -math.exp(lps[t] - mus[t]) * a,
                "reinforce": -lps[t] * a,
                "cispo": -min(max(r, 0.0), 5.0) * a * lps[t] * w,
                "gspo": -min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a) * w,
                "gspo_token": -min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a) * w,
                "gmpo": -a * geometric[a > 0] * w,
                "sapo": -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * a * w,
                "dppo": 0.0 if abs(moved) > 0.2 and moved * a > 0 else -math.exp(lps[t] - mus[t]) * a,
                "dro": -a * lps[t] + 0.025 * (lps[t] - mus[t]) ** 2,
                "clip_cov": 0.0 if 0.1 < cov < 5.0 and (r <= 1.2 if a > 0 else r >= 0.8) else ppo * w,
                "kl_cov": (-r * a + (abs(lps[t] - olds[t]) if cov > 0.1 else 0.0)) * w,
            }[name]
    return total


@pytest.mark.parametrize("name", RL_LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_random_batches_match_the_slow_version(name, seed):
    generator = torch.Generator().manual_seed(seed)
    lp, old, mu = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    # one sign a row, for gmpo clips by it
    advantages = torch.rand(4, 6, generator=generator, dtype=torch.float64) * torch.tensor(
        [[1.0], [-1.0], [2.0], [1.0]]
    )
    mask = torch.rand(4, 6, generator=generator) < 0.6
    mask[3] = False
    inputs = LossInputs(
        log_probs=lp, old_log_probs=old, rollout_log_probs=mu, advantages=advantages, mask=mask
    )
    expected = slow_loss(name, lp.tolist(), old.tolist(), mu.tolist(), advantages.tolist(), mask.tolist())
    out = LOSSES[name](inputs, unit="tokens", **WHOLE_BATCH.get(name, {}))
    assert float(out.sum) == pytest.approx(expected, rel=1e-10)
    assert out.count == float(mask.sum())


# --- gradients ----------------------------------------------------------------------------------------------


def test_ppo_gradient_is_exactly_zero_on_clipped_tokens_and_only_there():
    # A > 0: r = [1.35, .67, 1.49] is clipped above 1.2; A < 0: below .8
    grads = gradient(ppo_clip_loss, make_inputs(1.0))
    assert grads[0] == 0.0
    assert grads[2] == 0.0
    assert grads[1] == pytest.approx(-0.670320046)
    grads = gradient(ppo_clip_loss, make_inputs(-1.0))
    assert grads[1] == 0.0
    assert [grads[0], grads[2]] == pytest.approx([1.349858808, 1.491824698])


def test_cispo_keeps_the_gradient_of_tokens_that_ppo_clips():
    # weight min(r, 1.28) times -A
    assert gradient(cispo_loss, make_inputs(1.0), ratio_high=1.28) == pytest.approx(
        [-1.28, -0.670320046, -1.28]
    )


def test_on_policy_all_losses_share_one_gradient():
    for advantage in (1.0, -2.0):
        inputs = make_inputs(advantage, log_probs=row(*OLD), rollout_log_probs=row(*OLD))
        sequences = {
            "gspo",
            "gmpo",
        }  # whose unit's gradient is spread over the row: -A for a row of one token, and in sum
        for name in RL_LOSSES:
            expected = [-advantage / 3] * 3 if name in sequences else [-advantage] * 3
            assert gradient(
                LOSSES[name], inputs, unit="sequences" if name in sequences else "tokens"
            ) == pytest.approx(expected), name
        single = make_inputs(
            advantage,
            log_probs=row(-1.0),
            old_log_probs=row(-1.0),
            rollout_log_probs=row(-1.0),
            advantages=row(advantage),
        )
        for name in RL_LOSSES:
            assert gradient(LOSSES[name], single, unit="sequences") == pytest.approx([-advantage]), name


def test_gspo_spreads_one_gradient_evenly_over_its_sequence():
    grads = gradient(gspo_loss, make_inputs(-1.0), unit="sequences")
    assert grads == pytest.approx([1.105170918 / 3] * 3)


def test_truncated_weights_carry_no_gradient_and_scale_the_rest():
    plain = gradient(ppo_clip_loss, make_inputs(-1.0))
    weighted = gradient(ppo_clip_loss, make_inputs(-1.0, rollout_log_probs=row(*MU)))
    assert weighted == pytest.approx(
        [grad * min(math.exp(old - mu), 2.0) for grad, old, mu in zip(plain, OLD, MU, strict=True)]
    )


def test_gradients_agree_with_finite_differences():
    inputs = make_inputs(-1.0, rollout_log_probs=row(*MU), ref_log_probs=row(*REF))
    log_probs = row(*LP).requires_grad_()
    for estimator in ("k2", "k3"):

        def value(values: Tensor, estimator: str = estimator) -> Tensor:
            fields = {
                name: getattr(inputs, name)
                for name in ("mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")
            }
            return ppo_clip_loss(
                LossInputs(log_probs=values, **fields), kl_coef=0.3, kl_estimator=estimator
            ).sum

        assert torch.autograd.gradcheck(value, (log_probs,))


def test_expected_kl_gradients_are_none_reverse_and_forward():
    # over three actions p = softmax(z), q; the gradient of E_{x~p}[k(x)] used as a loss on samples: sum_x
    # p(x) * dk(x)/dz
    p, q = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64),
    )
    kl = float((p * (p / q).log()).sum())
    expected = {"k1": [0.0] * 3, "k2": (p * ((p / q).log() - kl)).tolist(), "k3": (p - q).tolist()}
    assert kl == pytest.approx(0.025267154)
    for name, estimator in KL_ESTIMATORS.items():
        logits = p.log().clone().requires_grad_()
        values = estimator(torch.log_softmax(logits, dim=0), q.log())
        (p * values).sum().backward()
        assert logits.grad is not None
        assert logits.grad.tolist() == pytest.approx(expected[name], abs=1e-12), name
    means = {
        name: float((p * estimator(p.log(), q.log())).sum()) for name, estimator in KL_ESTIMATORS.items()
    }
    assert means == pytest.approx({"k1": 0.025267154, "k2": 0.024862407, "k3": 0.025267154})


@pytest.mark.parametrize("name", [*RL_LOSSES, "sft"])
@pytest.mark.parametrize("unit", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize("garbage", [NAN, float("inf"), -float("inf")])
def test_masked_tokens_get_no_gradient_and_no_garbage_leaks(name, unit, garbage):
    def padded(values: list[float]) -> Tensor:
        return torch.tensor([[garbage, *values], [garbage] * 4], dtype=torch.float64)

    mask = torch.tensor([[False, True, True, True], [False] * 4])
    fields = {
        "old_log_probs": OLD,
        "rollout_log_probs": MU,
        "ref_log_probs": REF,
        "entropy": [1.0, 2.0, 3.0],
        "advantages": [1.0, -1.0, 0.5],
    }
    dirty = LossInputs(
        log_probs=padded(LP), mask=mask, **{key: padded(values) for key, values in fields.items()}
    )
    clean = make_inputs(log_probs=row(*LP), **{key: row(*values) for key, values in fields.items()})
    params = {"kl_coef": 0.1} if name == "ppo_clip" else {}
    dirty_out, clean_out = LOSSES[name](dirty, unit=unit, **params), LOSSES[name](clean, unit=unit, **params)
    assert float(dirty_out.sum) == pytest.approx(float(clean_out.sum))
    assert (dirty_out.count, metric_values(dirty_out.metrics)) == (
        clean_out.count,
        pytest.approx(metric_values(clean_out.metrics)),
    )
    log_probs = dirty.log_probs.clone().requires_grad_()
    LOSSES[name](
        LossInputs(log_probs=log_probs, mask=mask, **{key: padded(v) for key, v in fields.items()}),
        unit=unit,
        **params,
    ).sum.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[~mask].tolist() == [0.0] * 5
    assert log_probs.grad[0, 1:].tolist() == pytest.approx(gradient(LOSSES[name], clean, unit=unit, **params))


@pytest.mark.parametrize("name", [*RL_LOSSES, "sft"])
def test_a_nan_inside_the_mask_is_not_hidden(name):
    inputs = make_inputs(log_probs=row(NAN, -0.9, -1.6), rollout_log_probs=row(*MU))
    assert math.isnan(float(LOSSES[name](inputs, unit="tokens").sum))


@pytest.mark.parametrize("name", [name for name in RL_LOSSES if name not in ("reinforce", "dro")])
def test_a_ratio_beyond_float_range_gives_finite_gradients(name):
    inputs = LossInputs(
        log_probs=torch.tensor([[-0.1, -400.0]]),
        mask=torch.ones(1, 2, dtype=torch.bool),
        advantages=torch.tensor([[1.0, 1.0]]),
        rollout_log_probs=torch.tensor([[-300.0, -0.1]]),
    )
    assert all(map(math.isfinite, gradient(LOSSES[name], inputs)))


def test_a_far_away_reference_gives_a_finite_k3_term():
    log_probs = torch.tensor([[-200.0]], requires_grad=True)
    compute_kl_penalty(log_probs, torch.tensor([[-0.1]]), "k3").sum().backward()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


# --- units and metrics --------------------------------------------------------------------------------------


def test_units_divide_by_what_they_say():
    # losses [3] and [1, 1, 4]: token mean 9/4, sequence mean of token means 5/2
    losses = torch.tensor([[3.0, NAN, NAN], [1.0, 1.0, 4.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    # sequence mean of token sums 9/2; Dr. GRPO's constant, 2 rows of at most 8 tokens, 9/16; token sum: a
    # constant of 1
    units = ("tokens", "constant", "sequences", "sequence_sums")
    assert [
        (float(total), count) for total, count in (reduce_loss(losses, mask, unit) for unit in units)
    ] == [
        (9.0, 4.0),
        (9.0, 4.0),
        (5.0, 2.0),
        (9.0, 2.0),
    ]
    with pytest.raises(ConfigError, match="'tokens', 'sequences', 'sequence_sums' or 'constant'"):
        reduce_loss(losses, mask, "rows")


def test_nothing_to_train_gives_zero_with_a_zero_gradient():
    for name in [*RL_LOSSES, "sft"]:
        inputs = make_inputs(rollout_log_probs=row(*MU), mask=torch.zeros(1, 3, dtype=torch.bool))
        out = LOSSES[name](inputs, unit="sequences")
        assert (float(out.sum), out.count, out.metrics) == (0.0, 0.0, {}), name
        assert gradient(LOSSES[name], inputs) == [0.0] * 3


@pytest.mark.parametrize("name", [*RL_LOSSES, "sft"])
@pytest.mark.parametrize("unit", ["tokens", "sequences", "sequence_sums", "constant"])
def test_micro_batches_add_up_to_the_whole_batch(name, unit):
    generator = torch.Generator().manual_seed(1)
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "ref_log_probs", "entropy")
    fields = {key: torch.randn(5, 4, generator=generator, dtype=torch.float64) for key in names}
    fields |= {key: fields[key].requires_grad_() for key in ("log_probs", "entropy")}
    mask = torch.rand(5, 4, generator=generator) < 0.5
    params: dict = {} if name == "sft" else {
        "correction": "token_tis(cap=1.5) * geometric_mask(low=0.4, high=2.0) * veto(floor=0.05) * opsm(delta=0.2)",
        "kl_coef": 0.1, "kl_importance": True, "kl_estimator": "k3",
        "entropy_coef": 0.02, "entropy_fraction": 0.5, "policy_entropy_fraction": 0.7, "mu_penalty_coef": 0.03,
    }  # fmt: skip
    if name in ("importance_sampling", "dppo"):  # whose ratio takes no weight
        params["correction"] = "token_mask(low=0.4, high=2.0) * sequence_k3_mask(limit=1.0)"
    params |= WHOLE_BATCH.get(name, {})

    def run(rows: slice, width: int = 4) -> LossOutput:
        padding = torch.full((len(mask[rows]), width - 4), NAN, dtype=torch.float64)
        padded = {key: torch.cat([value[rows], padding], dim=1) for key, value in fields.items()}
        return LOSSES[name](
            LossInputs(mask=torch.cat([mask[rows], padding > 0], dim=1), **padded), unit=unit, **params
        )

    def grads(total: Tensor) -> list[Tensor]:
        inputs = [fields["log_probs"], fields["entropy"]]
        return list(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))

    whole = run(slice(0, 5))
    whole_grads = grads(whole.sum)
    assert torch.count_nonzero(whole_grads[0]) > 3
    for cuts in ((0, 1, 4, 5), (0, 1, 2, 3, 4, 5), (0, 3, 5)):
        parts = [run(slice(start, end), width=4 + end) for start, end in itertools.pairwise(cuts)]
        total = torch.stack([part.sum for part in parts]).sum()
        assert float(total.detach()) == pytest.approx(float(whole.sum.detach()), rel=1e-10, abs=1e-12)
        for one, other in zip(grads(total), whole_grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        assert sum(part.count for part in parts) == whole.count
        assert metric_values(merge_metrics([part.metrics for part in parts])) == pytest.approx(
            metric_values(whole.metrics), abs=1e-12
        )


def test_metrics_say_what_happened():
    inputs = make_inputs(1.0, rollout_log_probs=row(*MU), ref_log_probs=row(*REF), entropy=row(0.5, 1.0, 1.5))
    metrics = metric_values(ppo_clip_loss(inputs, importance_cap=1.3).metrics)
    weights = [1.221402758, 0.904837418, 1.3]
    log_weights = [old - mu for old, mu in zip(OLD, MU, strict=True)]
    k3 = [math.exp(w) - w - 1 for w in log_weights]
    assert metrics == pytest.approx(
        {
            "clip_ratio": 2 / 3,
            "clip_ratio/low": 0.0,
            "clip_ratio/high": 2 / 3,
            "ratio/mean": (1.349858808 + 0.670320046 + 1.491824698) / 3,
            "ratio/max": 1.491824698,
            "kl/ref": (0.4 - 0.3 - 0.1) / 3,
            "mismatch_kl/mean": sum(k3) / 3,
            "mismatch_kl/max": max(k3),
            "mismatch/logprob_abs_diff": 0.2,
            "mismatch/k1": -0.4 / 3,
            "mismatch/chi2": sum(math.exp(2 * w) for w in log_weights) / 3 - 1,
            "mismatch/ess": 0.974612193,
            "mismatch/prob_abs_diff/max": math.exp(-1.0) - math.exp(-1.2),
            "approx_kl/mean": sum(math.exp(d) - 1 - d for d in (0.3, -0.4, 0.4)) / 3,
            "importance_weight/ess": sum(weights) ** 2 / (3 * sum(w * w for w in weights)),
            "importance_weight/mean": sum(weights) / 3,
            "importance_weight/mean_square": sum(w * w for w in weights) / 3,
            "importance_weight/capped": 1 / 3,
            "importance_weight/max": 1.3,
            "entropy/mean": 1.0,
        },
        abs=1e-8,
    )


def test_mismatch_is_measured_on_the_policy_itself_when_old_is_the_engine():
    inputs = make_inputs(1.0, old_log_probs=None, rollout_log_probs=row(*MU))
    differences = [lp - mu for lp, mu in zip(LP, MU, strict=True)]
    metrics = metric_values(ppo_clip_loss(inputs).metrics)
    assert metrics["mismatch_kl/mean"] == pytest.approx(sum(math.exp(d) - d - 1 for d in differences) / 3)


def test_effective_sample_size_of_the_fixture():
    weights = compute_truncated_weights(row(*OLD), row(*MU), 2.0)
    assert weights[0].tolist() == pytest.approx([1.221402758, 0.904837418, 1.349858808])
    assert compute_ess_fraction(float(weights.mean()), float(weights.square().mean())) == pytest.approx(
        0.974612193
    )
    assert compute_ess_fraction(0.0, 0.0) == 0.0


def test_bool_metrics_are_shares():
    values = torch.tensor([[True, False, True]])
    metrics = collect_token_metrics({"share": values}, {}, torch.tensor([[True, True, False]]))
    assert metric_values(metrics) == {"share": 0.5}


def test_ratios_of_a_row_without_tokens_are_one():
    assert compute_sequence_ratio(row(*LP), row(*OLD), torch.zeros(1, 3, dtype=torch.bool)).tolist() == [
        [1.0]
    ]
    assert compute_token_ratio(row(0.0), row(0.0)).tolist() == [[1.0]]


# --- errors and names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RL_LOSSES)
def test_a_loss_names_the_field_that_the_batch_lacks(name):
    with pytest.raises(ConfigError, match=f"'{name}' needs advantages"):
        LOSSES[name](make_inputs(advantages=None, rollout_log_probs=row(*MU)), unit="tokens")


def test_a_ratio_needs_something_to_compare_with():
    bare = make_inputs(old_log_probs=None)
    for name in sorted(set(RL_LOSSES) - {"importance_sampling", "dppo", "dro", "reinforce"}):
        with pytest.raises(ConfigError, match=f"'{name}' needs log-probs to compare with"):
            LOSSES[name](bare, unit="tokens")
    for name in ("importance_sampling", "dppo", "dro"):
        with pytest.raises(
            ConfigError,
            match=rf"'{name}' needs the engine's log-probs .* fill RolloutBatch\.rollout_log_probs",
        ):
            LOSSES[name](bare, unit="tokens")


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"kl_coef": 0.1}, "needs ref_log_probs"),
        ({"kl_coef": -0.1}, "kl_coef=-0.1"),
        ({"clip_low": 0.0}, "clip_low=0.0"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": -0.2}, "clip_high=-0.2"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
    ],
)
def test_ppo_refuses_numbers_that_break_its_rules(params, match):
    with pytest.raises(ConfigError, match=match):
        ppo_clip_loss(make_inputs(), **params)


def test_other_parameters_that_break_a_rule_are_refused():
    with pytest.raises(ConfigError, match=r"ratio_low=2\.0, ratio_high=1\.0"):
        cispo_loss(make_inputs(), ratio_low=2.0, ratio_high=1.0)
    with pytest.raises(ConfigError, match=r"importance_cap=0\.0"):
        ppo_clip_loss(make_inputs(rollout_log_probs=row(*MU)), importance_cap=0.0)
    for estimator, match in (("k1", "expected gradient of zero"), ("k4", "takes 'k2' or 'k3'")):
        with pytest.raises(ConfigError, match=match):
            ppo_clip_loss(make_inputs(ref_log_probs=row(*REF)), kl_coef=0.1, kl_estimator=estimator)


def test_a_field_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"LossInputs.advantages has shape \(1, 2\)"):
        reinforce_loss(make_inputs(advantages=row(1.0, 1.0)))


def test_losses_resolve_by_key_and_by_module_and_name_the_nearest():
    assert resolve_loss("cispo") is cispo_loss
    assert resolve_loss("rollouts.losses.sft:sft_loss") is sft_loss
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        resolve_loss("ppo-clip")
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        resolve_loss("sftt")


@pytest.mark.parametrize(
    "name", ["no_such_module:f", "rollouts.losses.sft:no_such", ":f", "rollouts.losses.ratios:MAX_LOG_RATIO"]
)
def test_a_plug_in_that_does_not_import_or_is_no_function_is_refused(name):
    with pytest.raises(PlugInError, match="loss="):
        resolve_loss(name)


def test_parameters_are_checked_against_the_signature(monkeypatch):
    check_loss_params("ppo_clip", {"clip_high": 0.3, "dual_clip": 3.0})
    with pytest.raises(ConfigError, match="no parameter 'cliphigh'; did you mean 'clip_high'"):
        check_loss_params("ppo_clip", {"cliphigh": 0.3})
    with pytest.raises(ConfigError, match="it takes none"):
        check_loss_params("sft", {"clip_high": 0.3})
    plug_in = types.ModuleType("a_plug_in")
    plug_in.free = lambda inputs, **params: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_plug_in", plug_in)
    check_loss_params("a_plug_in:free", {"anything": 1})
