"""The arithmetic of a step: the packing of a batch, the loss of a micro-batch, the decisions of an optimizer
step.

OptimizerSteps   where the optimizer stands, and whether what has accumulated may be used
prepare_batch    denominator, expected count and packing of a batch
compute_loss     from log-probs (of a scalar head: values) of a micro-batch to the loss's sum
"""

import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.backends.shares import Portion, TokenTrace, deal_portions, make_portion
from rollouts.backends.state import Position
from rollouts.config.tables import OptimConfig
from rollouts.data.packing import make_micro_batches
from rollouts.errors import BackendError, NonFiniteSteps, RolloutsError, UserFunctionError
from rollouts.losses import LossFn, LossInputs, LossOutput
from rollouts.models.log_probs import ForwardPlan, Layout, TokenOutputs
from rollouts.models.optim import compute_lr
from rollouts.rewards.check import RAISED, describe, shorten
from rollouts.types import (
    BoolArray,
    LossSpec,
    Mean,
    Metric,
    Metrics,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
)

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

    layout: Layout
    denominator: float  # of the loss's unit, over the whole batch
    expected_count: float  # what the counts of the micro-batches must add up to
    skipped_rows: int
    portions: list[list[Portion]]  # [rank][round]


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
    if spec is not None:
        denominator = compute_denominator(batch, spec)
        if options.skip_zero_advantage and not needs_every_row(spec):
            skip_rows = find_zero_advantage_rows(batch)
        expected_count = count_unit(batch, spec, ~skip_rows)
    check_token_ids(batch, vocab_size)
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
    )
    portions = deal_portions(
        [make_portion(micro_batch, batch) for micro_batch in micro_batches],
        ranks,
        micro_batch_cost=options.micro_batch_cost,
        attention_cost=options.attention_cost,
    )
    return PreparedBatch(layout, denominator, expected_count, int(skip_rows.sum()), portions)


def compute_denominator(batch: RolloutBatch, spec: LossSpec) -> float:
    """What the loss's sum over the whole batch is divided by. Raises BackendError if nothing trains."""
    count = count_unit(batch, spec, np.ones(len(batch), np.bool_))
    if count == 0:
        raise BackendError(
            f"none of the batch's {len(batch)} rows has a token to train on; check its loss masks"
        )
    if spec.unit == "constant":
        if spec.constant is None or not spec.constant > 0:
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


def needs_every_row(spec: LossSpec) -> bool:
    """Whether rows without an advantage have a gradient, or change that of others, or may."""
    correction = spec.params.get("correction")
    is_ours = spec.name in SKIPPING_LOSSES and (not correction or ":" not in str(correction))
    return not is_ours or any(spec.params.get(name) for name in OTHER_TERMS)


def find_zero_advantage_rows(batch: RolloutBatch) -> BoolArray:
    """[B] rows with trained tokens, all of advantage 0; none when the batch has no advantages."""
    if batch.advantages is None:
        return np.zeros(len(batch), np.bool_)
    rows = zip(batch.advantages, batch.loss_masks, strict=True)
    return np.asarray([mask.any() and not np.any(advantages[mask]) for advantages, mask in rows], np.bool_)


def check_token_ids(batch: RolloutBatch, vocab_size: int) -> None:
    """Raises BackendError naming the first row with an id outside the model's vocabulary; on an accelerator
    torch would abort the process.
    """
    for row, ids in enumerate(batch.tokens):
        for wrong in ids[(ids < 0) | (ids >= vocab_size)]:
            raise BackendError(
                f"batch.tokens[{row}] has the id {wrong}; the model's ids are 0 to {vocab_size - 1}: use the"
                " model's own tokenizer"
            )


# --- losses -------------------------------------------------------------------------------------------------


class ComputedLoss(NamedTuple):
    """The loss of one micro-batch."""

    sum: Tensor
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    metrics: Metrics  # the loss's own, and the mean entropy of its trained tokens where the model has one
    trace: TokenTrace | None = None  # where the LossSpec asks for it


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


def compute_loss(flat: TokenOutputs, portion: Portion, loss_fn: LossFn, spec: LossSpec) -> ComputedLoss:
    """The loss of one micro-batch. Raises BackendError if the sum has no gradient."""
    micro_batch, device = portion.micro_batch, flat.log_probs.device
    indices = (micro_batch.token_pairs, micro_batch.token_rows, micro_batch.token_positions)
    pairs, rows, positions = (torch.from_numpy(index).to(device) for index in indices)
    place = rows, positions
    shape = len(micro_batch.rows), portion.width

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=values.dtype, device=device).index_put(place, values)

    fields = {name: spread(torch.from_numpy(values).to(device)) for name, values in portion.fields.items()}
    # with gradient where the loss has an entropy bonus
    entropy = None if flat.entropy is None else flat.entropy[pairs]
    log_probs = spread(flat.log_probs[pairs])
    weights: list[Tensor] = []  # of a correction
    if spec.per_token:
        log_probs.retain_grad()
    inputs = LossInputs(
        log_probs=log_probs,
        mask=spread(torch.ones_like(pairs, dtype=torch.bool)),
        entropy=None if entropy is None else spread(entropy),
        note_weights=weights.append if spec.per_token else None,
        **fields,
    )
    output = call_loss(loss_fn, inputs, spec)
    if not output.sum.requires_grad:
        raise BackendError(
            f"loss {spec.name!r} returned a sum without gradient; it must depend on inputs.log_probs, not"
            " detached"
        )
    metrics = output.metrics
    if entropy is not None:
        metrics = {"entropy/mean": Mean(float(entropy.detach().sum()), float(len(entropy))), **metrics}
    trace = TokenTrace(log_probs, weights[-1] if weights else None, place) if spec.per_token else None
    return ComputedLoss(output.sum, float(output.count), metrics, trace)


# --- optimizer steps ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class OptimizerSteps:
    """Where the optimizer stands: its steps, those skipped, and what has accumulated for the next one."""

    _optim: OptimConfig
    _total_steps: int
    steps: int = 0  # skipped ones included: the schedule's position
    poisoned: str | None = None  # why the pending step will be skipped
    pending_batches: int = 0  # forward_backward calls since the last step
    # of COUNTS and more, since the backend was opened
    counts: Counter[str] = field(default_factory=Counter[str])
    _skipped_in_a_row: int = 0

    def choose_params(self, params: OptimParams | None) -> OptimParams:
        """lr and clipping of the next step: the schedule's, or those of `params`. Raises BackendError if
        nothing has accumulated.
        """
        if self.pending_batches == 0:
            raise BackendError(
                "optim_step without a forward_backward since the last one; there is no gradient to step with"
            )
        if params is not None:
            return params
        return OptimParams(
            lr=compute_lr(self.steps, self._total_steps, self._optim), max_grad_norm=self._optim.max_grad_norm
        )

    def finish_step(
        self, lr: float, grad_norm: float | None, *, clipped: bool = False, skipped: str | None = None
    ) -> OptimStepResult:
        """The result of a step that was taken, or `skipped` for a reason. Raises NonFiniteSteps after too
        many skipped ones in a row.
        """
        self.steps += 1
        self.counts["skipped_steps"] += skipped is not None
        self._skipped_in_a_row = in_a_row = 0 if skipped is None else self._skipped_in_a_row + 1
        self.discard_pending()
        if in_a_row >= MAX_NONFINITE_STEPS:
            self._skipped_in_a_row = 0  # whoever goes on all the same, goes on for as many again
            raise NonFiniteSteps(
                f"{in_a_row} steps in a row were not finite, the last because {skipped}; lower optim.lr, or"
                " look at samples.jsonl for what the batch holds"
            )
        return OptimStepResult(step=self.steps, lr=lr, grad_norm=grad_norm, clipped=clipped, skipped=skipped)

    def discard_pending(self) -> None:
        """Forgets what has accumulated since the last step."""
        self.poisoned, self.pending_batches = None, 0

    def position(self, weight_version: int) -> Position:
        """What a checkpoint keeps of this."""
        return Position(self.steps, self._skipped_in_a_row, weight_version)

    def restore(self, position: Position) -> None:
        """Takes a saved position."""
        self.steps, self._skipped_in_a_row = position.steps, position.skipped_in_a_row
        self.discard_pending()


def collect_gradients(trained: Mapping[str, Tensor], *, every: bool = False) -> list[Tensor]:
    """Every gradient; zeros where no row ran at all, or with `every` where none ran of a parameter's, as an
    expert's, for AdamW moves a parameter with a zero gradient and passes over one without.
    """
    parameters = [parameter for parameter in trained.values() if parameter.requires_grad]
    for parameter in parameters if every or all(one.grad is None for one in parameters) else ():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
