"""All token-level losses: numbers worked by hand, a slow version, and what holds for every loss.

Fixture: lp − old = [.3, −.4, .4], old − mu = [.2, −.1, .3], lp − ref = [.4, −.3, −.1].
"""

import itertools
import json
import math
import sys
import types
from functools import partial
from math import exp

import pytest
import torch

from rollouts.errors import ConfigError, PlugInError
from rollouts.losses import (
    LOSSES,
    LossInputs,
    LossOutput,
    resolve_loss,
    sft_loss,
    try_loss,
    wants_entropy_gradient,
)
from rollouts.losses.corrections import parse_correction
from rollouts.losses.inputs import reduce_loss
from rollouts.losses.rl_losses import compute_covariances
from rollouts.types import merge_metrics, metric_values
from tests.support.text_tables import cases, read_params

OLD, LP, MU, REF = json.loads("[[-1, -0.5, -2], [-0.7, -0.9, -1.6], [-1.2, -0.4, -2.3], [-1.1, -0.6, -1.5]]")
NAN, INFINITY = math.nan, math.inf
POLICY = [name for name in LOSSES if name not in ("sft", "value", "linear")]
AGAINST_MU = ("importance_sampling", "dppo", "dppo_kl", "vespo")
AGAINST_OLD = [name for name in POLICY if name not in (*AGAINST_MU, "reinforce", "dro")]


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def make_inputs(advantage=1.0, **fields):
    given = {"log_probs": LP, "old_log_probs": OLD, "rollout_log_probs": MU, "ref_log_probs": REF}
    given |= {"advantages": [advantage] * 3, "entropy": [0.5, 1.0, 1.5]}
    given |= {"returns": [1.0, 0.0, -1.0], "old_values": [-0.8] * 3}
    given = {name: row(*values) for name, values in given.items()} | fields
    given.setdefault("mask", torch.ones_like(given["log_probs"], dtype=torch.bool))
    for name in ("log_probs", "entropy"):
        if given[name] is not None:
            given[name] = given[name].clone().requires_grad_()
    return LossInputs(**given)


def run(name, inputs, **params):
    """The sum and its gradient by the first row's log-probs."""
    total = LOSSES[name](inputs, **{"unit": "tokens"} | params).sum
    (grad,) = torch.autograd.grad(total, [inputs.log_probs], materialize_grads=True)
    return total.item(), grad[0].tolist()


def whole(name):
    """With these the choice of tokens by covariance does not depend on the micro-batch."""
    if not name.endswith("_cov"):
        return {}
    return read_params("cov_fraction = 1.0, cov_low = 0.1, log_prob_mean = 0.0, advantage_mean = 0.0")


# --- by hand ------------------------------------------------------------------------------------------------

S = exp(0.1)  # the geometric mean of the ratios


# r = e^(lp − old), m = e^(lp − mu), s = e^.1 the geometric mean of r; the losses of the tokens | the gradient
@cases("""
name       | params            | advantage | value      | grad                             | …
sft        |                   |  1 | 3.2        | -1 -1 -1                         | −lp
linear     |                   |  2 | 6.4        | -2 -2 -2                         | −A·lp
value      |                   |  1 | 2.03       | -1.7 -0.9 -0.6                   | ½·(1.7² + .9² + .6²)
value      | clip = 0.05       |  1 | 2.11625    | 0 -0.9 -0.6                      | ½·(1.75² + .9² + .6²)
reinforce  |                   |  1 | 3.2        | -1 -1 -1                         | −A·lp
importance_sampling |          | -2 | 8.53800928 | 3.29744254 1.21306132 4.02750541 | −A·m
ppo_clip   | clip_high = 0.28  |  1 | -3.23032005 | 0 -0.670320046 0                | −1.28 − r₂ − 1.28
ppo_clip   | clip_high = 0.28  | -1 | 3.64168351 | 1.34985881 0 1.4918247           | r₁ + .8 + r₃
ppo_clip   | dual_clip = 1.4   | -1 | 3.54985881 | 1.34985881 0 0                   | r₁ + .8 + 1.4
cispo | ratio_high = 1.28 | 1 | 3.54728804 | -1.28 -0.670320046 -1.28 | 1.28·.7 + r₂·.9 + 1.28·1.6
sapo | | 1 | -6.501752 | | −2.346333 − 1.673274 − 2.482145
sapo | | -1 | 6.215014 | | 2.250739 + 1.578335 + 2.385940
dppo | | -1 | 3.66247398 | 1.64872127 0 2.01375271 | m₁ + m₃; e^lp − e^mu = .195, −.264, .102
dppo       | tv_high = 0.15    |  1 | -2.62028337 | 0 -0.60653066 -2.01375271       | −m₂ − m₃
dppo_kl | | 1 | -2.62028337 | 0 -0.60653066 -2.01375271 | −m₂ − m₃; KL .0786, .1414, .0377
dppo_kl | | -1 | 3.66247398 | 1.64872127 0 2.01375271 | m₁ + m₃
dppo_kl | kl_high = 0.03 | 1 | -0.60653066 | 0 -0.60653066 0 | −m₂
vespo | | 1 | 0.61995566 | -0.193736145 -0.193736145 -0.193736145 | φ = e^(1.4 + 3·(1 − W)), W = e^.7
vespo | | -1 | -3.44059835 | 1.07518698 1.07518698 1.07518698 | φ = e^(2.1 + 2·(1 − W))
dro | | 1 | 3.22475 | -0.975 -1.025 -0.965 | .70625 + .90625 + 1.61225
gspo       | unit = "sequences" |  1 | -1.0004   | 0 0 0                            | clipped
gspo       | unit = "sequences" | -1 | 1.10517092 | 0.368390306 0.368390306 0.368390306 | s
gspo       |                   | -1 | 3.31551275 | 1.10517092 1.10517092 1.10517092 | 3·s
gspo_token | unit = "sequences" | -1 | 1.10517092 | 0.368390306 0.368390306 0.368390306 | s
gmpo       | unit = "sequences", clip_high = 0.35 |  1 | -1.08690405 | -0.36230135 -0.36230135 0 | −e^(.25/3)
gmpo       | unit = "sequences", clip_low = 0.35  | -1 | 1.12374479  |                           | e^(.35/3)
""")
def test_values_and_gradients_by_hand(name, params: dict, advantage: float, value: float, grad: list[float]):
    """Without mu where the ratio is against old, so that no weight is taken."""
    inputs = make_inputs(advantage, **({"rollout_log_probs": None} if name in AGAINST_OLD else {}))
    found, found_grad = run(name, inputs, **params)
    assert found == pytest.approx(value, abs=3e-6)
    if grad:
        assert found_grad == pytest.approx(grad, abs=1e-8)


def test_gspo_token_gives_each_token_its_own_advantage():
    inputs = make_inputs(advantages=row(-1.0, -2.0, 0.0), rollout_log_probs=None)
    assert run("gspo_token", inputs, unit="sequences")[1] == pytest.approx([S / 3, 2 * S / 3, 0.0])
    assert run("gspo", inputs, unit="sequences")[1] == pytest.approx([S / 3] * 3)


def test_tokens_of_large_covariance_by_hand():
    """Means −2 and 0, covariances 2, −2, −2, 2; r = 1 but on the last token, e^−.5, which PPO clips."""
    inputs = make_inputs(
        log_probs=row(-1, -3, -1, -3), old_log_probs=row(-1, -3, -1, -2.5), advantages=row(2, 2, -2, -2),
        **dict.fromkeys(("rollout_log_probs", "ref_log_probs", "entropy", "returns", "old_values")),
    )  # fmt: skip
    assert compute_covariances(inputs).tolist() == [[2.0, -2.0, -2.0, 2.0]]
    last = exp(-0.5)
    assert run("clip_cov", inputs, cov_fraction=0.5) == (pytest.approx(1.6), [0.0, -2.0, 2.0, 0.0])
    assert run("clip_cov", inputs, cov_low=2.5) == run("ppo_clip", inputs)
    # |lp − old| is 0 on the first, without gradient, and .5 on the last, where its derivative is −1
    value, grad = run("kl_cov", inputs, cov_fraction=0.5, cov_kl_coef=0.7)
    assert value == pytest.approx(-2 - 2 + 2 + 2 * last + 0.35)
    assert grad == pytest.approx([-2.0, -2.0, 2.0, 2 * last - 0.7])
    assert run("kl_cov", inputs, cov_fraction=0.25)[1][3] == pytest.approx(2 * last)  # of equals the earlier


FIELDS = "log_probs old_log_probs rollout_log_probs ref_log_probs entropy returns old_values"


def draw(seed, rows=4, width=5):
    """Fields of a batch; one sign of advantage a row, for gmpo clips by it, and one row trains nothing."""
    generator = torch.Generator().manual_seed(seed)
    make = partial(torch.randn, rows, width, generator=generator, dtype=torch.float64)
    fields = {name: make() for name in FIELDS.split()}
    fields["advantages"] = make().abs() * torch.tensor([1.0, -1.0, 2.0, 1.0, -1.0])[:rows, None]
    fields["mask"] = torch.rand(rows, width, generator=generator) < 0.6
    fields["mask"][2] = False
    return fields


# --- every loss ---------------------------------------------------------------------------------------------


def all_terms(name):
    """Every term at once; ratios against mu take no weight, only masks."""
    if name not in POLICY:
        return {"clip": 0.3} if name == "value" else {}
    weights = "token_mask(low=0.4, high=2.0) * sequence_k3_mask(limit=1.0)"
    if name not in AGAINST_MU:
        masks = "geometric_mask(low=0.4, high=2.0) * veto(floor=0.05) * opsm(delta=0.2)"
        weights = f"token_tis(cap=1.5) * {masks}"
    terms = 'kl_coef = 0.1, kl_importance = true, kl_estimator = "k3", entropy_coef = 0.02'
    more = "entropy_fraction = 0.5, policy_entropy_fraction = 0.7, mu_penalty_coef = 0.03"
    return {"correction": weights} | read_params(f"{terms}, {more}") | whole(name)


@cases("name", LOSSES)
@cases("unit: tokens sequences sequence_sums constant")
def test_micro_batches_add_up_whatever_the_padding_and_masked_tokens_leave_no_trace(name, unit):
    """Padding, and what lies outside the mask, is NaN or infinite."""
    fields, params = draw(1, rows=5), all_terms(name)
    mask = fields.pop("mask")
    fields = {key: torch.where(mask, value, NAN) for key, value in fields.items()}
    leaves = [fields[key].requires_grad_() for key in ("log_probs", "entropy")]

    def run_rows(start, end, padding):
        filler = (NAN, INFINITY, -INFINITY)[padding % 3]
        rows = {
            key: torch.nn.functional.pad(value[start:end], (0, padding), value=filler if key != "mask" else 0)
            for key, value in (fields | {"mask": mask}).items()
        }
        return LOSSES[name](LossInputs(**rows), unit=unit, **params)

    def grads(total):
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    together = run_rows(0, 5, 0)
    expected = grads(together.sum)
    assert expected[0][mask].count_nonzero() > 3
    for grad in expected:
        assert not grad[~mask].any()
    for cuts in ((0, 1, 4, 5), (0, 1, 2, 3, 4, 5), (0, 3, 5)):
        parts = [run_rows(start, end, end) for start, end in itertools.pairwise(cuts)]
        total = torch.stack([part.sum for part in parts]).sum()
        assert total.item() == pytest.approx(together.sum.item(), rel=1e-10, abs=1e-12)
        for one, other in zip(grads(total), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        assert sum(part.count for part in parts) == together.count
        merged = metric_values(merge_metrics([part.metrics for part in parts]))
        assert merged == pytest.approx(metric_values(together.metrics), abs=1e-12)
    empty = run_rows(2, 3, 1)  # a row that trains nothing
    assert (empty.sum.item(), empty.count, empty.metrics) == (0.0, 0.0, {})
    assert not any(grad.any() for grad in grads(empty.sum))


@cases("terms: no yes")
@cases("name", [name for name in LOSSES if name not in ("cispo", "gspo_token", "vespo")])
def test_gradients_agree_with_finite_differences(name, terms: bool):
    """Those three hold part of lp constant. A correction and a rank by lp itself are constants as well."""
    params = all_terms(name) if terms else whole(name)
    if name in (*AGAINST_MU, "reinforce", "dro"):
        params.pop("correction", None)
    fields = draw(7, rows=3, width=3)
    entropy = fields.pop("entropy").requires_grad_()
    log_probs = fields.pop("log_probs").requires_grad_()

    def value(log_probs):
        return LOSSES[name](
            LossInputs(log_probs=log_probs, entropy=entropy, **fields), unit="sequences", **params
        ).sum

    assert torch.autograd.gradcheck(value, (log_probs,))


@cases("name", LOSSES)
def test_what_is_not_finite_is_never_hidden_and_ratios_stay_finite(name):
    assert math.isnan(run(name, make_inputs(log_probs=row(NAN, -0.9, -1.6)))[0])
    for advantage in (1.0, -1.0):
        impossible = make_inputs(advantage, log_probs=row(-INFINITY, -0.9, -1.6), old_log_probs=None)
        value, grad = run(name, impossible)
        if name in ("sft", "linear", "value", "reinforce", "cispo", "dro", "vespo"):
            assert not math.isfinite(value)
        else:
            assert math.isfinite(value) and grad[0] == 0.0 and all(map(math.isfinite, grad))
        far = make_inputs(advantage, old_log_probs=None, rollout_log_probs=row(-INFINITY, -300.0, 300.0))
        assert name == "dro" or all(map(math.isfinite, run(name, far)[1]))


def test_units_divide_by_what_they_say():
    losses = torch.tensor(json.loads("[[3.0, NaN, NaN], [1.0, 1.0, 4.0], [NaN, NaN, NaN]]"))
    mask = losses == losses
    expected = {"tokens": (9, 4), "constant": (9, 4), "sequences": (5, 2), "sequence_sums": (9, 2)}
    for unit, wanted in expected.items():
        total, count = reduce_loss(losses, mask, unit)
        assert (float(total), count) == wanted
    wholes = torch.where(mask, 4.0, NAN)  # the first two rows are one trajectory
    for unit, wanted in {"tokens": (9, 4), "sequences": (9 / 4, 1), "sequence_sums": (9, 1)}.items():
        total, count = reduce_loss(losses, mask, unit, wholes)
        assert (float(total), count) == wanted
    with pytest.raises(ConfigError, match="'sequence_sums' or 'constant'"):
        reduce_loss(losses, mask, "rows")


# --- names --------------------------------------------------------------------------------------------------


def loss_with_entropy(inputs, *, unit, entropy_coef=0.5, **other):
    """A function of the user that has an entropy bonus by default."""
    return LossOutput(inputs.log_probs.sum(), 1.0, {})


def test_losses_resolve_by_key_and_by_module_and_name_the_nearest(monkeypatch):
    assert resolve_loss("rollouts.losses:sft_loss") is sft_loss
    try_loss(f"{__name__}:loss_with_entropy", {"anything": 1})
    with pytest.raises(ConfigError, match=r"'unit'; it is called as function\(inputs"):
        try_loss(f"{__name__}:row", {})
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        resolve_loss("ppo-clip")
    for name in ["no_such_module:f", "rollouts.losses:no_such", ":f", "math:pi", "a/file.py:f"]:
        with pytest.raises(PlugInError, match="loss="):
            resolve_loss(name)
    plug_in = types.SimpleNamespace(
        halve=lambda inputs, *, by=2.0: torch.full_like(inputs.log_probs.detach(), 1 / by)
    )
    monkeypatch.setitem(sys.modules, "a_correction", plug_in)
    weights = parse_correction("a_correction:halve(by=4) * token_tis(cap=1)")(make_inputs())
    assert weights[0].tolist() == pytest.approx([0.25, 0.25 * exp(-0.1), 0.25])
    with pytest.raises(ConfigError, match="it takes by"):
        parse_correction("a_correction:halve(to=4)")


def test_a_loss_asks_for_the_entropy_s_gradient_by_its_parameter():
    mine = f"{__name__}:loss_with_entropy"
    for name in ("ppo_clip", mine):
        found = [wants_entropy_gradient(name, {"entropy_coef": one}) for one in (-0.01, 0.1, 0)]
        assert found == [True, True, False]
    assert wants_entropy_gradient(mine, {})
    assert not any(wants_entropy_gradient(name, {}) for name in LOSSES)
