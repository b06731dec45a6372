"""Run by test_logprobs_triton.py with TRITON_INTERPRET=1: compares the kernels with log_softmax in float64,
and prints one line a case.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from rollouts.losses import logprobs_triton
from rollouts.losses.logprobs import linear_logprobs_tiled
from rollouts.losses.logprobs_triton import find_disagreement, linear_logprobs_triton


def compute_errors(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative error of the tensors, norm-wise."""
    pairs = [(one.detach().double(), two.detach()) for one, two in zip(found, wanted, strict=True)]
    return max(float((one - two).norm() / two.norm().clamp_min(1e-30)) for one, two in pairs)


def run_case(
    n: int, h: int, v: int, dtype: str, temperature: float, entropy_gradient: bool, transposed: bool
) -> dict[str, float]:
    """Errors of values and gradients against float64; some positions have no gradient."""
    generator = torch.Generator().manual_seed(n + v)
    hidden = torch.randn(n, h, generator=generator).to(getattr(torch, dtype))
    weight = (torch.randn(v, h, generator=generator) / h**0.5 * 3).to(getattr(torch, dtype))
    if transposed:
        weight = weight.T.contiguous().T
    targets = torch.randint(0, v, (n,), generator=generator)
    upstream = torch.randn(2, n, generator=generator)
    upstream[:, ::3] = 0.0
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    result = linear_logprobs_triton(
        *leaves, targets, temperature=temperature, entropy_gradient=entropy_gradient
    )
    loss = (result.log_probs * upstream[0]).sum() + (result.entropy * upstream[1]).sum() * entropy_gradient
    gradients = torch.autograd.grad(loss, leaves)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    log_probs = (doubles[0] @ doubles[1].T / temperature).log_softmax(-1)
    wanted = [log_probs.gather(-1, targets[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)]
    expected = torch.autograd.grad(
        (wanted[0] * upstream[0]).sum() + (wanted[1] * upstream[1]).sum() * entropy_gradient, doubles
    )
    assert gradients[0][::3].abs().max() == 0
    return {
        "values": compute_errors(list(result), wanted),
        "gradients": compute_errors(list(gradients), list(expected)),
    }


def break_entropy() -> str | None:
    """What the check of the device says of kernels whose entropy is 1 % too large."""
    reduce_logits = logprobs_triton.reduce_logits

    def reduce_wrongly(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        log_sum, entropy, target_logits = reduce_logits(*arguments)
        return log_sum, entropy * 1.01, target_logits

    logprobs_triton.reduce_logits = reduce_wrongly
    return find_disagreement(torch.device("cpu"), torch.float32)


def main() -> None:
    cases = json.loads(sys.argv[1])
    errors = [run_case(**case) for case in cases]
    empty = torch.zeros(0, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
    result = linear_logprobs_triton(*empty, torch.zeros(0, dtype=torch.int64))
    result.log_probs.sum().backward()
    shapes = [list(tensor.shape) for tensor in result]
    large = (
        torch.full((2, 4), 200.0),
        torch.randn(40, 4, generator=torch.Generator().manual_seed(0)),
    )  # logits of hundreds
    pairs = zip(
        linear_logprobs_triton(*large, torch.tensor([3, 39])),
        linear_logprobs_tiled(*large, torch.tensor([3, 39])),
        strict=True,
    )
    print(
        json.dumps(
            {
                "errors": errors,
                "empty": shapes,
                "empty_gradient": float(empty[1].grad.abs().max()) if empty[1].grad is not None else None,
                "large": max(float((one - two).abs().max()) for one, two in pairs),
                "disagreement": find_disagreement(torch.device("cpu"), torch.float32),
                "found_broken": break_entropy(),
            }
        )
    )


if __name__ == "__main__":
    main()
