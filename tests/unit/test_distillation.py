"""Divergences between a teacher and a student."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from rollouts.advantages.distillation import align_rows, compute_distillation_advantages
from rollouts.errors import ConfigError
from rollouts.losses import distillation
from rollouts.losses.distillation import compute_divergence, compute_linear_divergence, gkd_loss
from rollouts.types import metric_values
from tests.support.made_updates import floats
from tests.support.text_tables import cases

NAN, INF = float("nan"), float("inf")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(p, q):
    """[N] Σ p·log(p/q)."""
    return (p * np.log(p / q)).sum(-1)


def slow_divergence(student, teacher, beta):
    """[N] from logits, by the definition."""
    p, q = (np.exp(one.numpy()) / np.exp(one.numpy()).sum(-1, keepdims=True) for one in (student, teacher))
    if beta in (0, 1):
        return kl(q, p) if beta == 0 else kl(p, q)
    middle = beta * q + (1 - beta) * p
    return beta * kl(q, middle) + (1 - beta) * kl(p, middle)


# --- divergences --------------------------------------------------------------------------------------------


@cases("temperature: 0.5 1.0 3.0")
@cases("beta: 0.0 0.1 0.5 0.9 1.0")
def test_random_logits_match_the_slow_version(beta: float, temperature: float):
    student, teacher = 3 * draw(5, 7), 3 * draw(5, 7, seed=1)
    found = compute_divergence(student, teacher, beta=beta, temperature=temperature)
    wanted = slow_divergence(student / temperature, teacher / temperature, beta)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-10)


@cases("""
beta | expected | …
0    | inf
1    | 0.693147181 | log 2
0.5  | 0.215761558 | ½·(½·log ⅔ + ½·log 2) + ½·log 4/3
""")
def test_a_token_that_only_one_gives_probability_zero_makes_one_direction_infinite(
    beta: float, expected: float
):
    student, teacher = torch.tensor([[0.0, -INF]]), torch.tensor([[0.0, 0.0]])
    assert float(compute_divergence(student, teacher, beta=beta)) == pytest.approx(expected)


def test_tiles_and_heads_give_the_same_values_and_gradients(monkeypatch):
    hidden, weight = draw(11, 4).requires_grad_(), draw(9, 4, seed=1).requires_grad_()
    teacher, teacher_weight = draw(11, 6, seed=2).requires_grad_(), draw(9, 6, seed=3)
    options = {"beta": 0.3, "temperature": 0.7}
    whole = compute_divergence(hidden @ weight.T, teacher @ teacher_weight.T, **options)
    scale = torch.arange(11.0, dtype=torch.float64)
    wanted = torch.autograd.grad((whole * scale).sum(), (hidden, weight))
    for tile in (1, 25, 10_000):
        monkeypatch.setattr(distillation, "DIVERGENCE_TILE", tile)
        found = compute_linear_divergence(hidden, weight, teacher, teacher_weight, **options)
        assert_close(found, whole, rtol=1e-12, atol=0)
        grads = torch.autograd.grad((found * scale).sum(), (hidden, weight))
        assert_close(grads, wanted, rtol=1e-10, atol=1e-14)
    assert compute_linear_divergence(hidden[:0], weight, teacher[:0], teacher_weight).shape == (0,)


# --- the loss -----------------------------------------------------------------------------------------------


def test_gkd_sums_over_the_mask_in_each_unit_and_no_garbage_leaks(monkeypatch):
    monkeypatch.setattr(distillation, "DIVERGENCE_TILE", 7)
    student, teacher = draw(3, 4, 5), draw(3, 4, 5, seed=1)
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0] * 4]).bool()
    token_losses = compute_divergence(student.flatten(0, 1), teacher.flatten(0, 1), beta=0.4).reshape(3, 4)
    by_tokens = float(token_losses[mask].sum())
    by_rows = float(token_losses[0][mask[0]].mean() + token_losses[1, 1])
    dirty_student = torch.where(mask[..., None], student, NAN).requires_grad_()
    dirty_teacher = torch.where(mask[..., None], teacher, INF)
    for unit, *wanted in (("tokens", by_tokens, 4), ("constant", by_tokens, 4), ("sequences", by_rows, 2)):
        output = gkd_loss(dirty_student, dirty_teacher, mask, beta=0.4, unit=unit)
        assert [output.sum.item(), output.count] == pytest.approx(wanted, rel=1e-12)
        assert metric_values(output.metrics) == pytest.approx({"divergence/mean": by_tokens / 4})
    clean = student.clone().requires_grad_()
    for logits, other in ((clean, teacher), (dirty_student, dirty_teacher)):
        gkd_loss(logits, other, mask, beta=0.4).sum.backward()
    assert_close(dirty_student.grad, clean.grad, rtol=0, atol=0)
    assert not clean.grad[~mask].any() and clean.grad[mask].all()


def test_bad_parameters_and_shapes_are_named():
    for name, value in (("beta", 1.5), ("temperature", 0.0)):
        with pytest.raises(ConfigError, match=f"{name}={value} is outside its range"):
            compute_divergence(draw(1, 3), draw(1, 3), **{name: value})
    with pytest.raises(ValueError, match=r"\(1, 3\), teacher_logits \(1, 2\)"):
        compute_divergence(draw(1, 3), draw(1, 2))
    with pytest.raises(ValueError, match="the heads have 4 and 5 rows"):
        compute_linear_divergence(draw(2, 3), draw(4, 3), draw(2, 3), draw(5, 3))
    with pytest.raises(ValueError, match=r"those of the mask, \(2, 2\)"):
        gkd_loss(draw(1, 2, 3), draw(1, 2, 3), torch.ones(2, 2, dtype=torch.bool))


# --- by sampled tokens --------------------------------------------------------------------------------------


@cases("""
options                 | wanted
                        | 0.2 -0.6 0.4
coef = 0.5, clip = 0.25 | 0.1 -0.25 0.2
""")
def test_advantages_are_how_much_likelier_the_teacher_finds_each_token(options: dict, wanted: list[float]):
    both = floats([-0.5, -1.5, -1.2]), floats([-0.7, -0.9, -1.6])
    (found,) = compute_distillation_advantages(*both, [np.ones(3, bool)], **options)
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)


def test_rows_are_aligned_by_their_masks():
    teacher = floats([9, 9, 9, -1, -2], [9, -3])
    teacher_masks, masks = [np.arange(5) > 2, np.arange(2) > 0], [np.arange(3) > 0, np.arange(3) > 1]
    found = align_rows(teacher, teacher_masks, masks)
    assert [row.tolist() for row in found] == [[0, -1, -2], [0, 0, -3]]
    with pytest.raises(ValueError, match="row 1: the teacher's mask selects 1 tokens, the student's 2"):
        align_rows(teacher, teacher_masks, masks[:1] * 2)
