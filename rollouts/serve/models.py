"""The models that users train: each does its requests one after the other, in the order of their numbers.

    arrives(seq) ─► waits until all before it are done ─► a place in memory ─► the work ─► finished
                             the model is opened from its newest snapshot ──┘
                             and does once more what it had done since, which the store has

A model that nothing is asked of is saved and leaves memory. A server that was killed goes on in the same way.
"""

import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from rollouts.checkpoints.save import save_checkpoint
from rollouts.config.tables import OptimConfig
from rollouts.errors import ServiceRefused
from rollouts.rewards.check import describe
from rollouts.serve.evaluate import evaluate_model
from rollouts.serve.operations import CHANGES, EFFECTS, OPERATIONS, Operation, do_call
from rollouts.serve.store import BEGIN, Result, Row, Store, remove_others
from rollouts.types import Fields, live

if TYPE_CHECKING:
    from rollouts.backends.pytorch import RankedTrainingBackend
    from rollouts.serve.service import Service

EVERY: Mapping[str, Operation] = {**OPERATIONS, "evaluate": evaluate_model}  # but for "call:METHOD"


@live
class Model:
    """A model and its requests; alive while its session is."""

    store: Store
    name: str
    owner: str
    lora: Fields | None  # of a LoraConfig, with the seed; None: the whole model trains
    # the checkpoint that it began from, at which seq, and whether with the optimizer
    source: Fields | None
    optim: Fields  # an OptimConfig, and where its schedule ends
    snapshot: int  # the seq that its newest snapshot on disk has seen; −1: there is none
    next_seq: int
    unload: bool = False  # another needs the place in memory
    interrupted: int = -1  # calls up to this seq that compute do not begin any more
    idle_since: float = 0.0
    stays_until: float = -math.inf  # on trio's clock, if it has something to do
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    changed: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    # in memory
    backend: "RankedTrainingBackend" = field(init=False)
    settled: int = -1  # seq of the newest request that has changed the weights
    saved_at: float = -math.inf  # of the newest snapshot, on trio's clock
    reopen: bool = False  # it is to go on with `source`
    held: bool = False  # the backend holds a copy that only the requests since can make again
    failed: str = ""  # of the call that failed since the last reset

    def leave(self) -> None:
        """Another needs the place in memory."""
        self.unload = True
        self.changed.unpark_all()

    @property
    def next_request(self) -> str | None:
        """The id of what it does, or has to do next: what has no number is done between the others."""
        return self.store.value(
            "SELECT id FROM requests WHERE scope = ? AND ended IS NULL AND (seq IS NULL OR seq = ?)"
            " ORDER BY seq, submitted",
            self.name, self.next_seq,
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether it has something to do."""
        return self.next_request is not None

    async def wait_next(self, limit_s: float) -> bool:
        """Whether its next request is there; not within the limit, or when the place is needed."""
        self.idle_since = trio.current_time()
        with trio.move_on_after(limit_s):
            while not self.busy and not self.unload:
                await self.changed.park()
        return self.busy and not (self.unload and trio.current_time() > self.stays_until)


def start_model(service: "Service", name: str) -> None:
    """A model goes on as the store has it: its requests are done from now on."""
    store = service.store
    row = store.find("models", id=name)
    remove_others(service.folder / "models" / name, {f"step_{row['snapshot']}"})
    next_seq = store.value(
        "SELECT ifnull(MAX(seq) + 1, 0) FROM requests WHERE scope = ? AND ended IS NOT NULL", name
    )
    lora, source, optim = (json.loads(row[column]) for column in ("lora", "source", "optim"))
    model = Model(store, name, row["owner"], lora, source, optim, row["snapshot"], next_seq)
    service.models[name] = model
    service.nursery.start_soon(run_model, service, model)


async def run_model(service: "Service", model: Model) -> None:
    """Does the model's requests until its session ends; those that wait then have failed."""
    with model.scope:
        while await model.wait_next(math.inf):
            try:
                async with hold_place(service, model):
                    began = trio.current_time()
                    async with open_model(service, model):
                        # at least as long as it took to open it, and one request
                        model.stays_until = 2 * trio.current_time() - began
                        going = True
                        while going:
                            await do_next(service, model)
                            going = not model.reopen and await model.wait_next(service.config.idle_s)
                        await save_snapshot(service, model)
            except Exception as error:  # it cannot be opened, or saved: who asks next hears of it
                service.say(f"{model.name}: {describe(error)}")
                if model.busy:
                    finish(service, model, model.store.find("requests", id=model.next_request), error)
    service.end_requests(model.name)


# --- in memory ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def hold_place(service: "Service", model: Model) -> AsyncIterator[None]:
    """Inside, the model may be in memory. The one that has been idle for longest makes room, or else the one
    that was opened first.
    """
    async with service.line:
        while service.closing or len(service.loaded) >= service.config.loaded_models:
            if service.loaded:
                leaving = min(
                    service.loaded, key=lambda other: (other.busy, other.idle_since * (not other.busy))
                )
                leaving.leave()
            await service.place_free.park()
        service.loaded[model] = None
    try:
        yield
    finally:
        model.unload = False
        del service.loaded[model]
        service.place_free.unpark_all()


@asynccontextmanager
async def open_model(service: "Service", model: Model) -> AsyncIterator[None]:
    """Inside, the model is as its last request has left it."""
    folder = service.folder / "models" / model.name
    start, model.settled, whole = folder / f"step_{model.snapshot}", model.snapshot, True
    if model.snapshot < 0:
        start = Path(model.source["folder"]) if model.source else None
        if model.source:
            model.settled, whole = model.source["seq"], model.source["optimizer"]
    # an adapter of the base, or a whole model; with the weights at `start`, where there are only weights
    path, options, weights = service.base_path, dict(model.optim), None if whole else start
    options["optim"] = OptimConfig.model_validate(options["optim"])
    if model.lora is None:
        path, options["device_thread"] = weights or path, service.base.device_thread
    else:
        lora = {**model.lora, "init_from": str(weights or "")}
        options |= {"seed": lora.pop("seed"), "lora": lora, "beside": service.base}
    async with service.open_backend(path, **options) as model.backend:
        model.reopen, model.held, model.failed = False, False, ""
        if start is not None and whole:
            await model.backend.load(start)
        await save_snapshot(service, model)  # of a checkpoint, which may be deleted
        done = service.store.all(
            "SELECT * FROM requests WHERE scope = ? AND seq > ? AND (state = 'lost' OR state = 'done' AND"
            " body IS NOT NULL) ORDER BY seq",
            model.name, model.settled,
        )  # fmt: skip
        for row in done:
            if row["state"] == "lost":
                await model.backend.reset()
                model.failed = row["kind"] if row["kind"] not in EVERY else model.failed
            else:
                await do(service, model, row)
        yield


async def save_snapshot(service: "Service", model: Model, age_s: float = 0.0) -> None:
    """Weights and optimizer are on disk, if the newest snapshot is of that age; the requests up to there are
    not needed any more.
    """
    seq, early = model.settled, trio.current_time() - model.saved_at < age_s
    if early or seq <= model.snapshot or model.held or model.reopen:
        return
    folder = service.folder / "models" / model.name
    path = folder / f"step_{seq}"
    await save_checkpoint(path, write_model=model.backend.save, state={}, stage=model.name, step=seq)
    model.snapshot, model.saved_at = seq, trio.current_time()
    model.store.run("UPDATE models SET snapshot = ? WHERE id = ?", seq, model.name)
    service.store.run(
        "UPDATE requests SET body = NULL WHERE scope = ? AND seq <= ? AND ended", model.name, seq
    )
    await trio.to_thread.run_sync(remove_others, folder, {path.name})


# --- one request --------------------------------------------------------------------------------------------


async def do_next(service: "Service", model: Model) -> None:
    """The next request, and what became of it, on record."""
    row, failed = service.store.find("requests", id=model.next_request), False
    model.store.run(BEGIN, time.time(), row["id"])
    if row["kind"] == "call:hold":  # in place of the copy before
        model.held = False
        await save_snapshot(service, model, service.config.snapshot_s)
    try:
        found: Any = await do(service, model, row)
    except Exception as error:  # of one user's request, or of the machine: the others' models go on
        found = error
        if not isinstance(error, ServiceRefused):
            service.say(f"{model.name}, request {row['seq']} ({row['kind']}): {describe(error)}")
            failed = row["seq"] is None
            if not failed:
                await model.backend.reset()
    if model.reopen:  # it goes on with other weights, and does the request then
        return
    finish(service, model, row, found)
    if failed:  # what had accumulated is made again: the requests in order know nothing of this one
        model.reopen = True
    await save_snapshot(service, model, service.config.snapshot_s)


async def do(service: "Service", model: Model, row: Row) -> Result:
    """What a request comes to; it is noted what that means for the next snapshot."""
    found = await EVERY.get(row["kind"], do_call)(service, model, row)
    if row["kind"] in CHANGES:
        model.settled = row["seq"]
    return found


def finish(service: "Service", model: Model, row: Row, found: Result | Exception) -> None:
    """The next request has ended, with a result or an error."""
    if row["seq"] is not None:
        model.next_seq = row["seq"] + 1
    service.end_request(row["id"], found, kept=row["kind"] in EFFECTS)
