"""Log-probs of the trained tokens of a micro-batch under a Hugging Face model, or its values before them: one
forward pass, logits only where they are needed.

How a model may be run without changing its numbers is in a ForwardPlan, which rollouts.models.forward_plan
proves on the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.losses.logprobs import LinearLogProbs, linear_logprobs, widen
from rollouts.models.devices import find_device
from rollouts.models.layers import run_twice
from rollouts.models.limits import RotaryLimit, find_rotary_limit
from rollouts.models.lora import find_scalar_weight
from rollouts.models.packed_attention import ARGUMENT, TILE, PackedRow, register_packed_attention
from rollouts.models.scalar_head import has_scalar_head, project_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollouts.data.packing import MicroBatch

Layout = Literal["packed", "rows", "single"]
Head = Literal["linear", "own", "whole", "scalar"]
OWN_TILE = 16 * 2**20  # logits that a model's own head computes at a time: 64 MiB


class ForwardPlan(NamedTuple):
    """Which shortcuts give this model's exact log-probs.

    Layouts. packed: one packed row without padding, whose attention computes what is visible (see
    rollouts.models.packed_attention); rows that begin alike share nodes, if they are to. rows: right-padded,
    plain causal forward. single: one row at a time, without padding. Heads. linear: logits = scale · hidden @
    weight.T, computed in tiles. own: everything the model does after its decoder, on the positions that
    predict. whole: the logits of a forward pass of the whole model, at every position. scalar: no logits but
    one number, hidden · head (see rollouts.models.scalar_head).
    """

    head: Head = "linear"
    logit_scale: float = 1.0  # of the linear head
    layout: Layout = "single"  # the fastest exact one
    reason: str = ""  # why the faster layouts are not taken; "" when they are
    rotary: RotaryLimit | None = None  # beyond it longrope rows are exact one at a time, others not at all
    tile: int = TILE  # of packed attention

    def choose_layout(self, longest: int) -> Layout:
        """The fastest exact layout of rows of at most `longest` tokens. Raises ModelError if no layout is
        exact for so long a row.
        """
        if self.rotary is None or longest <= self.rotary.tokens:
            return self.layout
        if self.rotary.kind != "longrope":
            raise ModelError(
                f"the batch has a row of {longest} tokens, and the model is exact for at most"
                f" {self.rotary.tokens}: {self.rotary}; make rows shorter (fewer prompt tokens, lower"
                " max_new_tokens)"
            )
        return "single"


def plan_plainly(model: PreTrainedModel) -> ForwardPlan:
    """No shortcut but padding: exact for every causal model, without trying anything out; B·T·V logits."""
    return ForwardPlan(
        head="scalar" if has_scalar_head(model) else "whole",
        layout="rows",
        rotary=find_rotary_limit(model.config),
    )


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
    """Log-probs and entropy (with gradient, if it is asked for) of the N pairs under softmax(logits /
    temperature); or the values of a scalar head, which the temperature does not concern.
    """
    states = compute_micro_batch_states(model, micro_batch, plan=plan, autocast_dtype=autocast_dtype)
    if plan.head == "scalar":
        return TokenOutputs(project_states(states, find_scalar_weight(model)[0]), None)
    if plan.head == "linear" and autocast_dtype is not None and states.is_cuda:
        # the last norm gives float32, which an accelerator multiplies ten times slower
        states = states.to(autocast_dtype)  # pragma: gpu
    targets = torch.from_numpy(micro_batch.targets).to(states.device)
    return TokenOutputs(
        *score_states(
            model, states, targets, plan=plan, temperature=temperature, entropy_gradient=entropy_gradient
        )
    )


def compute_micro_batch_states(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    plan: ForwardPlan,
    autocast_dtype: torch.dtype | None = None,
) -> Tensor:
    """The decoder's hidden states [N, H] at the predictors, logits [N, V] for the whole head."""
    device = find_device(model)
    inputs = {"input_ids": torch.from_numpy(micro_batch.input_ids).to(device), "use_cache": False}
    packed = None
    # else the model's own mask and positions: causal, counted from 0. Padding comes last, so nobody sees it.
    if not micro_batch.causal:
        register_packed_attention()
        packed = PackedRow(micro_batch.subtree_end[0], micro_batch.position_ids[0], plan.tile)
        # a finished mask, which nothing reads
        inputs |= {"attention_mask": torch.zeros((1, 1, 1, 1), device=device), ARGUMENT: packed}
        inputs["position_ids"] = torch.from_numpy(micro_batch.position_ids).to(device)
    run = model if plan.head == "whole" else model.get_decoder()
    with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        output = run(**inputs)
    if packed is not None and not packed.made:
        raise ModelError(
            f"the attention of {type(model).__name__} did not take the packed row that it was given:"
            " something has replaced transformers' 'sdpa' since the model was opened (a kernel library,"
            " set_attn_implementation); do that before, or not at all"
        )
    states = output.logits if plan.head == "whole" else output.last_hidden_state
    return states.flatten(0, 1).index_select(0, torch.from_numpy(micro_batch.predictors).to(device))


def score_states(
    model: PreTrainedModel,
    states: Tensor,
    targets: Tensor,
    *,
    plan: ForwardPlan,
    temperature: float,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """Log-probs of targets [N] and entropies, from hidden states [N, H], or logits [N, V] of the whole
    head.
    """
    if plan.head == "whole":
        return score_logits(states, targets, temperature, entropy_gradient=entropy_gradient)
    if plan.head == "own":
        return _score_by_own_head(model, states, targets, temperature, entropy_gradient)
    head: Any = model.get_output_embeddings()
    return linear_logprobs(
        states,
        head.weight,
        targets,
        temperature=temperature / plan.logit_scale,
        entropy_gradient=entropy_gradient,
    )


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> LinearLogProbs:
    """Log-probs of targets [N] and entropy, from logits [N, V] before the temperature."""
    all_log_probs = (widen(logits) / temperature).log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return LinearLogProbs(all_log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy)


# --- the model's own head -----------------------------------------------------------------------------------


def _score_by_own_head(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> LinearLogProbs:
    """By what the model itself does after its decoder: bias, scale, soft cap or else. A tile of positions at
    a time; their logits are computed again for the gradient. float32, whatever the decoder ran in.
    """
    tile = max(OWN_TILE // max(model.config.get_text_config().vocab_size, 1), 1)

    def score(states: Tensor, wanted: Tensor) -> LinearLogProbs:
        ids = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
        states = states.to(model.dtype)
        with torch.autocast(states.device.type, enabled=False), _decoder_answers(model, states[None]):
            logits = model(input_ids=ids, use_cache=False).logits[0]
        return score_logits(logits, wanted, temperature, entropy_gradient=entropy_gradient)

    parts = [
        run_twice(score, states, wanted)
        for states, wanted in zip(hidden.split(tile), targets.split(tile), strict=True)
    ]
    log_probs, entropy = zip(*parts, strict=True)
    return LinearLogProbs(torch.cat(log_probs), torch.cat(entropy))


class _Answer:
    """A decoder's output of hidden states alone; whatever else it is asked for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def _decoder_answers(model: PreTrainedModel, hidden: Tensor) -> Iterator[None]:
    """Inside, the model's decoder answers at once with `hidden` [1, N, H]."""
    decoder = model.get_decoder()
    before = decoder.__dict__.get("forward")
    decoder.forward = lambda *_, **__: _Answer(hidden)
    try:
        yield
    finally:
        if before is None:
            del decoder.forward
        else:
            decoder.forward = before
