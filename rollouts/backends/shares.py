"""A step's arithmetic: a batch packed and dealt to W ranks, the loss of a micro-batch, the decisions of an
optimizer step.

    batch ──pack, W at a time──► micro-batches ──sort by cost──► rounds ──► one share per rank

All ranks work on a round at the same time and wait for the slowest, so a round costs what its dearest portion
costs.

prepare_batch    denominator, expected count, packing and shares of a batch
compute_loss     from log-probs (of a scalar head: values) of a micro-batch to the loss's sum
OptimizerSteps   where the optimizer stands, and whether what has accumulated may be used
"""

import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from rollouts.backends.state import Position
from rollouts.config.tables import OptimConfig
from rollouts.data.packing import (
    ATTENTION_COST,
    MicroBatch,
    make_micro_batches,
    spread_to_rows,
)
from rollouts.errors import (
    BackendError,
    DenominatorMismatch,
    NonFiniteSteps,
    RolloutsError,
    UserFunctionError,
)
from rollouts.losses import LossFn, LossInputs, LossOutput
from rollouts.models.forward_plan import ForwardPlan, Layout, TokenOutputs
from rollouts.models.optim import compute_lr
from rollouts.rewards.check import RAISED, describe, shorten
from rollouts.types import (
    LOSS_FIELDS,
    BoolArray,
    FloatArray,
    LossSpec,
    Mean,
    Metric,
    Metrics,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    TokenArrays,
    live,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_NONFINITE_STEPS = 3  # in a row
CLIP_EPS = 1e-6  # what torch.nn.utils.clip_grads_with_norm_ adds to the norm
# parameters of a loss: of terms without an advantage
OTHER_TERMS = ("kl_coef", "entropy_coef", "mu_penalty_coef")
# In which a token without an advantage has no gradient and changes no other token's. Of a function of the
# user nobody knows.
SKIPPING_LOSSES = (
    "ppo_clip", "importance_sampling", "reinforce", "cispo", "gspo", "gspo_token", "gmpo", "sapo", "dppo",
    "dppo_kl", "vespo",
)  # fmt: skip
COUNTS = ("skipped_steps", "trained_tokens", "computed_tokens", "skipped_rows")


class Portion(NamedTuple):
    """A micro-batch with what its loss needs to know of its rows."""

    micro_batch: MicroBatch
    width: int  # tokens of its longest row
    fields: Mapping[str, FloatArray]  # [M] of each trained token; those of LOSS_FIELDS that the batch has
    extras: Mapping[str, FloatArray] = {}  # the same of the batch's extras
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

    def pick(columns: Mapping[str, Any]) -> dict[str, FloatArray]:
        return {
            name: np.concatenate([values[row] for row in rows])[places].astype(np.float32, copy=False)
            for name, values in columns.items()
            if values is not None
        }

    fields = {name: getattr(batch, name) for name in LOSS_FIELDS.values()}
    return Portion(micro_batch, int(lengths.max()), pick(fields), pick(batch.extras))


# --- dealing ------------------------------------------------------------------------------------------------


def find_attention_cost(model: "PreTrainedModel") -> float:
    """What a (query, key) pair costs in tokens, by FLOPs: 4·layers·width over 2·parameters, those that every
    token is multiplied by, the head included; of experts as if all answered. ATTENTION_COST for a config that
    does not say.
    """
    config = model.config.get_text_config()
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    if not layers or not width:
        return ATTENTION_COST
    return 2 * layers * width / model.num_parameters(exclude_embeddings=True)


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
    dealt = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for start in range(0, len(order), ranks):
        chosen = order[start : start + ranks]
        takers = np.argsort(load, kind="stable")
        load[takers[: len(chosen)]] += prices[chosen]
        for rank, number in zip_longest(takers.tolist(), chosen.tolist()):
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


# --- batches ------------------------------------------------------------------------------------------------


class PackingOptions(NamedTuple):
    """How batches become micro-batches."""

    micro_batch_tokens: int  # computed tokens of one micro-batch at most, unless a row is longer
    micro_batch_cost: int  # what a micro-batch costs beside its tokens, in tokens
    share_prefix: bool  # rows that begin alike share tokens, where that is exact for the model
    skip_zero_advantage: bool  # leave rows out whose advantages are all 0
    attention_cost: float  # of a (query, key) pair, in tokens; ranks are evened out by it


class PreparedBatch(NamedTuple):
    """A batch that passed its checks, packed and dealt."""

    batch: RolloutBatch
    layout: Layout
    skipped_rows: int
    shares: list[Share]  # of each rank


def prepare_batch(
    batch: RolloutBatch,
    spec: LossSpec | None,
    plan: ForwardPlan,
    options: PackingOptions,
    *,
    vocab_size: int,
    ranks: int,
) -> PreparedBatch:
    """The batch's denominators and packing for so many ranks; `spec` is None for log-probs only. Raises
    BackendError or ModelError for what cannot be computed.
    """
    denominator, expected_count, skip_rows = 1.0, 0.0, np.zeros(len(batch), np.bool_)
    if spec:
        denominator = compute_denominator(batch, spec)
        if options.skip_zero_advantage and not needs_every_row(spec) and batch.advantages is not None:
            rows = zip(batch.advantages, batch.loss_masks, strict=True)
            skip_rows[:] = [mask.any() and not np.any(advantages[mask]) for advantages, mask in rows]
        expected_count = count_unit(batch, spec, ~skip_rows)
    for name in ("tokens", "targets"):
        for row, ids in enumerate(getattr(batch, name) or []):
            for wrong in ids[(ids < 0) | (ids >= vocab_size)]:
                raise BackendError(  # on an accelerator torch would abort the process
                    f"batch.{name}[{row}] has the id {wrong}; the model's ids are 0 to {vocab_size - 1}: use"
                    " the model's own tokenizer"
                )
    layout = plan.choose_layout(max(len(row) for row in batch.tokens))
    micro_batches = make_micro_batches(
        batch.tokens,
        batch.loss_masks,
        micro_batch_tokens=1 if layout == "single" else options.micro_batch_tokens,
        share_prefix=options.share_prefix,
        padding_free=layout == "packed",
        ranks=ranks,
        attention_cost=options.attention_cost,
        micro_batch_cost=options.micro_batch_cost,
        skip_rows=skip_rows,
        targets=batch.targets,
    )
    dealt = deal_portions(
        [make_portion(micro_batch, batch) for micro_batch in micro_batches],
        ranks,
        micro_batch_cost=options.micro_batch_cost,
        attention_cost=options.attention_cost,
    )
    shares = [Share(tuple(mine), batch.temperature, spec, denominator, expected_count) for mine in dealt]
    return PreparedBatch(batch, layout, int(skip_rows.sum()), shares)


def compute_denominator(batch: RolloutBatch, spec: LossSpec) -> float:
    """What the loss's sum over the whole batch is divided by. Raises BackendError if nothing trains."""
    count = count_unit(batch, spec, np.ones(len(batch), np.bool_))
    if not count:
        raise BackendError(
            f"none of the batch's {len(batch)} rows has a token to train on; check its loss masks"
        )
    if spec.unit == "constant":
        if not (spec.constant and spec.constant > 0):
            raise BackendError(
                f"LossSpec(unit='constant') has constant={spec.constant}; give the denominator, a number"
                " above 0"
            )
        return spec.constant
    return count


def count_unit(batch: RolloutBatch, spec: LossSpec, rows: BoolArray) -> float:
    """How many of the loss's unit are in the chosen rows [B]: trained tokens, or rows that have one; of a
    trajectory of several rows each is the part that has its tokens.
    """
    lengths = batch.response_lengths[rows]
    if spec.unit not in ("sequences", "sequence_sums"):
        return float(lengths.sum())
    if batch.trajectory_tokens is None:
        return float((lengths > 0).sum())
    wholes = np.asarray([max(row[:1], default=1) for row in batch.trajectory_tokens])
    return float((lengths / wholes[rows]).sum())


def check_count(count: float, expected: float, spec: LossSpec) -> None:
    """Raises DenominatorMismatch if the counts of a batch's micro-batches are not those of its unit."""
    if not math.isclose(count, expected, rel_tol=1e-6):
        raise DenominatorMismatch(
            f"loss {spec.name!r} counted {count:g} {spec.unit} where the batch has {expected:g}; its count"
            " must be that of its unit"
        )


def needs_every_row(spec: LossSpec) -> bool:
    """Whether rows without an advantage have a gradient, or change that of others, or may."""
    correction = spec.params.get("correction")
    is_ours = spec.name in SKIPPING_LOSSES and (not correction or ":" not in str(correction))
    return not is_ours or any(spec.params.get(name) for name in OTHER_TERMS)


# --- losses -------------------------------------------------------------------------------------------------


class ComputedLoss(NamedTuple):
    """The loss of one micro-batch."""

    sum: Tensor
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    metrics: Metrics  # the loss's own, and the mean entropy of its trained tokens where the model has one
    trace: "TokenTrace | None" = None  # where the LossSpec asks for it


def call_loss(loss_fn: LossFn, inputs: LossInputs, spec: LossSpec) -> LossOutput:
    """What the loss answers. Raises UserFunctionError if it raises, naming the line, or answers with no
    LossOutput.
    """
    try:
        output = loss_fn(inputs, unit=spec.unit, **spec.params)
    except RolloutsError:
        raise
    except RAISED as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserFunctionError(
            f"loss {spec.name!r} raised {describe(error)} ({place.filename}, line {place.lineno})"
        ) from error
    match output:
        case LossOutput(Tensor(ndim=0), _, metrics) if all(
            isinstance(one, Metric) for one in metrics.values()
        ):
            return output
    raise UserFunctionError(
        f"loss {spec.name!r} answered with {shorten(output)}; it must be a LossOutput of a sum without axes,"
        " a count, and metrics such as Mean(total, count)"
    )


def compute_loss(
    flat: TokenOutputs, portion: Portion, loss_fn: LossFn, spec: LossSpec, *, gradient: bool = True
) -> ComputedLoss:
    """The loss of one micro-batch. Raises BackendError if the sum has no gradient."""
    micro_batch, device = portion.micro_batch, flat.log_probs.device
    indices = (micro_batch.token_pairs, micro_batch.token_rows, micro_batch.token_positions)
    pairs, rows, positions = (torch.from_numpy(index).to(device) for index in indices)
    place = rows, positions
    shape = len(micro_batch.rows), portion.width

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=values.dtype, device=device).index_put(place, values)

    fields = {name: spread(torch.from_numpy(values).to(device)) for name, values in portion.fields.items()}
    # with gradient: the entropy where the loss has a bonus of it
    flat = flat._replace(states=None)
    said = {name: spread(found[pairs]) for name, found in flat._asdict().items() if found is not None}
    log_probs, entropy = said["log_probs"], said.get("entropy")
    weights = []  # of a correction
    if spec.per_token and gradient:
        log_probs.retain_grad()
    inputs = LossInputs(
        mask=spread(torch.ones_like(pairs, dtype=torch.bool)),
        note_weights=weights.append if spec.per_token else None,
        extras={name: spread(torch.from_numpy(values).to(device)) for name, values in portion.extras.items()},
        **said,
        **fields,
    )
    output = call_loss(loss_fn, inputs, spec)
    if gradient and not output.sum.requires_grad:
        raise BackendError(
            f"loss {spec.name!r} returned a sum without gradient; it must depend on inputs.log_probs, not"
            " detached"
        )
    metrics = output.metrics
    if entropy is not None:
        metrics = {"entropy/mean": Mean(float(entropy.detach().sum()), float(len(pairs))), **metrics}
    trace = None
    if spec.per_token:
        trace = TokenTrace(log_probs, weights[-1] if weights else None, inputs.exact_kl, place)
    return ComputedLoss(output.sum, float(output.count), metrics, trace)


# --- optimizer steps ----------------------------------------------------------------------------------------


@live
class OptimizerSteps:
    """Where the optimizer stands: its steps, those skipped, and what has accumulated for the next one."""

    _optim: OptimConfig
    _total_steps: int
    position: Position = field(default=Position(0, 0, 0))  # of the schedule: steps that were skipped count
    poisoned: str | None = None  # why the pending step will be skipped
    pending_batches: int = 0  # forward_backward calls since the last step
    # of COUNTS and more, since the backend was opened
    counts: Counter[str] = field(default_factory=Counter[str])

    def choose_params(self, params: OptimParams | None) -> OptimParams:
        """lr and clipping of the next step: the schedule's, or those of `params`. Raises BackendError if
        nothing has accumulated.
        """
        if self.pending_batches == 0:
            raise BackendError(
                "optim_step without a forward_backward since the last one; there is no gradient to step with"
            )
        if params:
            return params
        lr = compute_lr(self.position.steps, self._total_steps, self._optim)
        return OptimParams(lr=lr, max_grad_norm=self._optim.max_grad_norm)

    def finish_step(self, params: OptimParams, norm: float | None, skipped: str | None) -> OptimStepResult:
        """The result of a step that was taken, or `skipped` for a reason. Raises NonFiniteSteps after too
        many skipped ones in a row.
        """
        limit = params.max_grad_norm
        clipped = norm is not None and limit is not None and norm > limit
        self.counts["skipped_steps"] += skipped is not None
        in_a_row = 0 if skipped is None else self.position.skipped_in_a_row + 1
        step, too_many = self.position.steps + 1, in_a_row >= MAX_NONFINITE_STEPS
        # whoever goes on all the same, goes on for as many again
        self.place(steps=step, skipped_in_a_row=0 if too_many else in_a_row)
        self.discard_pending()
        if too_many:
            raise NonFiniteSteps(
                f"{in_a_row} steps in a row were not finite, the last because {skipped}; lower optim.lr, or"
                " look at samples.jsonl for what the batch holds"
            )
        return OptimStepResult(step=step, lr=params.lr, grad_norm=norm, clipped=clipped, skipped=skipped)

    def place(self, **counters: int) -> None:
        """Changes the position."""
        self.position = structs.replace(self.position, **counters)

    def discard_pending(self) -> None:
        """Forgets what has accumulated since the last step."""
        self.poisoned, self.pending_batches = None, 0


# --- per-token results --------------------------------------------------------------------------------------


class TokenTrace(NamedTuple):
    """What a micro-batch's loss saw of its trained tokens."""

    log_probs: Tensor  # [B, T], which keeps its gradient
    weights: Tensor | None  # [B, T]
    kls: Tensor | None  # [B, T]
    place: tuple[Tensor, Tensor]  # row and position of the M trained tokens

    def read(self) -> Tensor:
        """[4, M] log-prob, slope, weight and exact KL of each trained token. After the backward pass."""
        none = torch.zeros_like(self.log_probs)
        slopes = none if self.log_probs.grad is None else self.log_probs.grad
        weights = none + 1 if self.weights is None else self.weights
        kinds = self.log_probs, slopes, weights, none if self.kls is None else self.kls
        return torch.stack([values.detach()[self.place].float() for values in kinds])


def join_traces(traces: Sequence[Tensor]) -> FloatArray:
    """[4, tokens of all] of what TokenTrace.read gave, in their order."""
    return np.concatenate([np.zeros((4, 0), np.float32), *(trace.cpu().numpy() for trace in traces)], axis=1)


def split_values(values: FloatArray, counts: Sequence[int]) -> list[FloatArray]:
    """`values` [..., sum of counts] in parts of so many."""
    return np.split(values, np.cumsum(counts), axis=-1)[:-1]


def collect_token_arrays(
    portions: Sequence[Sequence[Portion]], traces: Sequence[FloatArray], batch: RolloutBatch, spec: LossSpec
) -> TokenArrays:
    """What the loss saw of each token, by row of the batch, from [rank][round] portions and of each rank [4,
    tokens of its portions that count], in their order.
    """
    parts = []
    found = []
    for mine, trace in zip(portions, traces, strict=True):
        counted = [portion.micro_batch for portion in mine if portion.counts]
        parts += counted
        found += split_values(trace, [len(one.token_rows) for one in counted])
    log_probs, slopes, weights, kls = (
        spread_to_rows(parts, [trace[kind] for trace in found], batch.tokens, per_pair=False)
        for kind in range(4)
    )
    kls = kls if spec.params.get("kl_estimator") == "exact" else ()
    return TokenArrays(log_probs=log_probs, slopes=slopes, weights=weights, kls=kls)
