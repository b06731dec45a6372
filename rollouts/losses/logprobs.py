"""Log-probs and entropy of a linear head over the vocabulary, in chunks: the logits of all tokens are never in memory at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

VOCAB_CHUNK = 8192
TOKEN_CHUNK = 1024  # with VOCAB_CHUNK: 32 MiB of float32 logits at a time


class LinearLogProbs(NamedTuple):
    """One value per token, float32."""

    log_probs: Tensor  # [N] nats, with gradient
    entropy: Tensor  # [N] nats of the whole distribution, without gradient


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, vocab_chunk: int = VOCAB_CHUNK, token_chunk: int = TOKEN_CHUNK
) -> LinearLogProbs:
    """log_softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of the same distribution.

    hidden [N, H], weight [V, H], targets [N] in 0..V−1. No more than [token_chunk, vocab_chunk] logits exist at a time, in the backward
    pass too, which computes them again. Sums are in float32 whatever the inputs are; rows whose gradient is exactly 0 cost no backward.
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, weight.shape, targets.shape)
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, targets, float(temperature), vocab_chunk, token_chunk)  # pyright: ignore[reportGeneralTypeIssues]
    return LinearLogProbs(log_probs, entropy)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_chunk: int, token_chunk: int
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            parts = [
                _score(rows, weight, wanted, temperature, vocab_chunk)
                for rows, wanted in zip(hidden.split(token_chunk), targets.split(token_chunk), strict=True)
            ]
        log_probs, entropy, log_sum = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, log_sum)
        ctx.settings = temperature, vocab_chunk, token_chunk
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, targets, log_sum = ctx.saved_tensors
        temperature, vocab_chunk, token_chunk = ctx.settings
        gradient = gradients[0].float() / temperature
        needed = gradient.nonzero().flatten()  # NaN is not zero: it stays
        hidden_gradient = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in needed.split(token_chunk):
                hidden_gradient[rows] = _add_gradients(
                    hidden[rows], weight, targets[rows], log_sum[rows], gradient[rows], temperature, vocab_chunk, weight_gradient
                )
        return hidden_gradient.to(hidden.dtype), None if weight_gradient is None else weight_gradient.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.to(hidden.dtype).T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _score(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and log-sum-exp [n], by a running maximum `top` with z = Σ e^(l − top) and u = Σ e^(l − top)·(l − top)."""
    target_logits = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    top = z = u = torch.zeros((), device=hidden.device)
    for start in range(0, len(weight), vocab_chunk):
        logits = _logits(hidden, weight[start : start + vocab_chunk], temperature)
        rows, columns = _targets_inside(targets, start, logits.shape[1])
        target_logits[rows] = logits[rows, columns]
        chunk_top = logits.amax(dim=1)
        new_top = chunk_top if start == 0 else torch.maximum(top, chunk_top)
        shifted = logits.sub_(new_top[:, None])
        exponentials = shifted.exp()
        chunk_z, chunk_u = exponentials.sum(dim=1), torch.linalg.vecdot(exponentials, shifted)
        if start == 0:
            z, u = chunk_z, chunk_u
        else:
            scale = (top - new_top).exp()
            u = scale * (u + z * (top - new_top)) + chunk_u
            z = scale * z + chunk_z
        top = new_top
    log_z = z.log()
    return target_logits - top - log_z, log_z - u / z, top + log_z


def _add_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    gradient: Tensor,
    temperature: float,
    vocab_chunk: int,
    weight_gradient: Tensor | None,
) -> Tensor:
    """The gradient of `hidden` [n, H] in float32; adds that of `weight` to `weight_gradient`. d log p / d logits = onehot − p."""
    hidden_gradient = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(weight), vocab_chunk):
        chunk = weight[start : start + vocab_chunk].to(hidden.dtype)
        logit_gradient = _logits(hidden, chunk, temperature).sub_(log_sum[:, None]).exp_().mul_(-gradient[:, None])
        rows, columns = _targets_inside(targets, start, len(chunk))
        logit_gradient[rows, columns] += gradient[rows]
        logit_gradient = logit_gradient.to(hidden.dtype)
        hidden_gradient += logit_gradient @ chunk
        if weight_gradient is not None:
            weight_gradient[start : start + vocab_chunk] += logit_gradient.T @ hidden
    return hidden_gradient


def _targets_inside(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Which rows have their target in this chunk, and in which column."""
    inside = (targets >= start) & (targets < start + width)
    rows = inside.nonzero().flatten()
    return rows, targets[rows] - start
