"""A reference model that follows the policy: an exponential moving average, a reset every k steps, or
TR-DPO's mixture.

    after step n ──► due? ──► backend.stream_weights ──► per weight: accumulator ← rule(accumulator, policy)
                                                         all came ──► the scoring model gets the accumulators
    checkpoint   ──► save(dir): a model directory of the accumulators, and moving_reference.json
    resume       ──► open_moving_reference(dir): goes on from there, bit for bit

Accumulators are float32 or float64, also where the model that scores is bfloat16: with a decay of 0.999 a
step of an average is below half the distance of two bfloat16 numbers and would be rounded away. A float32
accumulator stands still when a step is below 6e-8 of a weight, a float64 one at 1e-16. Where both have one
dtype, the scoring model's weights are the accumulators.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch
import trio
from torch import Tensor

from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.models.export import save_hf_model
from rollouts.models.load import load_hf_model
from rollouts.protocols import TrainingBackend
from rollouts.reference.score import FrozenReference
from rollouts.types import FloatArray, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"  # the directory in a checkpoint
STATE_FILE = "moving_reference.json"


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """reference ← policy_weight · policy + reference_weight · reference, after every `every`-th step.

    EMA of decay d: (1 − d, d). Reset, TR-DPO's hard update: (1, 0). TR-DPO's soft update of α: (α, 1 − α)
    (Gorbatovski et al. 2024, arXiv 2404.09656).
    """

    policy_weight: float  # above 0, at most 1
    reference_weight: float  # 1 − policy_weight
    every: int = 1  # completed steps from one update to the next

    def __post_init__(self) -> None:
        if not (0.0 < self.policy_weight <= 1.0 and self.every >= 1):
            raise ConfigError(
                f"a moving reference needs 0 < policy_weight <= 1 and every >= 1, not {self.policy_weight}"
                f" and {self.every}; a reference that never moves is a frozen one"
            )
        if abs(self.policy_weight + self.reference_weight - 1.0) > 1e-12:
            raise ConfigError(
                f"policy_weight={self.policy_weight} and reference_weight={self.reference_weight} of a moving"
                " reference must add up to 1"
            )


def compute_update(reference: Tensor, policy: Tensor, rule: UpdateRule) -> Tensor:
    """reference_weight · reference + policy_weight · policy, in the reference's dtype and on its device.

    Computed in float64 and rounded once: in float32 the two weights are rounded and no longer add up to 1,
    which over many updates pulls every weight by up to 3e-8 / policy_weight. A hard update is a copy: it is
    equal bit for bit, and an infinity of the old reference does not become NaN.
    """
    assert reference.shape == policy.shape, (reference.shape, policy.shape)
    policy = policy.detach().to(device=reference.device)
    if rule.reference_weight == 0.0:
        return policy.to(reference.dtype, copy=True)
    mixed = reference.double().mul(rule.reference_weight).add_(policy.double().mul(rule.policy_weight))
    return mixed.to(reference.dtype)


class _Counters(msgspec.Struct, frozen=True):
    """What moving_reference.json holds."""

    format: Literal[1] = 1
    updates: Annotated[int, msgspec.Meta(ge=0)] = 0
    step: Annotated[int, msgspec.Meta(ge=0)] = 0  # completed steps at the last call of update()


class MovingReference:
    """A LogProbScorer whose model follows the policy. Made by open_moving_reference."""

    def __init__(
        self,
        model: PreTrainedModel,
        accumulators: dict[str, Tensor],
        scorer: FrozenReference,
        device_thread: DeviceThread,
        rule: UpdateRule,
        counters: _Counters,
    ) -> None:
        self.rule = rule
        self._model = model
        self._accumulators = accumulators
        self._scorer = scorer
        self._device_thread = device_thread
        self._counters = counters
        self._is_whole = True  # False after an update that broke off in the middle
        self._followed: tuple[TrainingBackend, Callable[[], int]] | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        """reference/updates: how often the reference moved since its run began, across resumes."""
        return {"reference/updates": float(self._counters.updates)}

    def follow(self, backend: TrainingBackend, completed_steps: Callable[[], int]) -> None:
        """From here on the reference updates itself: before it scores and before it is held, up to the
        completed steps.
        """
        self._followed = backend, completed_steps

    async def _catch_up(self) -> None:
        if self._followed is not None:
            backend, completed_steps = self._followed
            await self.update(backend, step=completed_steps())

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0. Sees all earlier updates."""

        def work() -> tuple[FloatArray, ...]:
            self._check_whole()
            return self._scorer.score_now(batch)

        await self._catch_up()
        return await self._device_thread.submit(work)

    async def update(self, backend: TrainingBackend, *, step: int) -> bool:
        """Moves the reference if it is due after `step` completed steps; True if it moved. A step that was
        seen before changes nothing.

        Scores that are asked for later see the moved weights, also if this call is cancelled. Call it on rank
        0, whose backend streams whole weights. Raises what stream_weights raises; BackendError if a weight is
        missing, unknown or of another shape: then only load() helps.
        """
        if step <= self._counters.step:
            return False
        if step % self.rule.every:
            self._counters = msgspec.structs.replace(self._counters, step=step)
            return False
        self._check_whole()
        seen: set[str] = set()
        problem = ""

        def take(bucket: Sequence[tuple[str, Tensor]]) -> None:
            nonlocal problem  # a sink must not raise: other ranks would wait in a collective
            for name, policy in bucket:
                held = self._accumulators.get(name)
                if held is None or name in seen or held.shape != policy.shape:
                    what = f"the policy's weight {name!r} {list(policy.shape)} came twice or is none of the"
                    problem = problem or f"{what} reference's; both must be of one architecture"
                if held is None or problem:
                    return
                seen.add(name)
                with torch.no_grad():
                    held.copy_(compute_update(held, policy, self.rule))

        def finish() -> None:
            nonlocal problem
            missing = self._accumulators.keys() - seen
            if missing:
                what = f"{len(missing)} weights of the reference never came, {min(missing)!r} for one"
                problem = problem or f"{what}; stream all of the policy's"
            if problem:
                self._is_whole = self._is_whole and not seen
            else:
                self._copy_to_model()
                self._counters = _Counters(updates=self._counters.updates + 1, step=step)

        streamed = backend.stream_weights(take)
        finished = self._device_thread.submit(finish)  # queued before any score
        try:
            await streamed
        finally:
            await finished
        if problem:
            raise BackendError(problem)
        return True

    def _copy_to_model(self) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if parameter is not self._accumulators[name]:
                    parameter.copy_(self._accumulators[name])

    async def hold(self) -> Callable[[Path], Awaitable[None]]:
        """A copy of the reference as it is now, as the function that writes it to a directory later.

        The directory is a model directory with the accumulators in their own dtype, and the counters. Not
        atomic, not synced: write into a directory that nobody reads yet. Raises BackendError if an update
        broke off, and the writer OSError.
        """

        def copy() -> dict[str, Tensor]:
            self._check_whole()
            return {name: held.to("cpu", copy=True) for name, held in self._accumulators.items()}

        await self._catch_up()
        held, counters = await self._device_thread.submit(copy), self._counters

        def write(path: Path) -> None:
            save_hf_model(self._model, path, weights=held.items(), dtype=next(iter(held.values())).dtype)
            (path / STATE_FILE).write_bytes(msgspec.json.encode(counters))

        return lambda path: trio.to_thread.run_sync(write, path)

    async def save(self, path: Path) -> None:
        """Writes what hold() holds at once."""
        await (await self.hold())(path)

    async def load(self, path: Path) -> None:
        """Goes on from what save() wrote, bit for bit. Raises ModelError and CheckpointError, with the
        reference as it was.
        """

        def work() -> None:
            if not (path / STATE_FILE).is_file():
                raise CheckpointError(f"{path} has no {STATE_FILE}; give the directory that save() wrote")
            counters = _read_counters(path)
            dtype = next(iter(self._accumulators.values())).dtype
            weights = dict(load_hf_model(path, dtype=dtype).named_parameters())
            shapes = [
                {name: weight.shape for name, weight in of.items()} for of in (weights, self._accumulators)
            ]
            if shapes[0] != shapes[1]:
                raise CheckpointError(f"the reference in {path} is of another model; give this run's own")
            with torch.no_grad():
                for name, held in self._accumulators.items():
                    held.copy_(weights[name])
            self._copy_to_model()
            self._counters, self._is_whole = counters, True

        await self._device_thread.submit(work)

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise BackendError("the last update of this reference broke off; load() a saved one")


def _read_counters(path: Path) -> _Counters:
    """The counters that hold() wrote, 0 for a directory that is only a model. Raises CheckpointError."""
    file = path / STATE_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Counters)
    except FileNotFoundError:
        return _Counters()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy the directory again") from error


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

    `device_thread` is the backend's, so that scores and updates keep the order in which they were asked for.
    `dtype` is what the model scores in, `accumulator_dtype` (float32 or float64) what is averaged. Raises
    ModelError, CheckpointError, ConfigError.
    """
    if accumulator_dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"accumulator_dtype={accumulator_dtype} of a moving reference rounds small steps away; use"
            " torch.float32 or torch.float64"
        )

    def load_frozen(dtype: torch.dtype) -> PreTrainedModel:
        model = load_hf_model(model_path, dtype=dtype).to(device)  # pyright: ignore[reportArgumentType]
        return model.requires_grad_(False)

    def load() -> MovingReference:
        counters, averaged = _read_counters(model_path), load_frozen(accumulator_dtype)
        model = averaged if dtype == accumulator_dtype else load_frozen(dtype)
        scorer = FrozenReference(model, device_thread, micro_batch_tokens)
        accumulators: dict[str, Tensor] = dict(averaged.named_parameters())
        return MovingReference(model, accumulators, scorer, device_thread, rule, counters)

    yield await device_thread.submit(load)
