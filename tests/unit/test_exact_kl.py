"""The exact KL from the reference: by hand, in a backend, and in every loss. test_logprobs has it beside the
full softmax.
"""

import copy
from dataclasses import replace
from math import exp
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from rollouts.errors import ConfigError, ModelError, RecordError
from rollouts.loops.algorithm import LoopState, choose_algorithm
from rollouts.loops.rl import training_metrics
from rollouts.losses import LOSSES, LossOutput
from rollouts.losses.distillation import compute_linear_divergence
from rollouts.losses.inputs import reduce_loss
from rollouts.losses.logprobs import LinearScores
from rollouts.reference.score import FrozenReference
from rollouts.replay.compare import recompute
from rollouts.testing.torch_contracts import STEP, make_batch
from rollouts.types import (
    ForwardBackwardResult,
    LossSpec,
    Mean,
    OptimStepResult,
    Sample,
    metric_values,
)
from tests.support.plain_backend import assert_gradients_close, load_tiny, open_backend, take_gradients
from tests.support.text_tables import cases
from tests.unit import test_loops
from tests.unit.test_losses import AGAINST_OLD, POLICY, make_inputs, row
from tests.unit.test_pytorch_backend import FORMS
from tests.unit.test_rl_batch import batch_of

torch.set_num_threads(1)
EYE = torch.eye(3, dtype=torch.float64)


# --- by hand ------------------------------------------------------------------------------------------------


@cases("temperature: 1.0 0.5")
def test_the_value_and_the_gradient_of_two_distributions_by_hand(temperature: float):
    """.5 log(.5/.4) + .3 log(.3/.4) + .2 log 1, and p_policy − p_ref, over the temperature."""
    ref, policy = (torch.tensor(one, dtype=torch.float64) for one in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]))
    logits = (policy.log() * temperature).requires_grad_()
    given = ref.log()[None] * temperature, EYE
    *_, kl = LinearScores.apply(logits[None], EYE, torch.tensor([2]), temperature, False, given)
    divergence = compute_linear_divergence(logits[None], EYE, *given, beta=0, temperature=temperature)
    for found in kl, divergence:
        assert found.item() == pytest.approx(0.025267154, abs=1e-9)
        (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        assert (gradient * temperature).tolist() == pytest.approx([-0.1, 0.1, 0.0])


@cases("""
policy   | reference | kl                      | …
0 -30 -60 | 0 -30 -60 | 0
0 -30 -60 | -60 0 -30 | 30                      | not 18.4, where log(p + 1e-8) ends
0 -60 -30 | 0 -30 -60 | 2.8072868906520526e-12  | 30·(e^−30 − e^−60)
""")
def test_small_probabilities_are_not_clamped(policy: list[float], reference: list[float], kl: float):
    logits = torch.tensor([policy], dtype=torch.float64, requires_grad=True)
    given = torch.tensor([reference], dtype=torch.float64), EYE
    *_, found = LinearScores.apply(logits, EYE, torch.tensor([0]), 1.0, False, given)
    assert found.item() == pytest.approx(kl, rel=1e-3 if kl < 1 else 1e-9, abs=1e-16)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    p, p_ref = (torch.tensor(one).double().softmax(-1) for one in (policy, reference))
    assert_close(gradient[0], p - p_ref, rtol=1e-12, atol=1e-20)


# --- in a backend -------------------------------------------------------------------------------------------

SEEN = []
EXACT = {"kl_coef": 0.3, "kl_estimator": "exact"}


def watching_loss(inputs, *, unit, kl_estimator):
    """The KL of each token alone; keeps what it was given."""
    SEEN.append(inputs)
    return LossOutput(*reduce_loss(inputs.exact_kl, inputs.mask, unit), {})


def make_pair(kind="llama", *, far=0.02):
    """A random policy, and a reference near it."""
    policy, generator = load_tiny(kind), torch.Generator().manual_seed(3)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for one in reference.parameters():
            one += far * torch.randn(one.shape, generator=generator)
    return policy, reference


async def compare(backend, reference):
    """Gives the backend its reference."""
    thread = backend.device_thread
    await backend.compare_with(await thread.submit(lambda: FrozenReference(reference, thread, 64)))


def score_slowly(model, batch):
    """Of each row the log-probs [T, V] before each token but the first, by a forward pass of its own."""
    return [
        (model(input_ids=torch.as_tensor(tokens)[None]).logits[0, :-1] / batch.temperature).log_softmax(-1)
        for tokens in batch.tokens
    ]


def compute_rows(policy, reference, batch):
    """Of each row the log-probs of its tokens but the first, and the KL before them."""
    with torch.no_grad():
        refs = score_slowly(reference, batch)
    owns = score_slowly(policy, batch)
    kls = [(ref.exp() * (ref - own)).sum(-1) for ref, own in zip(refs, owns, strict=True)]
    tokens = [torch.as_tensor(ids)[1:, None] for ids in batch.tokens]
    return [own.gather(-1, ids)[:, 0] for own, ids in zip(owns, tokens, strict=True)], kls


@cases("form", FORMS)
async def test_each_token_has_the_kl_of_the_full_softmax_whatever_the_packing(form):
    SEEN.clear()
    batch, (policy, reference) = make_batch(temperature=0.7), make_pair()
    _, rows = compute_rows(copy.deepcopy(policy).double(), copy.deepcopy(reference).double(), batch)
    wanted = [kl[mask[1:]].tolist() for kl, mask in zip(rows, batch.loss_masks, strict=True)]
    spec = LossSpec(f"{__name__}:watching_loss", {"kl_estimator": "exact"})
    async with open_backend(policy, **FORMS[form]) as backend:
        await compare(backend, reference)
        result = await backend.compute_loss(batch, spec)
    found = [kl[mask].tolist() for one in SEEN for kl, mask in zip(one.exact_kl, one.mask, strict=True)]
    assert min(map(min, wanted)) > 1e-3
    assert len(found) == len(wanted)
    for one in wanted:  # rows come in the order of the packing
        assert any(other == pytest.approx(one, abs=1e-6) for other in found)
    assert result.loss == pytest.approx(np.concatenate(wanted).mean(), abs=1e-6)


@cases("form", FORMS)
async def test_the_gradient_is_that_of_the_full_softmax_whatever_the_packing(form):
    batch, (policy, reference) = make_batch(temperature=0.7), make_pair()
    plain = copy.deepcopy(policy)
    losses = [
        (0.3 * kl - torch.as_tensor(advantages)[1:] * own)[torch.as_tensor(mask[1:])]
        for own, kl, advantages, mask in zip(
            *compute_rows(plain, reference, batch), batch.advantages, batch.loss_masks, strict=True
        )
    ]
    loss = torch.cat(losses).mean()
    loss.backward()
    async with open_backend(policy, skip_zero_advantage=True, **FORMS[form]) as backend:
        await compare(backend, reference)
        result = await backend.forward_backward(batch, LossSpec("reinforce", EXACT))
        assert not any(weight.requires_grad or weight.grad is not None for weight in reference.parameters())
        found = take_gradients(policy)
    assert result.loss == pytest.approx(loss.item(), abs=1e-5)
    assert_gradients_close(found, take_gradients(plain), 2e-5)


async def test_after_an_update_the_same_kl_is_measured_without_a_gradient_also_to_half_precision():
    """The weights of a reference in bfloat16 are compared as they are."""
    batch, (policy, near) = make_batch(), make_pair()
    reference, spec = copy.deepcopy(policy), LossSpec("ppo_clip", EXACT)
    async with open_backend(policy) as backend:
        await compare(backend, reference)
        first = await backend.forward_backward(batch, spec)
        assert first.metrics["kl/exact"].total == 0  # policy and reference are one model, and run alike
        await backend.optim_step(STEP)
        for other, rel in (reference, 1e-4), (near.bfloat16(), 0.05):
            _, rows = compute_rows(policy, copy.deepcopy(other), batch)
            await compare(backend, other)
            after = await backend.compute_loss(batch, spec)
            pairs = zip(rows, batch.loss_masks, strict=True)
            kl = torch.cat([one[torch.as_tensor(mask[1:])] for one, mask in pairs]).mean().item()
            assert metric_values(after.metrics)["kl/exact"] == pytest.approx(kl, rel=rel) and kl > 1e-3
        assert all(weight.grad is None for weight in policy.parameters())


async def test_a_head_that_is_no_matrix_and_a_reference_that_runs_otherwise_are_refused():
    for kind, change in (("gemma", {}), ("llama", {"layout": "rows"}), ("llama", {"logit_scale": 2.0})):
        model = load_tiny(kind)
        async with open_backend(model) as backend:
            plan = backend.trainer.find_plan()._replace(**change)
            with pytest.raises(ModelError, match=r"kl_estimator='exact' needs a linear head, and the same"):
                await backend.compare_with(SimpleNamespace(plan=plan, model=model))


async def test_a_loss_that_asks_for_it_without_a_reference_says_what_is_missing():
    async with open_backend(load_tiny("llama")) as backend:
        with pytest.raises(ConfigError, match="kl_estimator='exact' needs a reference beside a trainer"):
            await backend.forward_backward(make_batch(), LossSpec("ppo_clip", EXACT))


# --- as a term of losses ------------------------------------------------------------------------------------


@cases("name", POLICY)
def test_every_policy_loss_adds_it_to_each_token_with_the_weight_1(name):
    kl = row(0.1, 0.2, 0.4).requires_grad_()
    inputs = replace(make_inputs(), exact_kl=kl, ref_log_probs=None)
    params = {"importance_cap": 1.2} if name in AGAINST_OLD else {}
    found = LOSSES[name](inputs, unit="tokens", **EXACT, **params)
    assert torch.autograd.grad(found.sum, kl)[0].tolist() == [pytest.approx([0.3] * 3)]
    without = LOSSES[name](replace(inputs, exact_kl=None), unit="tokens", **params)
    assert (found.sum - without.sum).item() == pytest.approx(0.3 * 0.7)
    metrics = metric_values(found.metrics)
    assert (metrics["kl/exact"], metrics["loss/kl"]) == (pytest.approx(0.7 / 3), pytest.approx(0.07))
    assert "kl/ref" not in metrics and "kl/exact" not in metric_values(without.metrics)


def test_a_token_that_a_correction_drops_has_no_kl_term_either():
    """exp(lp − mu) is e^.5, e^−.5 and e^.7, of which the last is above the mask's bound."""
    assert exp(0.5) < 1.8 < exp(0.7)
    kl = row(0.1, 0.2, 0.4).requires_grad_()
    inputs = replace(make_inputs(old_log_probs=None), exact_kl=kl)
    found = LOSSES["ppo_clip"](inputs, correction="token_mask(low=0.5, high=1.8)", **EXACT)
    assert torch.autograd.grad(found.sum, kl)[0].tolist() == [pytest.approx([0.3, 0.3, 0.0])]


def test_what_is_about_sampled_tokens_does_not_go_with_it():
    inputs = replace(make_inputs(), exact_kl=row(0.1, 0.2, 0.4))
    with pytest.raises(ConfigError, match="no kl_importance, which is about sampled tokens"):
        LOSSES["ppo_clip"](inputs, kl_importance=True, **EXACT)


def test_a_replay_refuses_it_by_name():
    """The record has log-probs of the sampled tokens alone."""
    columns = {name: np.ones(2) for name in ("mask", "log_prob", "advantage", "mu")}
    with pytest.raises(
        RecordError, match=r"loss 'ppo_clip' fails on what is recorded: .*kl_estimator='exact'"
    ):
        recompute(LossSpec("ppo_clip", EXACT), [columns])


def test_the_controller_is_told_the_sum_over_a_trajectory_of_what_the_last_pass_measured():
    """Two trajectories, one of two segments, with 2 trained tokens a row; .25 and .5 nats a token of the two
    parts of the last pass.
    """
    samples = tuple(Sample(id=id_, prompt="p", group_index=7) for id_ in ("g7-s0", "g7-s0.1", "g7-s1"))
    batch = replace(batch_of([1.0, 1.0, 0.0]), samples=samples)
    settings = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "exact"}
    config = test_loops.rl_config(updates_per_batch=2, minibatches=2, **settings)
    optim = OptimStepResult(step=1, lr=1e-3, grad_norm=1.0, clipped=False)
    results = [
        (ForwardBackwardResult(loss=0.0, denominator=1.0, metrics={"kl/exact": Mean(total, tokens)}), optim)
        for total, tokens in ((9.0, 4.0), (9.0, 2.0), (1.0, 4.0), (1.0, 2.0))
    ]
    algorithm = choose_algorithm(config, 1, LoopState(0.1))
    assert algorithm.loss.params.items() >= {"kl_coef": 0.1, "kl_estimator": "exact"}.items()
    metrics = training_metrics(config, algorithm, batch, results, (), 1)
    assert metrics["kl/exact"] == pytest.approx(1 / 3)
    assert metrics["kl/ref_per_sample"] == pytest.approx((2 + 2 + 2) / 3 / 2)
    assert metrics["kl/coef"] == 0.1
