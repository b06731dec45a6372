"""Prompts in a seeded order, without end, from one source or from several in exact proportions.

    get_prompts(n) ◄── returned prompts first ◄── return_prompts([...]), put back in front in the order given
                   ◄─ then the stream: whose turn it is
                       ─► that source's permutation from its cursor on; its next epoch has another

Giving back everything that a draw took, in the order it came, leaves the buffer as if nothing had been drawn.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rollouts.data.mixture import (
    SOURCE_FIELD,
    Mixture,
    choose_source,
    compute_amounts,
    make_mixture,
    metric_name,
    settle,
)
from rollouts.data.rows import SourceRows, check_row, require_prompts
from rollouts.errors import DataError
from rollouts.types import IntArray, JSONValue


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One dataset row in one epoch of its source."""

    # "row-17", or "NAME/row-17" in a mixture: the position of the row in its source, the same in every epoch
    prompt_id: str
    epoch: int  # of its source, from 0
    row: Mapping[
        str, Any
    ]  # has `prompt`, and whatever a reward function reads; in a mixture also `source`, its source's name

    @property
    def key(self) -> tuple[int, str]:
        """What tells one draw of the stream from every other."""
        return self.epoch, self.prompt_id


@dataclass(slots=True)
class _Stream:
    """One source and how far its stream is."""

    source: SourceRows
    prefix: str  # of its prompt ids: "" or "NAME/"
    seed: int
    shuffle: bool
    good_count: int
    epoch: int = 0
    cursor: int = 0  # rows of this epoch that were drawn; holes do not count
    order: IntArray | None = None  # of this epoch, without holes; None: not made yet

    def next_prompt(self) -> PromptRow:
        if self.cursor == self.good_count:
            self.move_to(self.epoch + 1, 0)
        index = int(self.current_order()[self.cursor])
        self.cursor += 1
        return self.prompt(index, self.epoch)

    def prompt(self, index: int, epoch: int) -> PromptRow:
        row = self.source.rows[index]
        assert row is not None, "a hole was drawn"
        row = {**row, SOURCE_FIELD: self.source.name} if self.prefix else row
        return PromptRow(f"{self.prefix}row-{index}", epoch, row)

    def move_to(self, epoch: int, cursor: int) -> None:
        self.epoch, self.cursor, self.order = epoch, cursor, None

    def current_order(self) -> IntArray:
        if self.order is None:
            good = np.array([row is not None for row in self.source.rows])
            order = (
                _permute(len(good), f"{self.seed}/{self.prefix}{self.epoch}")
                if self.shuffle
                else np.arange(len(good), dtype=np.int64)
            )
            self.order = order[good[order]]
        return self.order

    def was_drawn(self, index: int, epoch: int) -> bool:
        if epoch != self.epoch:
            return 0 <= epoch < self.epoch
        return bool((self.current_order()[: self.cursor] == index).any())

    def index_of(self, number: str) -> int | None:
        """The position that "row-17" means; None if there is no such row or it is a hole."""
        digits, rows = number.removeprefix("row-"), self.source.rows
        index = int(digits) if digits.isdecimal() else len(rows)
        known = number == f"row-{index}" and index < len(rows) and rows[index] is not None
        return index if known else None

    @property
    def drawn(self) -> int:
        return self.epoch * self.good_count + self.cursor


def _permute(count: int, key_text: str) -> IntArray:
    # numpy promises that raw bits of a bit generator never change between versions; it does not promise that
    # of permutation()
    key = hashlib.sha256(key_text.encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64)


class DataBuffer:
    """An endless seeded stream of prompts. The order depends on seed, sizes, names, holes and weights, not on
    ranks or on who draws.
    """

    def __init__(
        self, rows: Mixture | Sequence[Mapping[str, Any] | None], *, seed: int, shuffle: bool = True
    ) -> None:
        """From a mixture, or from the rows of one source, where None is a hole.

        Raises DataError if a source has no row, or naming the first one without a usable prompt.
        """
        mixture = rows if isinstance(rows, Mixture) else make_mixture(rows)
        mixture.check_fields(name="DataBuffer")
        several = len(mixture.sources) > 1
        for source in mixture.sources:
            _check_source(source, f"{source.name} " if several else "")
        self._seed = seed
        self._shuffle = shuffle
        self._streams = [
            _Stream(source, f"{source.name}/" if several else "", seed, shuffle, source.good_count)
            for source in mixture.sources
        ]
        self._weights = tuple(source.weight for source in mixture.sources)
        self._amounts = compute_amounts(self._weights)
        self._counts = [0] * len(self._streams)  # drawn off each source since the weights were last changed
        self._owed = (0,) * len(self._streams)  # what each had coming then; see mixture.settle
        self._returned: deque[PromptRow] = deque()

    def __len__(self) -> int:
        """Rows of all sources that can be drawn."""
        return sum(stream.good_count for stream in self._streams)

    def get_prompts(self, count: int) -> list[PromptRow]:
        """The next `count` prompts: returned ones first, then the stream, over as many epochs as it takes."""
        assert count >= 0, count
        return [self._returned.popleft() if self._returned else self._next_prompt() for _ in range(count)]

    def return_prompts(self, prompts: Sequence[PromptRow]) -> None:
        """Puts prompts back in front of everything else, the first given being the next drawn.

        Raises DataError, changing nothing, if one is not of this dataset, was not drawn yet, or is here
        already.
        """
        here = {prompt.key for prompt in self._returned}
        for prompt in prompts:
            stream, index = self._find(prompt.prompt_id)
            if prompt.key in here or not stream.was_drawn(index, prompt.epoch):
                raise DataError(
                    f"prompt {prompt.prompt_id} of epoch {prompt.epoch} is not out: return a prompt once"
                    " after each draw"
                )
            here.add(prompt.key)
        self._returned.extendleft(reversed(prompts))

    def find_prompt(self, prompt_id: str, epoch: int) -> PromptRow:
        """The prompt with that id, for records that keep only ids. Raises DataError if the dataset has no
        such row.
        """
        stream, index = self._find(prompt_id)
        return stream.prompt(index, epoch)

    # --- weights --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Mapping[str, float]:
        """By source, relative to each other."""
        return {
            stream.source.name: weight for stream, weight in zip(self._streams, self._weights, strict=True)
        }

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Draws from here on in the proportions of `weights`, which name every source; 0 pauses one. Returned
        prompts still come first.

        What a source had coming, about a draw at most, it still has: a small source has its turn however
        often the weights change. The proportions in force already change nothing. Raises DataError for
        weights that are not of these sources, or none above 0.
        """
        names = [stream.source.name for stream in self._streams]
        good = set(weights) == set(names) and all(0 <= weight < math.inf for weight in weights.values())
        if not good or not any(weights.values()):
            raise DataError(
                f"weights {dict(weights)} are not for the sources {', '.join(names)}: 0 or more for each, and"
                " one above 0"
            )
        self._weights = tuple(float(weights[name]) for name in names)
        amounts = compute_amounts(self._weights)
        if amounts != self._amounts:
            self._owed = settle(self._amounts, self._counts, self._owed, amounts)
            self._amounts, self._counts = amounts, [0] * len(names)

    def drawn_by_source(self) -> dict[str, int]:
        """Prompts taken off the stream of each source, each once, returned ones too."""
        return {stream.source.name: stream.drawn for stream in self._streams}

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, JSONValue]:
        """Everything an exact resume needs, as JSON. The rows themselves are not in it, only their
        fingerprint.
        """
        common: dict[str, JSONValue] = {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "returned": [[prompt.prompt_id, prompt.epoch] for prompt in self._returned],
            "rows": len(self),
            "fingerprint": self.fingerprint,
        }
        if len(self._streams) == 1:
            return {**common, "epoch": self._streams[0].epoch, "cursor": self._streams[0].cursor}
        return {
            **common,
            "sources": [[stream.source.name, stream.epoch, stream.cursor] for stream in self._streams],
            "weights": list(self._weights),
            "counts": list(self._counts),
            "owed": list(self._owed),
        }

    def load_state_dict(self, state: Mapping[str, JSONValue]) -> None:
        """Continues the stream that `state` was taken from, with its seed and its weights.

        Raises DataError, changing nothing, for another dataset's state.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the saved data order is of dataset {state['fingerprint']} ({state['rows']} rows), this one"
                f" is {self.fingerprint} ({len(self)} rows): the prompts changed; resume with the same data,"
                " or start a new run"
            )
        returned = [self.find_prompt(prompt_id, epoch) for prompt_id, epoch in state["returned"]]
        places = (
            [(epoch, cursor) for _, epoch, cursor in state["sources"]]
            if "sources" in state
            else [(state["epoch"], state["cursor"])]
        )
        self._seed, self._shuffle = int(state["seed"]), bool(state["shuffle"])
        for stream, (epoch, cursor) in zip(self._streams, places, strict=True):
            stream.seed, stream.shuffle = self._seed, self._shuffle
            stream.move_to(int(epoch), int(cursor))
        if "sources" in state:
            self._weights = tuple(float(weight) for weight in state["weights"])
            self._amounts = compute_amounts(self._weights)
            self._counts = [int(count) for count in state["counts"]]
            self._owed = tuple(int(owes) for owes in state["owed"])
        self._returned = deque(returned)

    def statistics(self) -> Mapping[str, float]:
        """`epoch`, `drawn` (prompts taken off the stream, each once), `returned` (waiting to be drawn again).

        `epoch` is the current one, from 0. The sources of a mixture have epochs of their own, and `epoch` is
        the lowest: how often every row was drawn. For each of them there are also `source/NAME/epoch`,
        `source/NAME/drawn` and `source/NAME/share` of the next draws.
        """
        total = {
            "epoch": float(min(stream.epoch for stream in self._streams)),
            "drawn": float(sum(stream.drawn for stream in self._streams)),
            "returned": float(len(self._returned)),
        }
        if len(self._streams) == 1:
            return total
        for stream, amount in zip(self._streams, self._amounts, strict=True):
            name = f"source/{metric_name(stream.source.name)}"
            total[f"{name}/epoch"] = float(stream.epoch)
            total[f"{name}/drawn"] = float(stream.drawn)
            total[f"{name}/share"] = amount / sum(self._amounts)
        return total

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of SHA-256 over the rows in order, whatever the order of their keys; in a mixture
        also over the sources' names.

        Weights are not in it: a curriculum changes them, and the state has them.
        """
        digests = [_digest_rows(stream.source) for stream in self._streams]
        if len(digests) == 1:
            return digests[0][:16]
        named = [[stream.source.name, digest] for stream, digest in zip(self._streams, digests, strict=True)]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]

    def _next_prompt(self) -> PromptRow:
        index = choose_source(self._amounts, self._counts, self._owed) if len(self._streams) > 1 else 0
        self._counts[index] += 1
        return self._streams[index].next_prompt()

    def _find(self, prompt_id: str) -> tuple[_Stream, int]:
        prefix, slash, number = prompt_id.rpartition("/")
        for stream in self._streams:
            index = stream.index_of(number) if stream.prefix == prefix + slash else None
            if index is not None:
                return stream, index
        raise DataError(f"prompt {prompt_id!r} is none of the {len(self)} rows of this dataset")


def _check_source(source: SourceRows, name: str) -> None:
    if not source.good_count:
        raise DataError(f"the dataset {name}has no rows; a DataBuffer needs at least one prompt")
    for index, row in enumerate(source.rows):
        if row is not None:
            check_row(row, where=f"{name}row {index}")
    require_prompts(source.rows, name=name.strip() or "DataBuffer")


def _digest_rows(source: SourceRows) -> str:
    digest = hashlib.sha256()
    for row in source.rows:
        digest.update(
            json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
        )
    return digest.hexdigest()
