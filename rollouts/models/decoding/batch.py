"""The rows being decoded. Everything here runs in one thread, that of the device.

admit ──► prefill of each distinct prompt ──► rows 0..n-1 ──► step, step, … ──► rows that end leave at once,
          or: joined to a row that has it                                 the last ones take their places
          or: only what is new in it ◄── what is kept of its trajectory ◄── copied from a row that ends

Which way a model is run: the fastest whose log-probs agree with the model's own forward on a probe.

compiled    fast, decoding under torch.compile            the same models on a GPU
fast        the layers taken apart (decoder.py)           Llama-like models with full attention
cached      the model's own forward with its own cache    windows, recurrent states, soft caps, other layouts
recompute   the model's own forward without a cache       any causal model; a token costs a pass over its row
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.errors import EngineError, ModelError
from rollouts.models.decoding.decoder import (
    CachedDecoder,
    FastDecoder,
    RecomputeDecoder,
    WholeModel,
    score_prompt,
)
from rollouts.models.decoding.stop_texts import StopTexts
from rollouts.models.draws import DRAW_DTYPE, make_draw, sample_tokens
from rollouts.models.limits import find_rotary_limit
from rollouts.models.lora import Adapter, find_adapters, use_adapters
from rollouts.types import (
    Completion,
    Fields,
    FinishReason,
    GenerateRequest,
    IntArray,
    SamplingParams,
    TokenScores,
    live,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PREFILL_TOKENS = 8192  # padded prompt tokens of one forward pass
KEPT_BYTES = 1 << 29  # keys and values of ended rows whose trajectories may go on
# Decode steps of one device job, and seconds after which it ends; and the same while other work waits for the
# device thread: it gets its turn soon, and each turn of ours is worth having.
ALONE, SHARED = (32, 0.1), (4, 0.025)


Decoder = FastDecoder | CachedDecoder | RecomputeDecoder


@dataclass(slots=True, eq=False)
class Row:
    """One request, from its arrival to its answer."""

    request: GenerateRequest
    draw: NDArray[np.void]  # how it samples; see rollouts.models.draws
    answer: Callable[[], object] = lambda: None  # tells who waits that the row has ended
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_version: int | None = None  # weights that computed what is kept of the prompt
    finish_reason: FinishReason | None = None
    prompt_scores: Fields = field(default_factory=dict)  # fields of its completion
    top: list[TokenScores] = field(default_factory=list)  # [k] the likeliest, of each token
    leaving: bool = False  # whether it ends before the next step
    failure: EngineError | None = None

    @property
    def tokens(self) -> IntArray:
        """The prompt's, and those drawn."""
        return np.array([*self.request.prompt_ids, *self.token_ids])

    @property
    def position(self) -> int:
        """Of the token that goes in next."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def completion(self) -> Completion:
        """What there is; "abort" if the row did not finish."""
        top = (np.stack(each)[:, : self.request.top_log_probs] for each in zip(*self.top, strict=True))
        return Completion(
            request_id=self.request.request_id,
            token_ids=np.asarray(self.token_ids, np.int64),
            log_probs=np.asarray(self.log_probs, np.float32),
            weight_versions=np.asarray(self.versions, np.int64),
            finish_reason=self.finish_reason or "abort",
            top_log_probs=TokenScores(*top) if self.top else None,
            **self.prompt_scores,
        )


@live
class DecodeBatch:
    """Rows without holes. Made by open_decoder."""

    whole: WholeModel
    decoder: Decoder
    path: "ForwardPath"
    refused: "Mapping[ForwardPath, str]"  # the paths faster than `path`, and what was in their way

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        # tokens of the prompts computed, and kept of earlier turns; steps, and rows summed over the steps
        self.totals = dict.fromkeys(("prefill_tokens", "prefix_tokens", "decode_steps", "decode_rows"), 0)
        self.adapters: dict[str, Adapter] = {}  # that rows may name
        self.stops: StopTexts | None = None  # without it no row may have stop texts
        self.kept_bytes = KEPT_BYTES  # with a FastDecoder; 0: keeps nothing of rows that end
        # by trajectory, least recently ended first: its last row, and what FastDecoder.copy_row gave of it
        self._kept: dict[str, tuple[Row, Tensor]] = {}
        self._draws = np.zeros(0, DRAW_DTYPE)

    def describe(self) -> str:
        """How the model is run, and why no faster: one line for people."""
        if self.path not in COSTS:
            return "the embedded engine runs this model by its fast path"
        reasons = "; ".join(f"{path}: {why}" for path, why in self.refused.items())
        return f"the embedded engine runs this model {COSTS[self.path]} ({reasons})"

    def run(
        self,
        *,
        admit: Sequence[Row],
        version: int,
        decode: bool,
        interrupted: Callable[[], bool],
        others_wait: Callable[[], bool],
    ) -> list[Row]:
        """The rows that ended. Admits, then decodes until a row ends, someone interrupts, or the job is long
        enough.

        Other work that waits shortens the job; one step is always made, unless interrupted or without rows.
        """
        if isinstance(self.decoder, FastDecoder):
            self.decoder.note_weights(version)
        with self.whole.computing():
            if admit:
                self.admit(admit, version)
            ended = self.take_ended()
            began, steps = time.perf_counter(), 0
            while decode and self.rows and not ended and not interrupted():
                limit, limit_s = SHARED if others_wait() else ALONE
                if steps and (steps >= limit or time.perf_counter() - began > limit_s):
                    break
                self.step(version)
                steps += 1
                ended = self.take_ended()
        return ended

    def reset(self) -> None:
        """Forgets all rows and gives their memory back."""
        self.rows, self._draws = [], self._draws[:0]
        self._kept.clear()
        self.decoder.drop()

    def note_new_weights(self) -> None:
        """What is there was computed by weights that are gone; versions may repeat."""
        self._kept.clear()
        if isinstance(self.decoder, FastDecoder):
            self.decoder.note_weights(None)
        for row in self.rows:
            row.prompt_version = None

    def admit(self, rows: Sequence[Row], version: int) -> None:
        """Each distinct prompt is computed once, or taken over from an active row that has it by the same
        weights; what is kept of its trajectory by the same weights is not computed again.
        """
        holders = {_key(row): index for index, row in enumerate(self.rows) if row.prompt_version == version}
        groups = {}
        for row in rows:
            # an adapter with a name has no version: what it computed is not used again
            row.prompt_version = None if row.request.adapter else version
            if row.request.asks_of_prompt:
                with self._routing([row]):
                    row.prompt_scores = score_prompt(self.whole, row.request, row.draw)
            groups.setdefault(_key(row), []).append(row)
        if isinstance(self.decoder, FastDecoder):  # a recurrent state cannot be turned back to its prompt
            joined = [row for key in list(groups) if key in holders for row in groups.pop(key)]
            self._append(joined, [holders[_key(row)] for row in joined])
            kept = {
                key: states
                for key, group in groups.items()
                if (states := self._take_kept(group[0])) is not None
            }
            self._prefill({key: groups.pop(key) for key in kept}, version, kept)
        self._prefill(groups, version, {})

    def _prefill(self, groups: Mapping[bytes, list[Row]], version: int, kept: Mapping[bytes, Tensor]) -> None:
        """Computes the prompts of groups, or what is not kept of them, and lets the rows begin."""
        held_tokens = sum(states.shape[3] for states in kept.values())
        self.totals["prefix_tokens"] += held_tokens
        self.totals["prefill_tokens"] -= held_tokens
        keys = sorted(groups, key=lambda key: groups[key][0].position)
        while keys:
            count = 1  # a long prompt goes alone
            while count < len(keys) and (count + 1) * (groups[keys[count]][0].position + 1) <= PREFILL_TOKENS:
                count += 1
            chosen, first = [groups[key] for key in keys[:count]], len(self.rows)
            firsts = [group[0] for group in chosen]
            prompts = [row.request.prompt_ids for row in firsts]
            with self._routing(firsts):
                if kept:
                    assert isinstance(self.decoder, FastDecoder)
                    logits = self.decoder.prefill(prompts, [kept[key] for key in keys[:count]])
                else:
                    logits = self.decoder.prefill(prompts)
            # every row draws its first token by the logits after the prompt of its group
            copied = [index for index, group in enumerate(chosen) for _ in group[1:]]
            self.totals["prefill_tokens"] += sum(row.position + 1 for row in firsts)
            self._append(firsts)
            self._append([row for group in chosen for row in group[1:]], [first + index for index in copied])
            self._draw(logits[self.whole.to_device(np.array([*range(count), *copied]))], first, version)
            del keys[:count]

    def _take_kept(self, row: Row) -> Tensor | None:
        """What is kept of its trajectory, if the same weights computed it: keys and values of the tokens with
        which its prompt begins, but never of its last one. The trajectory keeps nothing more.

        A row whose prompt is of today's version has no token of another: see note_new_weights.
        """
        ended, states = self._kept.pop(row.request.trajectory, (row, None))
        if states is None or ended.prompt_version != row.prompt_version:
            return None
        held = ended.tokens[: states.shape[3]]
        prompt = row.request.prompt_ids[:-1]
        same = held[: len(prompt)] == prompt[: len(held)]
        return states[..., : np.cumprod(same).sum(), :]

    def _append(self, rows: Sequence[Row], holders: Sequence[int] = ()) -> None:
        """Adds rows, whose prompts are copied from the rows `holders`; without these the decoder has them."""
        if not rows:
            return
        if holders:
            order = np.array([*range(len(self.rows)), *holders])
            self.decoder.select(order, max(row.position for row in rows) + 1)
        self.rows += rows
        self._draws = np.concatenate([self._draws, np.stack([row.draw for row in rows])])

    def step(self, version: int) -> None:
        """One token for every row."""
        last = [row.token_ids[-1] if row.token_ids else row.request.prompt_ids[-1] for row in self.rows]
        positions = [row.position for row in self.rows]
        with self._routing(self.rows):
            if isinstance(self.decoder, RecomputeDecoder):
                logits = self.decoder.prefill([row.tokens for row in self.rows])
            else:
                logits = self.decoder.decode(np.array(last, np.int64), np.array(positions))
        self.totals["decode_steps"] += 1
        self.totals["decode_rows"] += len(self.rows)
        self._draw(logits, 0, version)

    def _routing(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Inside, row i of what the layers are given goes through the adapter of rows[i]."""
        names = [row.request.adapter for row in rows]
        if not any(names):
            return nullcontext()
        routes = []
        for name in sorted(set(names)):
            if adapter := self.adapters[name] if name else self.whole.adapter:
                own = np.flatnonzero([other == name for other in names])
                routes.append((adapter, None if len(own) == len(names) else self.whole.to_device(own)))
        return use_adapters(self.whole.model, routes)

    def _draw(self, logits: Tensor, first: int, version: int) -> None:
        """One token for each row from `first` on."""
        rows, draws = self.rows[first:], self._draws[first:]
        sampled = sample_tokens(logits, draws)
        if wrong := int((~np.isfinite(sampled.log_probs)).sum()):
            raise EngineError(
                f"the model's logits are not finite in {wrong} of {len(rows)} rows; the weights are damaged"
                " or overflow in this dtype: load good weights or compute in float32"
            )
        if ranked := [index for index, row in enumerate(rows) if row.request.top_log_probs]:
            most = max(rows[index].request.top_log_probs for index in ranked)
            top = sample_tokens(logits[ranked], draws[ranked], top=most).top
            for index, *found in zip(ranked, *top, strict=True):
                rows[index].top.append(TokenScores(*found))
        draws["drawn"] += np.uint64(1)
        for row, token, log_prob in zip(
            rows, sampled.token_ids.tolist(), sampled.log_probs.tolist(), strict=True
        ):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)
            sampling = row.request.sampling
            if token in sampling.stop_token_ids or (
                self.stops and sampling.stop_texts and self.stops.complete(row.token_ids, sampling.stop_texts)
            ):
                row.finish_reason = "stop"
            elif len(row.token_ids) == sampling.max_new_tokens:
                row.finish_reason = "length"

    def take_ended(self) -> list[Row]:
        """The rows that finished or leave, taken out. The last of the others move into the holes: the order
        is a function of who leaves when.
        """
        ended = np.array([row.leaving or row.finish_reason is not None for row in self.rows], bool)
        gone = np.flatnonzero(ended).tolist()
        if not gone:
            return []
        for index in gone:  # keeps what a row leaves to the next turn of its trajectory
            row = self.rows[index]
            known, trajectory = row.prompt_version is not None, row.request.trajectory
            if known and trajectory and self.kept_bytes and isinstance(self.decoder, FastDecoder):
                self._kept[trajectory] = row, self.decoder.copy_row(index, row.position)
                while sum(states.nbytes for _, states in self._kept.values()) > self.kept_bytes:
                    del self._kept[next(iter(self._kept))]  # what was kept first makes room
        count = len(ended) - len(gone)
        order = np.arange(count)
        order[ended[:count]] = count + np.flatnonzero(~ended[count:])
        self.decoder.select(order, max(row.position for row in self.rows))
        rows, self._draws = self.rows, self._draws[order]
        self.rows = [rows[index] for index in order]
        return [rows[index] for index in gone]


def _key(row: Row) -> bytes:
    return row.request.adapter.encode() + np.asarray(row.request.prompt_ids, np.int64).tobytes()


# --- the way a model is run ---------------------------------------------------------------------------------


ForwardPath = Literal["compiled", "fast", "cached", "recompute"]
PATHS = get_args(ForwardPath)
# Unlike, so that padding and positions are tried; more than a CPU's way with many rows needs; and equal ones,
# which are one prompt: computed once for two rows, and taken over by the first row, which comes late.
PROBE_LENGTHS = (13, 8, 11, 5, 9, 2, 12, 7, 10, 8, 13)
PROBE_STEPS = (6, 7, 8)  # tokens of the rows, in turn, so that rows leave while others are decoded
LONGEST_PROBED_WINDOW = 4096  # positions; a longer prompt would take too long to open with
WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
# nats by which two ways of one computation may differ by rounding: in float32 and float64 for every token;
# in half precision in the mean over a row, for bfloat16 keeps 8 bits: some tokens differ by several tenths
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.25
# a recurrence makes more of rounding: in float32 so many times what the model's own forward differs by where
# it is run on several rows, but no more than the second number
SPREAD, LOOSEST = 4, 0.01
COSTS = {
    "cached": "by the model's own forward pass and cache, which is somewhat slower than the fast path",
    "recompute": "without a cache: a token costs a forward pass over its whole sequence, which is very slow",
}


def open_decoder(
    model: "PreTrainedModel",
    max_context: int,
    *,
    max_rows: int = 128,
    autocast_dtype: torch.dtype | None = None,
    compiled: bool = True,
    adapter: Adapter | None = None,
) -> DecodeBatch:
    """A batch on the fastest decoder, of a model with the adapter, whose log-probs agree with the model's own
    forward on a probe (see TOLERANCE). Without `compiled` none that a compiler makes, which takes minutes.

    Raises ModelError naming what was in the way of each; and for rotary frequencies that change with the
    length within `max_context`: there is then no one log-prob to agree with.
    """
    limit = find_rotary_limit(model.config)
    if limit and max_context > limit.tokens:
        raise ModelError(
            f"config.rope_parameters: {limit}, so a token's log-prob would depend on what comes after it; set"
            f" max_context to {limit.tokens} or less"
        )
    whole = WholeModel(model, autocast_dtype, adapter)
    config = model.config.get_text_config()
    windows = {getattr(config, name, None) for name in WINDOW_NAMES}  # a prompt leaves each
    longest = min(LONGEST_PROBED_WINDOW + 1, max_context)
    beyond = [window + 2 for window in windows if isinstance(window, int) and 8 < window < longest]
    chunk = getattr(config, "attention_chunk_size", None) or 0
    refused = dict[ForwardPath, str]()
    # of adapters that come and go each set would be a program
    compiled = compiled and whole.device.type == "cuda" and find_adapters(model) is None
    for path in PATHS if compiled else PATHS[1:]:
        lengths = PROBE_LENGTHS
        try:
            if path == "recompute":
                decoder = RecomputeDecoder(whole)
            elif path != "cached":
                rows = max(max_rows, len(lengths))
                decoder = FastDecoder(
                    whole, max_rows=rows, max_context=max_context, compiled=path == "compiled"
                )
            elif LONGEST_PROBED_WINDOW < chunk < max_context:
                # padding moves the borders of chunks, which only a probe can show to be harmless
                raise ModelError(
                    f"config.attention_chunk_size={chunk} is more than the {LONGEST_PROBED_WINDOW} positions"
                    f" that are probed and less than the context of {max_context}; lower max_context to"
                    f" {chunk}"
                )
            else:
                decoder, lengths = CachedDecoder(whole), (*lengths, *sorted(beyond))
            batch = DecodeBatch(whole, decoder, path, refused)
            check_log_probs(batch, lengths)
            return batch
        except ModelError as error:
            refused[path] = str(error)
        except Exception as error:  # whatever a model raises that is run in a way it was not written for
            refused[path] = f"it does not run: {type(error).__name__}: {error}"
    raise ModelError(
        f"{type(model).__name__} cannot be run exactly here"
        f" ({'; '.join(f'{path}: {why}' for path, why in refused.items())}); use an engine that serves it"
    )


def check_log_probs(batch: DecodeBatch, lengths: Sequence[int]) -> None:
    """Raises ModelError if the log-probs of tokens that are decoded after prompts of these lengths differ
    from the model's by more than rounding. The batch is as new afterwards.
    """
    whole, difference = batch.whole, measure_difference(batch, lengths)
    limit = TOLERANCE if whole.is_exact else HALF_TOLERANCE
    if whole.is_exact and not difference <= limit:
        alone = DecodeBatch(whole, RecomputeDecoder(whole), "recompute", {})
        spread = measure_difference(alone, PROBE_LENGTHS)
        limit = max(limit, min(SPREAD * spread, LOOSEST))
        if difference <= limit:
            logging.getLogger("rollouts").warning(
                "log-probs that are decoded (%s) differ from the model's own by %.3g nats on a probe; its own"
                " forward on several rows differs from that on one by %.3g, so this is rounding",
                batch.path,
                difference,
                spread,
            )
    if not difference <= limit:  # or NaN
        raise ModelError(
            f"its log-probs differ from the model's own by {difference:.3g} nats on a probe; the limit is"
            f" {limit:g}"
        )


def measure_difference(batch: DecodeBatch, lengths: Sequence[int]) -> float:
    """Nats by which the log-probs of tokens that are decoded after prompts of these lengths differ from the
    model's, at most; in half precision in the mean over a row. The batch is as new afterwards.

    Rows join one after the other and leave, as they do while generating, and where rows are kept the first
    that leave have a second turn; the model scores each by itself.
    """
    rows, whole = [], batch.whole

    def add(prompt: IntArray) -> None:
        request = GenerateRequest(
            request_id=str(len(rows)),
            prompt_ids=prompt,
            sampling=SamplingParams(max_new_tokens=PROBE_STEPS[len(rows) % len(PROBE_STEPS)]),
            trajectory=str(prompt[:2]),  # a second turn begins as the first did
        )
        rows.append(Row(request, make_draw(0, request)))

    for length in lengths:
        places = np.arange(length)
        add((places * 7919 + (places * places) % 31 * 131 + length * 613) % whole.vocab_size)
    worst = []
    with whole.computing():
        batch.admit(rows[1:], 0)
        batch.step(0)
        batch.admit(rows[:1], 0)
        while batch.rows:
            batch.step(0)
            count = len(rows)
            for row in batch.take_ended():
                turns = len(rows) - len(lengths)
                if turns < 3 and isinstance(batch.decoder, FastDecoder):  # the last has no token more
                    add(np.append(row.tokens, row.request.prompt_ids[6 * turns :]))
            batch.admit(rows[count:], 0)
        for row in rows:
            request = replace(row.request, prompt_ids=row.tokens, score_prompt=True)
            own = score_prompt(whole, request, row.draw)["prompt_log_probs"]
            differences = np.abs(own[-len(row.log_probs) :] - row.log_probs)
            worst.append(differences.max() if whole.is_exact else differences.mean())
    batch.reset()
    batch.totals = dict.fromkeys(batch.totals, 0)
    return float(np.max(worst))
