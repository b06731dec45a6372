"""A batch's micro-batches, dealt to W ranks: the same number for each, in rounds of like cost, as bytes that
cross ranks.

    batch ──pack, W at a time──► micro-batches ──sort by cost──► rounds ──► one share per rank

All ranks work on a round at the same time and wait for the slowest, so a round costs what its dearest portion
costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollouts.data.packing import ATTENTION_COST, MicroBatch, estimate_attention_cost, spread_tokens_to_rows
from rollouts.errors import BackendError
from rollouts.types import LOSS_FIELDS, FloatArray, LossSpec, RolloutBatch, TokenArrays

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Portion(NamedTuple):
    """A micro-batch with what its loss needs to know of its rows."""

    micro_batch: MicroBatch
    width: int  # tokens of its longest row
    fields: Mapping[str, FloatArray]  # [M] of each trained token; those of LOSS_FIELDS that the batch has
    counts: bool = True  # False: work without weight, for a rank that would have none in this round


class Share(NamedTuple):
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
    # in the rows one after the other
    places = micro_batch.token_positions + (np.cumsum(lengths) - lengths)[micro_batch.token_rows]
    fields: dict[str, FloatArray] = {}
    for name in LOSS_FIELDS.values():
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
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    if not layers or not width:
        return ATTENTION_COST
    return estimate_attention_cost(
        layers=layers, attention_width=width, parameters=model.num_parameters(exclude_embeddings=True)
    )


def compute_cost(micro_batch: MicroBatch, *, micro_batch_cost: float, attention_cost: float) -> float:
    """Tokens computed, what a micro-batch costs beside them, and the (query, key) pairs of its attention,
    each `attention_cost` tokens.
    """
    pairs = float((micro_batch.position_ids + 1).sum())
    return micro_batch.computed_tokens + micro_batch_cost + attention_cost * pairs


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
        numbers = [*chosen.tolist(), *[None] * (ranks - len(chosen))]
        for rank, number in zip(takers.tolist(), numbers, strict=True):
            dealt[rank].append(number)
    return dealt


def deal_portions(
    portions: Sequence[Portion],
    ranks: int,
    *,
    micro_batch_cost: float,
    attention_cost: float = ATTENTION_COST,
) -> list[list[Portion]]:
    """[rank][round] portions; where a round has none left for a rank, the smallest of all, without weight.
    One rank gets all in their order.
    """
    if not portions or ranks == 1:
        return [[*portions] for _ in range(ranks)]
    costs = [
        compute_cost(portion.micro_batch, micro_batch_cost=micro_batch_cost, attention_cost=attention_cost)
        for portion in portions
    ]
    idle = portions[int(np.argmin(costs))]._replace(counts=False)
    return [
        [idle if index is None else portions[index] for index in mine] for mine in deal_rounds(costs, ranks)
    ]


# --- as bytes -----------------------------------------------------------------------------------------------


def encode_share(share: Share) -> bytes:
    """The share as msgpack, its arrays as dtype, shape and bytes. Raises BackendError for a loss's parameter
    that is no JSON value.
    """

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, Mapping):
            return dict(value)
        raise BackendError(f"LossSpec.params must be JSON values, to cross ranks: {value!r} is none")

    return msgspec.msgpack.encode(share, enc_hook=encode)


def decode_share(message: bytes) -> Share:
    """What encode_share was given; the arrays are copies, so that torch may wrap them."""

    def decode(_: type, value: Any) -> Any:
        dtype, shape, content = value
        return np.frombuffer(content, dtype).reshape(shape).copy()

    return msgspec.msgpack.decode(message, type=Share, dec_hook=decode)


# --- per-token results --------------------------------------------------------------------------------------


class TokenTrace(NamedTuple):
    """What a micro-batch's loss saw of its trained tokens."""

    log_probs: Tensor  # [B, T], which keeps its gradient
    weights: Tensor | None  # [B, T]
    place: tuple[Tensor, Tensor]  # row and position of the M trained tokens

    def read(self) -> Tensor:
        """[3, M] log-prob, slope and weight of each trained token, on the device. After the backward pass."""
        slopes = torch.zeros_like(self.log_probs) if self.log_probs.grad is None else self.log_probs.grad
        weights = torch.ones_like(self.log_probs) if self.weights is None else self.weights
        return torch.stack(
            [values.detach()[self.place].float() for values in (self.log_probs, slopes, weights)]
        )


def split_values(values: FloatArray, counts: Sequence[int]) -> list[FloatArray]:
    """`values` [..., sum of counts] in parts of so many."""
    return np.split(values, np.cumsum(counts), axis=-1)[:-1]


def collect_token_arrays(
    portions: Sequence[Sequence[Portion]], traces: Sequence[FloatArray], batch: RolloutBatch
) -> TokenArrays:
    """What the loss saw of each token, by row of the batch, from [rank][round] portions and of each rank [3,
    tokens of its portions that count], in their order.
    """
    parts: list[MicroBatch] = []
    found: list[FloatArray] = []
    for mine, trace in zip(portions, traces, strict=True):
        counted = [portion.micro_batch for portion in mine if portion.counts]
        parts += counted
        found += split_values(trace, [len(one.token_rows) for one in counted])
    log_probs, slopes, weights = (
        spread_tokens_to_rows(parts, [trace[kind] for trace in found], batch.tokens) for kind in range(3)
    )
    return TokenArrays(log_probs=log_probs, slopes=slopes, weights=weights)
