"""What a loss saw of each token, for the record: taken where the loss is computed, brought into the rows of
the batch.

micro-batch ──compute_loss──► TokenTrace ──backward──► read: [3, M] ──► TokenArrays, by row of the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.backends.shares import Portion
from rollouts.data.packing import MicroBatch, spread_tokens_to_rows
from rollouts.types import FloatArray, RolloutBatch, TokenArrays


class TokenTrace(NamedTuple):
    """What a micro-batch's loss saw of its trained tokens, and after the backward pass their slopes too."""

    log_probs: Tensor  # [B, T], which keeps its gradient
    weights: Tensor | None  # [B, T]
    place: tuple[Tensor, Tensor]  # row and position of the M trained tokens

    def read(self) -> Tensor:
        """[3, M] log-prob, slope and weight of each trained token, on the device. After the backward pass."""
        slopes = torch.zeros_like(self.log_probs) if self.log_probs.grad is None else self.log_probs.grad
        weights = torch.ones_like(self.log_probs) if self.weights is None else self.weights
        return torch.stack(
            [values.detach()[self.place].float() for values in (self.log_probs, slopes, weights)]
        )


def make_token_arrays(
    micro_batches: Sequence[MicroBatch], traces: Sequence[FloatArray], batch: RolloutBatch
) -> TokenArrays:
    """By row of the batch, from each micro-batch's [3, M] of TokenTrace.read."""
    log_probs, slopes, weights = (
        spread_tokens_to_rows(micro_batches, [trace[kind] for trace in traces], batch.tokens)
        for kind in range(3)
    )
    return TokenArrays(log_probs=log_probs, slopes=slopes, weights=weights)


def collect_token_arrays(
    portions: Sequence[Sequence[Portion]], traces: Sequence[FloatArray], batch: RolloutBatch
) -> TokenArrays:
    """By row of the batch, from [rank][round] portions and of each rank [3, tokens of its portions that
    count], in their order.
    """
    parts: list[MicroBatch] = []
    found: list[FloatArray] = []
    for mine, trace in zip(portions, traces, strict=True):
        counted = [portion.micro_batch for portion in mine if portion.counts]
        parts += counted
        found += (
            np.split(trace, np.cumsum([len(one.token_rows) for one in counted])[:-1], axis=1)
            if counted
            else []
        )
    return make_token_arrays(parts, found, batch)
