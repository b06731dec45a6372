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

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollouts.data.packing import MicroBatch, make_micro_batches
from rollouts.errors import ModelError
from rollouts.models.limits import find_rotary_limit
from rollouts.models.log_probs import (
    NO_LIMIT,
    ForwardPlan,
    compute_micro_batch_outputs,
    compute_micro_batch_states,
    score_logits,
    widen,
)
from rollouts.models.packed_attention import SIZES, SMALL_SIZES
from rollouts.models.quiet import quiet_transformers
from rollouts.models.scalar_head import HEAD, has_scalar_head, make_probing_directions
from rollouts.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), quiet_transformers():
            return _Probe(model, on_error).plan()
    finally:
        model.train(was_training)


def describe_plan(model: PreTrainedModel, plan: ForwardPlan) -> str:
    """One line for the log."""
    names = {"packed": "packed rows", "rows": "right-padded rows", "single": "one row at a time"}
    every = ("packed rows", plan.packed_up_to), ("rows", plan.rows_up_to)
    limits = [f"{what} up to {limit} tokens" for what, limit in every if 0 < limit < NO_LIMIT]
    start = f"{type(model).__name__} trains on {names[plan.choose_layout(1)]}, {plan.head} head"
    return "; ".join([start, *limits, *([plan.reason] if plan.reason else [])])


def log_plan(model: PreTrainedModel, plan: ForwardPlan) -> None:
    """Writes describe_plan to the log "rollouts": a warning where rows of the model cannot share what they
    have in common.
    """
    level = logging.INFO if plan.choose_layout(1) == "packed" else logging.WARNING
    logging.getLogger("rollouts").log(level, "%s", describe_plan(model, plan))


class _Probe:
    """A row of random tokens, and others of which two begin alike and one does not; the first is compared
    with itself alone.
    """

    def __init__(self, model: PreTrainedModel, on_error: Callable[[Exception], None]) -> None:
        rng = np.random.default_rng(0)
        self.model = model
        self.config: Any = model.config.get_text_config()
        self.scalar = has_scalar_head(model)
        self._on_error = on_error
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size = int(embeddings.num_embeddings)
        row = rng.integers(0, self._vocab_size, LENGTH)
        self._rows: list[IntArray] = [row]
        for kept in (3, LENGTH - 1, 0):  # tokens that another row has in common with the first
            other = rng.integers(0, self._vocab_size, OTHER_LENGTH)
            other[:kept], other[kept] = row[:kept], (row[kept] + 1) % self._vocab_size
            self._rows.append(other)
        self._directions: Tensor | None = None  # [D, H] of a scalar head
        self._tolerance = 0.0

    def plan(self) -> ForwardPlan:
        expected = self._score_plainly()
        self._check_causal()
        plan = self._choose_head(expected)
        padded = self._pack(packed=False)
        capacity = sorted(key for key, value in self.config.to_dict().items() if "capacity" in key and value)
        if capacity:
            reason = f"{capacity[0]}={getattr(self.config, capacity[0])}: experts drop tokens by the batch"
        else:
            reason = self._find_difference(expected, plan, padded)
            reason = reason and f"padded rows are not exact: {reason}"
        if not reason:
            plan = dataclasses.replace(plan, rows_up_to=NO_LIMIT)
            plan, reason = self._prove_packed(expected, plan)
            reason = reason and f"packed rows are not exact: {reason}"
        return _apply_length_limit(dataclasses.replace(plan, reason=reason), self.model)

    # --- the plain forward

    def _score_plainly(self) -> Tensor:
        """[K, T - 1] what counts of the first row's tokens 1, 2, …: log-probs and entropies; with a scalar
        head the projections of what the head is given.
        """
        ids = torch.from_numpy(self._rows[0]).to(self.model.device)
        if self.scalar:
            seen: list[Tensor] = []
            head = self.model.get_submodule(HEAD)
            hook = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
            try:
                self.model(input_ids=ids[None], use_cache=False)
            finally:
                hook.remove()
            logits = self._project(seen[0].flatten(0, -2)) if seen else torch.full((1, 1), torch.nan)
        else:
            logits = widen(self.model(input_ids=ids[None], use_cache=False).logits[0])
        self._logits = logits
        largest = float(logits.abs().max())
        if not math.isfinite(largest):
            raise ModelError(
                f"{type(self.model).__name__} gives logits of {largest} for ordinary tokens; its weights are"
                " damaged"
            )
        self._tolerance = TOLERANCE.get(self.model.dtype, HALF_TOLERANCE) * max(largest, 1.0)
        return logits[:-1].T if self.scalar else torch.stack([*score_logits(logits[:-1], ids[1:], 1.0)])

    def _project(self, states: Tensor) -> Tensor:
        """[T, D] float32."""
        if self._directions is None:
            self._directions = make_probing_directions(states)
        return widen(states) @ widen(self._directions).T

    def _check_causal(self) -> None:
        """Raises ModelError if the second half of a row changes what the model says in the first. Where
        experts or other choices are nearly even rounding may change it too, so several rows must agree.
        """
        length = min(CAUSAL_LENGTH, getattr(self.config, "max_position_embeddings", None) or CAUSAL_LENGTH)
        half = length // 2
        for seed in range(CAUSAL_TRIES):
            rng = np.random.default_rng(seed)
            row = rng.integers(0, self._vocab_size, length)
            other = np.concatenate([row[:half], (row[half:] + 1) % self._vocab_size])
            one, two = (self._forward(ids)[:half] for ids in (row, other))
            if float((one - two).abs().max()) <= self._tolerance:
                return
        raise ModelError(
            f"{type(self.model).__name__} is not causal: what follows a token changes its log-probs; use a"
            " decoder-only model"
        )

    def _forward(self, row: IntArray) -> Tensor:
        ids = torch.from_numpy(row).to(self.model.device)[None]
        if self.scalar:
            decoder: Any = self.model.get_decoder()
            return self._project(decoder(input_ids=ids, use_cache=False).last_hidden_state[0])
        return widen(self.model(input_ids=ids, use_cache=False).logits[0]).log_softmax(-1)

    # --- shortcuts

    def _choose_head(self, expected: Tensor) -> ForwardPlan:
        """The first head whose scores are those of the model's own logits. A linear one may have a scale,
        which is measured.
        """
        plan = ForwardPlan(head="scalar" if self.scalar else "linear")
        single = self._pack(packed=False, rows=1)
        reason = self._find_difference(expected, plan, single)
        if not reason:
            return plan
        if self.scalar:
            raise ModelError(
                f"{type(self.model).__name__} puts its head on something else than its decoder's hidden"
                f" states ({reason}); use a Llama, Qwen or Gemma"
            )
        candidates = [ForwardPlan(head="own")]
        with self._tolerating_errors():
            states = compute_micro_batch_states(self.model, single, plan=plan)
            head: Any = self.model.get_output_embeddings()
            product = (widen(states) @ widen(head.weight).T).double()
            scale = float((product * self._logits[:-1].double()).sum() / (product * product).sum())
            if math.isfinite(scale) and scale > 0:
                candidates.insert(0, ForwardPlan(logit_scale=scale))
        exact = [one for one in candidates if not self._find_difference(expected, one, single)]
        return exact[0] if exact else ForwardPlan(head="whole")

    def _prove_packed(self, expected: Tensor, plan: ForwardPlan) -> tuple[ForwardPlan, str]:
        """`plan` with packed rows where they are exact, and why they are not."""
        attention = getattr(self.config, "_attn_implementation", None)
        if attention != "sdpa":
            return plan, f"they need the attention 'sdpa', and this model runs with {attention!r}"
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if others := sorted(map(str, kinds - {"full_attention", "sliding_attention"})):
            return plan, f"they need attention in every layer, and this model has {', '.join(others)}"
        settings = self.config.to_dict()
        if far := [key for key, value in settings.items() if _is_distance(key, value)]:
            return plan, f"{far[0]}={settings[far[0]]} reaches beyond what a probe can see"
        window = int(getattr(self.config, "sliding_window", None) or 0)
        if getattr(self.config, "use_sliding_window", True) is False:
            window = 0
        if not window or (kinds and "sliding_attention" not in kinds):
            return self._try_packed(expected, dataclasses.replace(plan, packed_up_to=NO_LIMIT))
        reason = f"sliding_window={window} does not rule what the model sees"
        with self._smaller_window():
            narrow = self._score_plainly()
            if torch.equal(narrow, expected) and window > PROBE_WINDOW:
                return plan, reason
            for masks in ("by_kind",) if len(kinds) > 1 else ("by_kind", "windowed"):
                candidate = dataclasses.replace(plan, masks=masks, window=PROBE_WINDOW, packed_up_to=NO_LIMIT)
                found, reason = self._try_packed(narrow, candidate)
                if not reason:
                    return dataclasses.replace(found, window=window), ""
        return plan, reason

    def _try_packed(self, expected: Tensor, candidate: ForwardPlan) -> tuple[ForwardPlan, str]:
        """Rows that share nodes and rows that do not, in pieces of the usual size and in small ones, so that
        there are pieces of every kind.
        """
        for share in (True, False):
            micro_batch = self._pack(packed=True, share=share)
            for sizes in (SIZES, SMALL_SIZES):
                plan = dataclasses.replace(candidate, sizes=sizes)
                if reason := self._find_difference(expected, plan, micro_batch):
                    return dataclasses.replace(candidate, packed_up_to=0, masks="one", window=None), reason
        return candidate, ""

    @contextmanager
    def _smaller_window(self) -> Iterator[None]:
        window = self.config.sliding_window
        self.config.sliding_window = PROBE_WINDOW
        try:
            yield
        finally:
            self.config.sliding_window = window

    # --- comparing

    def _pack(self, *, packed: bool, share: bool = True, rows: int = 4) -> MicroBatch:
        tokens = self._rows[:rows]
        masks = [np.arange(len(row)) > 0 for row in tokens]
        (micro_batch,) = make_micro_batches(
            tokens, masks, micro_batch_tokens=64, share_prefix=share, padding_free=packed
        )
        return micro_batch

    def _find_difference(self, expected: Tensor, plan: ForwardPlan, micro_batch: MicroBatch) -> str:
        """ "" if the first row's scores in the micro-batch are the expected ones; else what went wrong."""
        try:
            found = torch.stack([*self._score(micro_batch, plan)])
            mine = micro_batch.rows[micro_batch.token_rows] == 0
            found = found[:, torch.from_numpy(micro_batch.token_pairs[mine]).to(found.device)]
            worst = float((found - expected).abs().max())
        except PROBE_ERRORS as error:
            self._on_error(error)
            message = (str(error).strip() or "no message").splitlines()[0][:100]
            return f"the model raised {type(error).__name__} ({message})"
        if worst <= self._tolerance:
            return ""
        what, unit = ("hidden states", "of their size") if self.scalar else ("log-probs", "nats")
        return f"{what} differ from a plain forward's by {worst:.1e} {unit} (rounding: {self._tolerance:.1e})"

    def _score(self, micro_batch: MicroBatch, plan: ForwardPlan) -> Sequence[Tensor]:
        if self.scalar:
            return self._project(compute_micro_batch_states(self.model, micro_batch, plan=plan)).unbind(-1)
        log_probs, entropy = compute_micro_batch_outputs(self.model, micro_batch, plan=plan, temperature=1.0)
        assert entropy is not None
        return log_probs, entropy

    @contextmanager
    def _tolerating_errors(self) -> Iterator[None]:
        try:
            yield
        except PROBE_ERRORS as error:
            self._on_error(error)


def _is_distance(key: str, value: object) -> bool:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return False
    return bool(DISTANCE.search(key)) and not NOT_DISTANCE.search(key)


def _apply_length_limit(plan: ForwardPlan, model: PreTrainedModel) -> ForwardPlan:
    """`plan` within the length up to which rotary frequencies are fixed. Beyond it a longrope row is exact by
    itself; a dynamic one keeps the frequencies of the longest row that ever ran, and so has no log-probs of
    its own.
    """
    limit = find_rotary_limit(model.config)
    if limit is None:
        return plan
    setting = f"(config.{limit.field}={limit.tokens})"
    if limit.kind != "longrope":
        refusal = (
            f"rope_type={limit.kind!r} changes the frequencies of every position, in later rows too, with the"
            f" longest row so far {setting}"
        )
        return dataclasses.replace(plan, refused_above=limit.tokens, refusal=refusal)
    reason = f"positions of type {limit.kind} change with the longest row of a batch {setting}"
    return dataclasses.replace(
        plan,
        packed_up_to=min(plan.packed_up_to, limit.tokens),
        rows_up_to=min(plan.rows_up_to, limit.tokens),
        reason="; ".join(filter(None, (plan.reason, reason))),
    )
