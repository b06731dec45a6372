"""What a server has open, and the life of sessions, models and samplers.

open_service ─► the store ─► what was there before: models, requests that wait, samples
             └► the base model: adapters train beside it, the engine samples from it
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from rollouts.backends.together import Asked
from rollouts.config.serve import ServeConfig
from rollouts.errors import BackendError, ServiceRefused
from rollouts.models.load import stop_token_ids
from rollouts.protocols import Say
from rollouts.reference.cache import ReferenceCache, open_reference_cache
from rollouts.reference.score import FrozenReference
from rollouts.rewards.check import describe
from rollouts.serve.combine import Combiner
from rollouts.serve.models import Model, start_model
from rollouts.serve.prometheus import Meters
from rollouts.serve.sampling import Loaded, make_sampler_cache, run_sample
from rollouts.serve.store import Result, Row, Store, answer, open_store, remove, remove_others
from rollouts.types import (
    EngineFeatures,
    Fields,
    ForwardBackwardResult,
    Function,
    LossSpec,
    RolloutBatch,
)

if TYPE_CHECKING:
    from rollouts.backends.pytorch import RankedTrainingBackend

SWEEP_S = 10.0  # between looks at what has expired
SAMPLING = 256  # requests for samples that are in the engine at once; the others wait their turn


@dataclass(kw_only=True, eq=False)
class Service:
    """A server's state. Made by open_service."""

    config: ServeConfig
    folder: Path
    store: Store
    record: Callable[[Fields], object]  # takes a row about each request that has ended
    base: "RankedTrainingBackend"  # an adapter that never trains: the others are opened beside it
    base_path: Path
    name: str  # of the base model, as clients are told
    names: frozenset[str]  # that clients may call it
    engine: Any  # an InferenceEngine that takes adapters
    open_embedded: Function  # an engine in this process, of a model; see open_local_engine
    tokenizer: Any
    open_backend: Function  # see open_pytorch_backend
    deterministic: bool  # each forward_backward runs alone
    nursery: trio.Nursery
    say: Say
    closing: bool = False
    references: ReferenceCache[FrozenReference] = field(init=False)

    def __post_init__(self) -> None:
        self.features: EngineFeatures = self.engine.features
        self.stop_ids = stop_token_ids(self.tokenizer, self.base_path)  # what ends a turn
        self.meters = Meters()
        self.ended: dict[str, trio.Event] = {}  # of requests that somebody works on, by id
        self.models: dict[str, Model] = {}  # those of sessions that go on
        self.loaded: dict[Model, None] = {}
        self.line = trio.Lock()  # of those that wait for a place in memory
        self.place_free = trio.lowlevel.ParkingLot()
        self.sampling: dict[str, trio.CancelScope] = {}  # of samples under way, by request
        self.sampling_places = trio.CapacityLimiter(SAMPLING)
        self.samplers: ReferenceCache[Loaded] = make_sampler_cache(self)
        self.combiner = Combiner(self.base.device_thread, self.config.window_s)
        self.secret = secrets.token_bytes(32)  # of addresses of downloads

    async def train(
        self, backend: "RankedTrainingBackend", batch: RolloutBatch, spec: LossSpec, *, gradient: bool
    ) -> ForwardBackwardResult:
        """forward_backward, or without gradient its result alone; of adapters, with those of others."""
        tokens = sum(map(len, batch.tokens))
        alone = backend.trainer.adapter is None or backend.ranks.world_size > 1 or self.deterministic
        if not alone and self.config.window_s and tokens < self.config.micro_batch_tokens:
            result = await self.combiner.train(Asked(backend, batch, spec, gradient))
        else:
            result = await (backend.forward_backward if gradient else backend.compute_loss)(batch, spec)
        self.meters.trained.inc(int(batch.response_lengths.sum()) * gradient)
        return result

    async def drain(self) -> None:
        """Every model is saved and out of memory, and no other comes in."""
        self.closing = True
        while self.loaded:
            for model in self.loaded:
                model.leave()
            await self.place_free.park()

    # --- what there is --------------------------------------------------------------------------------------

    def find_checkpoint(self, owner: str, path: str) -> Row:
        """A checkpoint that the user may read. Raises ServiceRefused with 404."""
        row = self.store.one(
            "SELECT * FROM checkpoints WHERE path = ? AND (owner = ? OR public) AND (expires IS NULL OR"
            " expires > ?)", path, owner, time.time(),
        )  # fmt: skip
        if row is None:
            raise ServiceRefused(f"there is no checkpoint {path!r}", 404)
        return row

    def check_base(self, name: str) -> None:
        """Raises ServiceRefused for a model that is not served here."""
        if name not in self.names:
            raise ServiceRefused(
                f"base_model={name!r} is not served here; there is {', '.join(sorted(self.names))}"
            )

    # --- sessions -------------------------------------------------------------------------------------------

    def see(self, session: str) -> None:
        """It goes on."""
        self.store.run("UPDATE sessions SET seen = ? WHERE id = ?", time.time(), session)

    def end_session(self, session: str) -> None:
        """Its models leave memory, and what waits has failed; checkpoints stay."""
        self.store.run("UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL", time.time(), session)
        for name, model in list(self.models.items()):
            if name.partition(":")[0] == session:
                del self.models[name]
                model.scope.cancel()
        for request, scope in self.sampling.items():
            if self.store.find("requests", id=request)["scope"].partition(":")[0] == session:
                scope.cancel()

    # --- requests -------------------------------------------------------------------------------------------

    def end_request(self, name: str, found: Result | Exception, *, kept: bool = False) -> None:
        """It came to a result, or to an error that says why; what is no refusal has cost what had
        accumulated. Who waits for it is told. kept: its body is needed when a server begins again.
        """
        state = "done"
        if isinstance(found, Exception):
            refused, kept = isinstance(found, ServiceRefused), False
            state, text = ("failed", str(found)) if refused else ("lost", describe(found))
            category = "user" if isinstance(found, ServiceRefused | BackendError) else "server"
            found = answer(error=text, category=category, type=type(found).__name__)
        self.store.run(
            "UPDATE requests SET state = ?, result = ?, media = ?, ended = ?, body = iif(?, body, NULL) WHERE"
            " id = ?", state, *found, time.time(), kept, name,
        )  # fmt: skip
        row: Any = self.store.one(
            "SELECT id AS request_id, scope AS run_id, seq AS seq_id, kind, state, submitted,"
            " ifnull(begun, ended) - submitted AS queued_s, ended - ifnull(begun, ended) AS seconds,"
            " length(result) AS result_bytes FROM requests WHERE id = ?",
            name,
        )
        if name in self.ended:
            self.ended.pop(name).set()
        self.meters.seconds.labels(row["kind"], row["state"]).observe(row["seconds"])
        self.meters.queued.labels(row["kind"]).observe(row["queued_s"])
        self.record(dict(row))

    def end_requests(self, scope: str) -> None:
        """What waits of a model whose session has ended has failed."""
        for row in self.store.all("SELECT id FROM requests WHERE scope = ? AND ended IS NULL", scope):
            self.end_request(row["id"], ServiceRefused(f"the session of {scope} has ended"))

    # --- time -----------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Ends sessions that nobody keeps, and removes what has expired. Runs until cancelled."""
        while True:
            await trio.sleep(SWEEP_S)
            now, before = time.time(), time.time() - self.config.keep_s
            for row in self.store.all(
                "SELECT id FROM sessions WHERE ended IS NULL AND seen < ?", now - self.config.session_s
            ):
                self.end_session(row["id"])
            for row in self.store.all("SELECT path, folder FROM checkpoints WHERE expires < ?", now):
                await self.delete_checkpoint(row)
            self.store.run("UPDATE requests SET result = NULL WHERE ended < ? AND result IS NOT NULL", before)
            await self.forget(before)

    async def forget(self, before: float) -> None:
        """Samplers that were not used since are gone, but for the newest of a model; so is what sessions that
        ended before leave, but for their names, their runs and their checkpoints.
        """
        ended = "session IN (SELECT id FROM sessions WHERE ended < ?1)"
        models = self.store.all(f"SELECT id FROM models WHERE {ended}", before)
        samplers = self.store.all(
            f"SELECT id, model, folder FROM samplers AS old WHERE {ended} OR model IS NOT NULL AND used < ?1"
            " AND EXISTS (SELECT 1 FROM samplers WHERE model = old.model AND created > old.created)",
            before,
        )
        for table in ("models", "samplers"):
            self.store.run(
                f"DELETE FROM requests WHERE scope IN (SELECT id FROM {table} WHERE {ended})", before
            )
        for row in samplers:
            self.store.run("DELETE FROM samplers WHERE id = ?", row["id"])
        folders = [self.folder / part / row["id"] for row in models for part in ("models", "files")]
        for folder in (*folders, *(row["folder"] for row in samplers if row["model"])):
            await remove(folder)

    async def delete_checkpoint(self, row: Row) -> None:
        """It is not there any more."""
        self.store.run("DELETE FROM checkpoints WHERE path = ?", row["path"])
        await remove(Path(row["folder"]).parent)


@asynccontextmanager
async def open_service(*, folder: Path, config: ServeConfig, **parts: Any) -> AsyncIterator[Service]:
    """The service in `folder`, with all that it knew before. Raises StorageError."""
    for name in ("models", "samplers", "checkpoints"):
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    with open_store(folder / "service.sqlite") as store:
        rows = store.all("SELECT folder FROM samplers WHERE model IS NOT NULL")
        remove_others(folder / "samplers", {Path(row["folder"]).name for row in rows})
        rows = store.all("SELECT request FROM checkpoints")
        remove_others(folder / "checkpoints", {row["request"] for row in rows})
        async with trio.open_nursery() as nursery:
            service = Service(config=config, folder=folder, store=store, nursery=nursery, **parts)
            nursery.start_soon(service.combiner.run_passes)
            async with (
                aclosing(service.samplers),
                open_reference_cache(
                    budget_bytes=config.reference_bytes,
                    device_thread=service.base.device_thread,
                    micro_batch_tokens=config.micro_batch_tokens,
                    device=str(service.base.ranks.device),
                    dtype=config.reference_dtype,
                    say=service.say,
                ) as service.references,
            ):
                live = (
                    "SELECT models.id FROM models JOIN sessions AS of ON of.id = session WHERE ended IS NULL"
                )
                for row in store.all(live):
                    start_model(service, row["id"])
                for row in store.all("SELECT id, scope, kind FROM requests WHERE ended IS NULL"):
                    if row["kind"] == "sample":
                        nursery.start_soon(run_sample, service, row["id"])
                    elif row["scope"] not in service.models:
                        service.end_requests(row["scope"])
                        continue
                    service.ended[row["id"]] = trio.Event()
                nursery.start_soon(service.sweep)
                yield service
                nursery.cancel_scope.cancel()
