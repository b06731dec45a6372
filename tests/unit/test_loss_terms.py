"""Terms, corrections, KL and refusals of the losses, on the fixture of test_losses."""

import math
import tomllib
from dataclasses import replace
from math import exp

import pytest
import torch

from rollouts.errors import ConfigError
from rollouts.losses import CORRECTIONS, KL_ESTIMATORS, LOSSES, LossInputs, try_loss
from rollouts.losses.corrections import compute_loglinear_prox, parse_correction, renormalise_log_probs
from rollouts.losses.distillation import compute_divergence
from rollouts.losses.kl import (
    compute_exact_kl,
    compute_kl_penalty,
    kl_k2,
    make_truncated_kl,
    make_weighted_kl,
)
from rollouts.types import merge_metrics, metric_values
from tests.support.text_tables import cases
from tests.unit.test_losses import AGAINST_OLD, INFINITY, LP, MU, NAN, OLD, POLICY, REF, make_inputs, row, run

# --- terms --------------------------------------------------------------------------------------------------

K2 = [0.08, 0.045, 0.005]
M = [exp(0.5), exp(-0.5), exp(0.7)]  # exp(lp − mu)
KL_MU = sum(m * d for m, d in zip(M, (0.4, -0.3, -0.1), strict=True))  # (lp − ref)·exp(lp − mu)


# the KL of the three tokens is .08, .045, .005 by k2 and .070320046, .049858808, .005170918 by k3
@cases("""
params                                                   | value       | …
kl_coef = 0.5                                            | 0.065
kl_coef = 1.0, kl_estimator = "k3"                       | 0.125349772
kl_coef = 1.0, kl_estimator = "rollouts.losses.kl:kl_k2" | 0.13
mu_penalty_coef = 1.0                                    | 0.99        | .25 + .25 + .49
entropy_coef = 0.1                                       | -0.3
entropy_coef = 0.1, entropy_fraction = 0.5               | -0.25
""")
def test_terms_by_hand(params: dict, value: float):
    """Of a loss that is 0 without them."""
    assert run("reinforce", make_inputs(0.0), **params)[0] == pytest.approx(value)


def test_a_kl_estimator_is_cut_and_weighted():
    estimators = make_truncated_kl(kl_k2, 0.06), make_weighted_kl(kl_k2, lambda policy, ref: ref.exp())
    values = 0.06 + 0.045 + 0.005, sum(exp(q) * k for q, k in zip(REF, K2, strict=True))
    for estimator, value in zip(estimators, values, strict=True):
        found, _ = run("reinforce", make_inputs(0.0), kl_coef=2.0, kl_estimator=estimator)
        assert found == pytest.approx(2 * value)


@cases("name", POLICY)
def test_kl_importance_by_hand_for_every_loss(name):
    """With A = 0 only (lp − ref)·exp(lp − mu) is left, by way of the weight where there is one."""
    params = {"kl_coef": 1.0, "kl_estimator": "k1", "kl_importance": True}
    params |= {"beta": 0.0} if name == "dro" else {"cov_low": 4.0} if name.endswith("_cov") else {}
    assert run(name, make_inputs(0.0), **params)[0] == pytest.approx(KL_MU)
    if name in ("reinforce", "dro"):  # the factor is there already: a weight does not count it again
        for old in (None, row(*OLD)):
            inputs = make_inputs(0.0, old_log_probs=old)
            assert run(name, inputs, correction="token_tis(cap=100)", **params)[0] == pytest.approx(KL_MU)
            value, _ = run(name, inputs, correction="token_mask(low=0.5, high=1.8)", **params)
            assert value == pytest.approx(KL_MU + 0.1 * exp(0.7))  # a dropped token has no KL term either


@cases("""
params               | weights                             | …
                     | 1.221402758 0.904837418 1.349858808 | e^(old − mu)
importance_cap = 1.2 | 1.2 0.904837418 1.2
correction = "icepop(low=0.5, high=1.3)", importance_cap = 1.0 | 1.221402758 0.904837418 0
""")
def test_the_weight_is_the_truncated_ratio_or_the_correction_s(params: dict, weights: list[float]):
    noted = []
    out = LOSSES["ppo_clip"](make_inputs(note_weights=noted.append), **params)
    expected = -1.2 * weights[0] - exp(-0.4) * weights[1] - 1.2 * weights[2]
    assert out.sum.item() == pytest.approx(expected)
    assert noted[0][0].tolist() == pytest.approx(weights)
    assert out.count == 3.0  # a dropped token stays in the denominator
    if "correction" in params:
        assert metric_values(out.metrics)["importance_weight/dropped"] == pytest.approx(1 / 3)


def test_only_tokens_of_high_entropy_get_the_policy_term_and_a_dropped_token_whatever_it_holds_none():
    impossible = make_inputs(log_probs=row(-INFINITY, -0.9, -1.6))
    for inputs, params in (
        (make_inputs(), {"policy_entropy_fraction": 0.5}),
        (impossible, {"correction": "token_mask(low=0.1, high=10)"}),
    ):
        assert run("reinforce", inputs, **params) == (pytest.approx(2.5), [0.0, -1.0, -1.0])


def test_terms_of_a_token_that_the_policy_cannot_give_are_finite_and_without_gradient():
    """lp − ref and lp − mu are held at −20."""
    inputs = make_inputs(0.0, log_probs=row(-INFINITY, -0.9, -1.6), old_log_probs=None)
    value, grad = run("ppo_clip", inputs, kl_coef=1.0, mu_penalty_coef=1.0)
    assert value == pytest.approx(0.5 * 400 + 0.045 + 0.005 + 400 + 0.25 + 0.49)
    assert grad == pytest.approx([0.0, -0.3 - 1.0, -0.1 + 1.4])


def test_the_parts_of_a_loss_add_up_to_it():
    params = {"kl_coef": 0.5, "entropy_coef": 0.1, "mu_penalty_coef": 1.0}
    out = LOSSES["reinforce"](make_inputs(), **params)
    found = {name: 3 * value for name, value in metric_values(out.metrics).items() if name[:5] == "loss/"}
    parts = {"policy": 3.2, "kl": 0.5 * sum(K2), "entropy": -0.3, "mu_penalty": 0.99}
    assert found == pytest.approx({f"loss/{name}": part for name, part in parts.items()})
    assert out.sum.item() == pytest.approx(sum(parts.values()))
    critic = LOSSES["value"](make_inputs(), clip=0.05)
    assert metric_values(critic.metrics)["loss/value"] == pytest.approx(2.11625 / 3)


def test_equal_weights_have_a_whole_effective_sample_size_however_small_they_are():
    part = LOSSES["ppo_clip"](make_inputs(log_probs=row(*MU) - 19.0, old_log_probs=None)).metrics
    assert metric_values(merge_metrics([part, part]))["mismatch/ess"] == pytest.approx(1.0, abs=1e-12)


METRICS = """
"loss/policy" = -1.210737990  # (−1.2·e^.2 − e^−.4·e^−.1 − 1.2·1.3)/3
clip_ratio = 0.666666667
"clip_ratio/low" = 0
"clip_ratio/high" = 0.666666667
"ratio/mean" = 1.170667850
"ratio/max" = 1.49182470  # e^.4
"kl/ref" = 0
"mismatch_kl/mean" = 0.025366328  # of e^w − w − 1, w = .2, −.1, .3
"mismatch_kl/max" = 0.049858808
"mismatch/logprob_abs_diff" = 0.2
"mismatch/k1" = -0.133333333
"mismatch/chi2" = 0.377558084  # mean of e^2w, − 1
"mismatch/ess" = 0.974612193
"mismatch/prob_abs_diff/max" = 0.066685229  # e^−1 − e^−1.2
"approx_kl/mean" = 0.070667850  # of e^d − d − 1, d = .3, −.4, .4
"importance_weight/ess" = 0.978124320  # (Σw)²/3Σw² of e^.2, e^−.1, 1.3
"importance_weight/mean" = 1.142080059
"importance_weight/mean_square" = 1.333518484
"importance_weight/capped" = 0.333333333
"importance_weight/max" = 1.3
"entropy/mean" = 1.0
"""


def test_metrics_say_what_happened():
    found = LOSSES["ppo_clip"](make_inputs(), importance_cap=1.3).metrics
    assert metric_values(found) == pytest.approx(tomllib.loads(METRICS), abs=1e-8)
    alone = metric_values(LOSSES["ppo_clip"](make_inputs(old_log_probs=None)).metrics)  # on the policy
    assert alone["mismatch_kl/mean"] == pytest.approx(sum(exp(d) - d - 1 for d in (0.5, -0.5, 0.7)) / 3)
    assert "importance_weight/mean" not in alone


# --- corrections --------------------------------------------------------------------------------------------


@cases("""
text                                         | expected | …
token_tis                                    | 1.221402758 0.904837418 1.349858808 | e^(old − mu)
token_tis(low=1, cap=1.3)                    | 1.221402758 1 1.3
sequence_mask(low=0.5, high=1.4919)          | 1 1 1 | e^.4 = 1.491824698
sequence_mask(low=0.5, high=1.4918)          | 0 0 0
icepop(low=1.0,high=2)                       | 1.221402758 0 1.349858808
sequence_tis                                 | 1.491824698 1.491824698 1.491824698 | e^.4
sequence_tis(cap=1.25)                       | 1.25 1.25 1.25
token_mask(low=0.95, high=1.3)               | 1 0 0
geometric_mask(low=0.5, high=1.1426309)      | 1 1 1 | e^(.4/3) = 1.142630812
geometric_mask(low=0.5, high=1.1426308)      | 0 0 0
veto(floor=0.9)                              | 1 1 1
veto(floor=0.91)                             | 0 0 0
sequence_k1_mask(limit=0.1334)               | 1 1 1 | |−.133333|
sequence_k1_mask(limit=0.1333)               | 0 0 0
sequence_k3_mask(limit=0.02537)              | 1 1 1 | .025366
sequence_k3_mask(limit=0.02536)              | 0 0 0
opsm(delta=0.49)                             | 1 1 0 | the mean of mu − lp is .5
opsm(delta=0.51)                             | 1 1 1
token_tis (cap = 1.3)*veto( floor=1e-4 )*sequence_k3_mask(limit=0.1) | 1.221402758 0.904837418 1.3
""")
def test_weights_by_hand_row_by_row(text, expected: list[float]):
    """The second row trains nothing, the third has a token that the trainer would hardly give."""
    log_probs, old, mu, advantages = (
        row(*values).repeat(3, 1) for values in ((-2.0, -0.9, -2.5), OLD, MU, (1.0, 0.0, -1.0))
    )
    mu[2, 2] = 20.0
    inputs = make_inputs(
        log_probs=log_probs, old_log_probs=old, rollout_log_probs=mu, advantages=advantages,
        mask=torch.tensor([[True], [False], [True]]).expand(3, 3),
    )  # fmt: skip
    found = parse_correction(text)(inputs)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-8)
    if text.startswith(("geo", "seq", "veto", "opsm")):
        assert found[1].tolist() == [1.0] * 3  # a row without trained tokens is kept
    if text.startswith("veto"):
        assert found[2].tolist() == [0.0] * 3


@cases("name", CORRECTIONS)
@cases("advantage: 1.0 -1.0")
def test_a_nan_is_never_hidden_by_a_correction(name, advantage: float):
    """The ratio is against old, so mu counts in the correction only."""
    inputs = make_inputs(advantage, rollout_log_probs=row(NAN, *MU[1:]))
    assert LOSSES["ppo_clip"](inputs, correction=name).sum.isnan()
    outside = replace(inputs, mask=torch.tensor([[False, True, True]]))
    assert LOSSES["ppo_clip"](outside, correction=name).sum.isfinite()
    far = make_inputs(
        advantage, log_probs=row(-INFINITY, -0.9, -1.6), old_log_probs=row(-INFINITY, -0.5, -2.0)
    )
    assert parse_correction(name)(far).isfinite().all()


ACTING = """
veto(floor=2.1e-9)            token_mask(low=2.1e-9)   icepop(low=2.1e-9)  geometric_mask(low=2.1e-9)
sequence_k1_mask(limit=19.99) sequence_k3_mask(limit=18.99)  opsm(delta=19.99)
"""


def test_the_widest_bounds_that_are_taken_drop_a_token_that_the_trainer_cannot_give():
    impossible = row(-INFINITY)
    inputs = LossInputs(
        log_probs=impossible, mask=impossible < 0, advantages=row(-1), rollout_log_probs=row(-1)
    )
    for text in ACTING.split():
        assert parse_correction(text)(replace(inputs, old_log_probs=impossible)).tolist() == [[0.0]], text


@cases("""
field             | values         | params
log_probs         | nan -0.9 -1.6  | correction = "geometric_mask"
old_log_probs     | -8.0 nan -2.0  | correction = "veto(floor=0.5)"
rollout_log_probs | nan -0.4 9.0   | correction = "veto"
advantages        | nan 1 1        | correction = "token_mask(low=2, high=3)"
log_probs         | nan -0.9 -1.6  | policy_entropy_fraction = 0.3
ref_log_probs     | nan -0.6 -1.5  | correction = "geometric_mask", kl_coef = 0.1
""")
def test_a_nan_in_a_row_that_is_dropped_is_not_hidden(field, values: list[float], params: dict):
    inputs = make_inputs(**{field: row(*values)})
    assert LOSSES["ppo_clip"](inputs, **params).sum.isnan()


@cases("name", POLICY)
def test_no_gap_to_the_engine_is_weighted_twice(name):
    inputs = make_inputs(old_log_probs=None)
    if name in ("reinforce", "dro"):  # these weigh the policy itself, with or without old log-probs
        params = {"beta": 0.0} if name == "dro" else {}
        for values in (inputs, make_inputs()):
            grad = run(name, values, correction="token_tis(cap=1.6)", **params)[1]
            assert grad == pytest.approx([-min(m, 1.6) for m in M])
        return
    with pytest.raises(ConfigError, match=r"the ratio is against the engine already; set rl\.recompute_old"):
        run(
            name, make_inputs() if name in ("importance_sampling", "dppo") else inputs, correction="token_tis"
        )
    masked = parse_correction("token_mask(low=0.9, high=1.7)")(inputs)  # masks judge exp(lp − mu)
    assert masked.tolist() == [[1.0, 0.0, 0.0]]


def test_a_kept_set_is_renormalised_and_equal_models_have_ratio_one():
    """The engine samples from the first two of four tokens, which hold .895 of the mass."""
    logits = row(0.6, 0.295, 0.08, 0.025)[0].log().requires_grad_()
    everything = torch.log_softmax(logits, -1)
    kept = renormalise_log_probs(everything[:1][None], everything[:2].exp().sum()[None, None])
    assert float(kept.detach().exp()) == pytest.approx(0.6 / 0.895)
    kept.sum().backward()  # the gradient of a softmax over the kept two alone
    assert logits.grad.tolist() == pytest.approx([0.295 / 0.895, -0.295 / 0.895, 0.0, 0.0], abs=1e-12)


def test_old_log_probs_between_engine_and_policy_by_version():
    """α = 2/3, 0 of the current version's own, and 1/2."""
    lp, versions = row(*LP).requires_grad_(), torch.tensor([[1, 4, 2]])
    prox = compute_loglinear_prox(lp, row(*MU), sampled_version=versions, old_version=3, version=4)
    assert prox[0].tolist() == pytest.approx([MU[0] + 0.5 * 2 / 3, MU[1], (MU[2] + LP[2]) / 2])
    assert not prox.requires_grad
    with pytest.raises(ConfigError, match="old_version=5"):
        compute_loglinear_prox(lp, row(*MU), sampled_version=versions, old_version=5, version=4)


# --- KL -----------------------------------------------------------------------------------------------------

P, Q = torch.cat([row(0.5, 0.3, 0.2), row(0.4, 0.4, 0.2)])
KL = 0.025267154  # of P and Q
REVERSE = [0.098938, -0.093885, -0.005053]  # p·(log p/q − KL)


@cases("""
name | value       | gradient                     | …
k1   | 0.025267154 | 0 0 0
k2   | 0.024862407 | 0.098938 -0.093885 -0.005053 | REVERSE
k3   | 0.025267154 | 0.1 -0.1 0                   | P − Q
""")
def test_expected_kl_gradients_are_none_reverse_and_forward(name, value: float, gradient: list[float]):
    """Σ p·dk/dz used as a loss on the policy's samples; drawn by mu and with the ratio it is KL's."""
    logits = P.log().requires_grad_()
    values = KL_ESTIMATORS[name](torch.log_softmax(logits, 0), Q.log())
    (grad,) = torch.autograd.grad((P * values).sum(), [logits])
    assert grad.tolist() == pytest.approx(gradient, abs=1e-6)
    mu = row(0.2, 0.3, 0.5)[0]
    terms = compute_kl_penalty(torch.log_softmax(logits, 0), Q.log(), name, sampler_log_probs=mu.log())
    mean = (mu * terms).sum()
    assert mean.item() == pytest.approx(value)
    if name != "k2":
        assert torch.autograd.grad(mean, [logits])[0].tolist() == pytest.approx(REVERSE, abs=1e-6)


def test_exact_kl_by_hand():
    policy, ref = (torch.stack([one.log(), one.log() + 7.0]).requires_grad_() for one in (P, Q))
    found = compute_exact_kl(policy * 2.0, ref * 2.0, temperature=2.0)
    assert found.tolist() == pytest.approx([KL] * 2)
    grads = torch.autograd.grad(found[0], [policy, ref])
    assert grads[0][0].tolist() == pytest.approx(REVERSE, abs=1e-6)
    assert grads[1][0].tolist() == pytest.approx((Q - P).tolist())
    assert torch.autograd.gradcheck(compute_exact_kl, (policy, ref))
    top = compute_exact_kl(P.log()[None], Q.log()[None], weigh=lambda p, q: (q > math.log(0.3)).double())
    assert top.tolist() == pytest.approx([0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)])


@cases("""
policy    | ref       | kl | …
0 0 -inf  | 0 0 0     | 0.405465108 | Σ ½ log(½ / ⅓)
0 0       | 0 -inf    | inf
0 -inf    | 0 -inf    | 0
0 nan     | 0 0       | nan
0 0       | nan 0     | nan
10 9 -200 | 10 9 -inf | inf | in float32 e^−210 is 0
""")
def test_tokens_without_probability(policy: list[float], ref: list[float], kl: float):
    logits, ref_logits = torch.tensor([policy], requires_grad=True), torch.tensor([ref])
    found = compute_exact_kl(logits, ref_logits)
    assert found.tolist() == [pytest.approx(kl, nan_ok=True)]
    assert compute_divergence(logits, ref_logits, beta=1.0).tolist() == [pytest.approx(kl, nan_ok=True)]
    if math.isfinite(kl):
        assert torch.autograd.grad(found.sum(), [logits])[0].isfinite().all()


# --- refusals -----------------------------------------------------------------------------------------------


@cases("""
name        | params                                      | match
ppo_clip    | clip_low = 0.0                              | clip_low=0.0
ppo_clip    | clip_low = 1.5                              | clip_low=1.5
gspo        | clip_high = -0.2                            | clip_high=-0.2
ppo_clip    | dual_clip = 1.0                             | dual_clip=1.0
ppo_clip    | importance_cap = 0.0                        | cap=0.0
cispo       | ratio_low = 2.0, ratio_high = 1.0           | ratio_low=2.0
sapo        | tau_negative = -1.0                         | tau_negative=-1.0
dppo        | tv_high = 1.5                               | tv_high=1.5
dro         | beta = -0.1                                 | beta=-0.1
gmpo        | clip_low = 0.0                              | clip_low=0.0
clip_cov    | cov_fraction = 0.0                          | cov_fraction=0.0
clip_cov    | cov_low = 5.0                               | cov_low=5.0, cov_high=5.0
kl_cov      | cov_kl_coef = -1.0                          | cov_kl_coef=-1.0
value       | clip = 0.0                                  | clip=0.0
reinforce   | kl_coef = -0.1                              | kl_coef=-0.1
reinforce   | kl_coef = 0.1, kl_estimator = "k1"          | expected gradient of zero
reinforce   | kl_coef = 0.1, kl_estimator = "k4"          | did you mean 'k3'? Known: k1, k2, k3, or module
reinforce   | kl_importance = "false"                     | kl_importance='false'
reinforce   | mu_penalty_coef = -1.0                      | mu_penalty_coef=-1.0
reinforce   | entropy_fraction = 1.5                      | entropy_fraction=1.5
reinforce   | entropy_coef = "high"                       | look for a value of the wrong kind
reinforce   | importance_cap = 2.0                        | no parameter 'importance_cap'
sft         | clip_high = 0.3                             | it takes none
ppo_clip    | cliphigh = 0.3                              | did you mean 'clip_high'
dro         | entropy_coeff = 0.1                         | did you mean 'entropy_coef'
ppo_clip    | correction = "tis"                          | Known: token_tis, icepop
ppo_clip    | correction = "token_tis(cap)"               | is not of the form
ppo_clip    | correction = "token_tis(cap=big)"           | is not of the form
ppo_clip    | correction = "token_tis(limit=2)"           | it takes low, cap
ppo_clip    | correction = "token_tis * "                 | '' is not known
ppo_clip    | correction = "token_tis(cap=2) veto"        | is not of the form
ppo_clip    | correction = "token_tis(cap=0)"             | cap=0.0
ppo_clip    | correction = "sequence_tis(cap=-1)"         | cap=-1.0
ppo_clip    | correction = "token_tis(low=2)"              | low=2.0, cap=2.0
ppo_clip    | correction = "icepop(low=2, high=1)"        | low=2.0, high=1.0
ppo_clip    | correction = "geometric_mask(high=0.5)"     | high=0.5
ppo_clip    | correction = "veto(floor=0)"                | floor=0.0
ppo_clip    | correction = "sequence_k1_mask(limit=-1)"   | limit=-1.0
ppo_clip    | correction = "opsm(delta=-1)"               | delta=-1.0
ppo_clip    | correction = "veto(floor=1e-9)"             | floor=1e-09 is outside
ppo_clip    | correction = "token_mask(low=1e-9)"         | low=1e-09 never acts; choose 0, no lower bound
ppo_clip    | correction = "geometric_mask(low=2e-9)"     | low=2e-09 never acts
ppo_clip    | correction = "icepop(low=1e-12)"            | low=1e-12 never acts
cispo       | ratio_low = 1e-9                            | ratio_low=1e-09 never acts
ppo_clip    | correction = "sequence_k1_mask(limit=20)"   | limit=20.0
ppo_clip    | correction = "sequence_k3_mask(limit=5e8)"  | limit=500000000.0
ppo_clip    | correction = "opsm(delta=20)"               | delta=20.0
""")
def test_parameters_that_cannot_work_are_refused_before_the_run(name, params: dict, match):
    with pytest.raises(ConfigError) as error:
        try_loss(name, params, recompute_old=True, reference=True)
    assert match in str(error.value)


@cases(f"""
names        | missing           | params
ppo_clip     | ref_log_probs     | kl_coef = 0.1
ppo_clip     | entropy           | entropy_coef = 0.1
value        | returns           |
value        | old_values        | clip = 0.2
importance_sampling dppo dro | rollout_log_probs |
{" ".join(AGAINST_OLD)} | rollout_log_probs old_log_probs |
linear {" ".join(POLICY)} | advantages |
""")
def test_a_loss_names_the_field_that_the_batch_lacks(names, missing, params: dict):
    fields = missing.split()
    for name in names.split():
        with pytest.raises(ConfigError, match=f"needs {fields[0]}"):
            LOSSES[name](make_inputs(**dict.fromkeys(fields)), **params)


def test_inputs_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="entropy_gradient=True"):
        LOSSES["ppo_clip"](replace(make_inputs(), entropy=row(1.0, 1.0, 1.0)), entropy_coef=0.1)
    with pytest.raises(ValueError, match=r"LossInputs.advantages has shape \(1, 2\)"):
        LOSSES["reinforce"](make_inputs(advantages=row(1.0, 1.0)))
    for wrong in (lambda inputs: inputs.log_probs.exp(), lambda inputs: torch.ones(1, 1)):
        with pytest.raises(ConfigError, match=r"it must give \(1, 3\), detached"):
            LOSSES["ppo_clip"](make_inputs(), correction=wrong)
