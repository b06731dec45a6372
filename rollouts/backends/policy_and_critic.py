"""A policy and its critic as one thing to save and to restore: the critic lies in `critic/` inside the
policy's checkpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rollouts.checkpoints.save import WriteModel
from rollouts.checkpoints.writer import HeldElsewhere
from rollouts.protocols import TrainFuture, TrainingBackend

T = TypeVar("T")
CRITIC = "critic"  # the directory, and the name of its part of what is said


class SavedBackend(TrainingBackend, Protocol):
    """A backend as a checkpoint writer wants it."""

    def state_bytes(self) -> int: ...
    def held_bytes(self) -> int: ...
    def capture(self) -> TrainFuture[WriteModel | None]: ...


class AwaitedLater(Generic[T]):
    """A TrainFuture of what an async function gives, which is called when somebody awaits it."""

    def __init__(self, wait: Callable[[], Awaitable[T]], parts: tuple[TrainFuture[Any], ...]) -> None:
        self._wait = wait
        self._parts = parts

    async def result(self) -> T:
        """What the function gives. Raises what it raises."""
        return await self._wait()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()

    def done(self) -> bool:
        """Whether all that it waits for has ended."""
        return all(part.done() for part in self._parts)


def wait_for(*futures: TrainFuture[None]) -> TrainFuture[None]:
    """A future of all of them; it raises what the first that failed raises, when all have ended."""

    async def wait() -> None:
        errors: list[Exception] = []
        for future in futures:
            try:
                await future.result()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return AwaitedLater(wait, futures)


class PolicyAndCritic:
    """Both backends, which share a device thread, so that what is submitted to both runs in that order."""

    def __init__(self, policy: SavedBackend, critic: SavedBackend) -> None:
        self.policy = policy
        self.critic = critic

    def state_bytes(self) -> int:
        """Size of what save() writes."""
        return self.policy.state_bytes() + self.critic.state_bytes()

    def held_bytes(self) -> int:
        """Memory that capture() takes in this process."""
        return self.policy.held_bytes() + self.critic.held_bytes()

    def save(self, path: Path) -> TrainFuture[None]:
        """Writes both."""
        return wait_for(self.policy.save(path), self.critic.save(path / CRITIC))

    def capture(self) -> TrainFuture[WriteModel | None]:
        """What save() would write now, copied; None if there is no room for one of the two."""
        futures = self.policy.capture(), self.critic.capture()

        async def wait() -> WriteModel | None:
            held: list[WriteModel | None] = []
            errors: list[Exception] = []
            both: WriteBoth | None = None
            try:
                for future in futures:
                    try:
                        held.append(await future.result())
                    except Exception as error:
                        errors.append(error)
                if not errors and held[0] is not None and held[1] is not None:
                    both = WriteBoth(held[0], held[1])
            finally:
                if both is None:  # one of them has no room, failed, or nobody waits any more
                    for part in held:
                        drop_held(part)
            if errors:
                raise errors[0]
            return both

        return AwaitedLater(wait, futures)

    def load(self, path: Path) -> TrainFuture[None]:
        """Restores what save() wrote."""
        return wait_for(self.policy.load(path), self.critic.load(path / CRITIC))

    def reset(self) -> TrainFuture[None]:
        """As after the last step, both."""
        return wait_for(self.policy.reset(), self.critic.reset())


class WriteBoth:
    """What writes a captured policy and critic."""

    def __init__(self, policy: WriteModel, critic: WriteModel) -> None:
        self._policy = policy
        self._critic = critic

    async def __call__(self, path: Path) -> None:
        await self._policy(path)
        (path / CRITIC).mkdir(exist_ok=True)
        await self._critic(path / CRITIC)

    def drop(self) -> None:
        """Frees what other processes hold of either, if it was not written."""
        drop_held(self._policy)
        drop_held(self._critic)


def drop_held(held: WriteModel | None) -> None:
    """Frees what other processes hold of a captured state, if it was not written."""
    if isinstance(held, HeldElsewhere):
        held.drop()
