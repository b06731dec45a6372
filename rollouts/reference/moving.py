"""A reference model that follows the policy: an exponential moving average, a reset every k steps, or
TR-DPO's mixture.

    after step n ──► due? ──► backend.stream_weights ──► per weight, on the device thread: accumulator ← rule(accumulator, policy)
                                                         all came ──► the model that scores gets the accumulators' values
    checkpoint   ──► save(dir): a Hugging Face directory of the accumulators, exact, and moving_reference.json with the counters
    resume       ──► open_moving_reference(dir): goes on from there, bit for bit

Accumulators are float32 or float64, also where the model that scores is bfloat16: with a decay of 0.999 a
step of an average is below half the distance of two bfloat16 numbers and would be rounded away. A float32
accumulator stands still when a step is below 6e-8 of a weight, a float64 one at 1e-16. Where both have one
dtype, the scoring model's weights are the accumulators.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trio
from torch import Tensor

from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.models.export import write_hf_stream
from rollouts.models.load import load_hf_model
from rollouts.protocols import TrainingBackend
from rollouts.reference.forward_plan import plan_forward
from rollouts.reference.score import FrozenReference
from rollouts.types import FloatArray, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"  # the directory in a checkpoint
STATE_FILE = "moving_reference.json"
STATE_FORMAT = 1


# --- rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """reference ← policy_weight · policy + reference_weight · reference, after every `every`-th step. The
    weights add up to 1.
    """

    policy_weight: float  # 1.0: the reference becomes the policy
    reference_weight: float
    every: int = 1  # completed steps from one update to the next

    def __post_init__(self) -> None:
        for name, value in (
            ("policy_weight", self.policy_weight),
            ("reference_weight", self.reference_weight),
        ):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name}={value} of a moving reference must lie between 0 and 1")
        if not math.isclose(self.policy_weight + self.reference_weight, 1.0, abs_tol=1e-12):
            raise ConfigError(
                f"policy_weight={self.policy_weight} and reference_weight={self.reference_weight} must add up"
                " to 1"
            )
        if self.policy_weight == 0.0:
            raise ConfigError("policy_weight=0 never moves the reference; use a frozen reference instead")
        if self.every < 1:
            raise ConfigError(f"every={self.every} of a moving reference must be at least 1 step")

    def is_due(self, step: int) -> bool:
        """Whether the reference moves after `step` completed steps."""
        return step > 0 and step % self.every == 0


def make_ema_rule(*, ema_decay: float, every: int = 1) -> UpdateRule:
    """reference ← ema_decay · reference + (1 − ema_decay) · policy. Raises ConfigError unless 0 <= ema_decay
    < 1.
    """
    if not 0.0 <= ema_decay < 1.0:
        raise ConfigError(
            f"ema_decay={ema_decay} must be at least 0 and below 1; 0.99 keeps 99 % of the reference at each"
            " update"
        )
    return UpdateRule(policy_weight=1.0 - ema_decay, reference_weight=ema_decay, every=every)


def make_reset_rule(*, every: int) -> UpdateRule:
    """reference ← policy after every `every`-th step; TR-DPO's hard update (Gorbatovski et al. 2024, arXiv
    2404.09656).
    """
    return UpdateRule(policy_weight=1.0, reference_weight=0.0, every=every)


def make_tr_dpo_rule(*, policy_weight: float, every: int = 1) -> UpdateRule:
    """reference ← policy_weight · policy + (1 − policy_weight) · reference; TR-DPO's soft update, whose α is
    policy_weight (arXiv 2404.09656).
    """
    return UpdateRule(policy_weight=policy_weight, reference_weight=1.0 - policy_weight, every=every)


def make_rule(update: str, *, every: int, ema_decay: float, policy_weight: float) -> UpdateRule:
    """The rule of the settings in [reference]: "ema", "reset" or "tr_dpo"; each reads what concerns it."""
    if update == "ema":
        return make_ema_rule(ema_decay=ema_decay, every=every)
    return (
        make_reset_rule(every=every)
        if update == "reset"
        else make_tr_dpo_rule(policy_weight=policy_weight, every=every)
    )


def compute_update(reference: Tensor, policy: Tensor, rule: UpdateRule) -> Tensor:
    """reference_weight · reference + policy_weight · policy, a new tensor of the reference's shape, dtype and
    device.

    Computed in float64 and rounded once: in float32 the two weights themselves are rounded and no longer add
    up to 1, which over many updates pulls every weight by up to 3e-8 / policy_weight. A hard update is a
    copy, so that it is equal bit for bit and an infinity of the old reference does not become NaN.
    """
    assert reference.shape == policy.shape, (reference.shape, policy.shape)
    wide = policy.detach().to(device=reference.device)
    if rule.reference_weight == 0.0:
        return wide.to(reference.dtype, copy=True)
    return (
        reference.double()
        .mul(rule.reference_weight)
        .add_(wide.double().mul(rule.policy_weight))
        .to(reference.dtype)
    )


# --- the scorer ---------------------------------------------------------------------------------------------


class MovingReference:
    """A LogProbScorer whose model follows the policy. Made by open_moving_reference."""

    def __init__(
        self, model: PreTrainedModel, accumulators: dict[str, Tensor], scorer: FrozenReference, device_thread: DeviceThread, rule: UpdateRule,
        counters: _Counters,
    ) -> None:  # fmt: skip
        self.rule = rule
        self._model = model
        self._accumulators = accumulators
        self._scorer = scorer
        self._device_thread = device_thread
        self._counters = counters
        self._moved_in_part = False

    @property
    def updates(self) -> int:
        """How often the reference moved since its run began, across resumes."""
        return self._counters.updates

    @property
    def metrics(self) -> Mapping[str, float]:
        """reference/updates: how often it moved."""
        return {"reference/updates": float(self._counters.updates)}

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0. Under the weights after every
        update that was asked for before.
        """
        return await self._device_thread.submit(lambda: self._score(batch))

    def _score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        self._check_whole()
        return self._scorer._score(batch)

    async def update(self, backend: TrainingBackend, *, step: int) -> bool:
        """Moves the reference if the rule says so after `step` completed steps; True if it did. A step that
        was seen before changes nothing.

        What is scored afterwards sees the moved weights, also if who waits here is cancelled: the device
        thread finishes what it began. Call it on rank 0, whose backend hands out whole weights. Raises what
        stream_weights raises; BackendError if a weight is missing, unknown or of another shape: then the
        reference has moved in part, and nothing but load() helps.
        """
        if step <= self._counters.step:
            return False
        if not self.rule.is_due(step):
            self._counters.step = step
            return False
        self._check_whole()
        move = _Move(self._accumulators, self.rule)
        streamed = backend.stream_weights(move.take)
        finished = self._device_thread.submit(
            lambda: self._finish(move, step)
        )  # queued at once, so that nobody scores in between
        try:
            await streamed
        except Exception:
            with contextlib.suppress(
                BackendError
            ):  # says that weights are missing, which follows from what is raised
                await finished
            raise
        await finished
        if not move.seen:
            raise BackendError(
                "the policy's weights never came, so the reference did not move; stream_weights must hand out"
                " all of them"
            )
        return True

    def _finish(self, move: _Move, step: int) -> None:
        if move.failure is None and not move.seen:
            return  # the stream itself failed before it gave anything, and says so; nothing has moved
        if move.failure is None and (missing := self._accumulators.keys() - move.seen):
            move.failure = BackendError(
                f"{len(missing)} weights of the reference never came, {min(missing)!r} for one; stream all of"
                " the policy's"
            )
        if move.failure is not None:
            self._moved_in_part = self._moved_in_part or bool(move.seen)
            raise move.failure
        self._show()
        self._counters.step = step
        self._counters.updates += 1

    def _show(self) -> None:
        """Gives the model that scores the accumulators' values, where they are not its own weights."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if parameter is not self._accumulators[name]:
                    parameter.copy_(self._accumulators[name])

    async def save(self, path: Path) -> None:
        """Writes a model directory that holds the accumulators in their own dtype, and the counters beside
        it. Not atomic, not synced: write into a directory that nobody reads yet. Raises OSError, and
        BackendError if the reference has moved in part.
        """
        await self._device_thread.submit(lambda: self._save(path))

    def _save(self, path: Path) -> None:
        self._check_whole()
        self._write(path, self._accumulators, self._counters)

    def _write(self, path: Path, accumulators: Mapping[str, Tensor], counters: _Counters) -> None:
        path.mkdir(parents=True, exist_ok=True)
        dtype = next(iter(accumulators.values())).dtype
        with write_hf_stream(self._model, path, dtype=dtype) as sink:
            sink(list(accumulators.items()))
        record = {"format": STATE_FORMAT, "updates": counters.updates, "step": counters.step}
        (path / STATE_FILE).write_text(json.dumps(record) + "\n", "utf-8")

    async def hold(self) -> Callable[[Path], Awaitable[None]]:
        """What save() would write now, copied: the result writes it to a directory later, while the reference
        moves on.
        """

        def copy() -> dict[str, Tensor]:
            self._check_whole()
            return {name: held.to("cpu", copy=True) for name, held in self._accumulators.items()}

        held, counters = await self._device_thread.submit(copy), replace(self._counters)

        async def write(path: Path) -> None:
            await trio.to_thread.run_sync(self._write, path, held, counters)

        return write

    async def load(self, path: Path) -> None:
        """Goes on from what save() wrote, bit for bit. Raises ModelError and CheckpointError, with the
        reference as it was.
        """
        await self._device_thread.submit(lambda: self._load(path))

    def _load(self, path: Path) -> None:
        counters = _read_counters(path)
        if counters is None:
            raise CheckpointError(
                f"{path} has no {STATE_FILE}: it is no saved reference; give the directory that save() wrote"
            )
        dtype = next(iter(self._accumulators.values())).dtype
        weights = dict(load_hf_model(path, dtype=dtype).named_parameters())
        unlike = [
            name
            for name, held in self._accumulators.items()
            if name not in weights or weights[name].shape != held.shape
        ]
        if unlike or weights.keys() - self._accumulators.keys():
            raise CheckpointError(
                f"the reference in {path} is of another model:"
                f" {min([*unlike, *(weights.keys() - self._accumulators.keys())])!r}"
            )
        with torch.no_grad():
            for name, held in self._accumulators.items():
                held.copy_(weights[name])
        self._show()
        self._counters = counters
        self._moved_in_part = False

    def _check_whole(self) -> None:
        if self._moved_in_part:
            raise BackendError(
                "the last update of this reference broke off in the middle, so it is no model any more;"
                " load() a saved one"
            )


class FollowingReference:
    """A MovingReference that moves by itself: before it scores, and before it is held, it follows the policy
    up to the steps that are completed.
    """

    def __init__(
        self, moving: MovingReference, backend: TrainingBackend, completed_steps: Callable[[], int]
    ) -> None:
        self._moving = moving
        self._backend = backend
        self._completed_steps = completed_steps

    @property
    def metrics(self) -> Mapping[str, float]:
        """reference/updates: how often it moved."""
        return self._moving.metrics

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0."""
        await self._moving.update(self._backend, step=self._completed_steps())
        return await self._moving.score(batch)

    async def hold(self) -> Callable[[Path], Awaitable[None]]:
        """What writes the reference as it is after the completed steps to a directory, from which
        open_moving_reference goes on.
        """
        await self._moving.update(self._backend, step=self._completed_steps())
        return await self._moving.hold()


class _Move:
    """One update while the weights come in. A sink does not raise: under ranks the others would wait in a
    collective for ever.
    """

    def __init__(self, accumulators: dict[str, Tensor], rule: UpdateRule) -> None:
        self.seen: set[str] = set()
        self.failure: Exception | None = None
        self._accumulators = accumulators
        self._rule = rule

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        if self.failure is not None:
            return
        try:
            for name, policy in bucket:
                self._move(name, policy)
        except Exception as error:
            self.failure = error

    def _move(self, name: str, policy: Tensor) -> None:
        held = self._accumulators.get(name)
        if held is None or name in self.seen:
            raise BackendError(
                f"the weight {name!r} came twice, or is none of the reference's; both must be of one"
                " architecture"
            )
        if held.shape != policy.shape:
            raise BackendError(
                f"the policy's {name!r} is {list(policy.shape)}, the reference's {list(held.shape)}; use"
                " models of one architecture"
            )
        self.seen.add(name)
        with torch.no_grad():
            held.copy_(compute_update(held, policy, self._rule))


@dataclass(slots=True)
class _Counters:
    updates: int = 0
    step: int = 0  # the last that update() was told


def _read_counters(path: Path) -> _Counters | None:
    """What save() wrote; None for a directory that is only a model. Raises CheckpointError."""
    file = path / STATE_FILE
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text("utf-8"))
        written, updates, step = (record[name] for name in ("format", "updates", "step"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy the directory again") from error
    if written != STATE_FORMAT or not all(type(value) is int and value >= 0 for value in (updates, step)):
        raise CheckpointError(
            f"{file} is of format {written!r}, updates {updates!r}, step {step!r}; this version reads format"
            f" {STATE_FORMAT}"
        )
    return _Counters(updates, step)


@asynccontextmanager
async def open_moving_reference(
    model_path: Path,
    *,
    rule: UpdateRule,
    device_thread: DeviceThread,
    micro_batch_tokens: int = 8192,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    accumulator_dtype: torch.dtype = torch.float32,
) -> AsyncIterator[MovingReference]:
    """A reference that starts as the model at `model_path`, or goes on where save() left it there.

    `device_thread` is the one that the backend runs on, so that scores and updates keep the order in which
    they were asked for. `dtype` is what the model scores in, `accumulator_dtype` (float32 or float64) what is
    averaged. Raises ModelError, CheckpointError, ConfigError.
    """
    if accumulator_dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"accumulator_dtype={accumulator_dtype} of a moving reference rounds small steps away; use"
            " torch.float32 or torch.float64"
        )

    def load() -> MovingReference:
        counters = _read_counters(model_path) or _Counters()
        source = load_hf_model(model_path, dtype=accumulator_dtype).to(device)  # pyright: ignore[reportArgumentType]
        model = source.requires_grad_(False)
        accumulators: dict[str, Tensor] = {
            name: parameter.data for name, parameter in model.named_parameters()
        }
        if dtype != accumulator_dtype:
            model = load_hf_model(model_path, dtype=dtype).to(device).requires_grad_(False)  # pyright: ignore[reportArgumentType]
        else:
            accumulators = {**dict(model.named_parameters())}
        scorer = FrozenReference(model, device_thread, plan_forward(model), micro_batch_tokens)
        return MovingReference(model, accumulators, scorer, device_thread, rule, counters)

    yield await device_thread.submit(load)
