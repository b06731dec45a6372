"""A batch's micro-batches, dealt to W ranks: the same number for each, in rounds of like cost, as bytes that cross ranks.

    batch ──pack by token budget──► micro-batches ──sort by cost, W at a time──► rounds ──► one share per rank: a portion of every round

All ranks work on a round at the same time and wait for the slowest, so a round costs what its largest portion costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollouts.data.packing import MicroBatch
from rollouts.distributed.commands import Command, decode_command, encode_command
from rollouts.types import FloatArray, LossSpec, RolloutBatch

TOKEN_FIELDS = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "returns", "old_values")
MICRO_BATCH_ARRAYS = ("rows", "input_ids", "position_ids", "subtree_end", "predictors", "targets", "token_rows", "token_positions", "token_pairs")
TRIES_PER_ROUND = 2  # divisions tried that have up to so many rounds more than the first


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """A micro-batch with what its loss needs to know of its rows."""

    micro_batch: MicroBatch
    width: int  # tokens of its longest row
    fields: Mapping[str, FloatArray]  # [M] of each trained token; those of TOKEN_FIELDS that the batch has
    counts: bool = True  # False: work without weight, for a rank that would have none in this round


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank computes of a batch: as many portions as every other rank."""

    portions: tuple[Portion, ...]
    temperature: float
    spec: LossSpec | None = None  # None: log-probs only
    denominator: float = 1.0  # of the whole batch
    expected_count: float = 0.0  # what the counts of all portions of all ranks add up to


def make_portion(micro_batch: MicroBatch, batch: RolloutBatch) -> Portion:
    """The portion with the batch's values of each token that trains."""
    counts = np.bincount(micro_batch.token_rows, minlength=len(micro_batch.rows))
    positions = np.split(micro_batch.token_positions, np.cumsum(counts)[:-1])  # of each row: tokens come row by row
    rows = micro_batch.rows.tolist()
    fields: dict[str, FloatArray] = {}
    for name in TOKEN_FIELDS:
        values = getattr(batch, name)
        if values is not None:
            parts = [values[row][places] for row, places in zip(rows, positions, strict=True)]
            fields[name] = np.concatenate(parts).astype(np.float32, copy=False)
    return Portion(micro_batch, max(len(batch.tokens[row]) for row in rows), fields)


# --- dealing -----------------------------------------------------------------------------------------------------------------------


def compute_cost(micro_batch: MicroBatch, micro_batch_cost: int) -> int:
    """Tokens computed, and what a micro-batch costs beside them."""
    return micro_batch.computed_tokens + micro_batch_cost


def deal_rounds(costs: Sequence[int], ranks: int) -> list[list[int | None]]:
    """[rank][round] the number of a micro-batch, or None where there is none left. Every number once, every rank as many rounds.

    The dearest go first, `ranks` at a time; every second round is dealt from the other end, so that what a rank computes in all is even.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    dealt: list[list[int | None]] = [[] for _ in range(ranks)]
    for number, start in enumerate(range(0, len(order), ranks)):
        chosen: list[int | None] = [*order[start : start + ranks]]
        chosen += [None] * (ranks - len(chosen))
        for rank, index in enumerate(reversed(chosen) if number % 2 else chosen):
            dealt[rank].append(index)
    return dealt


def compute_round_cost(costs: Sequence[int], ranks: int) -> int:
    """What all rounds cost together: each its dearest micro-batch."""
    return sum(sorted(costs, reverse=True)[::ranks])


def pack_for_ranks(pack: Callable[[int], list[MicroBatch]], ranks: int, *, micro_batch_tokens: int, micro_batch_cost: int) -> list[MicroBatch]:
    """The packing whose rounds cost least among some budgets: `micro_batch_tokens`, and those that divide the batch evenly among the ranks.

    `pack(budget)` makes the micro-batches. Where the batch has as many rows as there are ranks, no rank is left without work.
    """
    best = pack(micro_batch_tokens)
    if ranks == 1 or not best:
        return best
    total = sum(micro_batch.computed_tokens for micro_batch in best)
    rounds, rows = -(-len(best) // ranks), sum(len(micro_batch.rows) for micro_batch in best)
    budgets = sorted({min(-(-total // (ranks * (rounds + more))), micro_batch_tokens) for more in range(TRIES_PER_ROUND)}, reverse=True)
    candidates = [best, *(pack(budget) for budget in budgets)]
    budget = budgets[-1]
    while len(candidates[-1]) < min(ranks, rows) and budget > 1:
        budget = max(budget // 2, 1)
        candidates.append(pack(budget))
    enough = [one for one in candidates if len(one) >= min(ranks, rows)]
    return min(enough or candidates, key=lambda one: compute_round_cost([compute_cost(part, micro_batch_cost) for part in one], ranks))


def deal_portions(portions: Sequence[Portion], ranks: int, *, micro_batch_cost: int) -> list[list[Portion]]:
    """[rank][round] portions; where a round has none left for a rank, the smallest of all, without weight."""
    costs = [compute_cost(portion.micro_batch, micro_batch_cost) for portion in portions]
    if not portions:
        return [[] for _ in range(ranks)]
    smallest = portions[int(np.argmin(costs))]
    idle = Portion(smallest.micro_batch, smallest.width, smallest.fields, counts=False)
    return [[idle if index is None else portions[index] for index in mine] for mine in deal_rounds(costs, ranks)]


# --- as bytes ----------------------------------------------------------------------------------------------------------------------


def encode_share(share: Share) -> bytes:
    """The share as one message. Raises ControlError if a parameter of the loss cannot cross."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    portions: list[dict[str, Any]] = []
    for number, portion in enumerate(share.portions):
        for name in MICRO_BATCH_ARRAYS:
            arrays[f"{number}/{name}"] = getattr(portion.micro_batch, name)
        for name, values in portion.fields.items():
            arrays[f"{number}/fields/{name}"] = values
        portions.append({"width": portion.width, "counts": portion.counts, "causal": portion.micro_batch.causal, "fields": [*portion.fields]})
    spec = share.spec
    loss = None if spec is None else {"name": spec.name, "params": dict(spec.params), "unit": spec.unit, "constant": spec.constant}
    numbers = {"temperature": share.temperature, "denominator": share.denominator, "expected_count": share.expected_count}
    return b"".join(encode_command(Command("share", {"portions": portions, "loss": loss, **numbers}, arrays)))


def decode_share(message: bytes) -> Share:
    """What encode_share was given; the arrays are copies, so that torch may wrap them. Raises ControlError for bytes that are no command."""
    command = decode_command(message)
    fields, arrays = command.fields, {name: array.copy() for name, array in command.arrays.items()}
    portions: list[Portion] = []
    for number, one in enumerate(fields["portions"]):
        parts: dict[str, Any] = {name: arrays[f"{number}/{name}"] for name in MICRO_BATCH_ARRAYS}
        values = {name: arrays[f"{number}/fields/{name}"] for name in one["fields"]}
        portions.append(Portion(MicroBatch(**parts, causal=one["causal"]), one["width"], values, counts=one["counts"]))
    return Share(
        tuple(portions),
        temperature=fields["temperature"],
        spec=None if fields["loss"] is None else LossSpec(**fields["loss"]),
        denominator=fields["denominator"],
        expected_count=fields["expected_count"],
    )
