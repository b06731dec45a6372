"""A batch as padded tensors: what a loss takes, from one forward pass with gradient. Axes: B rows, T positions, right-padded.

The training backend packs rows and shares prefixes; this is the plain way to the same numbers, for a loop written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.losses.inputs import LossInputs
from rollouts.losses.logprobs import linear_logprobs
from rollouts.models.log_probs import check_trainable_architecture
from rollouts.types import RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenLogProbs(NamedTuple):
    """Both [B, T], float32, in nats; position t is about token t given the tokens before it, and 0 where the mask is 0."""

    log_probs: Tensor  # with gradient, if grad mode is on
    entropy: Tensor  # of the whole distribution; without gradient


def pad_rows(rows: Sequence[NDArray[Any]], *, device: torch.device | None = None) -> Tensor:
    """Ragged rows [T_i] as one tensor [B, T] of their dtype, with 0 (False) after the end of each. No row at all gives [0, 0]."""
    width = max((len(row) for row in rows), default=0)
    padded = np.zeros((len(rows), width), rows[0].dtype if len(rows) else np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded).to(device or torch.device("cpu"))


def compute_token_log_probs(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, *, temperature: float = 1.0) -> TokenLogProbs:
    """Log-probs of the masked tokens of right-padded input_ids [B, T], mask [B, T] bool, under softmax(logits / temperature).

    Logits are computed for masked positions only, and never held. The model is used in the mode it is in: call model.eval() for log-probs
    without dropout. Raises ModelError if the model's head is not a plain linear one; ValueError if shapes differ, or if a first token is
    masked in, which nothing predicts.
    """
    check_trainable_architecture(model)
    if input_ids.shape != mask.shape or input_ids.ndim != 2:
        raise ValueError(f"input_ids have shape {tuple(input_ids.shape)} and mask {tuple(mask.shape)}; both must be [B, T]")
    first = mask[:, :1].flatten().nonzero()
    if len(first):
        raise ValueError(f"mask[{int(first[0])}] trains the first token; nothing comes before it to predict it from: mask it out")
    log_probs, entropy = input_ids.new_zeros((2, *input_ids.shape), dtype=torch.float32)
    if not mask.any():
        return TokenLogProbs(log_probs, entropy)
    # no attention mask: padding comes last, so no token sees it
    hidden: Tensor = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
    head: Any = model.get_output_embeddings()
    rows, positions = mask.nonzero(as_tuple=True)
    values = linear_logprobs(hidden[rows, positions - 1], head.weight, input_ids[rows, positions], temperature=temperature)
    return TokenLogProbs(
        log_probs.index_put((rows, positions), values.log_probs.float()), entropy.index_put((rows, positions), values.entropy.float())
    )


def make_loss_inputs(model: PreTrainedModel, batch: RolloutBatch) -> LossInputs:
    """What every loss of LOSSES takes, [B, T] on the model's device: the policy's log-probs with gradient and what the batch carries.

    At the temperature of the batch. Fields that the batch lacks are None. Raises like compute_token_log_probs.
    """
    device = model.device
    mask = pad_rows(batch.loss_masks, device=device)
    log_probs, entropy = compute_token_log_probs(model, pad_rows(batch.tokens, device=device), mask, temperature=batch.temperature)

    def pad(rows: Sequence[NDArray[np.float32]] | None) -> Tensor | None:
        return None if rows is None else pad_rows(rows, device=device)

    return LossInputs(
        log_probs=log_probs,
        mask=mask,
        entropy=entropy,
        advantages=pad(batch.advantages),
        old_log_probs=pad(batch.old_log_probs),
        rollout_log_probs=pad(batch.rollout_log_probs),
        ref_log_probs=pad(batch.ref_log_probs),
    )
