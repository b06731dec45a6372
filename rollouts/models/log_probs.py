"""Log-probs of the trained tokens of a micro-batch under a Hugging Face model: one forward pass, logits only where they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.losses.logprobs import LinearLogProbs, linear_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollouts.data.packing import MicroBatch


def check_trainable_architecture(model: PreTrainedModel) -> None:
    """Raises ModelError unless the model's head is plain: logits = hidden @ weight.T, without bias, scale or soft cap."""
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    what = None
    if head is None or getattr(head, "weight", None) is None:
        what = "no output embedding"
    elif getattr(head, "bias", None) is not None:
        what = "a bias in its output head"
    elif getattr(config, "final_logit_softcapping", None):
        what = f"final_logit_softcapping={config.final_logit_softcapping}"
    elif getattr(config, "logit_scale", None) not in (None, 1, 1.0):
        what = f"logit_scale={config.logit_scale}"
    elif getattr(config, "logits_scaling", None) not in (None, 1, 1.0):
        what = f"logits_scaling={config.logits_scaling}"
    if what is not None:
        raise ModelError(f"{type(model).__name__} has {what}; log-probs are computed from a plain linear head: use another model")


def supports_shared_prefix(model: PreTrainedModel) -> bool:
    """Whether an arbitrary attention mask with explicit positions is exact: full attention in every layer, positions only by position_ids."""
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
    rotary = getattr(config, "rope_parameters", None) is not None or getattr(config, "rope_theta", None) is not None
    return kinds == {"full_attention"} and not windowed and rotary


def compute_micro_batch_log_probs(
    model: PreTrainedModel, micro_batch: MicroBatch, *, temperature: float, autocast_dtype: torch.dtype | None = None
) -> LinearLogProbs:
    """Log-probs (with gradient, if grad mode is on) and entropy of the N pairs (predictor, target), float32."""
    device = model.device
    input_ids = torch.from_numpy(micro_batch.input_ids).to(device)
    mask, positions = None, None  # the model's own: causal, counted from 0. Padding comes last, so nobody sees it.
    if not micro_batch.causal:
        mask = make_trie_mask(torch.from_numpy(micro_batch.subtree_end).to(device), dtype=autocast_dtype or model.dtype)
        positions = torch.from_numpy(micro_batch.position_ids).to(device)
    with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        output = model.get_decoder()(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    selected = hidden.index_select(0, torch.from_numpy(micro_batch.predictors).to(device))
    if autocast_dtype is not None and selected.is_cuda:  # the last norm gives float32, which an accelerator multiplies ten times slower
        selected = selected.to(autocast_dtype)  # pragma: gpu
    head: Any = model.get_output_embeddings()
    return linear_logprobs(selected, head.weight, torch.from_numpy(micro_batch.targets).to(device), temperature=temperature)


def make_trie_mask(subtree_end: Tensor, *, dtype: torch.dtype) -> Tensor:
    """[R, 1, S, S], 0 where the first S may attend to the second, j <= i < subtree_end[j], and -inf elsewhere.

    In the dtype of the scores, to which every layer would convert a boolean mask again.
    """
    nodes = torch.arange(subtree_end.shape[1], device=subtree_end.device)
    causal = nodes[:, None] >= nodes[None, :]
    inside = nodes[:, None] < subtree_end[:, None, :]
    mask = torch.zeros(inside.shape, dtype=dtype, device=subtree_end.device)
    return mask.masked_fill_(~(causal & inside), float("-inf"))[:, None]
