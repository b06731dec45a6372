"""Log-probs of the trained tokens of a micro-batch under a Hugging Face model, or its values before them: one
forward pass, logits only where they are needed.

How a model may be run without changing its numbers is in a ForwardPlan, which rollouts.models.forward_plan
proves on the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollouts.errors import ModelError
from rollouts.losses.logprobs import LinearLogProbs, linear_logprobs
from rollouts.models.devices import find_device
from rollouts.models.packed_attention import (
    ALL_KEYS,
    ARGUMENT,
    WINDOWED,
    make_layer_mask,
    make_packed_row,
    register_packed_attention,
)
from rollouts.models.scalar_head import get_scalar_weight, project_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollouts.data.packing import MicroBatch

Layout = Literal["packed", "tries", "rows", "single"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Head = Literal["linear", "own", "whole", "scalar"]
MaskForm = Literal["one", "windowed", "by_kind"]
OWN_TILE = 16 * 2**20  # logits that a model's own head computes at a time: 64 MiB
NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Which shortcuts give this model's exact log-probs.

    Layouts. packed: one packed row without padding, whose attention computes what is visible (see
    rollouts.models.packed_attention); rows that begin alike share nodes, if they are to. tries: they share
    nodes of padded rows under a dense 4D mask (see rollouts.data.packing). rows: right-padded, one sequence a
    row, plain causal forward. single: one row at a time, without padding. Heads. linear: logits = scale ·
    hidden @ weight.T, computed in tiles. own: everything the model does after its decoder, on the positions
    that predict. whole: the logits of a forward pass of the whole model, at every position. scalar: no logits
    but one number, hidden · head (see rollouts.models.scalar_head).
    """

    tries_up_to: int  # tokens of the longest row that tries are exact for; 0 never
    rows_up_to: int  # the same for padded rows
    reason: str  # why the faster layouts are not taken; "" when they are
    masks: MaskForm = (
        "one"  # tries: the same mask for every layer, one with the window, or one for each kind of layer
    )
    window: int | None = None  # tokens that a layer with a window sees, itself included
    head: Head = "linear"
    logit_scale: float = 1.0  # of the linear head
    refused_above: int = NO_LIMIT  # tokens of the longest row that has log-probs of its own at all
    refusal: str = ""  # why, and the setting
    packed_up_to: int = 0  # tokens of the longest row that packed rows are exact for; 0 never

    def choose_layout(self, longest: int, *, share_prefix: bool = True) -> Layout:
        """The fastest exact layout of rows of at most `longest` tokens. Raises ModelError if no layout is
        exact for so long a row.
        """
        if longest > self.refused_above:
            raise ModelError(
                f"the batch has a row of {longest} tokens, and the model is exact for at most"
                f" {self.refused_above}: {self.refusal}; make rows shorter (fewer prompt tokens, lower"
                " max_new_tokens)"
            )
        if longest <= self.packed_up_to:
            return "packed"
        if share_prefix and longest <= self.tries_up_to:
            return "tries"
        return "rows" if longest <= self.rows_up_to else "single"


class TokenOutputs(NamedTuple):
    """What a model says of the N pairs (predictor, target) of a micro-batch, all [N], float32 (float64 of a
    model in float64).
    """

    log_probs: Tensor  # with gradient, if grad mode is on: nats; of a scalar head its value at the predictor
    entropy: Tensor | None  # nats, of the distribution at the predictor; None of a scalar head


def compute_micro_batch_outputs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    plan: ForwardPlan,
    temperature: float,
    autocast_dtype: torch.dtype | None = None,
    entropy_gradient: bool = False,
) -> TokenOutputs:
    """What compute_micro_batch_log_probs gives, or the values of a model with a scalar head, which the
    temperature does not concern.
    """
    if plan.head != "scalar":
        found = compute_micro_batch_log_probs(
            model,
            micro_batch,
            plan=plan,
            temperature=temperature,
            autocast_dtype=autocast_dtype,
            entropy_gradient=entropy_gradient,
        )
        return TokenOutputs(*found)
    states, _ = compute_micro_batch_states(model, micro_batch, plan=plan, autocast_dtype=autocast_dtype)
    return TokenOutputs(project_states(states, get_scalar_weight(model)[0]), None)


def compute_micro_batch_log_probs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    plan: ForwardPlan,
    temperature: float,
    autocast_dtype: torch.dtype | None = None,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """Log-probs (with gradient, if grad mode is on) and entropy (with one, if it is asked for) of the N pairs
    (predictor, target), float32.
    """
    assert plan.head != "scalar", "a model with a scalar head has no log-probs"
    selected, output_type = compute_micro_batch_states(
        model, micro_batch, plan=plan, autocast_dtype=autocast_dtype
    )
    targets = torch.from_numpy(micro_batch.targets).to(selected.device)
    if plan.head == "whole":
        return score_logits(selected, targets, temperature, entropy_gradient=entropy_gradient)
    if plan.head == "own":
        return own_log_probs(
            model, output_type, selected, targets, temperature=temperature, entropy_gradient=entropy_gradient
        )
    if (
        autocast_dtype is not None and selected.is_cuda
    ):  # the last norm gives float32, which an accelerator multiplies ten times slower
        selected = selected.to(autocast_dtype)  # pragma: gpu
    head: Any = model.get_output_embeddings()
    scaled = temperature / plan.logit_scale
    return linear_logprobs(
        selected, head.weight, targets, temperature=scaled, entropy_gradient=entropy_gradient
    )


def compute_micro_batch_states(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    plan: ForwardPlan,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[Tensor, type[Any]]:
    """The decoder's hidden states [N, H] at the predictors, logits [N, V] for the whole head; and the type of
    what the decoder answers.
    """
    device = find_device(model)
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(micro_batch.input_ids).to(device),
        "use_cache": False,
    }
    if (
        not micro_batch.causal
    ):  # else the model's own: causal, counted from 0. Padding comes last, so nobody sees it.
        inputs["position_ids"] = torch.from_numpy(micro_batch.position_ids).to(device)
        dtype = autocast_dtype or model.dtype
        if len(micro_batch.input_ids) == 1 and int(micro_batch.position_ids.max()) < plan.packed_up_to:
            inputs |= make_packed_inputs(model, micro_batch, plan=plan, dtype=dtype)
        else:
            subtree_end = torch.from_numpy(micro_batch.subtree_end).to(device)
            inputs["attention_mask"] = make_model_masks(
                subtree_end, inputs["position_ids"], plan=plan, dtype=dtype
            )
    run: Any = model if plan.head == "whole" else model.get_decoder()
    with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        output = run(**inputs)
    if ARGUMENT in inputs and not inputs[ARGUMENT].on_device.get("read"):
        raise ModelError(
            f"the attention of {type(model).__name__} did not take the packed row that it was given:"
            " something has replaced transformers' 'sdpa' since the model was opened (a kernel library,"
            " set_attn_implementation); do that before, or not at all"
        )
    states: Tensor = output.logits if plan.head == "whole" else output.last_hidden_state
    return states.flatten(0, 1).index_select(0, torch.from_numpy(micro_batch.predictors).to(device)), type(
        output
    )


def widen(logits: Tensor) -> Tensor:
    """In float32, or in float64 if they are so."""
    return logits if logits.dtype == torch.float64 else logits.float()


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> LinearLogProbs:
    """Log-probs of targets [N] and entropy, from logits [N, V] before the temperature."""
    all_log_probs = (widen(logits) / temperature).log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return LinearLogProbs(all_log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy)


def own_log_probs(
    model: PreTrainedModel,
    output_type: Any,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """Log-probs and entropy from hidden states [N, H] by what the model itself does after its decoder: bias,
    scale, soft cap or else.

    A tile of positions at a time; their logits are computed again for the gradient. float32, whatever the
    decoder ran in.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    tile = max(OWN_TILE // max(vocab_size, 1), 1)

    def score(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = compute_own_logits(model, output_type, states)
        return tuple(score_logits(logits, wanted, temperature, entropy_gradient=entropy_gradient))  # pyright: ignore[reportReturnType]

    parts: list[tuple[Tensor, Tensor]] = []
    for states, wanted in zip(hidden.split(tile), targets.split(tile), strict=True):
        parts.append(
            checkpoint(score, states, wanted, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportArgumentType]
            if torch.is_grad_enabled()
            else score(states, wanted)
        )
    log_probs, entropy = zip(*parts, strict=True)
    return LinearLogProbs(torch.cat(log_probs), torch.cat(entropy))


def compute_own_logits(model: PreTrainedModel, output_type: Any, hidden: Tensor) -> Tensor:
    """[N, V]: a forward pass of the model whose decoder answers at once with `hidden` [N, H]."""
    ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
    dtype = next(model.parameters()).dtype
    with (
        torch.autocast(hidden.device.type, enabled=False),
        _decoder_answers(model, output_type(last_hidden_state=hidden.to(dtype)[None])),
    ):
        return model(input_ids=ids, use_cache=False).logits[0]


@contextmanager
def _decoder_answers(model: PreTrainedModel, answer: Any) -> Iterator[None]:
    decoder: Any = model.get_decoder()
    before = decoder.__dict__.get("forward")
    decoder.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        if before is None:
            del decoder.forward
        else:
            decoder.forward = before


def make_packed_inputs(
    model: PreTrainedModel, micro_batch: MicroBatch, *, plan: ForwardPlan, dtype: torch.dtype
) -> dict[str, Any]:
    """What the model's forward takes for one packed row: what its attention does, and for each kind of layer
    which of the two it is.
    """
    register_packed_attention()
    masks: Any = make_layer_mask(ALL_KEYS if plan.masks == "one" else WINDOWED, model)
    if plan.masks == "by_kind":
        masks = {"full_attention": make_layer_mask(ALL_KEYS, model), "sliding_attention": masks}
    window = None if plan.masks == "one" else plan.window
    row = make_packed_row(
        micro_batch.subtree_end[0],
        micro_batch.position_ids[0],
        window=window,
        dtype=dtype,
        device=find_device(model),
    )
    return {"attention_mask": masks, ARGUMENT: row}


def make_model_masks(
    subtree_end: Tensor, position_ids: Tensor, *, plan: ForwardPlan, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """What the model takes as attention_mask for tries: one tensor, or one for each kind of layer."""
    if plan.masks == "one":
        return make_trie_mask(subtree_end, dtype=dtype)
    windowed = make_trie_mask(subtree_end, dtype=dtype, position_ids=position_ids, window=plan.window)
    if plan.masks == "windowed":
        return windowed
    return {"full_attention": make_trie_mask(subtree_end, dtype=dtype), "sliding_attention": windowed}


def make_trie_mask(
    subtree_end: Tensor, *, dtype: torch.dtype, position_ids: Tensor | None = None, window: int | None = None
) -> Tensor:
    """[R, 1, S, S], 0 where the first S may attend to the second, j <= i < subtree_end[j], and -inf
    elsewhere.

    In the dtype of the scores, to which every layer would convert a boolean mask again. With a window, j must
    also be less than `window` above i, counted along the path: in depths, which are the position ids, not in
    nodes.
    """
    nodes = torch.arange(subtree_end.shape[1], device=subtree_end.device)
    causal = nodes[:, None] >= nodes[None, :]
    inside = nodes[:, None] < subtree_end[:, None, :]
    visible = causal & inside
    if window is not None and position_ids is not None:
        visible &= position_ids[:, :, None] - position_ids[:, None, :] < window
    mask = torch.zeros(inside.shape, dtype=dtype, device=subtree_end.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None]
