"""Log-probs of the trained tokens of a micro-batch under a Hugging Face model, or its values before them: one
forward pass, logits only where they are needed. How a model may be run without changing its numbers is in a
ForwardPlan.

Which shortcuts are exact for a model: proved on the model, with a few tokens, when it is opened.

    plain forward of a row by itself ────────────────────────────► the log-probs that count
    the same row by each head, beside others padded, and in a packed row
        ─► equal to float rounding? then that shortcut is taken

A model with a scalar head is proved by its hidden states, projected on random directions: its own head may be
0, and would agree with anything. What a few tokens cannot show the config tells: windows are made smaller for
the probe; chunks, compression, positions that change with the length and experts with a capacity bound or
forbid.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.data.packing import MicroBatch, make_micro_batches
from rollouts.errors import ModelError
from rollouts.losses.logprobs import LinearLogProbs, LinearScores, linear_logprobs, widen
from rollouts.models.devices import autocast, find_device
from rollouts.models.directories import describe_error, quiet_transformers
from rollouts.models.layers import HEAD, evaluation_mode, has_scalar_head, make_probing_directions, run_twice
from rollouts.models.limits import RotaryLimit, find_rotary_limit
from rollouts.models.lora import find_scalar_weight
from rollouts.models.packed_attention import ARGUMENT, SMALL_TILE, TILE, PackedRow, register_packed_attention
from rollouts.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    one number, hidden · head (see rollouts.models.layers).
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
        if not self.rotary or longest <= self.rotary.tokens:
            return self.layout
        if self.rotary.kind != "longrope":
            raise ModelError(
                f"the batch has a row of {longest} tokens, and the model is exact for at most"
                f" {self.rotary.tokens}: {self.rotary}; make rows shorter (fewer prompt tokens, lower"
                " max_new_tokens)"
            )
        return "single"


def plan_plainly(model: "PreTrainedModel") -> ForwardPlan:
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
    exact_kl: Tensor | None = None  # nats: KL(reference || model) there, with gradient; None: not asked for
    states: Any = None  # the same of compute_micro_batch_states, [N, …], without gradient


def compute_micro_batch_outputs(
    model: "PreTrainedModel",
    micro_batch: MicroBatch,
    *,
    plan: ForwardPlan,
    temperature: float,
    autocast_dtype: torch.dtype | None = None,
    entropy_gradient: bool = False,
    reference: "PreTrainedModel | None" = None,
) -> TokenOutputs:
    """Log-probs and entropy (with gradient, if it is asked for) of the N pairs under softmax(logits /
    temperature); or the values of a scalar head, which the temperature does not concern. With a frozen
    `reference`, for which the plan must hold too and which runs as the model does: the exact KL from it, for
    a linear head.
    """
    states = compute_micro_batch_states(model, micro_batch, plan=plan, autocast_dtype=autocast_dtype)
    if plan.head == "scalar":
        with torch.autocast(states.device.type, enabled=False):
            # no view of something larger: FSDP waits for the gradient of what this gives. A copy: where a
            # weight lies in memory changes the rounding
            wide = widen(states)
            direction = find_scalar_weight(model)[0].to(wide.dtype, copy=True)
            return TokenOutputs(torch.mv(wide, direction), None)
    if plan.head == "linear" and autocast_dtype and states.is_cuda:
        # the last norm gives float32, which an accelerator multiplies ten times slower
        states = states.to(autocast_dtype)  # pragma: gpu
    targets = torch.from_numpy(micro_batch.targets).to(states.device)
    if reference is not None:
        others = compute_micro_batch_states(reference, micro_batch, plan=plan, autocast_dtype=autocast_dtype)
        both: Any = model, reference
        weight, ref_weight = (one.get_output_embeddings().weight for one in both)
        options = temperature / plan.logit_scale, entropy_gradient, (others.to(states.dtype), ref_weight)
        return TokenOutputs(*LinearScores.apply(states, weight, targets, *options))
    found = score_states(
        model, states, targets, plan=plan, temperature=temperature, entropy_gradient=entropy_gradient
    )
    return TokenOutputs(*found, states=states.detach())


def compute_micro_batch_states(
    model: "PreTrainedModel",
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
        ends, depths = micro_batch.subtree_end[0], micro_batch.position_ids[0]
        packed = PackedRow(ends, depths, plan.tile, micro_batch.fences)
        # a finished mask, which nothing reads
        inputs |= {
            "attention_mask": torch.zeros((1, 1, 1, 1), device=device),
            ARGUMENT: packed,
            "position_ids": torch.from_numpy(micro_batch.position_ids).to(device),
        }
    run = model if plan.head == "whole" else model.get_decoder()
    with autocast(autocast_dtype, device):
        output = run(**inputs)
    if packed and not packed.made:
        raise ModelError(
            f"the attention of {type(model).__name__} did not take the packed row that it was given:"
            " something has replaced transformers' 'sdpa' since the model was opened (a kernel library,"
            " set_attn_implementation); do that before, or not at all"
        )
    states = output.logits if plan.head == "whole" else output.last_hidden_state
    return states.flatten(0, 1).index_select(0, torch.from_numpy(micro_batch.predictors).to(device))


def score_states(
    model: "PreTrainedModel",
    states: Tensor,
    targets: Tensor,
    *,
    plan: ForwardPlan,
    temperature: float,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """Log-probs of targets [N] and entropies, from hidden states [N, H], or logits [N, V] of the whole
    head.

    The own head is what the model itself does after its decoder: bias, scale, soft cap or else. A tile of
    positions at a time; their logits are computed again for the gradient. float32, whatever the decoder ran
    in; on a CPU see rounding_products.
    """
    if plan.head == "whole":
        return score_logits(states, targets, temperature, entropy_gradient=entropy_gradient)
    if plan.head == "linear":
        head: Any = model.get_output_embeddings()
        temperature = temperature / plan.logit_scale
        return linear_logprobs(
            states, head.weight, targets, temperature=temperature, entropy_gradient=entropy_gradient
        )
    tile = max(OWN_TILE // model.config.get_text_config().vocab_size, 1)

    def score(hidden: Tensor, wanted: Tensor) -> LinearLogProbs:
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        answer = _Answer(hidden.to(model.dtype)[None])
        with torch.autocast(hidden.device.type, enabled=False), decoder_answers(model, answer):
            logits = model(input_ids=ids, use_cache=False).logits[0]
        return score_logits(logits, wanted, temperature, entropy_gradient=entropy_gradient)

    tiles = zip(states.split(tile), targets.split(tile), strict=True)
    log_probs, entropy = zip(*(run_twice(score, *each) for each in tiles), strict=True)
    return LinearLogProbs(torch.cat(log_probs), torch.cat(entropy))


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> LinearLogProbs:
    """Log-probs of targets [N] and entropy, from logits [N, V] before the temperature."""
    all_log_probs = (widen(logits) / temperature).log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return LinearLogProbs(all_log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy)


# --- the model's own head -----------------------------------------------------------------------------------


class _Answer:
    """A decoder's output of hidden states alone; whatever else it is asked for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def decoder_answers(model: "PreTrainedModel", answer: object) -> Iterator[None]:
    """Inside, the model's decoder gives this answer at once, whatever it is asked."""
    decoder = model.get_decoder()
    before = decoder.__dict__.get("forward")
    decoder.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        if before is None:
            del decoder.forward
        else:
            decoder.forward = before


# --- proving a plan -----------------------------------------------------------------------------------------


LENGTH, OTHER_LENGTH = 6, 8  # tokens of the row that is compared, and of those beside it
CAUSAL_LENGTH, CAUSAL_TRIES = 32, 3  # tokens of the rows whose halves are told apart, rows that must agree
PROBE_WINDOW = 2  # of layers with a window, while they are probed: shorter than the rows
# In nats, for each of the largest logit's size above 1. Rounding was seen up to 3e-6; a wrong mask moves even
# a random model by 1e-3.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5}
HALF_TOLERANCE = 0.03
# what raises when a model is handed masks or positions that it does not know
PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, ModelError)
# settings of attention that looks further than a probe; the exceptions are about which layers, not how far
DISTANCE = re.compile(r"window|chunk|local|index_topk|stride|compress|(?<!decoder_)sparse|block_size")
NOT_DISTANCE = re.compile(
    r"^sliding_window$|^max_window_layers$|pattern|^chunk_size_feed_forward$|^use_|rope|theta|experts"
)
# what configs call a factor of the logits, and whether it multiplies or divides
LOGIT_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
LAYOUT_NAMES = {"packed": "packed rows", "rows": "right-padded rows", "single": "one row at a time"}


def plan_forward(
    model: "PreTrainedModel", *, on_error: Callable[[Exception], None] = lambda error: None
) -> ForwardPlan:
    """The shortcuts that are exact for `model`, in evaluation mode. Leaves model and random state as they
    were; some forwards of a few tokens.

    `on_error` is given what the model raised at a shortcut, and may raise it again: several ranks must not
    find unlike things. Raises ModelError if later tokens change the log-probs of earlier ones (then the model
    is not causal), if logits are not finite, and if a scalar head is put on something else than the decoder's
    hidden states.
    """
    with evaluation_mode(model), torch.no_grad(), quiet_transformers():
        probe = _Probe(model, on_error)
        expected = probe.score_plainly()
        probe.check_causal()
        plan = probe.choose_head(expected)._replace(rotary=find_rotary_limit(probe.config))
        settings = sorted(probe.config.to_dict().items())
        bounds = [f"{key}={value}" for key, value in settings if "capacity" in key and value]
        reason = f"{bounds[0]}: experts drop tokens by the batch" if bounds else ""
        if reason := reason or probe.find_difference(expected, plan._replace(layout="rows")):
            return plan._replace(reason=f"padded rows are not exact: {reason}")
        if reason := probe.refuse_packed(expected, plan):
            return plan._replace(layout="rows", reason=f"packed rows are not exact: {reason}")
        return plan._replace(layout="packed")


def describe_plan(model: "PreTrainedModel", plan: ForwardPlan) -> str:
    """One line for the log."""
    start = f"{type(model).__name__} trains on {LAYOUT_NAMES[plan.layout]}, {plan.head} head"
    return "; ".join(filter(None, (start, plan.reason, str(plan.rotary or ""))))


def log_plan(model: "PreTrainedModel", plan: ForwardPlan) -> None:
    """Writes describe_plan to the log "rollouts": a warning where rows of the model cannot share what they
    have in common.
    """
    log = logging.getLogger("rollouts")
    (log.info if plan.layout == "packed" else log.warning)("%s", describe_plan(model, plan))


class _Probe:
    """A row of random tokens, and others of which two begin alike and one does not; the first is compared
    with itself alone.
    """

    def __init__(self, model: "PreTrainedModel", on_error: Callable[[Exception], None]) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.scalar = has_scalar_head(model)
        self._on_error = on_error
        self._vocab_size = self.config.vocab_size
        first, *others = np.random.default_rng(0).integers(0, self._vocab_size, (4, OTHER_LENGTH))
        for kept, other in zip((3, LENGTH - 1, 0), others, strict=True):  # tokens in common with the first
            other[:kept], other[kept] = first[:kept], (first[kept] + 1) % self._vocab_size
        self._rows = [first[:LENGTH], *others]
        self._directions: Tensor | None = None  # [D, H] of a scalar head
        self._tolerance = 0.0

    # --- the plain forward

    def score_plainly(self) -> Tensor:
        """[K, T - 1] what counts of the first row's tokens 1, 2, …: log-probs and entropies; with a scalar
        head the projections of what the head is given.
        """
        row = self._rows[0]
        said = self._run_plainly(row)
        largest = float(self._project(said).abs().max())
        if not math.isfinite(largest):
            raise ModelError(
                f"{type(self.model).__name__} gives logits of {largest} for ordinary tokens; its weights are"
                " damaged"
            )
        self._tolerance = TOLERANCE.get(self.model.dtype, HALF_TOLERANCE) * max(largest, 1.0)
        return self._score(said[:-1], row[1:], ForwardPlan(head="whole"))

    def _run_plainly(self, row: IntArray) -> Tensor:
        """Logits [T, V]; of a model with a scalar head the hidden states [T, H] that the head is given."""
        ids = torch.from_numpy(row).to(self.model.device)[None]
        if not self.scalar:
            return widen(self.model(input_ids=ids, use_cache=False).logits[0])
        seen = []
        hook = self.model.get_submodule(HEAD).register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0])
        )
        try:
            self.model(input_ids=ids, use_cache=False)
        finally:
            hook.remove()
        return seen[0].flatten(0, -2)

    def _project(self, said: Tensor) -> Tensor:
        """Logits as they are; hidden states in [D] random directions."""
        if not self.scalar:
            return said
        if self._directions is None:
            self._directions = make_probing_directions(said)
        return widen(said) @ widen(self._directions).T

    def _score(self, states: Tensor, targets: IntArray, plan: ForwardPlan) -> Tensor:
        """[K, N] from hidden states, or logits of a whole head."""
        if self.scalar:
            return self._project(states).T
        wanted = torch.from_numpy(targets).to(states.device)
        return torch.stack([*score_states(self.model, states, wanted, plan=plan, temperature=1.0)])

    def check_causal(self) -> None:
        """Raises ModelError if the second half of a row changes what the model says in the first. Where
        experts or other choices are nearly even rounding may change it too, so several rows must agree.
        """
        length = min(CAUSAL_LENGTH, getattr(self.config, "max_position_embeddings", None) or CAUSAL_LENGTH)
        half = length // 2
        for seed in range(CAUSAL_TRIES):
            row = np.random.default_rng(seed).integers(0, self._vocab_size, length)
            other = np.concatenate([row[:half], (row[half:] + 1) % self._vocab_size])
            one, two = (self._project(self._run_plainly(ids)[:half]) for ids in (row, other))
            if float((one - two).abs().max()) <= self._tolerance:
                return
        raise ModelError(
            f"{type(self.model).__name__} is not causal: what follows a token changes its log-probs; use a"
            " decoder-only model"
        )

    # --- shortcuts

    def choose_head(self, expected: Tensor) -> ForwardPlan:
        """The first head whose scores are those of the model's own logits."""
        scale = 1.0
        for name, power in LOGIT_SCALES.items():
            value = getattr(self.config, name, None)
            scale *= value**power if isinstance(value, int | float) and value > 0 else 1.0
        plan = ForwardPlan(head="scalar") if self.scalar else ForwardPlan(logit_scale=scale)
        reason = self.find_difference(expected, plan)
        if not reason:
            return plan
        if self.scalar:
            raise ModelError(
                f"{type(self.model).__name__} puts its head on something else than its decoder's hidden"
                f" states ({reason}); use a Llama, Qwen or Gemma"
            )
        own = ForwardPlan(head="own")
        return ForwardPlan(head="whole") if self.find_difference(expected, own) else own

    def refuse_packed(self, expected: Tensor, plan: ForwardPlan) -> str:
        """Why packed rows are not exact, or ""."""
        plan = plan._replace(layout="packed", tile=SMALL_TILE)
        attention = getattr(self.config, "_attn_implementation", None)
        if attention != "sdpa":
            return f"they need the attention 'sdpa', and this model runs with {attention!r}"
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if others := sorted(map(str, kinds - {"full_attention", "sliding_attention"})):
            return f"they need attention in every layer, and this model has {', '.join(others)}"
        for key, value in self.config.to_dict().items():
            far = type(value) is int and value > 0 and DISTANCE.search(key)
            if far and not NOT_DISTANCE.search(key):
                return f"{key}={value} reaches beyond what a probe can see"
        windows: list[tuple[Any, int]] = [
            (place, size)
            for place in (self.config, *self.model.modules())
            if isinstance(size := getattr(place, "sliding_window", None), int) and size > PROBE_WINDOW
        ]
        if (reason := self.find_difference(expected, plan)) or not windows:
            return reason
        # The config sizes the masks of a plain forward, and each layer its attention of packed rows.
        for place, _ in windows:
            place.sliding_window = PROBE_WINDOW
        try:
            narrow = self.score_plainly()
            used = getattr(self.config, "use_sliding_window", True) is not False
            if used and (not kinds or "sliding_attention" in kinds) and torch.equal(narrow, expected):
                return f"sliding_window={windows[0][1]} does not rule what the model sees"
            return self.find_difference(narrow, plan)
        finally:
            for place, size in windows:
                place.sliding_window = size

    # --- comparing

    def find_difference(self, expected: Tensor, plan: ForwardPlan) -> str:
        """ "" if the first row's scores in the plan's layout are the expected ones; else what went wrong.
        Packed rows are tried with nodes that they share and without.
        """
        packed, differences = plan.layout == "packed", list[float]()
        tokens = self._rows[: 1 if plan.layout == "single" else None]
        masks = [np.arange(len(row)) > 0 for row in tokens]
        try:
            for share in (True, False) if packed else (False,):
                one, *_ = make_micro_batches(
                    tokens, masks, micro_batch_tokens=64, share_prefix=share, padding_free=packed
                )
                states = compute_micro_batch_states(self.model, one, plan=plan)
                mine = torch.from_numpy(one.token_pairs[one.rows[one.token_rows] == 0])
                found = self._score(states, one.targets, plan)[:, mine.to(states.device)]
                differences.append(float((found - expected).abs().max()))
        except PROBE_ERRORS as error:
            self._on_error(error)
            return f"the model raised {describe_error(error)[:120]}"
        if all(one <= self._tolerance for one in differences):
            return ""
        what, unit = ("hidden states", "of their size") if self.scalar else ("log-probs", "nats")
        worst, rounding = f"{np.max(differences):.1e} {unit}", f"{self._tolerance:.1e}"
        return f"{what} differ from a plain forward's by {worst} (rounding: {rounding})"
