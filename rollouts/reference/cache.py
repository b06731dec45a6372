"""Frozen models by name within a budget of bytes: loaded when first asked for, the least recently used given
up for the next.

    lease(names) ─► all loaded ────────────────────────────────────────► leased ─► last lease ends ─► idle
                 └► some missing ─► its turn ─► idle models go until all fit ─► load ┘

Bytes are counted before a load begins and given back when a model is really gone, so the sum never exceeds
the budget. One task at a time makes room and loads, in the order of asking; leases of loaded models do not
wait for it. A lease of several names gets room for all of them at once, so no task holds a model while it
waits for another. A task that asks for a lease inside a lease breaks that rule: ask for both in one call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
import trio

from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendClosed, ConfigError
from rollouts.models.load import resolve_model
from rollouts.reference.quantize import count_bytes_by_headers
from rollouts.reference.score import FrozenModel, FrozenReference, ReferenceDtype, Say, load_frozen

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of one model."""

    held: int  # once it is loaded
    loading: int  # at most, while it is loaded: at least `held`


Measure = Callable[[str], Awaitable[ModelSize]]
"""The size of a model, before it is loaded. Raises ModelError."""
Load = Callable[[str], Awaitable[T]]
"""Loads a model. When it raises, Cancelled too, nothing of the model is left in memory."""
Unload = Callable[[T], Awaitable[None]]
"""Lets go of a model. Its memory is free when it returns."""


@dataclass(slots=True, eq=False)
class _Loaded(Generic[T]):
    value: T
    held: int  # bytes
    leases: int = 0


class ReferenceCache(Generic[T]):
    """Models in memory, by name. Made by open_model_cache."""

    def __init__(self, *, budget_bytes: int, measure: Measure, load: Load[T], unload: Unload[T]) -> None:
        self.budget_bytes = budget_bytes
        self._measure, self._load, self._unload = measure, load, unload
        self._loaded: OrderedDict[str, _Loaded[T]] = OrderedDict()  # least recently used first
        self._turn = trio.Lock()  # of the task that makes room and loads; fair
        self._lease_ended = trio.Event()  # set once; another one then takes its place
        self._closed = False
        self._used = self._peak = 0
        self._loads = self._evictions = 0

    @asynccontextmanager
    async def lease(self, *names: str) -> AsyncIterator[tuple[T, ...]]:
        """The models `names`, in their order, in memory as long as the context is open.

        Raises ConfigError if they are together larger than the budget, BackendClosed after the cache was
        closed, and what loading raises.
        """
        wanted = list(dict.fromkeys(names))
        pinned: list[_Loaded[T]] = []
        try:
            if any(name not in self._loaded for name in wanted):
                sizes = {name: await self._measure(name) for name in wanted}
                self._check_fits(sizes)
                async with self._turn:
                    self._pin([name for name in wanted if name in self._loaded], pinned)
                    missing = {name: sizes[name] for name in wanted if name not in self._loaded}
                    await self._load_all(missing, pinned)
            else:
                self._check_open()
                self._pin(wanted, pinned)
            yield tuple(self._loaded[name].value for name in names)
        finally:
            for loaded in pinned:
                loaded.leases -= 1
            self._notify()

    def _pin(self, names: Sequence[str], pinned: list[_Loaded[T]]) -> None:
        for name in names:
            self._loaded[name].leases += 1
            self._loaded.move_to_end(name)
            pinned.append(self._loaded[name])

    async def _load_all(self, missing: dict[str, ModelSize], pinned: list[_Loaded[T]]) -> None:
        self._check_open()
        needed = _add_up(missing)
        while self._used + needed > self.budget_bytes:
            idle = next((name for name, loaded in self._loaded.items() if not loaded.leases), None)
            if idle is None:
                await self._lease_ended.wait()
            else:
                await self._evict(idle)
            self._check_open()
        self._reserve(needed)
        held = 0
        try:
            for name, size in missing.items():
                self._loads += 1
                self._loaded[name] = _Loaded(await self._load(name), size.held)
                held += size.held
                self._pin([name], pinned)
        finally:
            self._used -= needed - held

    def _reserve(self, count: int) -> None:
        self._used += count
        self._peak = max(self._peak, self._used)

    def _check_fits(self, sizes: dict[str, ModelSize]) -> None:
        needed = _add_up(sizes)
        if needed > self.budget_bytes:
            raise ConfigError(
                f"reference models {', '.join(sizes)} need {needed} bytes at once, and the cache's"
                f" budget_bytes is {self.budget_bytes}; raise it, choose a smaller dtype, or lease fewer"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("the reference cache is closed; lease inside its `async with`")

    async def _evict(self, name: str) -> None:
        """Gives one model up. Shielded: its bytes count until it is gone."""
        loaded = self._loaded.pop(name)
        self._evictions += 1
        with trio.CancelScope(shield=True):
            await self._unload(loaded.value)
        self._used -= loaded.held

    def _notify(self) -> None:
        self._lease_ended.set()
        self._lease_ended = trio.Event()

    async def aclose(self) -> None:
        """Gives every model up. A model that is still leased stays with its holder, uncounted."""
        self._closed = True
        self._notify()
        for name in [name for name, loaded in self._loaded.items() if not loaded.leases]:
            await self._evict(name)

    def statistics(self) -> dict[str, float]:
        """Models and bytes in memory now, the most bytes ever, and counts of loads and evictions."""
        counts = len(self._loaded), self._used, self._peak, self._loads, self._evictions
        names = ("models", "bytes", "peak_bytes", "loads", "evictions")
        return dict(zip(names, map(float, counts), strict=True))


def _add_up(sizes: dict[str, ModelSize]) -> int:
    """Bytes that several models need which are loaded one after the other."""
    extra = max((size.loading - size.held for size in sizes.values()), default=0)
    return sum(size.held for size in sizes.values()) + extra


@asynccontextmanager
async def open_model_cache(
    *, budget_bytes: int, measure: Measure, load: Load[T], unload: Unload[T]
) -> AsyncIterator[ReferenceCache[T]]:
    """A cache of at most `budget_bytes` of models. Nothing is loaded before a lease asks for it."""
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
    are loaded and score on `device_thread`, one after the other. `say` gets a sentence on what quantising a
    model does to its log-probs.
    """
    paths: dict[str, Path] = {}

    async def measure(name: str) -> ModelSize:
        if name not in paths:
            paths[name] = await trio.to_thread.run_sync(lambda: resolve_model(name, cache_dir=cache_dir))
        size = await trio.to_thread.run_sync(lambda: count_bytes_by_headers(paths[name], dtype))
        # a quantised model is made from the whole one, which is on the CPU then
        beside = size.exact if dtype in ("8bit", "4bit") and torch.device(device).type == "cpu" else 0
        return ModelSize(held=size.held, loading=size.held + beside)

    async def load(name: str) -> FrozenReference:
        lines: list[str] = []  # said after the load, which runs on another thread
        frozen: FrozenModel | None = None
        with trio.CancelScope(shield=True):  # a job that has begun goes on, and its model would have no owner
            frozen = await device_thread.submit(
                lambda: load_frozen(
                    paths[name],
                    dtype=dtype,
                    device=device,
                    micro_batch_tokens=micro_batch_tokens,
                    say=lines.append,
                )
            )
        assert frozen is not None
        for line in lines:
            say(f"{name}: {line}")
        return FrozenReference(frozen, device_thread, micro_batch_tokens)

    async with open_model_cache(
        budget_bytes=budget_bytes, measure=measure, load=load, unload=FrozenReference.release
    ) as cache:
        yield cache
