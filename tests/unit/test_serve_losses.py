"""The losses of Tinker's API against their formulas in float64, and what their requests are refused for."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollouts.errors import ServiceRefused
from rollouts.losses import LossInputs, resolve_loss
from rollouts.serve.losses import HIGH, LOW, SEQUENCE, TINKER_LOSSES, choose_loss
from rollouts.serve.wire import Datum, TrainRequest
from rollouts.testing.torch_contracts import make_batch
from tests.support import plain_backend
from tests.support.text_tables import cases
from tests.unit.test_pytorch_backend import make_model

Values = NDArray[np.float64]
SHAPE = (3, 40)


def make_request(name, settings=None, data=2, **inputs):
    """A request for the loss, its datums with the inputs that it must have; an input of None is left out."""
    wanted = dict.fromkeys(("target_tokens", *TINKER_LOSSES[name].inputs), np.ones(3)) | inputs
    given = {key: values for key, values in wanted.items() if values is not None}
    return TrainRequest([Datum(np.arange(3), given)] * data, name, settings or {}, False)


def draw(seed=0, *, wide=False):
    """Log-probs, and what the losses read. wide: ratios far outside every bound."""
    rng = np.random.default_rng(seed)
    q = rng.normal(-2, 1, SHAPE)
    advantages = np.where(rng.random(SHAPE) < 0.2, 0.0, rng.normal(size=SHAPE))
    inside = (advantages != 0) | (rng.random(SHAPE) < 0.5)
    lp = q + rng.normal(0, 2.0 if wide else 0.3, SHAPE)
    return {"lp": lp, "q": q, "A": advantages, SEQUENCE: inside.astype(float)}


def compute_plainly(name, drawn, low, high, beta):
    """The loss's sum and its derivative by each lp, position by position."""
    total, slopes = 0.0, np.zeros(SHAPE)
    low, high = np.broadcast_to(low, SHAPE), np.broadcast_to(high, SHAPE)
    for i, j in np.ndindex(SHAPE):
        lp, q, a = (float(drawn[key][i, j]) for key in ("lp", "q", "A"))
        ratio = math.exp(lp - q)
        if name == "gspo":
            inside = drawn[SEQUENCE][i] == 1
            ratio = math.exp(float((drawn["lp"] - drawn["q"])[i, inside].mean()))
        clipped = min(max(ratio, low[i, j]), high[i, j])
        free = ratio * a < clipped * a or ratio == clipped
        of_clipped = -min(ratio * a, clipped * a), -ratio * a if free else 0.0
        value, slope = {
            "cross_entropy": (-a * lp, -a),
            "importance_sampling": (-ratio * a, -ratio * a),
            "ppo": of_clipped,
            "gspo": of_clipped,
            "cispo": (-clipped * a * lp, -clipped * a),
            "dro": (-(lp * a - beta / 2 * (lp - q) ** 2), -a + beta * (lp - q)),
        }[name]
        total, slopes[i, j] = total + value, slope
    return total, slopes


def run(name, params, drawn, **extras):
    """The loss's sum and its gradient, in float64; one more position is outside the mask and NaN."""

    def widen(values):
        return torch.from_numpy(np.pad(values, ((0, 0), (0, 1)), constant_values=np.nan))

    lp = widen(drawn["lp"]).requires_grad_()
    inputs = LossInputs(
        log_probs=lp,
        mask=torch.arange(SHAPE[1] + 1).expand(SHAPE[0], -1) < SHAPE[1],
        advantages=widen(drawn["A"]),
        rollout_log_probs=widen(drawn["q"]),
        extras={key: widen(values) for key, values in ({SEQUENCE: drawn[SEQUENCE]} | extras).items()},
    )
    output = resolve_loss(name)(inputs, unit="constant", **params)
    assert output.count == math.prod(SHAPE)
    (slopes,) = torch.autograd.grad(output.sum, [lp])
    assert (slopes[:, -1] == 0).all()
    return float(output.sum.detach()), slopes[:, :-1].numpy()


def check_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-9)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-9, atol=1e-12)


@cases("wide: no yes")
@cases("name", TINKER_LOSSES)
def test_values_and_gradients_are_those_of_the_formulas(name, wide: bool):
    drawn, settings = draw(wide=wide), {"ppo": (0.8, 1.2), "gspo": (0.8, 1.2), "cispo": (0.0, 4.0)}
    spec = choose_loss(make_request(name)).spec
    wanted = compute_plainly(name, drawn, *settings.get(name, (1.0, 1.0)), beta=0.05)
    check_same(run(spec.name, spec.params, drawn), wanted)
    if name in settings:  # other numbers, then each position's own
        own = choose_loss(make_request(name, {LOW: 0.5, HIGH: 0.95})).spec
        low, high = np.sort(np.random.default_rng(1).uniform(0.2, 2.0, (2, *SHAPE)), axis=0)
        for bounds in ({}, {LOW: low, HIGH: high}, {HIGH: high + 0.5}):
            wanted = compute_plainly(name, drawn, bounds.get(LOW, 0.5), bounds.get(HIGH, 0.95), beta=0.0)
            check_same(run(own.name, own.params, drawn, **bounds), wanted)


@cases("lp: -inf -1e30 0")
@cases("name", TINKER_LOSSES)
def test_a_prompts_target_adds_nothing_even_if_it_is_impossible(name, lp: float):
    """q and A are 0 there, and it is not in gspo's mean."""
    drawn, spec = draw(), choose_loss(make_request(name)).spec
    for key, value in {"lp": lp, "q": 0.0, "A": 0.0, SEQUENCE: 0.0}.items():
        drawn[key][:, :5] = value
    found, slopes = run(spec.name, spec.params, drawn)
    assert not slopes[:, :5].any() and np.isfinite(slopes).all()
    drawn["lp"][:, :5] = -1.0
    assert found == run(spec.name, spec.params, drawn)[0]


def run_first(name, lp, advantage):
    """Of which the first token has these."""
    drawn, spec = draw(), choose_loss(make_request(name)).spec
    for key, value in {"lp": lp, "A": advantage, SEQUENCE: advantage}.items():
        drawn[key][0, 0] = value
    return run(spec.name, spec.params, drawn)


@cases("name: importance_sampling ppo cispo gspo cross_entropy")
def test_a_token_without_advantage_adds_nothing_even_if_it_has_become_impossible(name):
    total, slopes = run_first(name, -np.inf, 0.0)
    assert math.isfinite(total) and slopes[0, 0] == 0 and np.isfinite(slopes).all()


@cases("name: importance_sampling ppo gspo")
def test_an_impossible_token_with_an_advantage_has_a_finite_ratio(name):
    total, slopes = run_first(name, -np.inf, 1.0)
    assert math.isfinite(total) and np.isfinite(slopes).all()


@cases("name", TINKER_LOSSES)
def test_a_log_prob_that_is_not_a_number_spoils_the_sum(name):
    assert math.isnan(run_first(name, np.nan, 1.0)[0])


@cases("name", TINKER_LOSSES)
async def test_a_backend_answers_with_the_sum_and_every_log_prob(name):
    batch, spec = make_batch(), choose_loss(make_request(name)).spec
    ones = tuple(mask.astype(np.float32) for mask in batch.loss_masks)
    batch = dataclasses.replace(batch, extras={SEQUENCE: ones})
    model = make_model()
    wanted, count = plain_backend.compute_plain_loss(model, batch, spec)
    async with plain_backend.open_backend(make_model()) as backend:
        result = await backend.forward_backward(batch, spec)
    assert result.loss == pytest.approx(wanted * count, rel=1e-5)
    scored, _ = plain_backend.score_plainly(model, batch)
    found = plain_backend.stack(result.per_token.log_probs)
    torch.testing.assert_close(found, scored.detach(), rtol=0, atol=1e-5)


# --- requests -----------------------------------------------------------------------------------------------


@cases(r"""
name             | settings                         | message
ppo              | beta = 0.1                       | loss_fn_config of 'ppo' has 'beta'
cross_entropy    | beta = 0.1                       | has 'beta'; its settings are: none
dro              | beta = -0.1                      | loss_fn_config\['beta'\]=-0.1; it must be
dro              | beta = nan                       | \['beta'\]=nan; it must be a number
dro              | beta = inf                       | \['beta'\]=inf; it must be a number
cispo            | clip_high_threshold = "x"        | \['clip_high_threshold'\]='x'; it must be a number
ppo              | clip_low_threshold = 1.3         | clip_low_threshold=1.3 above clip_high_threshold=1.2
""")
def test_settings_that_a_loss_does_not_take_are_refused_by_name(name, settings: dict, message):
    with pytest.raises(ServiceRefused, match=message):
        choose_loss(make_request(name, settings))


@cases(r"""
name              | message
stable_reinforce  | 'stable_reinforce' is not offered here; there is cross_entropy, importance_sampling
custom            | 'custom' is not offered here
grpo              | 'grpo' is not known
""")
def test_a_loss_that_there_is_not_is_refused(name, message):
    with pytest.raises(ServiceRefused, match=message):
        choose_loss(make_request("ppo")._replace(loss=name))


def test_inputs_that_are_missing_or_not_in_all_datums_are_refused():
    for name, loss in TINKER_LOSSES.items():
        for key in loss.inputs:
            with pytest.raises(
                ServiceRefused, match=rf"data\[0\].loss_fn_inputs lacks '{key}', which '{name}'"
            ):
                choose_loss(make_request(name, **{key: None}))
    with pytest.raises(ServiceRefused, match=r"data\[0\].loss_fn_inputs: several targets for a token"):
        choose_loss(make_request("ppo", target_tokens=np.ones((3, 2))))
    both = make_request("ppo", data=1).data[0], make_request("ppo", **{HIGH: np.ones(3)}).data[0]
    with pytest.raises(ServiceRefused, match=r"data\[1\].* differ in 'clip_high_threshold'"):
        choose_loss(make_request("ppo")._replace(data=both))


def test_cross_entropy_takes_several_targets_with_or_without_weights():
    with_weights = make_request("cross_entropy", target_tokens=np.ones((3, 2)), weights=np.ones((3, 2)))
    data = [*with_weights.data, *make_request("cross_entropy").data]
    found = choose_loss(with_weights._replace(data=data))
    assert (found.weights, found.spec.unit, found.spec.constant) == ("weights", "constant", 1.0)
    assert choose_loss(make_request("dro", data=0)).weights == "advantages"
