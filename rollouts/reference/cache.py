"""Frozen models by name within a budget of bytes: loaded when first asked for, the least recently used given
up for the next.

    lease(names) ─► all loaded ────────────────────────────────────────► leased ─► last lease ends ─► idle
                 └► some missing ─► its turn ─► idle models go until all fit ─► load ┘

Bytes are counted before a load begins and given back when a model is really gone, so the sum never exceeds
the budget. One task at a time makes room and loads, in the order of asking; leases of loaded models do not
wait for it. A lease of several names gets room for all of them at once, so no task holds a model while it
waits for another. A task that asks for a lease inside a lease breaks that rule: ask for both in one call.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
import trio
from trio.lowlevel import ParkingLot

from rollouts.config.tables import FrozenDtype
from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendClosed, ConfigError, ModelError
from rollouts.models.directories import ModelHead, has_own_scalar_head
from rollouts.models.load import resolve_model
from rollouts.protocols import Say
from rollouts.reference.quantize import count_bytes_by_headers
from rollouts.reference.score import FrozenReference, open_frozen_reference
from rollouts.types import live

T = TypeVar("T")


class ModelSize(NamedTuple):
    """Bytes of one model."""

    held: int  # once it is loaded
    loading: int  # at most, while it is loaded: at least `held`


@live
class _Loaded(Generic[T]):
    value: T
    held: int  # bytes
    context: AbstractAsyncContextManager[T]  # leaving it gives the model up
    leases: int = 0


@live
class ReferenceCache(Generic[T]):
    """At most `budget_bytes` of models in memory, by name, for as long as an `aclosing` around it is open.
    Nothing is loaded before a lease asks for it.
    """

    budget_bytes: int
    measure: Callable[[str], Awaitable[ModelSize]]  # of a model by its name, before it is loaded
    # loads a model, and frees its memory when it is left. When it raises, Cancelled too, nothing of the model
    # is left in memory
    open_model: Callable[[str], AbstractAsyncContextManager[T]]
    _loaded: dict[str, _Loaded[T]] = field(default_factory=dict)  # least recently used first
    _turn: trio.Lock = field(default_factory=trio.Lock)  # of the task that makes room and loads; fair
    _lease_ended: ParkingLot = field(default_factory=ParkingLot)
    _closed: bool = False
    _used: int = 0  # bytes, and the most that there ever were
    _peak: int = 0
    _loads: int = 0

    @asynccontextmanager
    async def lease(self, *names: str) -> AsyncIterator[tuple[T, ...]]:
        """The models `names`, in their order, in memory as long as the context is open.

        Raises ConfigError if they are together larger than the budget, BackendClosed after the cache was
        closed, and what loading raises.
        """
        self._check_open()
        async with AsyncExitStack() as turn:
            if not self._loaded.keys() >= set(names):
                sizes = {name: await self.measure(name) for name in names}
                needed = _add_up(sizes.values())
                if needed > self.budget_bytes:
                    raise ConfigError(
                        f"reference models {', '.join(sizes)} need {needed} bytes at once, and the cache's"
                        f" budget_bytes is {self.budget_bytes}; raise it, choose a smaller dtype, or lease"
                        " fewer"
                    )
                await turn.enter_async_context(self._turn)
                await self._load_missing(sizes)
            for name in names:
                self._loaded[name] = self._loaded.pop(name)  # the last used
            leased = [self._loaded[name] for name in names]
            for model in leased:
                model.leases += 1
        try:
            yield tuple(model.value for model in leased)
        finally:
            for model in leased:
                model.leases -= 1
            self._lease_ended.unpark_all()

    async def _load_missing(self, sizes: dict[str, ModelSize]) -> None:
        """Makes room for what is not loaded and loads it. What is loaded of `sizes` stays."""
        missing = {name: size for name, size in sizes.items() if name not in self._loaded}
        reserved = _add_up(missing.values())
        self._check_open()
        while self._used + reserved > self.budget_bytes:
            idle = [name for name, model in self._loaded.items() if not model.leases and name not in sizes]
            if idle:
                await self._evict(idle[0])
            else:
                await self._lease_ended.park()
            self._check_open()
        self._used += reserved
        self._peak = max(self._peak, self._used)
        try:
            for name, size in missing.items():
                self._loads += 1
                context = self.open_model(name)
                self._loaded[name] = _Loaded(await context.__aenter__(), size.held, context)
                reserved -= size.held
        finally:
            self._used -= reserved

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("the reference cache is closed; lease inside its `async with`")

    async def _evict(self, name: str) -> None:
        """Gives one model up. Shielded: its bytes count until it is gone."""
        model = self._loaded.pop(name)
        with trio.CancelScope(shield=True):
            await model.context.__aexit__(None, None, None)
        self._used -= model.held

    async def forget(self, name: str) -> None:
        """Gives the model up before its time, unless it is leased."""
        if name in self._loaded and not self._loaded[name].leases:
            await self._evict(name)
            self._lease_ended.unpark_all()

    async def aclose(self) -> None:
        """Gives every model up. A model that is still leased stays with its holder, uncounted."""
        self._closed = True
        self._lease_ended.unpark_all()
        for name in [name for name, model in self._loaded.items() if not model.leases]:
            await self._evict(name)

    def statistics(self) -> dict[str, int]:
        """Bytes in memory now, the most bytes ever, and how many models were loaded."""
        return {"bytes": self._used, "peak_bytes": self._peak, "loads": self._loads}


def _add_up(sizes: Collection[ModelSize]) -> int:
    """Bytes that several models need which are loaded one after the other."""
    return sum(size.held for size in sizes) + max((size.loading - size.held for size in sizes), default=0)


def find_frozen_model(name: str) -> tuple[Path, ModelHead]:
    """(directory of the model of that name, which resolve_model takes; what it answers with: a reward model
    has a scalar head of its own). Raises ModelError as resolve_model.
    """
    try:
        return resolve_model(name), "tokens"
    except ModelError:
        path = resolve_model(name, head="scalar")
        if not has_own_scalar_head(path):  # the head would be a new one
            raise
        return path, "scalar"


def open_reference_cache(
    *,
    budget_bytes: int,
    device_thread: DeviceThread,
    micro_batch_tokens: int = 8192,
    device: str = "cpu",
    dtype: FrozenDtype = "float32",
    say: Say = lambda _: None,
) -> AbstractAsyncContextManager[ReferenceCache[FrozenReference]]:
    """Frozen references by what resolve_model takes: a directory, a name on the hub, bundled:…, tiny:….
    Reward models, too, in float32 always.

    `budget_bytes` bounds the weights on `device`; what a forward pass needs beside them comes on top. Models
    are loaded and score on `device_thread`, one after the other. `say` gets a sentence on what quantising a
    model does to its log-probs.
    """

    def choose_dtype(head: ModelHead) -> FrozenDtype:
        return "float32" if head == "scalar" else dtype

    def measure(name: str) -> ModelSize:
        path, head = find_frozen_model(name)
        kept = choose_dtype(head)
        held = count_bytes_by_headers(path, kept)
        # a quantised model is made from the whole one, which is on the CPU then
        whole_beside = kept in ("8bit", "4bit") and torch.device(device).type == "cpu"
        return ModelSize(held, held + (count_bytes_by_headers(path, "float32") if whole_beside else 0))

    @asynccontextmanager
    async def open_model(name: str) -> AsyncIterator[FrozenReference]:
        path, head = await trio.to_thread.run_sync(find_frozen_model, name)
        async with open_frozen_reference(
            path,
            head=head,
            device_thread=device_thread,
            dtype=choose_dtype(head),
            device=device,
            micro_batch_tokens=micro_batch_tokens,
            say=lambda line: say(f"{name}: {line}"),
        ) as reference:
            yield reference
            await reference.release()

    return aclosing(ReferenceCache(budget_bytes, partial(trio.to_thread.run_sync, measure), open_model))
