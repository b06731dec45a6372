"""Which shortcuts are exact for a model: proved on the model, with a few tokens, when it is opened.

    plain forward of a row by itself ────────────────────────────► the log-probs that count
    the same row by each head, beside others padded, and in a packed row
        ─► equal to float rounding? then that shortcut is taken

A model with a scalar head is proved by its hidden states, projected on random directions: its own head may be
0, and would agree with anything. What a few tokens cannot show the config tells: windows are made smaller for
the probe; chunks, compression, positions that change with the length and experts with a capacity bound or
forbid.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollouts.data.packing import make_micro_batches
from rollouts.errors import ModelError
from rollouts.losses.logprobs import widen
from rollouts.models.directories import describe_error, quiet_transformers
from rollouts.models.layers import evaluation_mode
from rollouts.models.limits import find_rotary_limit
from rollouts.models.log_probs import ForwardPlan, compute_micro_batch_states, score_states
from rollouts.models.packed_attention import SMALL_TILE
from rollouts.models.scalar_head import HEAD, has_scalar_head, make_probing_directions
from rollouts.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollouts.data.packing import MicroBatch

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
    model: PreTrainedModel, *, on_error: Callable[[Exception], None] = lambda error: None
) -> ForwardPlan:
    """The shortcuts that are exact for `model`, in evaluation mode. Leaves model and random state as they
    were; some forwards of a few tokens.

    `on_error` is given what the model raised at a shortcut, and may raise it again: several ranks must not
    find unlike things. Raises ModelError if later tokens change the log-probs of earlier ones (then the model
    is not causal), if logits are not finite, and if a scalar head is put on something else than the decoder's
    hidden states.
    """
    with evaluation_mode(model), torch.no_grad(), quiet_transformers():
        return _Probe(model, on_error).plan()


def describe_plan(model: PreTrainedModel, plan: ForwardPlan) -> str:
    """One line for the log."""
    start = f"{type(model).__name__} trains on {LAYOUT_NAMES[plan.layout]}, {plan.head} head"
    return "; ".join([start, *filter(None, (plan.reason, str(plan.rotary or "")))])


def log_plan(model: PreTrainedModel, plan: ForwardPlan) -> None:
    """Writes describe_plan to the log "rollouts": a warning where rows of the model cannot share what they
    have in common.
    """
    level = logging.INFO if plan.layout == "packed" else logging.WARNING
    logging.getLogger("rollouts").log(level, "%s", describe_plan(model, plan))


class _Probe:
    """A row of random tokens, and others of which two begin alike and one does not; the first is compared
    with itself alone.
    """

    def __init__(self, model: PreTrainedModel, on_error: Callable[[Exception], None]) -> None:
        rng = np.random.default_rng(0)
        self.model = model
        self.config = model.config.get_text_config()
        self.scalar = has_scalar_head(model)
        self._on_error = on_error
        self._vocab_size = self.config.vocab_size
        first, *others = rng.integers(0, self._vocab_size, (4, OTHER_LENGTH))
        for kept, other in zip((3, LENGTH - 1, 0), others, strict=True):  # tokens in common with the first
            other[:kept], other[kept] = first[:kept], (first[kept] + 1) % self._vocab_size
        self._rows = [first[:LENGTH], *others]
        self._directions: Tensor | None = None  # [D, H] of a scalar head
        self._tolerance = 0.0

    def plan(self) -> ForwardPlan:
        expected = self._score_plainly()
        self._check_causal()
        plan = self._choose_head(expected)._replace(rotary=find_rotary_limit(self.config))
        if reason := self._refuse_rows(expected, plan):
            return plan._replace(reason=f"padded rows are not exact: {reason}")
        if reason := self._refuse_packed(expected, plan):
            return plan._replace(layout="rows", reason=f"packed rows are not exact: {reason}")
        return plan._replace(layout="packed")

    # --- the plain forward

    def _score_plainly(self) -> Tensor:
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
        seen: list[Tensor] = []
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

    def _check_causal(self) -> None:
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

    def _choose_head(self, expected: Tensor) -> ForwardPlan:
        """The first head whose scores are those of the model's own logits."""
        scale = 1.0
        for name, power in LOGIT_SCALES.items():
            value = getattr(self.config, name, None)
            scale *= value**power if isinstance(value, int | float) and value > 0 else 1.0
        plan = ForwardPlan(head="scalar") if self.scalar else ForwardPlan(logit_scale=scale)
        reason = self._find_difference(expected, plan)
        if not reason:
            return plan
        if self.scalar:
            raise ModelError(
                f"{type(self.model).__name__} puts its head on something else than its decoder's hidden"
                f" states ({reason}); use a Llama, Qwen or Gemma"
            )
        own = ForwardPlan(head="own")
        return ForwardPlan(head="whole") if self._find_difference(expected, own) else own

    def _refuse_rows(self, expected: Tensor, plan: ForwardPlan) -> str:
        """Why padded rows are not exact, or ""."""
        for key, value in sorted(self.config.to_dict().items()):
            if "capacity" in key and value:
                return f"{key}={value}: experts drop tokens by the batch"
        return self._find_difference(expected, plan._replace(layout="rows"))

    def _refuse_packed(self, expected: Tensor, plan: ForwardPlan) -> str:
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
        if (reason := self._find_difference(expected, plan)) or not windows:
            return reason
        # The config sizes the masks of a plain forward, and each layer its attention of packed rows.
        for place, _ in windows:
            place.sliding_window = PROBE_WINDOW
        try:
            narrow = self._score_plainly()
            used = getattr(self.config, "use_sliding_window", True) is not False
            if used and (not kinds or "sliding_attention" in kinds) and torch.equal(narrow, expected):
                return f"sliding_window={windows[0][1]} does not rule what the model sees"
            return self._find_difference(narrow, plan)
        finally:
            for place, size in windows:
                place.sliding_window = size

    # --- comparing

    def _pack(self, plan: ForwardPlan) -> list[MicroBatch]:
        """The rows in the plan's layout, packed ones once with nodes that they share and once without."""
        packed = plan.layout == "packed"
        tokens = self._rows[: 1 if plan.layout == "single" else None]
        masks = [np.arange(len(row)) > 0 for row in tokens]
        options = {"micro_batch_tokens": 64, "padding_free": packed}
        shares = (True, False) if packed else (False,)
        return [make_micro_batches(tokens, masks, share_prefix=share, **options)[0] for share in shares]

    def _find_difference(self, expected: Tensor, plan: ForwardPlan) -> str:
        """ "" if the first row's scores in the plan's layout are the expected ones; else what went wrong."""
        differences = [0.0]
        try:
            for one in self._pack(plan):
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
