"""Which shortcuts are exact for a model: proved on the model, with a few tokens, when it is opened.

    plain forward of a row by itself ────────────────────────────────────► the log-probs that count
    the same row beside others, padded, in a trie and in a packed row
        ─► equal to float rounding? then that layout is taken

A model with a scalar head is proved by its hidden states, projected on random directions: its own head may be
0, and would agree with anything.

A probe of a few tokens cannot see what happens beyond them, so the config has a word too: a window is made
smaller for the probe, and what the probe cannot bring about (chunks, compression, positions that change with
the length, experts with a capacity) bounds or forbids.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollouts.data.packing import MicroBatch, make_micro_batches
from rollouts.errors import ModelError
from rollouts.losses.logprobs import linear_logprobs
from rollouts.models.log_probs import (
    NO_LIMIT,
    ForwardPlan,
    compute_micro_batch_log_probs,
    compute_micro_batch_states,
    compute_own_logits,
    score_logits,
    widen,
)
from rollouts.models.packed_attention import small_pieces
from rollouts.models.plan_limits import (
    PROBE_WINDOW,
    apply_length_limit,
    find_distances,
    find_window,
    forbids_padding,
    forbids_tries,
    longest_probe,
    refuse_above,
    smaller_window,
)
from rollouts.models.quiet import quiet_transformers
from rollouts.models.scalar_head import HEAD, has_scalar_head, make_probing_directions
from rollouts.types import BoolArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED, LENGTH, OTHER_LENGTH = (
    3,
    6,
    8,
)  # tokens of the probe: the rows' common beginning, the row that is compared, the one beside it
CAUSAL_LENGTH, CAUSAL_TRIES, COMPARED = (
    32,
    3,
    64,
)  # tokens of the row whose halves are told apart, rows that must agree, positions compared
LONGEST_DISTANCE = 4096  # tokens; beyond it a probe would take too long to open with
# In nats, for each of the largest logit's size above 1. Rounding was seen up to 3e-6; a wrong mask moves even
# a random model by 1e-3.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5}
HALF_TOLERANCE = 0.03
# what raises when a model is handed masks or positions that it does not know
PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


def take_as_found(error: Exception) -> None:
    """A model that raises at a shortcut does not have it."""


def plan_forward(
    model: PreTrainedModel, *, on_error: Callable[[Exception], None] = take_as_found
) -> ForwardPlan:
    """The shortcuts that are exact for `model`, in evaluation mode. Leaves model and random state as they
    were; four forwards of some tokens, more for models that need it.

    `on_error` is told what the model raised at a shortcut, and may raise it again: several ranks must not
    find unlike things. Raises ModelError if later tokens change the log-probs of earlier ones: then it is not
    causal.
    """
    was_training = model.training
    model.eval()
    try:
        with (
            torch.no_grad(),
            quiet_transformers(),
        ):  # state space models say at their first forward that their kernels are not installed
            return _plan(_Probe(model, on_error), model)
    finally:
        model.train(was_training)


def describe_plan(model: PreTrainedModel, plan: ForwardPlan) -> str:
    """One line for the log."""
    layout = {
        "packed": "packed rows",
        "tries": "token tries",
        "rows": "right-padded rows",
        "single": "one row at a time",
    }[plan.choose_layout(1)]
    every = ("packed rows", plan.packed_up_to), ("tries", plan.tries_up_to), ("rows", plan.rows_up_to)
    limits = [f"{what} up to {limit} tokens" for what, limit in every if 0 < limit < NO_LIMIT]
    parts = [
        f"{type(model).__name__} trains on {layout}, {plan.head} head",
        *limits,
        *([plan.reason] if plan.reason else []),
    ]
    return "; ".join(parts)


def log_plan(model: PreTrainedModel, plan: ForwardPlan) -> None:
    """Writes describe_plan to the log "rollouts": a warning where rows of the model cannot share what they
    have in common.
    """
    level = logging.INFO if plan.choose_layout(1) in ("packed", "tries") else logging.WARNING
    logging.getLogger("rollouts").log(level, "%s", describe_plan(model, plan))


# --- the decision -------------------------------------------------------------------------------------------


def _plan(probe: _Probe, model: PreTrainedModel) -> ForwardPlan:
    plain = probe.run_plain()
    causal = _prove_causal(probe, plain, model)
    plan = ForwardPlan(tries_up_to=0, rows_up_to=0, reason="", head="scalar" if probe.scalar else "linear")
    difference = probe.find_difference(plain, plan, share_prefix=False)
    if difference and not probe.scalar:  # the head or the padding
        plan = _choose_head(plain, probe, model)
        difference = probe.find_difference(plain, plan, share_prefix=False)
    rows_reason = forbids_padding(model) or (f"padded rows are not exact: {difference}" if difference else "")
    rows_up_to = 0 if rows_reason else NO_LIMIT
    tries_reason = rows_reason or forbids_tries(model)
    tries = (
        dataclasses.replace(plan, reason=tries_reason)
        if tries_reason
        else _prove_tries(probe, plain, plan, model)
    )
    packed = _prove_packed(probe, plain, tries, model)
    proved = dataclasses.replace(
        packed, rows_up_to=rows_up_to, reason="; ".join(filter(None, (packed.reason, causal.unproved)))
    )
    if causal.up_to < NO_LIMIT:
        proved = refuse_above(proved, causal.up_to, causal.refusal)
    return apply_length_limit(proved, model)


@dataclasses.dataclass(frozen=True, slots=True)
class _Causality:
    up_to: int = NO_LIMIT  # tokens of the longest row in which no token looks ahead
    refusal: str = ""  # why longer ones are refused
    unproved: str = ""  # what could not be tried, for the log


def _prove_causal(probe: _Probe, plain: _Plain, model: PreTrainedModel) -> _Causality:
    """How far no token sees what follows: tried on a short row, and beyond each distance of the config that
    only shows in a longer one.

    Raises ModelError if even a short row looks ahead.
    """
    longest, distances = longest_probe(model), find_distances(model)
    tried = min(
        CAUSAL_LENGTH, longest, max(min((tokens for tokens, _ in distances), default=CAUSAL_LENGTH), SHARED)
    )
    if not probe.begins_alike(plain, tried) and probe.looks_ahead(tried):
        raise ModelError(
            f"{type(model).__name__} is not causal: what follows a token changes its log-probs; use a"
            " decoder-only model"
        )
    for tokens, name in distances:
        if tokens > LONGEST_DISTANCE:
            return _Causality(unproved=f"whether it is causal in rows above {name}={tokens} was not tried")
        if longest <= tokens:
            return _Causality(
                tokens,
                f"{name}={tokens} and no probe can be longer than {longest} tokens, so nothing is known"
                " beyond it",
            )
        tried = min(tokens + tokens // 16 + CAUSAL_LENGTH, longest)
        if probe.looks_ahead(tried) or probe.depends_on_length(tried, beyond=tokens):
            return _Causality(
                tokens,
                f"in longer rows what follows a token, or how much, changes its log-probs ({name}={tokens})",
            )
    return _Causality()


def _choose_head(plain: _Plain, probe: _Probe, model: PreTrainedModel) -> ForwardPlan:
    """The first head whose log-probs are those of the model's logits; a linear one may have a scale, which is
    measured.
    """
    plan = ForwardPlan(tries_up_to=0, rows_up_to=0, reason="")
    if plain.hidden is None:
        return dataclasses.replace(plan, head="whole")
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if isinstance(weight, Tensor) and weight.shape == (plain.logits.shape[-1], plain.hidden.shape[-1]):
        for scale in (1.0, probe.measure_scale(plain, weight)):
            if scale is not None and probe.linear_is_exact(plain, weight, scale):
                return dataclasses.replace(plan, logit_scale=scale)
    return dataclasses.replace(plan, head="own" if probe.own_is_exact(plain) else "whole")


def _prove_tries(probe: _Probe, plain: _Plain, plan: ForwardPlan, model: PreTrainedModel) -> ForwardPlan:
    """`plan` with the masks and the limit for which tries are exact; its reason says why they are not."""
    window, forms = find_window(model)
    if window is None:
        reason = probe.find_difference(plain, plan, share_prefix=True)
        return dataclasses.replace(
            plan, tries_up_to=0 if reason else NO_LIMIT, reason=reason and f"tries are not exact: {reason}"
        )
    with smaller_window(model):
        narrow = probe.run_plain()
        if (
            not torch.equal(narrow.logits, plain.logits) or window <= PROBE_WINDOW
        ):  # else the window is not where the config says
            for form in forms:
                candidate = dataclasses.replace(plan, masks=form, window=PROBE_WINDOW)
                if not probe.find_difference(narrow, candidate, share_prefix=True):
                    return dataclasses.replace(candidate, tries_up_to=NO_LIMIT, window=window)
    reason = f"rows above {window} tokens: tries with a window are not exact for this model"
    if window < OTHER_LENGTH or probe.find_difference(plain, plan, share_prefix=True):
        return dataclasses.replace(plan, reason=reason)
    return dataclasses.replace(plan, tries_up_to=window, reason=reason)


def _prove_packed(probe: _Probe, plain: _Plain, tries: ForwardPlan, model: PreTrainedModel) -> ForwardPlan:
    """`tries` with packed rows where they are exact as well, for rows as long and with the same kinds of
    masks; its reason says why they are not.
    """
    if not tries.tries_up_to:
        return tries
    candidate = dataclasses.replace(tries, packed_up_to=tries.tries_up_to)
    attention = getattr(model.config.get_text_config(), "_attn_implementation", None)
    try:
        if attention != "sdpa":
            reason = f"they need the attention 'sdpa', and this model runs with {attention!r}"
        elif tries.masks == "one":
            reason = probe.find_packed_difference(plain, candidate)
        else:
            with smaller_window(model):
                reason = probe.find_packed_difference(
                    probe.run_plain(), dataclasses.replace(candidate, window=PROBE_WINDOW)
                )
    except ModelError as error:
        reason = str(error)
    if not reason:
        return candidate
    return dataclasses.replace(
        tries, reason="; ".join(filter(None, (tries.reason, f"packed rows are not exact: {reason}")))
    )


# --- the probe ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Plain:
    """A row by itself: the forward pass that everything else must equal."""

    # [T, V] float32; of a scalar head hidden states in the probing directions, which take their place
    logits: Tensor
    hidden: Tensor | None  # [T, H] what the decoder gave; None if the model has no decoder of its own
    output_type: Any  # of the decoder
    scores: Sequence[
        Tensor
    ]  # each [T - 1], of the tokens 1, 2, …: log-probs and entropies; of a scalar head one for each direction


class _Probe:
    """A row of random tokens, and another that begins alike and stands before it in a trie; the first is
    compared with itself alone.
    """

    def __init__(self, model: PreTrainedModel, on_error: Callable[[Exception], None]) -> None:
        rng = np.random.default_rng(0)
        vocab_size = int(model.get_input_embeddings().num_embeddings)  # pyright: ignore[reportArgumentType]
        start = rng.integers(0, vocab_size, SHARED)
        self.model = model
        self.scalar = has_scalar_head(model)
        self._directions: Tensor | None = None  # [V, H] of a scalar head; made by the first plain forward
        self._on_error = on_error
        self._vocab_size = vocab_size
        self.tokens: list[IntArray] = [
            np.concatenate([start, rng.integers(0, vocab_size, length - SHARED)])
            for length in (LENGTH, OTHER_LENGTH)
        ]
        self.tokens[0][SHARED], self.tokens[1][SHARED] = (
            vocab_size - 1,
            vocab_size - 2,
        )  # tries are filled in the order of token ids
        self.masks: list[BoolArray] = [np.arange(len(row)) > 0 for row in self.tokens]

    def run_plain(self, row: int = 0) -> _Plain:
        ids = torch.from_numpy(self.tokens[row]).to(self.model.device)
        if self.scalar:
            logits = self._project_plain(ids)
            return _Plain(logits, None, None, logits[:-1].unbind(-1))
        seen: list[Any] = []
        decoder: Any = self.model.get_decoder()
        hook = (
            decoder.register_forward_hook(lambda module, inputs, output: seen.append(output))
            if decoder is not self.model
            else None
        )
        try:
            logits = widen(self.model(input_ids=ids[None], use_cache=False).logits[0])
        finally:
            if hook is not None:
                hook.remove()
        hidden = getattr(seen[0], "last_hidden_state", None) if len(seen) == 1 else None
        scores = score_logits(logits[:-1], ids[1:], 1.0)
        return _Plain(logits, None if hidden is None else hidden[0], type(seen[0]) if seen else None, scores)

    def _project_plain(self, ids: Tensor) -> Tensor:
        """[T, D] of what a forward pass of the whole model hands its head. Raises ModelError if that is not
        what the decoder gives.
        """
        seen: list[Tensor] = []
        hook = self.model.get_submodule(HEAD).register_forward_hook(
            lambda module, inputs, output: seen.append(inputs[0])
        )
        try:
            self.model(input_ids=ids[None], use_cache=False)
        finally:
            hook.remove()
        states = self._run_decoder(ids)
        if len(seen) == 1 and seen[0].shape == (1, *states.shape):
            found = self._project(seen[0][0])
            if float((self._project(states) - found).abs().max()) <= self._rounding(found):
                return found
        raise ModelError(
            f"{type(self.model).__name__} puts its head on something else than its decoder's hidden states;"
            " use a Llama, Qwen or Gemma"
        )

    def _run_decoder(self, ids: Tensor) -> Tensor:
        """Hidden states [T, H] of one row."""
        decoder: Any = self.model.get_decoder()
        return decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]

    def _project(self, states: Tensor) -> Tensor:
        """[T, D] float32."""
        if self._directions is None:
            self._directions = make_probing_directions(states)
        return widen(states) @ widen(self._directions).T

    def tolerance(self, plain: _Plain) -> float:
        return self._rounding(plain.logits)

    def _rounding(self, logits: Tensor) -> float:
        """In nats. Raises ModelError if the logits are not finite: nothing could be compared, and nothing
        could be trained.
        """
        largest = float(logits.abs().max())
        if not math.isfinite(largest):
            raise ModelError(
                f"{type(self.model).__name__} gives logits of {largest} for ordinary tokens; its weights are"
                " damaged"
            )
        return TOLERANCE.get(self.model.dtype, HALF_TOLERANCE) * max(largest, 1.0)

    def begins_alike(self, plain: _Plain, length: int) -> bool:
        """Whether the row keeps its logits when it goes on for `length` tokens: the quick proof that nothing
        looks ahead.
        """
        _, row = self._draw_row(max(length, LENGTH), 0)
        row[:LENGTH] = self.tokens[0]
        found = self._logits_at(row, torch.arange(LENGTH))
        return float((found.log_softmax(-1) - plain.logits.log_softmax(-1)).abs().max()) <= self._rounding(
            plain.logits
        )

    def looks_ahead(self, length: int) -> bool:
        """Whether the second half of a row changes what the model says in the first. Rows of one length round
        alike; where experts or other choices are nearly even they may still not, so the answer is yes only if
        several rows agree.
        """
        return all(self._halves_differ(length, seed) for seed in range(CAUSAL_TRIES))

    def depends_on_length(self, length: int, *, beyond: int) -> bool:
        """Whether a row's end changes by being there what the model says between `beyond` and it. Rows of
        unlike lengths round unlike, and an expert chosen otherwise at one position means nothing: half of the
        positions must differ, in several rows.
        """
        shorter = (beyond + length) // 2
        return shorter > beyond and all(
            self._ends_matter(length, shorter, beyond, seed) for seed in range(CAUSAL_TRIES)
        )

    def _halves_differ(self, length: int, seed: int) -> bool:
        half = length // 2
        rng, row = self._draw_row(length, seed)
        other = row.copy()
        other[half:] = (
            row[half:] + rng.integers(1, max(self._vocab_size, 2), length - half)
        ) % self._vocab_size  # another token everywhere
        difference, tolerance = self._compare(row, other, first=0, end=half)
        return not float(difference.max()) <= tolerance

    def _ends_matter(self, length: int, shorter: int, beyond: int, seed: int) -> bool:
        _, row = self._draw_row(length, seed)
        difference, tolerance = self._compare(row, row[:shorter], first=beyond, end=shorter)
        return not float(difference.median()) <= min(10 * tolerance, HALF_TOLERANCE)

    def _draw_row(self, length: int, seed: int) -> tuple[np.random.Generator, IntArray]:
        rng = np.random.default_rng(seed)
        return rng, rng.integers(0, self._vocab_size, length)

    def _compare(self, row: IntArray, other: IntArray, *, first: int, end: int) -> tuple[Tensor, float]:
        """Largest difference of a log-prob at positions between `first` and `end` [P], and how much may be
        rounding.
        """
        places = torch.from_numpy(np.unique(np.linspace(first, end - 1, COMPARED).astype(np.int64)))
        ours, theirs = self._logits_at(row, places), self._logits_at(other, places)
        difference = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().amax(-1)
        return difference, self._rounding(ours)

    def _logits_at(self, row: IntArray, places: Tensor) -> Tensor:
        """[P, V] float32; of a long row no others are computed, if the model can leave them out."""
        if self.scalar:
            return self._project(
                self._run_decoder(torch.from_numpy(row).to(self.model.device))[places.to(self.model.device)]
            )
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(row).to(self.model.device)[None],
            "use_cache": False,
        }
        if len(row) > CAUSAL_LENGTH and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            logits = self.model(**inputs, logits_to_keep=places.to(self.model.device)).logits[0]
            if len(logits) == len(places):
                return widen(logits)
        return widen(self.model(**inputs).logits[0, places.to(self.model.device)])

    def find_difference(self, plain: _Plain, plan: ForwardPlan, *, share_prefix: bool) -> str:
        """ "" if the row gives the plain log-probs and entropy when it is computed with the other by `plan`;
        else what went wrong.
        """
        (micro_batch,) = make_micro_batches(
            self.tokens, self.masks, micro_batch_tokens=64, share_prefix=share_prefix
        )
        assert micro_batch.causal != share_prefix
        return self._find_difference(plain, plan, micro_batch)

    def find_packed_difference(self, plain: _Plain, plan: ForwardPlan) -> str:
        """As find_difference, in a packed row: where others branch off twice on the row's way, and beside
        them without anything shared; in small pieces and in the usual ones.
        """
        rng = np.random.default_rng(1)
        row = self.tokens[0]
        late, beside = (
            np.concatenate([row[:kept], rng.integers(0, self._vocab_size, OTHER_LENGTH - kept)])
            for kept in (LENGTH - 1, 0)
        )
        late[LENGTH - 1], beside[0] = ((row[place] + 1) % self._vocab_size for place in (LENGTH - 1, 0))
        rows = [*self.tokens, late, beside]
        masks = [np.arange(len(tokens)) > 0 for tokens in rows]
        for share_prefix in (True, False):
            (micro_batch,) = make_micro_batches(
                rows, masks, micro_batch_tokens=64, share_prefix=share_prefix, padding_free=True
            )
            for sizes in (nullcontext(), small_pieces()):
                with sizes:
                    reason = self._find_difference(plain, plan, micro_batch)
                if reason:
                    return reason
        return ""

    def _find_difference(self, plain: _Plain, plan: ForwardPlan, micro_batch: MicroBatch) -> str:
        allowed = self.tolerance(plain)
        try:
            found = self._score(micro_batch, plan)
        except PROBE_ERRORS as error:
            self._on_error(error)
            return (
                f"the model raised {type(error).__name__}"
                f" ({(str(error).strip() or 'no message').splitlines()[0][:100]})"
            )
        mine = micro_batch.rows[micro_batch.token_rows] == 0
        pairs = torch.from_numpy(micro_batch.token_pairs[mine]).to(plain.logits.device)
        worst = max(
            float((ours[pairs] - theirs).abs().max())
            for ours, theirs in zip(found, plain.scores, strict=True)
        )
        what, measure = ("hidden states", "of their size") if self.scalar else ("log-probs", "nats")
        return (
            ""
            if worst <= allowed
            else f"{what} differ from a plain forward's by {worst:.1e} {measure} (rounding: {allowed:.1e})"
        )

    def _score(self, micro_batch: MicroBatch, plan: ForwardPlan) -> Sequence[Tensor]:
        """As _Plain.scores, but of the micro-batch's pairs."""
        if not self.scalar:
            return compute_micro_batch_log_probs(self.model, micro_batch, plan=plan, temperature=1.0)
        return self._project(compute_micro_batch_states(self.model, micro_batch, plan=plan)[0]).unbind(-1)

    # --- heads

    def measure_scale(self, plain: _Plain, weight: Tensor) -> float | None:
        """The number that hidden @ weight.T is multiplied by to give the logits, by least squares; None if
        there is no positive one.
        """
        assert plain.hidden is not None
        product = (widen(plain.hidden) @ widen(weight).T).double()
        above, below = float((product * plain.logits.double()).sum()), float((product * product).sum())
        return above / below if above > 0 and below > 0 else None

    def linear_is_exact(self, plain: _Plain, weight: Tensor, scale: float) -> bool:
        assert plain.hidden is not None
        targets = torch.from_numpy(self.tokens[0][1:]).to(weight.device)
        found = linear_logprobs(plain.hidden[:-1], weight, targets, temperature=1.0 / scale)
        worst = max(
            float((ours - theirs).abs().max()) for ours, theirs in zip(found, plain.scores, strict=True)
        )
        return worst <= self.tolerance(plain)

    def own_is_exact(self, plain: _Plain) -> bool:
        assert plain.hidden is not None
        try:
            logits = compute_own_logits(self.model, plain.output_type, plain.hidden)
        except PROBE_ERRORS as error:
            self._on_error(error)
            return False
        return float((widen(logits) - plain.logits).abs().max()) <= self.tolerance(plain)
