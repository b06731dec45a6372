"""The chunked head beside log_softmax over all logits in float64, and the exact KL that it gives."""

import torch
from torch import Tensor
from torch.testing import assert_close

from rollouts.losses import logprobs
from rollouts.losses.logprobs import LinearScores, linear_logprobs
from tests.support.text_tables import cases

torch.set_num_threads(1)


def make(n, h, v, *, scale=1.0, dtype=torch.float32):
    """hidden and weight of a policy, targets; hidden and weight of a reference near it."""
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(size, h, generator=generator) * by for size, by in ((n, scale), (v, 1.0))]
    targets = torch.randint(0, v, (n,), generator=generator)
    others = [one + 0.1 * torch.randn(one.shape, generator=generator) for one in factors]
    own = [one.to(dtype).requires_grad_() for one in factors]
    return *own, targets, [one.to(dtype) for one in others]


def slow(hidden, weight, targets, temperature, *references):
    """Log-probs, entropies and, with a reference, KL in float64, from all logits."""
    own, *others = (
        (states.double() @ head.double().T / temperature).log_softmax(-1)
        for states, head in ((hidden, weight), *references)
    )
    kls = [(ref.exp() * (ref - own)).sum(-1) for ref in others]
    return own.gather(-1, targets[:, None]).squeeze(-1), -(own.exp() * own).sum(-1), *kls


@cases("entropy_gradient: no yes")
@cases("temperature: 1.0 0.7")
@cases("""
rows | chunk | scale | precision | tolerance | kl | …
5    | 1    | 1   | float32  | 1e-5  | no
5    | 7    | 1   | float32  | 1e-5  | no
1024 | 1000 | 1   | float32  | 1e-5  | no
5    | 7    | 1   | float64  | 1e-12 | no
5    | 9    | 200 | float32  | 1e-3  | no | logits of about 600 neither overflow nor lose the small ones
31   | 20   | 3   | bfloat16 | 1e-4  | no | is not rounded after the product
5    | 1    | 1   | float32  | 1e-5  | yes
5    | 7    | 1   | float32  | 1e-5  | yes
1024 | 1000 | 1   | float32  | 1e-5  | yes
5    | 7    | 1   | float64  | 1e-12 | yes
31   | 20   | 1   | bfloat16 | 1e-3  | yes
""")
def test_log_probs_entropy_kl_and_gradients_are_those_of_all_logits(
    rows: int,
    chunk: int,
    scale: int,
    precision,
    tolerance: float,
    kl: bool,
    temperature: float,
    entropy_gradient: bool,
    monkeypatch,
):
    """Of the KL to a tenth of the tolerance."""
    dtype = getattr(torch, precision)
    monkeypatch.setattr(logprobs, "CPU_ROWS", rows)
    monkeypatch.setattr(logprobs, "CPU_CHUNK", chunk)
    hidden, weight, targets, reference = make(23, 16, 97, scale=scale, dtype=dtype)
    given = [reference] * kl
    options = {"temperature": temperature, "entropy_gradient": entropy_gradient}
    found = linear_logprobs(hidden, weight, targets, **options)
    if kl:
        found = LinearScores.apply(hidden, weight, targets, *options.values(), *given)
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found[1].requires_grad == entropy_gradient
    wanted = slow(hidden, weight, targets, temperature, *given)
    for one, other, share in zip(found, wanted, (1, 1, 0.1), strict=False):
        assert_close(one.double(), other, atol=share * tolerance, rtol=1e-6 * min(scale, 10))
    upstream = torch.randn(2 + kl, 23, generator=torch.Generator().manual_seed(1)).double()
    upstream[:, [0, 5]] = 0.0
    upstream[1] *= entropy_gradient
    loss, expected = (
        sum((values * one).sum() for values, one in zip(each, upstream, strict=True) if one.any())
        for each in (found, wanted)
    )
    slack = 0.05 if dtype == torch.bfloat16 else tolerance
    both = [torch.autograd.grad(one, [hidden, weight]) for one in (loss, expected)]
    assert both[0][0][[0, 5]].abs().max() == 0
    for one, other in zip(*both, strict=True):
        assert one.dtype == dtype
        assert_close(one.double(), other.double(), atol=slack * scale, rtol=slack)


def test_the_kl_from_itself_is_exactly_zero_and_has_no_gradient():
    hidden, weight, targets, _ = make(9, 16, 40, dtype=torch.float64)
    *_, kl = LinearScores.apply(hidden, weight, targets, 0.7, False, (hidden.detach(), weight.detach()))
    assert not any(one.any() for one in (kl, *torch.autograd.grad(kl.sum(), [hidden, weight])))


def test_a_nan_gradient_is_not_lost():
    hidden, weight, targets, _ = make(2, 4, 6)
    spoilt = (linear_logprobs(hidden, weight, targets).log_probs * float("nan")).sum()
    assert torch.autograd.grad(spoilt, [hidden])[0].isnan().all()


def test_no_position_gives_empty_output_and_a_zero_gradient():
    hidden, weight, targets, _ = make(0, 4, 6)
    result = linear_logprobs(hidden, weight, targets)
    assert result.log_probs.shape == result.entropy.shape == (0,)
    assert torch.autograd.grad(result.log_probs.sum(), [weight])[0].abs().max() == 0


@cases("kl: no yes")
def test_the_logits_of_all_positions_and_tokens_never_exist_at_once_and_none_are_kept(kl: bool, monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_ROWS", 64)
    monkeypatch.setattr(logprobs, "CPU_CHUNK", 32)
    hidden, weight, targets, reference = make(512, 8, 4096)
    largest, kept = 0, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with Watch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = LinearScores.apply(hidden, weight, targets, 1.0, not kl, *[reference] * kl)
        (scores[0] + scores[1 + kl]).sum().backward()
    assert largest == 4096 * 8  # the weight's gradient; all logits would be 2,097,152
    assert max(kept) == 4096 * 8  # the weight
