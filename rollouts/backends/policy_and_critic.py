"""A policy and its critic as one thing to save and to restore: the critic lies in `critic/` inside the
policy's checkpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rollouts.checkpoints.writer import HeldCopy, SavingBackend
from rollouts.protocols import TrainFuture

T = TypeVar("T")
CRITIC = "critic"


class SavedBackend(SavingBackend, Protocol):
    """A backend that can be saved and restored."""

    def load(self, path: Path) -> TrainFuture[None]: ...


class LaterFuture(Generic[T]):
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


async def collect_results(futures: tuple[TrainFuture[Any], ...], found: list[Any]) -> None:
    """Awaits all futures, adding their results to `found`. Raises what the first that failed raises, when all
    have ended.
    """
    errors: list[Exception] = []
    for future in futures:
        try:
            found.append(await future.result())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


class PolicyAndCritic:
    """Both backends, which share a device thread, so that what is submitted to both runs in that order."""

    def __init__(self, policy: SavedBackend, critic: SavedBackend) -> None:
        self.policy = policy
        self.critic = critic

    def state_bytes(self) -> int:
        """Size of what save() writes."""
        return self.policy.state_bytes() + self.critic.state_bytes()

    def save(self, path: Path) -> TrainFuture[None]:
        """Writes both."""
        return self._both(self.policy.save(path), self.critic.save(path / CRITIC))

    def load(self, path: Path) -> TrainFuture[None]:
        """Restores what save() wrote."""
        return self._both(self.policy.load(path), self.critic.load(path / CRITIC))

    def reset(self) -> TrainFuture[None]:
        """As after the last step, both."""
        return self._both(self.policy.reset(), self.critic.reset())

    def _both(self, *futures: TrainFuture[Any]) -> TrainFuture[None]:
        return LaterFuture(lambda: collect_results(futures, []), futures)

    def capture(self) -> TrainFuture[HeldCopy | None]:
        """What save() would write now, copied; None if there is no room for one of the two."""
        futures = self.policy.capture(), self.critic.capture()

        async def wait() -> HeldCopy | None:
            held: list[HeldCopy | None] = []
            try:
                await collect_results(futures, held)
                if all(held):
                    return _HeldPair(*held)  # pyright: ignore[reportArgumentType]  (none is None)
            except BaseException:
                drop_all(held)
                raise
            drop_all(held)
            return None

        return LaterFuture(wait, futures)


class _HeldPair:
    """What writes a captured policy and critic."""

    def __init__(self, policy: HeldCopy, critic: HeldCopy) -> None:
        self._policy = policy
        self._critic = critic

    async def __call__(self, path: Path) -> None:
        await self._policy(path)
        (path / CRITIC).mkdir(exist_ok=True)
        await self._critic(path / CRITIC)

    def drop(self) -> None:
        drop_all([self._policy, self._critic])


def drop_all(held: list[HeldCopy | None]) -> None:
    """Frees copies that were not written."""
    for one in held:
        if one is not None:
            one.drop()
