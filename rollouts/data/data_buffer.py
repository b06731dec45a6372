"""Prompts in a seeded order, without end, from one source or from several in exact proportions.

    get_prompts(n) ◄── returned prompts first ◄── return_prompts([...]), put back in front in the order given
                   ◄─ then the stream: whose turn it is
                       ─► that source's permutation from its cursor on; its next epoch has another

Giving back everything that a draw took, in the order it came, leaves the buffer as if nothing had been drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from rollouts.data.messages import naming
from rollouts.data.mixture import (
    SOURCE_FIELD,
    Mixture,
    Source,
    Turns,
    make_mixture,
    order_rows,
    parse_weights,
)
from rollouts.data.rows import Row, parse_row
from rollouts.errors import DataError
from rollouts.types import IntArray, JSONValue


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One dataset row in one epoch of its source."""

    # "row-17", or "NAME/row-17" in a mixture: the position of the row in its source, the same in every epoch
    prompt_id: str
    epoch: int  # of its source, from 0
    # has `prompt`, and whatever a reward function reads; in a mixture also `source`, its source's name
    row: Mapping[str, Any]

    @property
    def key(self) -> tuple[int, str]:
        """What tells one draw of the stream from every other."""
        return self.epoch, self.prompt_id


@dataclass(slots=True)
class _Stream:
    """One source and how far its stream is."""

    source: Source[Row]
    epoch: int = 0
    cursor: int = 0  # rows of this epoch that were drawn; holes do not count
    order: IntArray | None = None  # of this epoch, without holes; None: not made yet

    @property
    def drawn(self) -> int:
        return self.epoch * len(self.source.good) + self.cursor


class DataBuffer:
    """An endless seeded stream of prompts. The order depends on seed, sizes, names, holes and weights, not on
    ranks or on who draws.
    """

    def __init__(
        self, rows: Mixture[Row] | Sequence[Mapping[str, Any] | None], *, seed: int, shuffle: bool = True
    ) -> None:
        """From a mixture of checked rows, or from the rows of one source, where None is a hole.

        Raises DataError if a source has no row, or naming the first one without a usable prompt.
        """
        mixture = rows if isinstance(rows, Mixture) else make_mixture(list(map(_check_row, rows, count())))
        self._several = len(mixture.sources) > 1
        for source in mixture.sources:
            if not source.good:
                name = f"{source.name} " if self._several else ""
                raise DataError(f"the dataset {name}has no rows; a DataBuffer needs at least one prompt")
        self._seed = seed
        self._shuffle = shuffle
        self._streams = [_Stream(source) for source in mixture.sources]
        self._names = [source.name for source in mixture.sources]
        self._turns = Turns([source.weight for source in mixture.sources])
        self._returned: deque[PromptRow] = deque()

    def __len__(self) -> int:
        """Rows of all sources that can be drawn."""
        return sum(len(stream.source.good) for stream in self._streams)

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
            was_drawn = 0 <= prompt.epoch < stream.epoch
            if prompt.epoch == stream.epoch:
                was_drawn = index in self._order(stream)[: stream.cursor]
            if prompt.key in here or not was_drawn:
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
        row = stream.source.rows[index]
        assert row is not None, "a hole was drawn"
        row = {**row, SOURCE_FIELD: stream.source.name} if self._several else row
        return PromptRow(prompt_id, epoch, row)

    # --- weights --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Mapping[str, float]:
        """By source, relative to each other."""
        return dict(zip(self._names, self._turns.weights, strict=True))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Draws from here on in the proportions of `weights`, which name every source; 0 pauses one. Returned
        prompts still come first.

        What a source had coming, about a draw at most, it still has: a small source has its turn however
        often the weights change. The proportions in force already change nothing. Raises DataError for
        weights that are not of these sources, or none above 0.
        """
        values = parse_weights(weights, self._names)
        if values is None:
            raise DataError(
                f"weights {dict(weights)} are not for the sources {', '.join(self._names)}: 0 or more for"
                " each, and one above 0"
            )
        self._turns.set_weights(values)

    def drawn_by_source(self) -> dict[str, int]:
        """Prompts taken off the stream of each source, each once, returned ones too."""
        return {stream.source.name: stream.drawn for stream in self._streams}

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, JSONValue]:
        """Everything an exact resume needs, as JSON. The rows themselves are not in it, only their
        fingerprint.
        """
        turns = self._turns
        common: dict[str, JSONValue] = {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "returned": [[prompt.prompt_id, prompt.epoch] for prompt in self._returned],
            "rows": len(self),
            "fingerprint": self.fingerprint,
        }
        if not self._several:
            return {**common, "epoch": self._streams[0].epoch, "cursor": self._streams[0].cursor}
        return {
            **common,
            "sources": [[stream.source.name, stream.epoch, stream.cursor] for stream in self._streams],
            "weights": list(turns.weights),
            "counts": list(turns.counts),
            "owed": list(turns.owed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the stream that `state` was taken from, with its seed and its weights.

        Raises DataError, changing nothing, for another dataset's state.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the saved data order is of dataset {state['fingerprint']} ({state['rows']} rows), this one"
                f" is {self.fingerprint} ({len(self)} rows): the prompts changed; resume with the same data,"
                " or start a new run"
            )
        self._returned = deque(self.find_prompt(prompt_id, epoch) for prompt_id, epoch in state["returned"])
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        places = state["sources"] if self._several else [["", state["epoch"], state["cursor"]]]
        self._streams = [
            _Stream(stream.source, epoch, cursor)
            for stream, (_, epoch, cursor) in zip(self._streams, places, strict=True)
        ]
        if self._several:
            self._turns = Turns(state["weights"])
            self._turns.counts, self._turns.owed = list(state["counts"]), list(state["owed"])

    def statistics(self) -> Mapping[str, float]:
        """`epoch`, `drawn` (prompts taken off the stream, each once), `returned` (waiting to be drawn again).

        `epoch` is the current one, from 0. The sources of a mixture have epochs of their own, and `epoch` is
        the lowest: how often every row was drawn. For each of them there are also `source/NAME/epoch`,
        `source/NAME/drawn` and `source/NAME/share` of the next draws.
        """
        amounts = self._turns.amounts
        values: dict[str, float] = {
            "epoch": min(stream.epoch for stream in self._streams),
            "drawn": sum(stream.drawn for stream in self._streams),
            "returned": len(self._returned),
        }
        for stream, amount in zip(self._streams, amounts, strict=True):
            if self._several:
                name = f"source/{stream.source.name}"
                values[f"{name}/epoch"], values[f"{name}/drawn"] = stream.epoch, stream.drawn
                values[f"{name}/share"] = amount / sum(amounts)
        return {name: float(value) for name, value in values.items()}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of SHA-256 over the rows in order, whatever the order of their keys; in a mixture
        also over the sources' names.

        Weights are not in it: a curriculum changes them, and the state has them.
        """
        named: list[list[str]] = []
        for stream in self._streams:
            digest = hashlib.sha256()
            for row in stream.source.rows:
                digest.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")
            named.append([stream.source.name, digest.hexdigest()])
        whole = hashlib.sha256(json.dumps(named).encode()).hexdigest() if self._several else named[0][1]
        return whole[:16]

    def _next_prompt(self) -> PromptRow:
        stream = self._streams[self._turns.take()]
        if stream.cursor == len(stream.source.good):
            stream.epoch, stream.cursor, stream.order = stream.epoch + 1, 0, None
        index = self._order(stream)[stream.cursor]
        stream.cursor += 1
        return self.find_prompt(f"{self._prefix(stream)}row-{index}", stream.epoch)

    def _prefix(self, stream: _Stream) -> str:
        return f"{stream.source.name}/" if self._several else ""

    def _order(self, stream: _Stream) -> IntArray:
        """The positions of the rows of the stream's epoch, in the order in which they are drawn."""
        if stream.order is None:
            digest = hashlib.sha256(f"{self._seed}/{self._prefix(stream)}{stream.epoch}".encode()).digest()
            order = order_rows(stream.source.rows, int.from_bytes(digest[:16], "big"))
            stream.order = order if self._shuffle else np.sort(order)
        return stream.order

    def _find(self, prompt_id: str) -> tuple[_Stream, int]:
        row = prompt_id.rpartition("/")[2]
        for stream in self._streams:
            rows, digits = stream.source.rows, row.removeprefix("row-")
            index = int(digits) if digits.isdecimal() else len(rows)
            if f"{self._prefix(stream)}row-{index}" == prompt_id and index < len(rows) and rows[index]:
                return stream, index
        raise DataError(f"prompt {prompt_id!r} is none of the {len(self)} rows of this dataset")


def _check_row(row: Mapping[str, Any] | None, index: int) -> Row | None:
    with naming(f"row {index}"):
        return None if row is None else parse_row(row, "prompt")
