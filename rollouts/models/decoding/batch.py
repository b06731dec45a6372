"""The rows being decoded. Everything here runs in one thread, that of the device.

admit ──► prefill of each distinct prompt ──► rows 0..n-1 ──► step, step, … ──► rows that end leave at once,
          or: joined to a row that has it                                 the last ones take their places
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollouts.errors import EngineError
from rollouts.models.decoding.decoder import FastDecoder
from rollouts.models.decoding.whole_model import CachedDecoder, RecomputeDecoder, WholeModel
from rollouts.models.draws import DRAW_DTYPE, sample_tokens
from rollouts.types import Completion, FinishReason, FloatArray, GenerateRequest

PREFILL_TOKENS = 8192  # padded prompt tokens of one forward pass
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
    prompt_log_probs: FloatArray | None = None  # where the request asks for them
    leaving: bool = False  # whether it ends before the next step
    failure: EngineError | None = None

    @property
    def position(self) -> int:
        """Of the token that goes in next."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

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


class DecodeBatch:
    """Rows without holes."""

    def __init__(self, whole: WholeModel, decoder: Decoder) -> None:
        self.decoder = decoder
        self.rows: list[Row] = []
        # tokens of the prompts computed, steps, and rows summed over the steps
        self.totals = dict.fromkeys(("prefill_tokens", "decode_steps", "decode_rows"), 0)
        self._whole = whole
        self._draws = np.zeros(0, DRAW_DTYPE)

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
        with self._whole.computing():
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
        self.decoder.drop()

    def admit(self, rows: Sequence[Row], version: int) -> None:
        """Each distinct prompt is computed once, or taken over from an active row that has it by the same
        weights.
        """
        holders = {_key(row): index for index, row in enumerate(self.rows) if row.prompt_version == version}
        groups: dict[bytes, list[Row]] = {}
        for row in rows:
            row.prompt_version = version
            if row.request.score_prompt:
                row.prompt_log_probs = self._whole.score(row.request.prompt_ids)
            groups.setdefault(_key(row), []).append(row)
        if isinstance(self.decoder, FastDecoder):  # a recurrent state cannot be turned back to its prompt
            joined = [row for key in list(groups) if key in holders for row in groups.pop(key)]
            self._append(joined, [holders[_key(row)] for row in joined])
        fresh = sorted(groups.values(), key=lambda group: group[0].position)
        while fresh:
            count = 1  # a long prompt goes alone
            while count < len(fresh) and (count + 1) * (fresh[count][0].position + 1) <= PREFILL_TOKENS:
                count += 1
            self._prefill(fresh[:count], version)
            del fresh[:count]

    def _prefill(self, groups: Sequence[list[Row]], version: int) -> None:
        """One forward pass over a prompt of each group; every row of it draws its first token."""
        first, firsts = len(self.rows), [group[0] for group in groups]
        logits = self.decoder.prefill([row.request.prompt_ids for row in firsts])
        copied = [index for index, group in enumerate(groups) for _ in group[1:]]
        self.totals["prefill_tokens"] += sum(row.position + 1 for row in firsts)
        self._append(firsts)
        self._append([row for group in groups for row in group[1:]], [first + index for index in copied])
        self._draw(logits[self._whole.to_device(np.array([*range(len(groups)), *copied]))], first, version)

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
        positions = np.array([row.position for row in self.rows])
        logits = self.decoder.decode(np.array(last, np.int64), positions)
        self.totals["decode_steps"] += 1
        self.totals["decode_rows"] += len(self.rows)
        self._draw(logits, 0, version)

    def _draw(self, logits: Tensor, first: int, version: int) -> None:
        """One token for each row from `first` on."""
        rows, draws = self.rows[first:], self._draws[first:]
        sampled = sample_tokens(logits, draws)
        if wrong := int((~np.isfinite(sampled.log_probs)).sum()):
            raise EngineError(
                f"the model's logits are not finite in {wrong} of {len(rows)} rows; the weights are damaged"
                " or overflow in this dtype: load good weights or compute in float32"
            )
        draws["drawn"] += np.uint64(1)
        for row, token, log_prob in zip(
            rows, sampled.token_ids.tolist(), sampled.log_probs.tolist(), strict=True
        ):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)
            if token in row.request.sampling.stop_token_ids:
                row.finish_reason = "stop"
            elif len(row.token_ids) == row.request.sampling.max_new_tokens:
                row.finish_reason = "length"

    def take_ended(self) -> list[Row]:
        """The rows that finished or leave, taken out. The last of the others move into the holes: the order
        is a function of who leaves when.
        """
        ended = np.array([row.leaving or row.finish_reason is not None for row in self.rows], bool)
        if not ended.any():
            return []
        count = int((~ended).sum())
        order = np.arange(count)
        order[ended[:count]] = count + np.flatnonzero(~ended[count:])
        self.decoder.select(order, max(row.position for row in self.rows))
        found = [self.rows[index] for index in np.flatnonzero(ended)]
        self.rows, self._draws = [self.rows[index] for index in order], self._draws[order]
        return found


def _key(row: Row) -> bytes:
    return np.asarray(row.request.prompt_ids, np.int64).tobytes()
