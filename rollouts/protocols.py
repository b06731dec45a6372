"""The seams of the framework. Behaviour is swapped by passing another function or another object of these
shapes.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rollouts.types import (
    Completion,
    EngineFeatures,
    Fields,
    FilterDecision,
    FloatRows,
    ForwardBackwardResult,
    GenerateRequest,
    LossSpec,
    Numbers,
    OptimParams,
    OptimStepResult,
    RewardResult,
    RolloutBatch,
    Sample,
    SampleGroup,
    SamplingParams,
    T,
)

if TYPE_CHECKING:
    import torch
    import trio

    from rollouts.metrics.spans import Span
    from rollouts.metrics.token_shards import UpdateRecord

CoResultT = TypeVar("CoResultT", covariant=True)


class TrainFuture(Protocol[CoResultT]):
    """Work that a backend has queued. Futures of one backend finish in submission order.

    May be awaited many times, by many tasks. Cancelling a waiter does not cancel the work. A failure that
    nobody awaited is raised when the backend closes.
    """

    async def result(self) -> CoResultT: ...
    def __await__(self) -> Generator[Any, Any, CoResultT]: ...
    def done(self) -> bool: ...


Bucket = Sequence[tuple[str, "torch.Tensor"]]  # weights by Hugging Face parameter name
WeightSink = Callable[[Bucket], None]
"""Takes one bucket; called on the backend's device thread,
tensors valid during the call only.
"""


class TrainingBackend(Protocol):
    """A model with its optimizer. Every call below that runs torch returns at once with a TrainFuture; work
    is done in submission order.

    When a submitted step fails, every step queued after it fails with EarlierStepFailed, accumulated
    gradients are discarded, and the backend works again after `reset()`. A loss or gradient that is not
    finite is not a failed step: nothing changes, its future says `skipped`, later steps run.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights after everything queued so far."""
        ...

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> TrainFuture[ForwardBackwardResult]: ...
    def optim_step(self, params: OptimParams | None = None) -> TrainFuture[OptimStepResult]: ...
    def hold(self) -> TrainFuture[None]:
        """Keeps one copy of the trainable weights and the optimizer's state, in place of the one before."""
        ...

    def revert(self) -> TrainFuture[None]:
        """Weights and optimizer state are, to the bit, as of the last hold(); what has accumulated is
        discarded. Optimizer steps done since still count in the schedule.

        Raises BackendError without a hold() of its own.
        """
        ...

    def forward(self, batch: RolloutBatch) -> TrainFuture[FloatRows]:
        """Log-probs [T_i] of every row's tokens at batch.temperature, of a model with a scalar head its
        values before them; 0.0 where the loss mask is 0.
        """
        ...

    def stream_weights(self, sink: WeightSink) -> TrainFuture[None]: ...
    def get_weights(self) -> "TrainFuture[dict[str, torch.Tensor]]": ...
    def load_weights(self, weights: "Mapping[str, torch.Tensor]") -> TrainFuture[None]: ...
    def save(self, path: Path) -> TrainFuture[None]:
        """Model (Hugging Face directory) and, in `state/`, everything an exact resume of the backend
        needs.
        """
        ...

    def load(self, path: Path) -> TrainFuture[None]: ...
    def interrupt(self) -> None:
        """forward_backward and forward queued so far end at their next micro-batch: they fail with
        StepInterrupted. Returns at once.

        The rest of the queue is a failed step's.
        """
        ...

    def reset(self) -> TrainFuture[None]:
        """Discards accumulated gradients and forgets an earlier failure. torch's random states are as after
        the last step.
        """
        ...

    def set_weight_version(self, version: int) -> TrainFuture[None]: ...
    def statistics(self) -> Numbers: ...


PauseMode = Literal["abort", "wait", "keep"]


class InferenceEngine(Protocol):
    """Something that generates. Token ids in, token ids and log-probs out."""

    @property
    def features(self) -> EngineFeatures: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion, and the prompt's log-probs where the request asks for them.
        Cancelling the caller frees its row. Raises RequestRefused, EngineError.
        """
        ...

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Fields: ...
    async def weight_version(self) -> int:
        """The version whose weights it serves; −1 while it serves weights that were never named."""
        ...

    async def checksum(self) -> str | None:
        """A fingerprint of the weights, equal for equal weights of one engine; None where features.checksum
        is False.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Admits nothing until resume(). abort: requests in flight are answered with what they have; wait:
        they finish first; keep: they freeze.
        """
        ...

    async def resume(self) -> None: ...
    async def abort_all(self) -> None:
        """Answers every request, in flight or waiting, with what it has."""
        ...

    async def health(self) -> bool: ...
    async def add_adapter(self, name: str, adapter: Path) -> None:
        """From now on requests may name the LoRA adapter in a directory of PEFT, beside others; its tokens
        bear the engine's version. Raises EngineError for a name that is taken and for what cannot be served.
        """
        ...

    async def remove_adapter(self, name: str) -> None:
        """Requests may not name it any more. Raises EngineError while one in flight does."""
        ...

    async def release_memory(self) -> None: ...
    async def restore_memory(self) -> None: ...
    async def begin_update(self) -> None: ...
    def receive_bucket(self, bucket: Bucket) -> None:
        """A WeightSink: copies one bucket. Raises EngineError on an unknown name or a wrong shape, before
        anything is copied.
        """
        ...

    async def finish_update(self, version: int) -> None: ...
    def statistics(self) -> Numbers: ...


class SyncWeights(Protocol):
    """Brings every engine to a version and proves it; returns metrics. Raises WeightSyncError.

    Without overlap it is called without `released`. Where generation runs ahead it sets `released` once the
    trainer may change its weights.
    """

    def __call__(
        self,
        backend: TrainingBackend,
        engines: Sequence[InferenceEngine],
        version: int,
        /,
        *,
        released: "trio.Event" = ...,
    ) -> Awaitable[Numbers]: ...


# --- plug-ins, each sync or async ---------------------------------------------------------------------------


Answer = T | Awaitable[T]
RewardValue = float | Numbers | RewardResult

# completes a sample on the fleet; several samples are segments of one trajectory and share its reward
GenerateFn = Callable[[Sample, InferenceEngine, SamplingParams], Answer[Sample | Sequence[Sample]]]
RewardFn = Callable[[Sample], Answer[RewardValue]]  # scores one sample
# scores the samples of a group together, one value per sample
GroupRewardFn = Callable[[Sequence[Sample]], Answer[Sequence[RewardValue]]]
FilterFn = Callable[[SampleGroup], Answer[bool | FilterDecision]]  # decides whether a scored group trains
# how much a scored group is worth training on: a finite number, the higher the better
RankerFn = Callable[[SampleGroup], Answer[float]]


# --- what a run keeps, says and asks ------------------------------------------------------------------------


Say = Callable[[str], object]  # takes one line for a person


class MetricsLogger(Protocol):
    """Takes what becomes the files of a run. What was logged survives the death of the process when the call
    returns.
    """

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Numbers,
        *,
        updates: "Sequence[UpdateRecord]" = (),
        spans: "Sequence[Span]" = (),
    ) -> None: ...
    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None: ...
    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Numbers
    ) -> None: ...
    async def log_spans(
        self, stage: str, step: int, policy_version: int, spans: "Sequence[Span]"
    ) -> None: ...


class LogProbScorer(Protocol):
    """Log-probs of given tokens under a model that this step does not train (a reference, a teacher)."""

    async def score(self, batch: RolloutBatch) -> FloatRows:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0."""
        ...
