"""A reference model that follows the policy: an exponential moving average, a reset every k steps, or
TR-DPO's mixture.

    after step n ──► due? ──► backend.stream_weights ──► per weight: accumulator ← rule(accumulator, policy)
                                                         all came ──► the scoring model gets the accumulators
    checkpoint   ──► hold() writes a model directory of the accumulators, and moving_reference.json
    resume       ──► open_moving_reference(dir): goes on from there, bit for bit

Accumulators are float32, also where the model that scores is bfloat16: with a decay of 0.999 a step of an
average is below half the distance of two bfloat16 numbers and would be rounded away. (A float32 accumulator
stands still when a step is below 6e-8 of a weight.) A float32 scoring model's weights are the accumulators.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import trio
from torch import Tensor

from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.metrics.jsonl import NonNegative
from rollouts.models.export import copy_bucket, save_hf_model
from rollouts.models.load import load_hf_model
from rollouts.protocols import Bucket, TrainingBackend, WeightSink
from rollouts.reference.score import FrozenReference
from rollouts.types import FloatRows, Numbers, RolloutBatch, T, live

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"  # the directory in a checkpoint
STATE_FILE = "moving_reference.json"


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """reference ← policy_weight · policy + (1 − policy_weight) · reference, after every `every`-th step.

    EMA of decay d: policy_weight = 1 − d. Reset, TR-DPO's hard update: 1. TR-DPO's soft update of α: α
    (Gorbatovski et al. 2024, arXiv 2404.09656).
    """

    policy_weight: float  # above 0, at most 1
    every: int = 1  # completed steps from one update to the next

    def __post_init__(self) -> None:
        if not (0.0 < self.policy_weight <= 1.0 and self.every >= 1):
            raise ConfigError(
                f"{self} of a moving reference: the rule is 0 < policy_weight <= 1 and every >= 1; a frozen"
                " reference is one that never moves"
            )


def mix_weights(reference: Tensor, policy: Tensor, policy_weight: float) -> Tensor:
    """policy_weight · policy + (1 − policy_weight) · reference, on the reference's device.

    Computed in float64, to be rounded once: in float32 the two weights are rounded and no longer add up to 1,
    which over many updates pulls every weight by up to 3e-8 / policy_weight. A reset is a copy: it is equal
    bit for bit, and an infinity of the old reference does not become NaN.
    """
    policy = policy.detach().to(reference.device)
    return policy if policy_weight == 1.0 else reference.double().lerp(policy.double(), policy_weight)


@torch.no_grad()
def update_reference(reference: torch.nn.Module, policy: torch.nn.Module, rule: UpdateRule) -> None:
    """Moves the weights of a reference, which is a copy of the policy that does not train, by the rule, now.

    Keep averages in float32, as above. Raises RuntimeError or ValueError for another architecture.
    """
    for held, trained in zip(reference.parameters(), policy.parameters(), strict=True):
        held.copy_(mix_weights(held, trained, rule.policy_weight))


class _Counters(msgspec.Struct, frozen=True):
    """What moving_reference.json holds."""

    format: Literal[1] = 1
    updates: NonNegative = 0
    step: NonNegative = 0  # completed steps at the last call of update()


@live
class MovingReference:
    """A LogProbScorer whose model follows the policy. Made by open_moving_reference.

    It answers what export_snapshot and WeightSync ask of a backend, for the average.
    """

    _model: "PreTrainedModel"  # that scores
    _averaged: "PreTrainedModel"  # whose weights are the accumulators; the same where both have one dtype
    _scorer: FrozenReference  # of _model
    _counters: _Counters
    _rule: UpdateRule
    _device_thread: DeviceThread
    _is_whole: bool = True  # False after an update that broke off in the middle
    _followed: tuple[TrainingBackend, Callable[[], int]] | None = None

    @property
    def metrics(self) -> Numbers:
        """reference/updates: how often the reference moved since its run began, across resumes."""
        return {"reference/updates": float(self._counters.updates)}

    def follow(self, backend: TrainingBackend, completed_steps: Callable[[], int]) -> None:
        """From here on the reference updates itself: before it scores and before it is held, up to the
        completed steps.
        """
        self._followed = backend, completed_steps

    async def _run_whole(self, work: Callable[[], T]) -> T:
        """What `work` returns on the device thread, once the reference is up to date. Raises BackendError if
        an update broke off.
        """
        if self._followed:
            await self.update(self._followed[0], step=self._followed[1]())

        def work_on_whole() -> T:
            self._check_whole()
            return work()

        return await self._device_thread.submit(work_on_whole)

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise BackendError("the last update of this reference broke off; go on from a saved one")

    async def score(self, batch: RolloutBatch) -> FloatRows:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0. Sees all earlier updates."""
        return await self._run_whole(lambda: self._scorer.score_now(batch))

    forward = score  # by a backend's name: what engines that serve the average are compared with

    @property
    def trained(self) -> "PreTrainedModel":
        """The model that names the weights of stream_weights."""
        return self._averaged

    async def stream_weights(self, sink: WeightSink) -> None:
        """Hands the accumulators, brought up to date, to `sink` in one bucket. Raises as hold()."""
        await self._run_whole(lambda: sink([*self._averaged.named_parameters()]))

    async def update(self, backend: TrainingBackend, *, step: int) -> bool:
        """Moves the reference if it is due after `step` completed steps; True if it moved. A step that was
        seen before changes nothing.

        Scores that are asked for later see the moved weights, also if this call is cancelled. Call it on rank
        0, whose backend streams whole weights. Raises what stream_weights raises; BackendError if a weight is
        missing, unknown or of another shape: then this reference is of no more use.
        """
        if step <= self._counters.step:
            return False
        if step % self._rule.every:
            self._counters = msgspec.structs.replace(self._counters, step=step)
            return False
        self._check_whole()
        held = dict(self._averaged.named_parameters())
        waiting, wrong = set(held), list[str]()

        def take(bucket: Bucket) -> None:
            for name, policy in bucket:  # nothing is raised: other ranks would wait in a collective
                if name not in waiting or held[name].shape != policy.shape:
                    wrong.append(name)
                elif not wrong:
                    waiting.discard(name)
                    held[name].copy_(mix_weights(held[name], policy, self._rule.policy_weight))

        def finish() -> None:
            if wrong or waiting:
                self._is_whole = len(waiting) == len(held)
                return
            if self._model is not self._averaged:
                for shown, exact in zip(self._model.parameters(), held.values(), strict=True):
                    shown.copy_(exact)
            self._counters = _Counters(updates=self._counters.updates + 1, step=step)

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

        def copy() -> tuple[list[tuple[str, Tensor]], _Counters]:
            return copy_bucket(self._averaged.named_parameters()), self._counters

        held, counters = await self._run_whole(copy)

        def write(path: Path) -> None:
            save_hf_model(self._model, path, weights=held, dtype=held[0][1].dtype)
            (path / STATE_FILE).write_bytes(msgspec.json.encode(counters))

        return lambda path: trio.to_thread.run_sync(write, path)


@asynccontextmanager
async def open_moving_reference(
    model_path: Path,
    *,
    rule: UpdateRule,
    device_thread: DeviceThread,
    micro_batch_tokens: int = 8192,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> AsyncIterator[MovingReference]:
    """A reference that starts as the model at `model_path`, or goes on, bit for bit, from what hold() wrote
    there.

    `device_thread` is the backend's, so that scores and updates keep the order in which they were asked for.
    `dtype` is what the model scores in. Raises ModelError, CheckpointError.
    """

    def load() -> MovingReference:
        file, counters = model_path / STATE_FILE, _Counters()  # those of a directory that is only a model
        try:
            counters = msgspec.json.decode(file.read_bytes(), type=_Counters)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); copy the directory again") from error
        models: dict[torch.dtype, Any] = {
            each: load_hf_model(model_path, dtype=each) for each in {torch.float32, dtype}
        }
        for model in models.values():
            model.requires_grad_(False).to(device)
        scorer = FrozenReference(models[dtype], device_thread, micro_batch_tokens)
        return MovingReference(models[dtype], models[torch.float32], scorer, counters, rule, device_thread)

    yield await device_thread.submit(load)
