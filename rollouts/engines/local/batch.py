"""The rows being decoded. Everything here runs on the device thread.

admit ──► prefill of each distinct prompt ──► slots 0..n-1 ──► step, step, … ──► finished rows leave at once
          or: copied from a row that has it                                 │ the last row moves into the hole
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollouts.engines.local.interface import Decoder
from rollouts.errors import EngineError
from rollouts.models.draws import DRAW_DTYPE, Sampled, make_draw, sample_tokens
from rollouts.types import Completion, FinishReason, FloatArray, GenerateRequest, IntArray

PREFILL_TOKENS = 8192  # padded prompt tokens of one forward pass
JOB_STEPS = 32  # decode steps of one device job
JOB_SECONDS = 0.1  # after which a job ends
# the same while other work waits for the device thread: it gets its turn soon, and each turn of ours is worth
# having
SHARED_STEPS = 4
SHARED_SECONDS = 0.025


@dataclass(slots=True, eq=False)
class Row:
    """One request while it is decoded."""

    request: GenerateRequest
    stream: tuple[int, int]  # key of its random stream
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_version: tuple[int, int] | None = None  # weights that computed the keys and values of the prompt
    finish_reason: FinishReason | None = None
    prompt_log_probs: FloatArray | None = None  # where the request asks for them

    def take(self, token_id: int, log_prob: float, version: int) -> None:
        """One more token, and whether it was the last."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token_id in self.request.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.sampling.max_new_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """What there is; "abort" if the row did not finish."""
        return Completion(
            request_id=self.request.request_id,
            token_ids=np.asarray(self.token_ids, np.int64),
            log_probs=np.asarray(self.log_probs, np.float32),
            weight_versions=np.asarray(self.versions, np.int64),
            finish_reason=self.finish_reason or "abort",
            prompt_log_probs=self.prompt_log_probs,
        )


@dataclass(slots=True)
class Counters:
    """Totals since the engine opened."""

    generated_tokens: int = 0
    prefill_tokens: int = 0  # prompt tokens computed
    prefill_tokens_saved: int = 0  # prompt tokens copied instead of computed
    decode_steps: int = 0
    decode_rows: int = 0  # rows summed over the steps
    wasted_tokens: int = 0  # of rows whose caller went away
    moved_rows: int = 0  # by compaction


class DecodeBatch:
    """Rows in slots 0..n-1, without holes."""

    def __init__(self, decoder: Decoder[Any], *, max_rows: int, max_context: int) -> None:
        self.decoder = decoder
        self.kv = decoder.make_slots(max_rows=max_rows, max_length=max_context)
        self.rows: list[Row] = []
        self.counters = Counters()
        self.weights_epoch = 0  # counts updates, for versions may repeat
        self._lengths = np.zeros(max_rows, np.int64)  # positions with keys and values
        self._last_ids = np.zeros(max_rows, np.int64)  # the token that goes in next
        self._draws = np.zeros(max_rows, DRAW_DTYPE)

    def run(
        self,
        *,
        admit: Sequence[Row],
        remove: Sequence[Row],
        version: int,
        decode: bool,
        interrupted: Callable[[], bool],
        others_wait: Callable[[], bool],
    ) -> list[Row]:
        """The rows that finished. Removes and admits, then decodes until a row finishes, someone interrupts,
        or the job is long enough.

        Other work that waits shortens the job; one step is always made, unless interrupted or without rows.
        """
        with self.decoder.computing():
            self.remove(remove)
            if admit:
                self.admit(admit, version)
            finished = self._take_finished()
            began = time.perf_counter()
            for steps in range(JOB_STEPS if decode else 0):
                if (
                    finished
                    or not self.rows
                    or interrupted()
                    or _is_over(steps, time.perf_counter() - began, others_wait())
                ):
                    break
                self.step(version)
                finished = self._take_finished()
        return finished

    def reset(self) -> None:
        """Forgets all rows and gives their memory back."""
        self.rows.clear()
        self.kv.drop()

    def admit(self, rows: Sequence[Row], version: int) -> None:
        """Rows take the next slots. Each distinct prompt is computed once, or copied from an active row that
        has it by the same weights.
        """
        weights = (version, self.weights_epoch)
        holders = {
            _prompt_key(row): slot for slot, row in enumerate(self.rows) if row.prompt_version == weights
        }
        groups: dict[bytes, list[int]] = {}
        self.kv.reserve(len(self.rows) + len(rows), max(len(row.request.prompt_ids) for row in rows) + 1)
        for row in rows:
            slot = len(self.rows)
            self.rows.append(row)
            row.prompt_version = weights
            self._draws[slot] = make_draw(row.stream, row.request.sampling)
            if row.request.score_prompt:
                row.prompt_log_probs = self._score(row.request.prompt_ids)
            groups.setdefault(_prompt_key(row), []).append(slot)
        fresh: list[list[int]] = []
        for key, slots in groups.items():
            prompt_length = len(self.rows[slots[0]].request.prompt_ids)
            if self.kv.keeps_prefixes and (key in holders or prompt_length == 1):
                self._join(slots, holders.get(key))
            else:
                fresh.append(slots)
        for chunk in _prefill_chunks(fresh, lambda slots: len(self.rows[slots[0]].request.prompt_ids)):
            self._prefill(chunk, version)

    def _score(self, prompt: IntArray) -> FloatArray:
        """[T] log-probs of a prompt's tokens at temperature 1, 0 for the first: each after the tokens before
        it, which are prompts of their own. For a few tokens.
        """
        count = len(prompt) - 1
        if not count:
            return np.zeros(1, np.float32)
        ids = self._to_device(np.tril(np.broadcast_to(prompt[:-1], (count, count))))
        kv = self.decoder.make_slots(max_rows=count, max_length=count)
        kv.reserve(count, count)
        places = torch.arange(count, device=ids.device)
        logits = self.decoder.prefill(ids, places + 1, places, kv)
        scored = logits.float().log_softmax(-1)[places, self._to_device(prompt[1:])]
        return np.concatenate([np.zeros(1, np.float32), scored.cpu().numpy()])

    def _join(self, slots: Sequence[int], holder: int | None) -> None:
        """Rows whose prompt but for its last token is copied from `holder`; the next step computes the last
        one.
        """
        prompt = self.rows[slots[0]].request.prompt_ids
        copied = len(prompt) - 1
        if holder is not None and copied:
            targets = self._to_device(np.asarray(slots, np.int64))
            self.kv.copy(torch.full_like(targets, holder), targets, copied)
        self._lengths[list(slots)] = copied
        self._last_ids[list(slots)] = prompt[-1]
        self.counters.prefill_tokens_saved += copied * len(slots)

    def _prefill(self, groups: Sequence[Sequence[int]], version: int) -> None:
        """One forward pass over the prompts of the groups, one row each; every row of a group draws its first
        token from it.
        """
        prompts = [self.rows[slots[0]].request.prompt_ids for slots in groups]
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int64)
        ids = np.zeros((len(prompts), int(lengths.max())), np.int64)
        for index, prompt in enumerate(prompts):
            ids[index, : len(prompt)] = prompt
        firsts = np.asarray([slots[0] for slots in groups], np.int64)
        logits = self.decoder.prefill(
            self._to_device(ids), self._to_device(lengths), self._to_device(firsts), self.kv
        )
        group_of = np.repeat(np.arange(len(groups)), [len(slots) for slots in groups])
        slots = np.concatenate([np.asarray(slots, np.int64) for slots in groups])
        copies = slots != firsts[group_of]
        if copies.any():
            self.kv.copy(
                self._to_device(firsts[group_of][copies]), self._to_device(slots[copies]), int(lengths.max())
            )
        self._lengths[slots] = lengths[group_of]
        self.counters.prefill_tokens += int(lengths.sum())
        self.counters.prefill_tokens_saved += int(lengths[group_of][copies].sum())
        self._take_tokens(
            slots, sample_tokens(logits[self._to_device(group_of)], self._draws[slots]), version
        )

    def step(self, version: int) -> None:
        """One token for every row."""
        count = len(self.rows)
        positions = self._lengths[:count]
        length = int(positions.max()) + 1
        self.kv.reserve(count, length)
        logits = self.decoder.decode(
            self._to_device(self._last_ids[:count]), self._to_device(positions), self.kv, length=length
        )
        self.counters.decode_steps += 1
        self.counters.decode_rows += count
        self._lengths[:count] += 1
        self._take_tokens(np.arange(count), sample_tokens(logits, self._draws[:count]), version)

    def _take_tokens(self, slots: IntArray, sampled: Sampled, version: int) -> None:
        _check_finite(sampled.log_probs)
        self._last_ids[slots] = sampled.token_ids
        self._draws["drawn"][slots] += np.uint64(1)
        self.counters.generated_tokens += len(slots)
        for slot, token_id, log_prob in zip(
            slots.tolist(), sampled.token_ids.tolist(), sampled.log_probs.tolist(), strict=True
        ):
            self.rows[slot].take(token_id, log_prob, version)

    def _take_finished(self) -> list[Row]:
        finished = [row for row in self.rows if row.finish_reason is not None]
        if finished:
            self._vacate(finished)
        return finished

    def remove(self, rows: Sequence[Row]) -> None:
        """Rows that end early; those that have left already are passed over."""
        held = set(map(id, self.rows))
        leaving = [row for row in rows if id(row) in held]
        self._vacate(leaving)
        self.counters.wasted_tokens += sum(len(row.token_ids) for row in leaving)

    def _vacate(self, leaving: Sequence[Row]) -> None:
        """Frees slots, the highest first; the last row moves into each hole, so the order is a function of
        who leaves when.
        """
        ids = set(map(id, leaving))
        for slot in reversed(range(len(self.rows))):
            if id(self.rows[slot]) not in ids:
                continue
            last = len(self.rows) - 1
            if slot != last:
                self.kv.move(last, slot, int(self._lengths[last]))
                self.rows[slot] = self.rows[last]
                for column in (self._lengths, self._last_ids, self._draws):
                    column[slot] = column[last]
                self.counters.moved_rows += 1
            self.rows.pop()

    def _to_device(self, values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.decoder.device)


def _is_over(steps: int, seconds: float, others_wait: bool) -> bool:
    """Whether a job that has made so many steps ends."""
    limit_s, limit = (SHARED_SECONDS, SHARED_STEPS) if others_wait else (JOB_SECONDS, JOB_STEPS)
    return steps > 0 and (steps >= limit or seconds > limit_s)


def _prompt_key(row: Row) -> bytes:
    return np.ascontiguousarray(row.request.prompt_ids, np.int64).tobytes()


def _prefill_chunks(
    groups: Sequence[list[int]], length_of: Callable[[list[int]], int]
) -> Iterator[list[list[int]]]:
    """Groups by length of prompt, in chunks of at most PREFILL_TOKENS padded tokens (a longer prompt goes
    alone).
    """
    chunk: list[list[int]] = []
    for group in sorted(groups, key=length_of):
        if chunk and (len(chunk) + 1) * length_of(group) > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(group)
    if chunk:
        yield chunk


def _check_finite(log_probs: FloatArray) -> None:
    if not np.isfinite(log_probs).all():
        raise EngineError(
            f"the model's logits are not finite in {int((~np.isfinite(log_probs)).sum())} of {len(log_probs)}"
            " rows; the weights are damaged or overflow in this dtype: load good weights or compute in"
            " float32"
        )
