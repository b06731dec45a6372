"""A batch as padded tensors: what a loss takes, from one forward pass with gradient. Axes: B rows, T
positions, right-padded.

The training backend packs rows and shares prefixes; this is the plain way to the same numbers, for a loop
written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.losses.inputs import LossInputs
from rollouts.losses.logprobs import LinearLogProbs, linear_logprobs
from rollouts.models.limits import find_rotary_limit
from rollouts.models.log_probs import own_log_probs, score_logits
from rollouts.models.sampling import without_cache
from rollouts.types import RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollouts.models.log_probs import ForwardPlan


class TokenLogProbs(NamedTuple):
    """Both [B, T], float32, in nats; position t is about token t given the tokens before it, and 0 where the
    mask is 0.
    """

    log_probs: Tensor  # with gradient, if grad mode is on
    entropy: Tensor  # of the whole distribution; with gradient only if it was asked for


def pad_rows(rows: Sequence[NDArray[Any]], *, device: torch.device | None = None) -> Tensor:
    """Ragged rows [T_i] as one tensor [B, T] of their dtype, with 0 (False) after the end of each. No row at
    all gives [0, 0].
    """
    width = max((len(row) for row in rows), default=0)
    padded = np.zeros((len(rows), width), rows[0].dtype if len(rows) else np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded).to(device or torch.device("cpu"))


def compute_token_log_probs(
    model: PreTrainedModel,
    input_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    plan: ForwardPlan | None = None,
    entropy_gradient: bool = False,
) -> TokenLogProbs:
    """Log-probs of the masked tokens of right-padded input_ids [B, T], mask [B, T] bool, under softmax(logits
    / temperature).

    Without a plan, from the model's logits at every position: right for every causal model, and B·T·V
    numbers. With the plan of rollouts.models.forward_plan.plan_forward, logits are computed for the
    positions that predict alone and never held together. The model is used in the mode it is in: call
    model.eval() for log-probs without dropout. entropy_gradient is for losses with an entropy_coef. Raises
    ValueError if shapes differ, or if a first token is masked in, which nothing predicts; ModelError if T is
    beyond the length up to which rotary frequencies are fixed, so that padding, or the rows before, would
    change the log-probs.
    """
    if input_ids.shape != mask.shape or input_ids.ndim != 2:
        raise ValueError(
            f"input_ids have shape {tuple(input_ids.shape)} and mask {tuple(mask.shape)}; both must be [B, T]"
        )
    first = mask[:, :1].flatten().nonzero()
    if len(first):
        raise ValueError(
            f"mask[{int(first[0])}] trains the first token; nothing comes before it to predict it from: mask"
            " it out"
        )
    _check_width(model, input_ids)
    log_probs, entropy = input_ids.new_zeros((2, *input_ids.shape), dtype=torch.float32)
    rows, positions = mask.nonzero(as_tuple=True)
    if len(rows) == 0:
        return TokenLogProbs(log_probs, entropy)
    values = _score(
        model,
        input_ids,
        (rows, positions - 1),
        input_ids[rows, positions],
        temperature,
        plan,
        entropy_gradient,
    )
    return TokenLogProbs(
        log_probs.index_put((rows, positions), values.log_probs.float()),
        entropy.index_put((rows, positions), values.entropy.float()),
    )


def _check_width(model: PreTrainedModel, input_ids: Tensor) -> None:
    limit, (count, width) = find_rotary_limit(model.config), input_ids.shape
    if (
        limit is None or width <= limit.tokens or (limit.kind == "longrope" and count == 1)
    ):  # then the frequencies are that row's own
        return
    way_out = ", or give them one at a time, unpadded" if limit.kind == "longrope" else ""
    raise ModelError(
        f"rows of {width} tokens, padding included: rope_type={limit.kind!r} changes the frequencies of every"
        f" position beyond {limit.tokens} tokens (config.{limit.field}), so a row's log-probs would depend on"
        f" other rows; make them shorter{way_out}"
    )


def _score(
    model: PreTrainedModel,
    input_ids: Tensor,
    predictors: tuple[Tensor, Tensor],
    targets: Tensor,
    temperature: float,
    plan: ForwardPlan | None,
    entropy_gradient: bool,
) -> LinearLogProbs:
    """Log-probs and entropy [N] of targets [N]. No attention mask: padding comes last, so no token sees
    it.
    """
    if plan is None or plan.head == "whole":
        logits = model(input_ids=input_ids, **without_cache(model)).logits[predictors]
        return score_logits(logits, targets, temperature, entropy_gradient=entropy_gradient)
    output: Any = model.get_decoder()(input_ids=input_ids, **without_cache(model))
    hidden = output.last_hidden_state[predictors]
    if plan.head == "own":
        return own_log_probs(
            model, type(output), hidden, targets, temperature=temperature, entropy_gradient=entropy_gradient
        )
    head: Any = model.get_output_embeddings()
    return linear_logprobs(
        hidden,
        head.weight,
        targets,
        temperature=temperature / plan.logit_scale,
        entropy_gradient=entropy_gradient,
    )


def make_loss_inputs(
    model: PreTrainedModel,
    batch: RolloutBatch,
    *,
    plan: ForwardPlan | None = None,
    entropy_gradient: bool = False,
) -> LossInputs:
    """What every loss of LOSSES takes, [B, T] on the model's device: the policy's log-probs with gradient and
    what the batch carries.

    At the temperature of the batch. Fields that the batch lacks are None. entropy_gradient: a loss with an
    entropy_coef needs it. Raises like compute_token_log_probs.
    """
    device = model.device
    mask = pad_rows(batch.loss_masks, device=device)
    input_ids = pad_rows(batch.tokens, device=device)
    log_probs, entropy = compute_token_log_probs(
        model, input_ids, mask, temperature=batch.temperature, plan=plan, entropy_gradient=entropy_gradient
    )

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
        returns=pad(batch.returns),
        old_values=pad(batch.old_values),
    )
