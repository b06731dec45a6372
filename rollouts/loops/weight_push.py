"""Updates of the engines, one at a time; where generation overlaps training, beside the next step.

loop ──► send(step) ─► update ─► released: the trainer may change its weights ──► the loop goes on
                          └────► engines serve the version ─► engines_updated; metrics wait for the next row
                          └────► fails: what is guarded is cancelled; the next guarding() or wait() raises it
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import field
from typing import Protocol

import trio

from rollouts.config.schema import RLTrainingConfig
from rollouts.loops.stopping import Stop
from rollouts.types import Metric, Numbers, RolloutBatch, Sample, live


class BatchSource(Protocol):
    """What the RL loop needs of an AsyncRolloutManager."""

    async def generate_batch(self) -> RolloutBatch: ...
    def generating(self) -> AbstractAsyncContextManager[None]: ...
    @property
    def overlaps(self) -> bool: ...  # whether generation goes on between calls
    def engines_updated(self, version: int) -> None: ...
    def batch_metrics(self) -> Mapping[str, Metric]: ...
    def failed_samples(self) -> Sequence[Sample]: ...


@live
class WeightPush:
    """Updates of the engines. They go on beside training where generation does; otherwise send() waits for
    their end.
    """

    nursery: trio.Nursery  # of an update in flight: a plain one, which cancels it when its block is left
    sync: Callable[..., Awaitable[Numbers]]  # a SyncWeights with its backend and engines
    rollout_manager: BatchSource
    config: RLTrainingConfig
    stop: Stop
    _ended: trio.Event | None = None  # of the update in flight
    _guarded: trio.CancelScope = field(default_factory=trio.CancelScope)
    _failure: Exception | None = None
    _metrics: dict[str, float] = field(default_factory=dict)

    async def send(self, step: int) -> None:
        """Returns when the trainer may go on; after the last step when the update has ended. Does nothing
        between two updates of the engines.

        Waits for the update before. A stop ends the waiting. Raises no failure, so that the step is logged
        first.
        """
        last = step == self.config.steps
        if step % self.config.sync_every != 0 and not last:
            return
        with self.stop.scope():
            if self._ended is not None:
                await self._ended.wait()
            if self._failure is not None:
                return
            released, ended = trio.Event(), trio.Event()
            self._ended = ended
            overlaps = self.rollout_manager.overlaps

            async def push() -> None:
                try:
                    metrics = await self.sync(step, **({"released": released} if overlaps else {}))
                    # not in one line: |= reads its left side before it waits, and take_metrics may come in
                    # between
                    self._metrics |= metrics
                    self.rollout_manager.engines_updated(step)
                except Exception as error:
                    self._failure = error
                    self._guarded.cancel()
                finally:
                    self._ended = None
                    released.set()
                    ended.set()

            self.nursery.start_soon(push)
            await (released if overlaps and not last else ended).wait()

    async def wait(self) -> None:
        """Returns when no update is in flight. Raises what the last one failed with."""
        if self._ended is not None:
            await self._ended.wait()
        self._raise_failure()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """The block is cancelled when the update in flight fails, and that failure is raised in its place.
        If the block ended before, the next call raises it.
        """
        self._raise_failure()
        with trio.CancelScope() as self._guarded:
            yield
        if self._guarded.cancelled_caught:
            self._raise_failure()

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the updates that have ended since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
