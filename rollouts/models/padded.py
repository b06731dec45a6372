"""A batch as padded tensors: what a loss takes, from one forward pass with gradient. Axes: B rows, T
positions, right-padded.

The training backend packs rows and shares prefixes; this is the plain way to the same numbers, for a loop
written by hand.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.data.packing import make_micro_batches
from rollouts.losses.inputs import LossInputs
from rollouts.losses.logprobs import LinearLogProbs
from rollouts.models.forward_plan import ForwardPlan, compute_micro_batch_outputs, plan_plainly
from rollouts.types import LOSS_FIELDS, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pad_rows(rows: Sequence[NDArray[Any]], *, device: torch.device | None = None) -> Tensor:
    """Ragged rows [T_i] as one tensor [B, T] of their dtype, with 0 (False) after the end of each. No row at
    all gives [0, 0].
    """
    if not len(rows):
        return torch.zeros((0, 0), dtype=torch.int64, device=device)
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)


def compute_token_log_probs(
    model: "PreTrainedModel",
    input_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    plan: ForwardPlan | None = None,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """Log-probs of the masked tokens of right-padded input_ids [B, T], mask [B, T] bool, under softmax(logits
    / temperature), and entropies of that distribution.

    Both [B, T], float32, in nats; position t is about token t given the tokens before it, and 0 where the
    mask is 0. Log-probs have a gradient, if grad mode is on; entropies only if it was asked for.

    Of a model with a scalar head: its values before these tokens, and entropies of 0. Without a plan, from
    the model's logits at every position: right for every causal model, and B·T·V numbers. With the plan of
    rollouts.models.forward_plan.plan_forward, logits are computed for the positions that predict alone and
    never held together. The model is used in the mode it is in: call model.eval() for log-probs without
    dropout. entropy_gradient is for losses with an entropy_coef. Raises ValueError if shapes differ, or if a
    first token is masked in, which nothing predicts; ModelError if T is beyond the length up to which the
    model is exact.
    """
    if input_ids.shape != mask.shape or input_ids.ndim != 2:
        raise ValueError(
            f"input_ids have shape {tuple(input_ids.shape)} and mask {tuple(mask.shape)}; both must be [B, T]"
        )
    plan = plan or plan_plainly(model)
    layout = plan.choose_layout(input_ids.shape[1])
    micro_batches = make_micro_batches(
        [*input_ids.cpu().numpy()],
        [*mask.cpu().numpy()],
        micro_batch_tokens=1 if layout == "single" else input_ids.numel(),
        share_prefix=False,
    )
    log_probs, entropy = input_ids.new_zeros((2, *input_ids.shape), dtype=torch.float32)
    for one in micro_batches:
        found = compute_micro_batch_outputs(
            model, one, plan=plan, temperature=temperature, entropy_gradient=entropy_gradient
        )
        indices = (one.rows[one.token_rows], one.token_positions, one.token_pairs)
        rows, positions, pairs = (torch.from_numpy(index).to(mask.device) for index in indices)
        log_probs = log_probs.index_put((rows, positions), found.log_probs[pairs].float())
        if found.entropy is not None:
            entropy = entropy.index_put((rows, positions), found.entropy[pairs].float())
    return LinearLogProbs(log_probs, entropy)


def make_loss_inputs(
    model: "PreTrainedModel",
    batch: RolloutBatch,
    *,
    entropy_gradient: bool = False,
) -> LossInputs:
    """What every loss of LOSSES takes, [B, T] on the model's device: the policy's log-probs with gradient and
    what the batch carries.

    At the temperature of the batch. Fields that the batch lacks are None. entropy_gradient: a loss with an
    entropy_coef needs it. Raises like compute_token_log_probs.
    """
    mask, input_ids = (pad_rows(rows, device=model.device) for rows in (batch.loss_masks, batch.tokens))
    log_probs, entropy = compute_token_log_probs(
        model, input_ids, mask, temperature=batch.temperature, entropy_gradient=entropy_gradient
    )
    fields: dict[str, Any] = {
        name: pad_rows(rows, device=model.device)
        for name in LOSS_FIELDS.values()
        if (rows := getattr(batch, name)) is not None
    }
    return LossInputs(log_probs=log_probs, mask=mask, entropy=entropy, **fields)
