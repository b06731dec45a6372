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
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

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
from rollouts.types import FloatRows, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"  # the directory in a checkpoint
STATE_FILE = "moving_reference.json"
T = TypeVar("T")


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
        adds_up = abs(self.policy_weight + self.reference_weight - 1.0) <= 1e-12
        if not (0.0 < self.policy_weight <= 1.0 and adds_up and self.every >= 1):
            raise ConfigError(
                f"{self} of a moving reference: the rule is 0 < policy_weight <= 1, every >= 1, and both"
                " weights add up to 1; a reference that never moves is a frozen one"
            )


def compute_update(reference: Tensor, policy: Tensor, rule: UpdateRule) -> Tensor:
    """reference_weight · reference + policy_weight · policy, on the reference's device.

    Computed in float64, to be rounded once: in float32 the two weights are rounded and no longer add up to 1,
    which over many updates pulls every weight by up to 3e-8 / policy_weight. A hard update is a copy: it is
    equal bit for bit, and an infinity of the old reference does not become NaN.
    """
    policy = policy.detach().to(reference.device)
    if rule.reference_weight == 0.0:
        return policy
    return reference.double().mul(rule.reference_weight).add_(policy.double().mul(rule.policy_weight))


class _Counters(msgspec.Struct, frozen=True):
    """What moving_reference.json holds."""

    format: Literal[1] = 1
    updates: Annotated[int, msgspec.Meta(ge=0)] = 0
    step: Annotated[int, msgspec.Meta(ge=0)] = 0  # completed steps at the last call of update()


@dataclass(slots=True)
class _State:
    """What load() makes anew."""

    model: PreTrainedModel  # that scores
    averaged: PreTrainedModel  # whose weights are the accumulators; the same model where both have one dtype
    scorer: FrozenReference
    counters: _Counters
    is_whole: bool = True  # False after an update that broke off in the middle


class MovingReference:
    """A LogProbScorer whose model follows the policy. Made by open_moving_reference."""

    def __init__(
        self, state: _State, load: Callable[[Path], _State], device_thread: DeviceThread, rule: UpdateRule
    ) -> None:
        self.rule = rule
        self._state, self._load, self._device_thread = state, load, device_thread
        self._followed: tuple[TrainingBackend, Callable[[], int]] | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        """reference/updates: how often the reference moved since its run began, across resumes."""
        return {"reference/updates": float(self._state.counters.updates)}

    def follow(self, backend: TrainingBackend, completed_steps: Callable[[], int]) -> None:
        """From here on the reference updates itself: before it scores and before it is held, up to the
        completed steps.
        """
        self._followed = backend, completed_steps

    async def _run_whole(self, work: Callable[[_State], T]) -> T:
        """What `work` answers on the device thread, of a reference that is up to date. Raises BackendError if
        an update broke off.
        """
        if self._followed is not None:
            await self.update(self._followed[0], step=self._followed[1]())
        return await self._device_thread.submit(lambda: work(self._check_whole()))

    def _check_whole(self) -> _State:
        if not self._state.is_whole:
            raise BackendError("the last update of this reference broke off; load() a saved one")
        return self._state

    async def score(self, batch: RolloutBatch) -> FloatRows:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0. Sees all earlier updates."""
        return await self._run_whole(lambda state: state.scorer.score_now(batch))

    async def update(self, backend: TrainingBackend, *, step: int) -> bool:
        """Moves the reference if it is due after `step` completed steps; True if it moved. A step that was
        seen before changes nothing.

        Scores that are asked for later see the moved weights, also if this call is cancelled. Call it on rank
        0, whose backend streams whole weights. Raises what stream_weights raises; BackendError if a weight is
        missing, unknown or of another shape: then only load() helps.
        """
        state = self._state
        if step <= state.counters.step:
            return False
        if step % self.rule.every:
            state.counters = msgspec.structs.replace(state.counters, step=step)
            return False
        self._check_whole()
        held = dict(state.averaged.named_parameters())
        waiting, wrong = set(held), list[str]()

        def take(bucket: Sequence[tuple[str, Tensor]]) -> None:
            for name, policy in bucket:  # nothing is raised: other ranks would wait in a collective
                if name not in waiting or held[name].shape != policy.shape:
                    wrong.append(name)
                elif not wrong:
                    waiting.discard(name)
                    held[name].copy_(compute_update(held[name], policy, self.rule))

        def finish() -> None:
            if wrong or waiting:
                state.is_whole = len(waiting) == len(held)
                return
            if state.model is not state.averaged:
                for shown, exact in zip(state.model.parameters(), held.values(), strict=True):
                    shown.copy_(exact)
            state.counters = _Counters(updates=state.counters.updates + 1, step=step)

        streamed = backend.stream_weights(take)
        finished = self._device_thread.submit(finish)  # queued before any score
        try:
            await streamed
        finally:
            await finished
        if wrong or waiting:
            raise BackendError(
                f"of the reference's weights {len(waiting)} never came ({sorted(waiting)[:1]}), and of the"
                f" policy's {len(wrong)} came twice or fit none ({wrong[:1]}); both must be one architecture"
            )
        return True

    async def hold(self) -> Callable[[Path], Awaitable[None]]:
        """A copy of the reference as it is now, as the function that writes it to a directory later.

        The directory is a model directory with the accumulators in their own dtype, and the counters. Not
        atomic, not synced: write into a directory that nobody reads yet. Raises BackendError if an update
        broke off, and the writer OSError.
        """

        def copy(state: _State) -> tuple[list[tuple[str, Tensor]], _Counters]:
            held = state.averaged.named_parameters()
            return [(name, weight.to("cpu", copy=True)) for name, weight in held], state.counters

        held, counters = await self._run_whole(copy)

        def write(path: Path) -> None:
            save_hf_model(self._state.model, path, weights=held, dtype=held[0][1].dtype)
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
            self._state = self._load(path)

        if not (path / STATE_FILE).is_file():
            raise CheckpointError(f"{path} has no {STATE_FILE}; give the directory that save() wrote")
        await self._device_thread.submit(work)


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

    def load(path: Path) -> _State:
        counters = _read_counters(path)
        models: dict[torch.dtype, Any] = {
            each: load_hf_model(path, dtype=each).requires_grad_(False) for each in {accumulator_dtype, dtype}
        }
        for model in models.values():
            model.to(device)
        scorer = FrozenReference(models[dtype], device_thread, micro_batch_tokens)
        return _State(models[dtype], models[accumulator_dtype], scorer, counters)

    state = await device_thread.submit(lambda: load(model_path))
    yield MovingReference(state, load, device_thread, rule)
