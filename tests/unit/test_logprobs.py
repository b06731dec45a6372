"""The chunked head beside log_softmax over all logits in float64."""

import torch
from torch import Tensor
from torch.testing import assert_close

from rollouts.losses import logprobs
from rollouts.losses.logprobs import linear_logprobs
from tests.support.text_tables import cases

torch.set_num_threads(1)


def make(n, h, v, *, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=generator) * scale
    weight = torch.randn(v, h, generator=generator)
    targets = torch.randint(0, v, (n,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def slow(hidden, weight, targets, temperature):
    log_probs = ((hidden.double() @ weight.double().T) / temperature).log_softmax(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


@cases("entropy_gradient: no yes")
@cases("temperature: 1.0 0.7")
@cases("""
rows | chunk | scale | precision | tolerance | …
5    | 1    | 1   | float32  | 1e-5
5    | 7    | 1   | float32  | 1e-5
1024 | 1000 | 1   | float32  | 1e-5
5    | 7    | 1   | float64  | 1e-12
5    | 9    | 200 | float32  | 1e-3 | logits of about 600 neither overflow nor lose the small ones
31   | 20   | 3   | bfloat16 | 1e-4 | is not rounded after the product
""")
def test_log_probs_entropy_and_gradients_equal_those_of_all_logits(
    rows: int,
    chunk: int,
    scale: int,
    precision,
    tolerance: float,
    temperature: float,
    entropy_gradient: bool,
    monkeypatch,
):
    dtype = getattr(torch, precision)
    monkeypatch.setattr(logprobs, "CPU_ROWS", rows)
    monkeypatch.setattr(logprobs, "CPU_CHUNK", chunk)
    hidden, weight, targets = make(23, 16, 97, scale=scale, dtype=dtype)
    result = linear_logprobs(
        hidden, weight, targets, temperature=temperature, entropy_gradient=entropy_gradient
    )
    wanted, entropy = slow(hidden, weight, targets, temperature)
    assert result.log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(result.log_probs.double(), wanted, atol=tolerance, rtol=1e-5)
    assert_close(result.entropy.double(), entropy, atol=tolerance, rtol=1e-5)
    upstream = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    upstream[:, [0, 5]] = 0.0
    loss = (result.log_probs * upstream[0]).sum() + entropy_gradient * (result.entropy * upstream[1]).sum()
    expected = (wanted * upstream[0]).sum() + entropy_gradient * (entropy * upstream[1]).sum()
    found = torch.autograd.grad(loss, [hidden, weight])
    assert result.entropy.requires_grad == entropy_gradient
    assert found[0][[0, 5]].abs().max() == 0
    slack = 0.05 if dtype == torch.bfloat16 else max(tolerance, 1e-12)
    for one, other in zip(found, torch.autograd.grad(expected, [hidden, weight]), strict=True):
        assert one.dtype == dtype
        assert_close(one.double(), other.double(), atol=slack * scale, rtol=slack)


def test_a_nan_gradient_is_not_lost():
    hidden, weight, targets = make(2, 4, 6)
    spoilt = (linear_logprobs(hidden, weight, targets).log_probs * float("nan")).sum()
    assert torch.autograd.grad(spoilt, [hidden])[0].isnan().all()


def test_no_position_gives_empty_output_and_a_zero_gradient():
    hidden, weight, _ = make(0, 4, 6)
    result = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert result.log_probs.shape == result.entropy.shape == (0,)
    assert torch.autograd.grad(result.log_probs.sum(), [weight])[0].abs().max() == 0


def test_the_logits_of_all_positions_and_tokens_never_exist_at_once(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_ROWS", 64)
    monkeypatch.setattr(logprobs, "CPU_CHUNK", 32)
    hidden, weight, targets = make(512, 8, 4096)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Watch():
        both = linear_logprobs(hidden, weight, targets, entropy_gradient=True)
        (both.log_probs + both.entropy).sum().backward()
    assert largest == 4096 * 8  # the weight's gradient; all logits would be 2,097,152
