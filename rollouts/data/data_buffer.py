"""Prompts in a seeded order, without end, from one source or from several in exact proportions.

    get_prompts(n) ◄── returned prompts first ◄── return_prompts([...]), put back in front in the order given
                   ◄─ then the stream: whose turn it is
                       ─► that source's permutation from its cursor on; its next epoch has another

Giving back everything that a draw took, in the order it came, leaves the buffer as if nothing had been drawn.
"""

import json
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import count
from typing import NamedTuple

from rollouts.data.mixture import SOURCE_FIELD, Mixture, Turns, make_mixture, parse_weights
from rollouts.data.rows import Row, naming, parse_row
from rollouts.errors import DataError
from rollouts.types import Fields, IntArray, JSONObject, Numbers


class PromptRow(NamedTuple):
    """One dataset row in one epoch of its source."""

    # "row-17", or "NAME/row-17" in a mixture: the position of the row in its source, the same in every epoch
    prompt_id: str
    epoch: int  # of its source, from 0
    # has `prompt`, and whatever a reward function reads; in a mixture also `source`, its source's name
    row: Row

    @property
    def key(self) -> tuple[int, str]:
        """What tells one draw of the stream from every other."""
        return self.epoch, self.prompt_id


class DataBuffer:
    """An endless seeded stream of prompts. The order depends on seed, sizes, names, holes and weights, not on
    ranks or on who draws.
    """

    def __init__(self, rows: Mixture[Row] | Sequence[Row | None], *, seed: int, shuffle: bool = True) -> None:
        """From a mixture of checked rows, or from the rows of one source, where None is a hole.

        Raises DataError if a source has no row, or naming the first one without a usable prompt.
        """
        mixture = rows if isinstance(rows, Mixture) else make_mixture(map(_check_row, rows, count()))
        self._several = len(mixture.sources) > 1
        # by what their prompts' ids begin with
        self._sources = {f"{one.name}/" if self._several else "": one for one in mixture.sources}
        for prefix, source in self._sources.items():
            if not source.good:
                raise DataError(f"the dataset {prefix}has no rows; a DataBuffer needs at least one prompt")
        self._names = [source.name for source in mixture.sources]
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = dict.fromkeys(self._sources, 0)  # rows taken off each stream, each once an epoch
        self._turns = Turns([source.weight for source in mixture.sources])
        self._returned: deque[PromptRow] = deque()

    def __len__(self) -> int:
        """Rows of all sources that can be drawn."""
        return sum(len(source.good) for source in self._sources.values())

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
            prefix, index = self._find(prompt.prompt_id)
            size = len(self._sources[prefix].good)
            drawn = self._drawn[prefix] - prompt.epoch * size  # of its epoch, and of those that followed
            was_drawn = drawn >= size or index in self._order(prefix, prompt.epoch)[: max(drawn, 0)]
            if prompt.key in here or prompt.epoch < 0 or not was_drawn:
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
        prefix, index = self._find(prompt_id)
        source = self._sources[prefix]
        row = source.rows[index]
        assert row is not None, "a hole was drawn"
        return PromptRow(prompt_id, epoch, {**row, SOURCE_FIELD: source.name} if self._several else row)

    # --- weights --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Numbers:
        """By source, relative to each other."""
        return dict(zip(self._names, self._turns.weights, strict=True))

    def set_weights(self, weights: Numbers) -> None:
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
        return dict(zip(self._names, self._drawn.values(), strict=True))

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> JSONObject:
        """Everything an exact resume needs, as JSON. The rows themselves are not in it, only their
        fingerprint.
        """
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "returned": [[prompt.prompt_id, prompt.epoch] for prompt in self._returned],
            "rows": len(self),
            "fingerprint": self.fingerprint,
            "drawn": list(self._drawn.values()),
            "weights": list(self._turns.weights),
            "owed": list(self._turns.owed),
        }

    def load_state_dict(self, state: Fields) -> None:
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
        self._drawn = dict(zip(self._sources, state["drawn"], strict=True))
        self._turns = Turns(state["weights"])
        self._turns.owed = state["owed"]

    def statistics(self) -> Numbers:
        """`epoch`, `drawn` (prompts taken off the stream, each once), `returned` (waiting to be drawn again).

        `epoch` is the current one, from 0. The sources of a mixture have epochs of their own, and `epoch` is
        the lowest: how often every row was drawn. For each of them there are also `source/NAME/epoch`,
        `source/NAME/drawn` and `source/NAME/share` of the next draws.
        """
        drawn, amounts = self._drawn.values(), self._turns.amounts
        sizes = (len(source.good) for source in self._sources.values())
        epochs = [max(count - 1, 0) // size for count, size in zip(drawn, sizes, strict=True)]
        values: dict[str, float] = {
            "epoch": min(epochs),
            "drawn": sum(drawn),
            "returned": len(self._returned),
        }
        if self._several:
            for name, epoch, count, amount in zip(self._names, epochs, drawn, amounts, strict=True):
                values |= {
                    f"source/{name}/epoch": epoch,
                    f"source/{name}/drawn": count,
                    f"source/{name}/share": amount / sum(amounts),
                }
        return values

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of SHA-256 over the rows in order, whatever the order of their keys; in a mixture
        also over the sources' names.

        Weights are not in it: a curriculum changes them, and the state has them.
        """
        digest = sha256()
        for prefix, source in self._sources.items():
            digest.update(prefix.encode())
            for row in source.rows:
                digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()[:16]

    def _next_prompt(self) -> PromptRow:
        prefix, source = list(self._sources.items())[self._turns.take()]
        epoch, place = divmod(self._drawn[prefix], len(source.good))
        self._drawn[prefix] += 1
        return self.find_prompt(f"{prefix}row-{self._order(prefix, epoch)[place]}", epoch)

    def _order(self, prefix: str, epoch: int) -> IntArray:
        """The positions of the rows of a source's epoch, in the order in which they are drawn."""
        digest = sha256(f"{self._seed}/{prefix}{epoch}".encode()).digest()
        return self._sources[prefix].order(int.from_bytes(digest[:16], "big") if self._shuffle else -1)

    def _find(self, prompt_id: str) -> tuple[str, int]:
        """(the prefix of its source, the position of its row)."""
        prefix, _, digits = prompt_id.rpartition("row-")
        rows = self._sources[prefix].rows if prefix in self._sources else ()
        index = int(digits) if digits.isdecimal() else len(rows)
        if index >= len(rows) or rows[index] is None:
            raise DataError(f"prompt {prompt_id!r} is none of the {len(self)} rows of this dataset")
        return prefix, index


def _check_row(row: Row | None, index: int) -> Row | None:
    with naming(f"row {index}"):
        return None if row is None else parse_row(row, "prompt")
