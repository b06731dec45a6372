from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollouts.losses import logprobs
from rollouts.losses.logprobs import linear_logprobs

torch.set_num_threads(1)


def make(
    n: int, h: int, v: int, *, seed: int = 0, scale: float = 1.0, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=generator) * scale
    weight = torch.randn(v, h, generator=generator)
    targets = torch.randint(0, v, (n,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def slow(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same by log_softmax over all logits, in float64."""
    log_probs = ((hidden.double() @ weight.double().T) / temperature).log_softmax(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def test_two_tokens_by_hand():
    """Logits (0, ln 3): probabilities 1/4 and 3/4."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [1.0986123]])
    result = linear_logprobs(hidden, weight, torch.tensor([0, 1]))
    assert result.log_probs.tolist() == pytest.approx([-1.3862944, -0.2876821], abs=1e-6)  # ln 1/4, ln 3/4
    assert result.entropy.tolist() == pytest.approx([0.5623351, 0.5623351], abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("vocab_chunk", [1, 7, 64, 1000])
def test_log_probs_entropy_and_gradients_equal_those_of_log_softmax(vocab_chunk: int, temperature: float):
    hidden, weight, targets = make(23, 16, 97)
    result = linear_logprobs(hidden, weight, targets, temperature=temperature, vocab_chunk=vocab_chunk)
    wanted, entropy = slow(hidden, weight, targets, temperature)
    torch.testing.assert_close(result.log_probs.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.entropy.double(), entropy, atol=1e-5, rtol=0)
    upstream = torch.randn(23, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((result.log_probs * upstream).sum(), [hidden, weight])
    expected = torch.autograd.grad((wanted * upstream).sum(), [hidden, weight])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_positions_in_many_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch):
    hidden, weight, targets = make(23, 8, 50)
    whole = linear_logprobs(hidden, weight, targets, vocab_chunk=16)
    whole_grads = torch.autograd.grad(whole.log_probs.sum(), [hidden, weight])
    monkeypatch.setattr(logprobs, "CPU_ROWS", 5)
    tiled = linear_logprobs(hidden, weight, targets, vocab_chunk=16)
    tiled_grads = torch.autograd.grad(tiled.log_probs.sum(), [hidden, weight])
    for one, other in zip([*whole, *whole_grads], [*tiled, *tiled_grads], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_derivatives_agree_with_finite_differences():
    hidden, weight, targets = make(3, 4, 11, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, targets, temperature=0.8, vocab_chunk=4).log_probs,
        (hidden, weight),
    )


def test_large_logits_neither_overflow_nor_lose_the_small_ones():
    hidden, weight, targets = make(5, 8, 40, scale=200.0)
    result = linear_logprobs(hidden, weight, targets, vocab_chunk=9)
    wanted, _ = slow(hidden, weight, targets, 1.0)
    torch.testing.assert_close(result.log_probs.double(), wanted, atol=1e-3, rtol=1e-5)  # logits of about 600


def test_bfloat16_inputs_are_not_rounded_after_the_product():
    hidden, weight, targets = make(31, 16, 97, scale=3.0, dtype=torch.bfloat16)
    result = linear_logprobs(hidden, weight, targets, vocab_chunk=20)
    wanted, _ = slow(hidden, weight, targets, 1.0)
    assert result.log_probs.dtype == torch.float32
    torch.testing.assert_close(result.log_probs.double(), wanted, atol=1e-4, rtol=0)
    grads = torch.autograd.grad(result.log_probs.sum(), [hidden, weight])
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16]


def test_a_position_without_gradient_gives_none_and_costs_none():
    hidden, weight, targets = make(4, 8, 20)
    result = linear_logprobs(hidden, weight, targets)
    (grad,) = torch.autograd.grad((result.log_probs * torch.tensor([0.0, 1.0, 0.0, 1.0])).sum(), [hidden])
    assert grad[[0, 2]].abs().max() == 0
    assert grad[[1, 3]].abs().min() > 0


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_keeping_the_logits_of_some_positions_changes_nothing(
    entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
):
    """Kept are none, 7 of the 23 positions, and all; some positions have no gradient."""
    hidden, weight, targets = make(23, 8, 50)
    monkeypatch.setattr(logprobs, "CPU_ROWS", 5)
    upstream = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    upstream[:, [0, 5, 6, 20]] = 0.0
    found = []
    for num_kept in (0, 7, 23):
        monkeypatch.setattr(logprobs, "CPU_KEPT", 50 * num_kept)
        result = linear_logprobs(
            hidden, weight, targets, temperature=0.7, vocab_chunk=16, entropy_gradient=entropy_gradient
        )
        loss = (result.log_probs * upstream[0]).sum() + (
            result.entropy * upstream[1]
        ).sum() * entropy_gradient
        first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
        again = torch.autograd.grad(loss, [hidden, weight])  # the kept logits are still there
        found.append([*result, *first, *again])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)


def test_a_nan_gradient_is_not_lost():
    hidden, weight, targets = make(2, 4, 6)
    (grad,) = torch.autograd.grad(
        (linear_logprobs(hidden, weight, targets).log_probs * float("nan")).sum(), [hidden]
    )
    assert grad.isnan().all()


def test_entropy_has_a_gradient_only_if_it_is_asked_for():
    hidden, weight, targets = make(2, 4, 6)
    assert not linear_logprobs(hidden, weight, targets).entropy.requires_grad
    assert linear_logprobs(hidden, weight, targets, entropy_gradient=True).entropy.requires_grad


def test_the_gradient_of_entropy_by_hand():
    """Logits (0, ln 3): p = (1/4, 3/4), H = .5623; dH/dlogit = −p(log p + H) = (.2060, −.2060), and logits
    are hidden · weight.
    """
    hidden, weight = (
        torch.ones(1, 1, dtype=torch.float64).requires_grad_(),
        torch.tensor([[0.0], [1.0986123]], dtype=torch.float64).requires_grad_(),
    )
    linear_logprobs(hidden, weight, torch.tensor([0]), entropy_gradient=True).entropy.sum().backward()
    assert weight.grad is not None and hidden.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([0.2059898, -0.2059898], abs=1e-6)
    assert hidden.grad.item() == pytest.approx(-0.2059898 * 1.0986123, abs=1e-6)


def test_derivatives_of_log_probs_and_entropy_together_agree_with_finite_differences():
    hidden, weight, targets = make(3, 4, 11, dtype=torch.float64)

    def both(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear_logprobs(h, w, targets, temperature=0.8, vocab_chunk=4, entropy_gradient=True))

    assert torch.autograd.gradcheck(both, (hidden, weight))


@pytest.mark.parametrize("vocab_chunk", [1, 7, 1000])
def test_entropy_s_gradient_equals_that_of_log_softmax_in_tiles(
    vocab_chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logprobs, "CPU_ROWS", 5)
    hidden, weight, targets = make(23, 16, 97)
    result = linear_logprobs(
        hidden, weight, targets, temperature=0.7, vocab_chunk=vocab_chunk, entropy_gradient=True
    )
    wanted, entropy = slow(hidden, weight, targets, 0.7)
    upstream = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    upstream[:, 5] = 0.0
    found = torch.autograd.grad(
        (result.log_probs * upstream[0] + result.entropy * upstream[1]).sum(), [hidden, weight]
    )
    expected = torch.autograd.grad((wanted * upstream[0] + entropy * upstream[1]).sum(), [hidden, weight])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert found[0][5].abs().max() == 0


def test_asking_for_entropy_s_gradient_does_not_change_that_of_the_log_probs():
    hidden, weight, targets = make(6, 8, 30, dtype=torch.float64)
    grads = [
        torch.autograd.grad(
            linear_logprobs(hidden, weight, targets, vocab_chunk=7, entropy_gradient=asked).log_probs.sum(),
            [hidden, weight],
        )
        for asked in (False, True)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)


def test_a_frozen_head_gets_no_gradient_and_the_states_still_do():
    hidden, weight, targets = make(6, 4, 12)
    (grad,) = torch.autograd.grad(
        linear_logprobs(hidden, weight.detach(), targets, vocab_chunk=5).log_probs.sum(), [hidden]
    )
    (wanted,) = torch.autograd.grad(slow(hidden, weight.detach(), targets, 1.0)[0].sum(), [hidden])
    torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1e-5)


def test_nothing_in_gives_nothing_out():
    hidden, weight, _ = make(0, 4, 6)
    result = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert result.log_probs.shape == result.entropy.shape == (0,)
    result.log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


def test_the_logits_of_all_positions_and_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch):
    """No tensor made by a matrix product forward or backward is larger than a tile or a gradient."""
    monkeypatch.setattr(logprobs, "CPU_ROWS", 64)
    monkeypatch.setattr(logprobs, "CPU_KEPT", 4096 * 4)
    hidden, weight, targets = make(512, 8, 4096)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Watch():
        linear_logprobs(hidden, weight, targets, vocab_chunk=32).log_probs.sum().backward()
        both = linear_logprobs(hidden, weight, targets, vocab_chunk=32, entropy_gradient=True)
        (both.log_probs + both.entropy).sum().backward()
    assert largest == 4096 * 8  # the weight's gradient; all logits would be 2,097,152
