"""A policy and its critic as one thing to save and to restore: the critic lies in `critic/` inside the
policy's checkpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollouts.backends.captures import HeldCheckpoint
from rollouts.protocols import TrainFuture

T = TypeVar("T")
CRITIC = "critic"


@dataclass(frozen=True, slots=True)
class LaterFuture(Generic[T]):
    """A TrainFuture of what an async function gives, which is called when somebody awaits it."""

    wait: Callable[[], Awaitable[T]]
    parts: tuple[TrainFuture[Any], ...]  # what it waits for

    async def result(self) -> T:
        """What the function gives. Raises what it raises."""
        return await self.wait()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()

    def done(self) -> bool:
        """Whether all that it waits for has ended."""
        return all(part.done() for part in self.parts)


class PolicyAndCritic:
    """Both backends, which share a device thread, so that what is submitted to both runs in that order."""

    def __init__(self, policy: Any, critic: Any) -> None:
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

    def capture(self) -> TrainFuture[HeldPair | None]:
        """What save() would write now, copied; None if there is no room for one of the two."""
        futures = self.policy.capture(), self.critic.capture()

        async def wait() -> HeldPair | None:
            held = HeldPair([])
            try:
                await collect_results(futures, held.parts)
            finally:
                if len(held.parts) < 2 or not all(held.parts):
                    held.drop()
            return held if all(held.parts) else None

        return LaterFuture(wait, futures)

    def _both(self, *futures: TrainFuture[Any]) -> TrainFuture[None]:
        return LaterFuture(partial(collect_results, futures, []), futures)


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


@dataclass(frozen=True, slots=True)
class HeldPair:
    """What writes a captured policy and critic."""

    parts: list[HeldCheckpoint | None]  # the policy's, the critic's; None where there was no room

    async def __call__(self, path: Path) -> None:
        for held, folder in zip(self.parts, (path, path / CRITIC), strict=True):
            assert held is not None, "there was no room for both"
            folder.mkdir(exist_ok=True)
            await held(folder)

    def drop(self) -> None:
        """Frees copies that were not written."""
        for held in self.parts:
            if held is not None:
                held.drop()
