"""Frozen models by name within a budget of bytes: loaded when first asked for, several at once, the least
recently used given up for the next.

    lease(names) ─► all here, or being loaded ───────────────────────────────────────► leased ─► last lease ends ─► idle, may be given up
                 └► some missing: sizes from the files ─► its turn ─► room for all ─► load
                                                                       │ idle models go, least recently used first, until they fit
                                                                       └ none idle: wait until a lease ends

Bytes are counted before a load begins and given back after a model is really gone, so the sum never exceeds
the budget, also during loads. Requests for what is missing are served in the order of asking; what is loaded
is leased at once, so models that are leased by somebody at every moment can keep others waiting. A lease of
several names gets room for all of them at once: nobody holds a model while waiting for another. A task that
asks for a second lease inside a first one breaks that rule and may wait for itself; ask for both in one call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
import trio

from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendClosed, ConfigError
from rollouts.models.load import resolve_model
from rollouts.reference.open import LoadedReference, ReferenceDtype, Say, load_reference
from rollouts.reference.quantize import count_bytes_by_headers
from rollouts.reference.score import FrozenReference

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of one model."""

    held: int  # once it is loaded
    loading: int  # at most, while it is loaded: at least `held`

    def __post_init__(self) -> None:
        assert 0 <= self.held <= self.loading, self


Measure = Callable[[str], Awaitable[ModelSize]]
"""The size of a model, before it is loaded. Raises ModelError."""
Load = Callable[[str], Awaitable[T]]
"""Loads a model. When it raises, Cancelled too, nothing of the model is left in memory."""
Unload = Callable[[T], Awaitable[None]]
"""Lets go of a model. Its memory is free when it returns."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    held: int  # bytes
    users: int = 1  # leases, and tasks that wait for it to be loaded
    value: T | None = None
    ready: bool = False
    error: Exception | None = None  # of the load, for all who waited for it
    settled: trio.Event = field(
        default_factory=trio.Event
    )  # loaded, failed, or given up by the task that loaded it


class ReferenceCache(Generic[T]):
    """Models in memory, by name. Made by open_model_cache."""

    def __init__(self, *, budget_bytes: int, measure: Measure, load: Load[T], unload: Unload[T]) -> None:
        self.budget_bytes = budget_bytes
        self._measure, self._load_model, self._unload_model = measure, load, unload
        self._entries: OrderedDict[str, _Entry[T]] = (
            OrderedDict()
        )  # loaded or being loaded; least recently used first
        self._used = 0
        self._peak = 0
        self._turn = trio.Lock()  # of those who need room: first come, first served
        self._changed = trio.Event()  # set once, when there may be more room
        self._closed = False
        self._counts = dict.fromkeys(("loads", "hits", "evictions", "failures"), 0)

    @asynccontextmanager
    async def lease(self, *names: str) -> AsyncIterator[tuple[T, ...]]:
        """The models `names`, in their order, which stay in memory as long as the context is open.

        Raises ConfigError if they are together larger than the budget, and what loading raised; BackendClosed
        after the cache was closed.
        """
        entries = await self._acquire(list(dict.fromkeys(names)))
        try:
            yield tuple(cast(T, entries[name].value) for name in names)
        finally:
            self._unpin(entries.values())

    async def _acquire(self, names: Sequence[str]) -> dict[str, _Entry[T]]:
        """Entries that are ready and have this task among their users."""
        while True:
            self._check_open()
            here = all(name in self._entries for name in names)
            entries = self._pin(names) if here else await self._add(names)
            self._counts["hits"] += here
            try:
                for entry in entries.values():
                    await entry.settled.wait()
            except BaseException:
                self._unpin(entries.values())
                raise
            if all(entry.ready for entry in entries.values()):
                for name in names:
                    self._entries.move_to_end(name)
                return entries
            self._unpin(entries.values())
            failed = next((entry.error for entry in entries.values() if entry.error is not None), None)
            if failed is not None:
                raise failed
            # the task that loaded one was cancelled: whoever asks again first takes over

    async def _add(self, names: Sequence[str]) -> dict[str, _Entry[T]]:
        """All of the entries, those that were missing loaded by this task."""
        sizes = {name: await self._measure(name) for name in names}
        self._check_fits(sizes)
        async with self._turn:
            entries = self._pin([name for name in names if name in self._entries])
            missing = {name: sizes[name] for name in names if name not in entries}
            needed = _add_up(missing.values())
            try:
                await self._make_room(needed)
            except BaseException:
                self._unpin(entries.values())
                raise
            self._used += needed
            self._peak = max(self._peak, self._used)
            for name, size in missing.items():
                entries[name] = self._entries[name] = _Entry[T](size.held)
        try:
            await self._load(missing)
        except BaseException:
            self._unpin(entries.values())
            raise
        return entries

    async def _make_room(self, needed: int) -> None:
        """Returns when `needed` bytes are free. Idle models are given up for them, least recently used first."""
        while self._used + needed > self.budget_bytes:
            self._check_open()
            idle = next(
                (name for name, entry in self._entries.items() if entry.ready and not entry.users), None
            )
            if idle is None:
                await self._changed.wait()
            else:
                await self._evict(idle)

    async def _load(self, sizes: Mapping[str, ModelSize]) -> None:
        """Loads models whose bytes are counted, one after the other. If one fails, it and those after it are
        as if never asked for.
        """
        waiting = list(sizes)
        try:
            while waiting:
                entry = self._entries[waiting[0]]
                self._counts["loads"] += 1
                entry.value = await self._load_model(waiting[0])
                entry.ready = True
                entry.settled.set()
                waiting.pop(0)
        except BaseException as error:
            self._counts["failures"] += isinstance(error, Exception)
            for name in waiting:
                entry = self._entries.pop(name)
                entry.error = error if name == waiting[0] and isinstance(error, Exception) else None
                entry.settled.set()
                self._give_back(entry.held)
            raise
        finally:
            self._give_back(_add_up(sizes.values()) - sum(size.held for size in sizes.values()))

    def _check_fits(self, sizes: Mapping[str, ModelSize]) -> None:
        needed = _add_up(sizes.values())
        if needed > self.budget_bytes:
            parts = ", ".join(
                f"{name} {size.held}, {size.loading} while it loads" for name, size in sizes.items()
            )
            raise ConfigError(
                f"reference models need {needed} bytes at once ({parts}), and the cache's budget_bytes is"
                f" {self.budget_bytes}; raise it, choose a smaller dtype, or lease fewer at once"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("the reference cache is closed; lease inside its `async with`")

    def _pin(self, names: Sequence[str]) -> dict[str, _Entry[T]]:
        entries = {name: self._entries[name] for name in names}
        for entry in entries.values():
            entry.users += 1
        return entries

    def _unpin(self, entries: Iterable[_Entry[T]]) -> None:
        for entry in entries:
            entry.users -= 1
            assert entry.users >= 0
        self._notify()

    async def _evict(self, name: str) -> None:
        """Gives one model up. Not to be interrupted: its bytes count until it is gone."""
        entry = self._entries.pop(name)
        assert entry.value is not None and not entry.users, name
        self._counts["evictions"] += 1
        with trio.CancelScope(shield=True):
            try:
                await self._unload_model(entry.value)
            finally:
                entry.value = None
                self._give_back(entry.held)

    def _give_back(self, count: int) -> None:
        self._used -= count
        assert self._used >= 0, self._used
        if count:
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def aclose(self) -> None:
        """Gives every model up. Leases must have ended: what is still leased stays with its holder,
        uncounted.
        """
        self._closed = True
        self._notify()
        for name in [name for name, entry in self._entries.items() if entry.ready and not entry.users]:
            await self._evict(name)

    def statistics(self) -> Mapping[str, float]:
        """models and bytes in memory now, the most bytes that ever were, and how many loads, hits, evictions
        and failed loads there were.
        """
        ready = sum(entry.ready for entry in self._entries.values())
        return {"models": float(ready), "bytes": float(self._used), "peak_bytes": float(self._peak)} | {
            name: float(count) for name, count in self._counts.items()
        }


def _add_up(sizes: Iterable[ModelSize]) -> int:
    """Bytes that several models need which are loaded one after the other."""
    sizes = list(sizes)
    return sum(size.held for size in sizes) + max((size.loading - size.held for size in sizes), default=0)


@asynccontextmanager
async def open_model_cache(
    *, budget_bytes: int, measure: Measure, load: Load[T], unload: Unload[T]
) -> AsyncIterator[ReferenceCache[T]]:
    """A cache of at most `budget_bytes` of models, which `load` loads and `unload` lets go of. Nothing is
    loaded before somebody asks.
    """
    if budget_bytes < 1:
        raise ConfigError(f"budget_bytes={budget_bytes} of the reference cache must be at least 1")
    cache = ReferenceCache(budget_bytes=budget_bytes, measure=measure, load=load, unload=unload)
    try:
        yield cache
    finally:
        with trio.CancelScope(shield=True):
            await cache.aclose()


@asynccontextmanager
async def open_reference_cache(
    *,
    budget_bytes: int,
    device_thread: DeviceThread,
    micro_batch_tokens: int = 8192,
    device: str = "cpu",
    dtype: ReferenceDtype = "float32",
    cache_dir: Path | None = None,
    say: Say = lambda _: None,
) -> AsyncIterator[ReferenceCache[FrozenReference]]:
    """Frozen references by what resolve_model takes: a directory, a name on the hub, bundled:…, tiny:….

    `budget_bytes` bounds the weights on `device`; what a forward pass needs beside them comes on top. Models
    are loaded and score on `device_thread`, one after the other. `say` is told what quantising a model does
    to its log-probs.
    """
    paths: dict[str, Path] = {}

    async def measure(name: str) -> ModelSize:
        if name not in paths:
            paths[name] = await trio.to_thread.run_sync(lambda: resolve_model(name, cache_dir=cache_dir))
        size = await trio.to_thread.run_sync(lambda: count_bytes_by_headers(paths[name], dtype))
        # a quantised model is made from the whole one, which is on the CPU then
        loading = (
            size.held + size.exact
            if dtype in ("8bit", "4bit") and torch.device(device).type == "cpu"
            else size.held
        )
        return ModelSize(held=size.held, loading=loading)

    async def load(name: str) -> FrozenReference:
        lines: list[str] = []
        options: dict[str, Any] = {"dtype": dtype, "device": device, "micro_batch_tokens": micro_batch_tokens}
        future = device_thread.submit(
            lambda: load_reference(paths[name], say=lambda line: lines.append(f"{name}: {line}"), **options)
        )
        loaded: LoadedReference | None = None
        with trio.CancelScope(
            shield=True
        ):  # a job that has begun goes on, and what it loaded would be nobody's
            loaded = await future
        assert loaded is not None
        for line in lines:
            say(line)
        return FrozenReference(
            loaded.model, device_thread, loaded.plan, micro_batch_tokens, metrics=loaded.metrics
        )

    options = {
        "budget_bytes": budget_bytes,
        "measure": measure,
        "load": load,
        "unload": FrozenReference.release,
    }
    async with open_model_cache(**options) as cache:
        yield cache
