"""Prompts in a seeded order, without end.

    get_prompts(n) ◄── returned prompts first ◄── return_prompts([...]), put back in front in the order given
                   ◄── then the epoch's permutation from `cursor` on; the next epoch has another permutation

Giving back everything that a draw took, in the order it came, leaves the buffer as if nothing had been drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rollouts.data.datasets import check_row, require_prompts
from rollouts.errors import DataError
from rollouts.types import IntArray, JSONValue


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One dataset row in one epoch."""

    prompt_id: str  # "row-17": the position of the row in the dataset, the same in every epoch
    epoch: int  # from 0
    row: Mapping[str, Any]  # has `prompt`, and whatever a reward function reads

    @property
    def key(self) -> tuple[int, str]:
        """What tells one draw of the stream from every other."""
        return self.epoch, self.prompt_id


class DataBuffer:
    """An endless seeded stream of prompts. The order depends on `seed` and the number of rows, not on ranks or on who draws."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, seed: int, shuffle: bool = True) -> None:
        """Raises DataError if there is no row, or naming the first one without a usable prompt."""
        if not rows:
            raise DataError("the dataset has no rows; a DataBuffer needs at least one prompt")
        for index, row in enumerate(rows):
            check_row(row, where=f"row {index}")
        require_prompts(rows, name="DataBuffer")
        self._rows = tuple(rows)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._cursor = 0  # rows of this epoch that were drawn
        self._order = self._permutation()
        self._returned: deque[PromptRow] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def get_prompts(self, count: int) -> list[PromptRow]:
        """The next `count` prompts: returned ones first, then the stream, over as many epochs as it takes."""
        assert count >= 0, count
        return [self._returned.popleft() if self._returned else self._next_prompt() for _ in range(count)]

    def return_prompts(self, prompts: Sequence[PromptRow]) -> None:
        """Puts prompts back in front of everything else, the first given being the next drawn.

        Raises DataError, changing nothing, if one is not of this dataset, was not drawn yet, or is here already.
        """
        here = {prompt.key for prompt in self._returned}
        for prompt in prompts:
            if prompt.key in here:
                raise DataError(f"prompt {prompt.prompt_id} of epoch {prompt.epoch} was returned twice; a prompt is drawn again before that")
            if not self._was_drawn(prompt):
                raise DataError(f"prompt {prompt.prompt_id} of epoch {prompt.epoch} was never drawn from this buffer of {len(self)} rows")
            here.add(prompt.key)
        self._returned.extendleft(reversed(prompts))

    def find_prompt(self, prompt_id: str, epoch: int) -> PromptRow:
        """The prompt with that id, for records that keep only ids. Raises DataError if the dataset has no such row."""
        return PromptRow(prompt_id, epoch, self._rows[self._index_of(prompt_id)])

    def state_dict(self) -> dict[str, JSONValue]:
        """Everything an exact resume needs, as JSON. The rows themselves are not in it, only their fingerprint."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "returned": [[prompt.prompt_id, prompt.epoch] for prompt in self._returned],
            "rows": len(self._rows),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, JSONValue]) -> None:
        """Continues the stream that `state` was taken from, with its seed. Raises DataError, changing nothing, for another dataset's state."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the saved data order is of dataset {state['fingerprint']} ({state['rows']} rows), this one is {self.fingerprint} "
                f"({len(self)} rows): the prompts changed; resume with the same data, or start a new run"
            )
        returned = [self.find_prompt(prompt_id, epoch) for prompt_id, epoch in state["returned"]]
        self._seed, self._shuffle = int(state["seed"]), bool(state["shuffle"])
        self._epoch, self._cursor = int(state["epoch"]), int(state["cursor"])
        self._order = self._permutation()
        self._returned = deque(returned)

    def statistics(self) -> Mapping[str, float]:
        """`epoch` (the current one, from 0), `drawn` (prompts taken off the stream, each once), `returned` (waiting to be drawn again)."""
        drawn = self._epoch * len(self) + self._cursor
        return {"epoch": float(self._epoch), "drawn": float(drawn), "returned": float(len(self._returned))}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of SHA-256 over the rows in order, whatever the order of their keys."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()[:16]

    def _next_prompt(self) -> PromptRow:
        if self._cursor == len(self):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._permutation()
        index = int(self._order[self._cursor])
        self._cursor += 1
        return PromptRow(f"row-{index}", self._epoch, self._rows[index])

    def _permutation(self) -> IntArray:
        if not self._shuffle:
            return np.arange(len(self), dtype=np.int64)
        # numpy promises that raw bits of a bit generator never change between versions; it does not promise that of permutation()
        key = hashlib.sha256(f"{self._seed}/{self._epoch}".encode()).digest()
        bits = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(len(self))
        return np.argsort(bits, kind="stable").astype(np.int64)

    def _index_of(self, prompt_id: str) -> int:
        number = prompt_id.removeprefix("row-")
        index = int(number) if number.isdecimal() else len(self)
        if prompt_id != f"row-{index}" or index >= len(self):
            raise DataError(f"prompt {prompt_id!r} is not of this dataset; its {len(self)} rows are row-0 to row-{len(self) - 1}")
        return index

    def _was_drawn(self, prompt: PromptRow) -> bool:
        index = self._index_of(prompt.prompt_id)
        if prompt.epoch != self._epoch:
            return 0 <= prompt.epoch < self._epoch
        return bool((self._order[: self._cursor] == index).any())
