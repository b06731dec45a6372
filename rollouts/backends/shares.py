"""A batch's micro-batches, dealt to W ranks: the same number for each, in rounds of like cost, as bytes that
cross ranks.

    batch ──pack, W at a time──► micro-batches ──sort by cost, W at a time──► rounds ──► one share per rank: a portion of every round

All ranks work on a round at the same time and wait for the slowest, so a round costs what its dearest portion
costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollouts.data.packing import ATTENTION_COST, MicroBatch
from rollouts.data.packing_plans import estimate_attention_cost
from rollouts.distributed.commands import Command, decode_command, encode_command
from rollouts.types import FloatArray, LossSpec, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKEN_FIELDS = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "returns", "old_values")
MICRO_BATCH_ARRAYS = (
    "rows", "input_ids", "position_ids", "subtree_end", "segments", "predictors", "targets", "token_rows", "token_positions", "token_pairs",
)  # fmt: skip


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
    rows = micro_batch.rows.tolist()
    lengths = np.asarray([len(batch.tokens[row]) for row in rows])
    places = (
        micro_batch.token_positions + (np.cumsum(lengths) - lengths)[micro_batch.token_rows]
    )  # in the rows one after the other
    fields: dict[str, FloatArray] = {}
    for name in TOKEN_FIELDS:
        values = getattr(batch, name)
        if values is not None:
            fields[name] = np.concatenate([values[row] for row in rows])[places].astype(
                np.float32, copy=False
            )
    return Portion(micro_batch, int(lengths.max()), fields)


# --- dealing ------------------------------------------------------------------------------------------------


def find_attention_cost(model: PreTrainedModel) -> float:
    """What a (query, key) pair costs in tokens, by FLOPs; of experts as if all answered. ATTENTION_COST for a
    config that does not say.
    """
    config = model.config.get_text_config()
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1))
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    embedding, head = (
        model.get_input_embeddings().weight,
        getattr(model.get_output_embeddings(), "weight", None),
    )
    if head is not embedding:
        parameters -= int(embedding.numel())  # pyright: ignore[reportCallIssue]
    return (
        estimate_attention_cost(layers=layers, attention_width=width, parameters=parameters)
        if layers and width
        else ATTENTION_COST
    )


def compute_cost(micro_batch: MicroBatch, *, micro_batch_cost: float, attention_cost: float) -> float:
    """Tokens computed, what a micro-batch costs beside them, and the (query, key) pairs of its attention,
    each `attention_cost` tokens.
    """
    _, first, last, _ = micro_batch.segments.T
    lines = micro_batch.segments[:, 0]
    depths, lengths = micro_batch.position_ids[lines, first], last - first
    return (
        micro_batch.computed_tokens
        + micro_batch_cost
        + attention_cost * float((lengths * (depths + (lengths + 1) / 2)).sum())
    )


def deal_rounds(costs: Sequence[float], ranks: int) -> list[list[int | None]]:
    """[rank][round] the number of a micro-batch, or None where there is none left. Every number once, every
    rank as many rounds.

    The dearest go first, `ranks` at a time, so that no other dealing has cheaper rounds; in each round the
    dearest goes to the rank that has least to compute so far, so that what a rank computes in all is even.
    O(n log n).
    """
    prices = np.asarray(costs, np.float64)
    order = np.argsort(-prices, kind="stable")
    dealt: list[list[int | None]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for start in range(0, len(order), ranks):
        chosen = order[start : start + ranks]
        takers = np.argsort(load, kind="stable")
        load[takers[: len(chosen)]] += prices[chosen]
        numbers: list[int | None] = [*chosen.tolist(), *[None] * (ranks - len(chosen))]
        for rank, number in zip(takers.tolist(), numbers, strict=True):
            dealt[rank].append(number)
    return dealt


def compute_imbalance(costs: Sequence[float], dealt: Sequence[Sequence[int | None]]) -> float:
    """What the busiest rank computes in all over what a rank does on average, at least 1; a rank without a
    micro-batch does nothing. 1 for none.
    """
    loads = [sum(costs[number] for number in mine if number is not None) for mine in dealt]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def deal_portions(
    portions: Sequence[Portion],
    ranks: int,
    *,
    micro_batch_cost: float,
    attention_cost: float = ATTENTION_COST,
) -> list[list[Portion]]:
    """[rank][round] portions; where a round has none left for a rank, the smallest of all, without weight."""
    if not portions:
        return [[] for _ in range(ranks)]
    costs = [
        compute_cost(portion.micro_batch, micro_batch_cost=micro_batch_cost, attention_cost=attention_cost)
        for portion in portions
    ]
    smallest = portions[int(np.argmin(costs))]
    idle = Portion(smallest.micro_batch, smallest.width, smallest.fields, counts=False)
    return [
        [idle if index is None else portions[index] for index in mine] for mine in deal_rounds(costs, ranks)
    ]


# --- as bytes -----------------------------------------------------------------------------------------------


def encode_share(share: Share) -> bytes:
    """The share as one message. Raises ControlError if a parameter of the loss cannot cross."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    portions: list[dict[str, Any]] = []
    for number, portion in enumerate(share.portions):
        for name in MICRO_BATCH_ARRAYS:
            arrays[f"{number}/{name}"] = getattr(portion.micro_batch, name)
        for name, values in portion.fields.items():
            arrays[f"{number}/fields/{name}"] = values
        portions.append(
            {
                "width": portion.width,
                "counts": portion.counts,
                "causal": portion.micro_batch.causal,
                "fields": [*portion.fields],
            }
        )
    spec = share.spec
    loss = (
        None
        if spec is None
        else {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        | {"params": dict(spec.params)}
    )
    numbers = {
        "temperature": share.temperature,
        "denominator": share.denominator,
        "expected_count": share.expected_count,
    }
    return b"".join(encode_command(Command("share", {"portions": portions, "loss": loss, **numbers}, arrays)))


def decode_share(message: bytes) -> Share:
    """What encode_share was given; the arrays are copies, so that torch may wrap them. Raises ControlError
    for bytes that are no command.
    """
    command = decode_command(message)
    fields, arrays = command.fields, {name: array.copy() for name, array in command.arrays.items()}
    portions: list[Portion] = []
    for number, one in enumerate(fields["portions"]):
        parts: dict[str, Any] = {name: arrays[f"{number}/{name}"] for name in MICRO_BATCH_ARRAYS}
        values = {name: arrays[f"{number}/fields/{name}"] for name in one["fields"]}
        portions.append(
            Portion(MicroBatch(**parts, causal=one["causal"]), one["width"], values, counts=one["counts"])
        )
    return Share(
        tuple(portions),
        temperature=fields["temperature"],
        spec=None if fields["loss"] is None else LossSpec(**fields["loss"]),
        denominator=fields["denominator"],
        expected_count=fields["expected_count"],
    )
