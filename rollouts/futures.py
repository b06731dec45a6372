"""A TrainFuture that is done from the start, and several TrainFutures as one.

forward_backward ─► TrainFuture ┐
optim_step ───────► TrainFuture ├─► FutureGroup ─► result(): every value, in the order of the group
of one backend, or of several   ┘              └─► open_completed(): each future as soon as it is done
"""

from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import trio

from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import TrainFuture
from rollouts.types import live

T = TypeVar("T")


@live
class ImmediateTrainFuture(Generic[T]):
    """A TrainFuture of work that is done when it is submitted, for backends and fakes that compute at
    once.
    """

    value: T
    error: Exception | None = None  # what the work raised, in place of a value; raised at each await

    def done(self) -> bool:
        return True

    async def result(self) -> T:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return self.value

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()


@live
class FutureGroup(Generic[T]):
    """Several TrainFutures as one, whose value is the list of theirs."""

    futures: Sequence[TrainFuture[T]]

    def done(self) -> bool:
        """Whether every one is."""
        return all(future.done() for future in self.futures)

    async def result(self) -> list[T]:
        """The values in the order of `futures`. The first failure is raised at once, as it is, with a note
        that says whose it was; the work of the others goes on.
        """
        async with self.open_completed() as completed:
            values = {index: await future async for index, future in completed}
        return [values[index] for index in sorted(values)]

    def __await__(self) -> Generator[Any, Any, list[T]]:
        return self.result().__await__()

    @asynccontextmanager
    async def open_completed(self) -> AsyncIterator[trio.MemoryReceiveChannel[tuple[int, TrainFuture[T]]]]:
        """(its place in the group, the future) of each as soon as it is done, well or not: await it for its
        value. Of those that are done together the first in the group comes first, so a cause comes before
        what failed because of it. A failure that the block does not come to is not raised elsewhere.
        """
        sender, completed = trio.open_memory_channel[Any](len(self.futures))
        waiting = dict(enumerate(self.futures))

        def send_done() -> None:
            for index in [index for index, future in waiting.items() if future.done()]:
                sender.send_nowait((index, waiting.pop(index)))
            if not waiting:
                sender.close()

        async def wait(index: int, future: TrainFuture[T]) -> None:
            try:
                await future
            except Exception as error:
                error.add_note(f"raised by future {index} of a group of {len(self.futures)}")
            send_done()

        async with open_plain_nursery() as nursery:
            send_done()
            for each in enumerate(self.futures):
                nursery.start_soon(wait, *each)
            yield completed
