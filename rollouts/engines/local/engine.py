"""LocalEngine: generation in this process, on the device thread that the trainer uses too.

    generate() ──► waiting ──► listed ──► active ──► row.answer() ──► its caller
                      └───────────┴──────────┴──── the scheduler task: one device job at a time
    pause, resume, abort_all, updates ──► change the state and wake it

Every wait is for `_changed`, which wakes whoever parks there when the state changes. Nobody polls.
While a job runs, the active rows belong to the device thread; between jobs they belong to the scheduler.
"""

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import trio
import trio.testing
from torch import Tensor

from rollouts.engines.local.weights import StagedWeights, read_checkpoint
from rollouts.errors import EngineClosed, EngineError, ModelError, RequestRefused, WeightVersionError
from rollouts.models.decoding.batch import KEPT_BYTES, DecodeBatch, Row, StopTexts, open_decoder
from rollouts.models.draws import make_draw
from rollouts.models.limits import check_new, check_request, check_unused, choose_context
from rollouts.models.lora import Adapter, copy_adapter, find_adapters, list_trained, read_adapter
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import Bucket, PauseMode
from rollouts.types import Completion, EngineFeatures, Fields, GenerateRequest, Numbers, live

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollouts.device_thread import DeviceThread

CLOSED = "the engine is closed; generate inside its `async with open_local_engine(…)`"


@asynccontextmanager
async def open_local_engine(
    model: "PreTrainedModel",
    *,
    device_thread: "DeviceThread",
    mode: Literal["shared", "copied", "given"],
    adapter: Adapter | None = None,
    trainer_version: Callable[[], int] | None = None,
    max_rows: int = 128,
    max_context: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    seed: int = 0,
    tokenizer: Any = None,
) -> "AsyncIterator[LocalEngine]":
    """An engine on a causal language model, run the fastest way that agrees with the model (models/decoding).

    Requests wait in memory without limit; `max_rows` are decoded at once. mode "shared" generates with
    `model` itself, which is never changed; its version is `trainer_version()`, read when a job is queued on
    the device thread, behind everything the trainer queued before. mode "copied" owns a copy, which starts at
    `trainer_version()`, or 0, and follows updates; mode "given" does so with `model` itself, which nobody
    else may use then. adapter: of `model`: then "shared" generates with the adapter as it trains, "copied"
    with a copy of it on the same model, and updates are the adapter's. `max_context` defaults to the model's
    own, and to 8192 where its config sets no limit. deterministic: requests are taken as lists. A list is
    what waits, sorted by request id, when the engine is idle and every other task is blocked; the next list
    is taken when the last row of this one has finished. The same lists give the same bits. `seed` and a
    request's own seed, or else its id, fix the random numbers of its tokens. tokenizer: for stop texts, which
    are refused without it. Raises ModelError for a model that cannot be run exactly, EngineError for bad
    settings.
    """
    context = choose_context(model.config, max_context)
    if max_rows < 1:
        raise EngineError(f"max_rows={max_rows}; it must be at least 1")
    if mode == "shared" and not trainer_version:
        raise EngineError(
            "mode='shared' needs trainer_version: a shared engine reports the trainer's version"
        )

    def open_on_device() -> DecodeBatch:
        added = copy_adapter(adapter) if mode == "copied" and adapter else adapter
        own = copy.deepcopy(model).eval().requires_grad_(False) if mode == "copied" and not adapter else model
        return open_decoder(own, context, max_rows=max_rows, autocast_dtype=autocast_dtype, adapter=added)

    batch = await device_thread.submit(open_on_device)
    batch.kept_bytes = 0 if deterministic else KEPT_BYTES  # what is kept changes last bits
    features = EngineFeatures(
        vocab_size=batch.whole.vocab_size,
        context_length=context,
        in_memory_update=mode != "shared",
        update_from_checkpoint=mode != "shared",
        shares_weights=mode == "shared",
        deterministic=deterministic,
    )
    batch.stops = StopTexts(tokenizer) if tokenizer else None
    engine = LocalEngine(batch, features, device_thread, trainer_version or (lambda: 0), max_rows, seed)
    async with open_plain_nursery() as nursery:
        nursery.start_soon(engine._schedule)
        try:
            yield engine
        finally:
            engine._close()


@live
class LocalEngine:
    """An InferenceEngine. Made by open_local_engine."""

    _batch: DecodeBatch
    features: EngineFeatures
    _device_thread: "DeviceThread"
    _trainer_version: Callable[[], int]
    _max_rows: int
    _seed: int

    def __post_init__(self) -> None:
        self.path, self.describe = self._batch.path, self._batch.describe  # see models/decoding
        self._model = self._batch.whole.model
        self._trained = self._batch.whole.adapter or self._model
        self._weights = None if self.features.shares_weights else StagedWeights(self._trained)
        self._version = self._trainer_version()  # of the copy; a shared engine asks the trainer every time
        self._in_flight: dict[str, Row] = {}  # whose callers wait
        self._waiting: list[Row] = []
        self._listed: list[Row] = []  # may be admitted, in this order
        self._active: list[Row] = []  # those in the batch
        self._paused: PauseMode | Literal["update"] | None = None  # "update": until it ends
        self._job_running = False
        self._interrupt = False  # read by the device thread between steps
        self._closed = False
        self._changed = trio.lowlevel.ParkingLot()

    # --- what callers see -----------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion; "abort" with what there is after pause("abort") or abort_all(). Waits while the
        engine is paused.

        Cancelling the caller frees its row before the next decode step. Raises RequestRefused, EngineClosed,
        and EngineError when the device failed, with the cause.
        """
        self._check_open()
        features = self.features
        check_request(request, vocab_size=features.vocab_size, max_context=features.context_length)
        check_new(request, self._in_flight, self._batch.adapters)
        name = request.request_id
        if request.sampling.stop_texts and not self._batch.stops:
            raise RequestRefused(
                f"request {name!r}: stop_texts take an engine that was opened with a tokenizer"
            )
        answered = trio.Event()
        row = self._in_flight[name] = Row(request, make_draw(self._seed, request), answered.set)
        self._waiting.append(row)
        if not features.deterministic and not self._paused and len(self._active) < self._max_rows:
            self._interrupt = True
        self._changed.unpark_all()
        try:
            await answered.wait()
        finally:
            del self._in_flight[name]
            if not answered.is_set():
                self._end_early(row)
        if row.failure:
            raise row.failure
        return row.completion()

    async def pause(self, mode: PauseMode) -> None:
        """Closes admission. "abort": everything in flight or queued ends as it is; "wait": what is active
        finishes; "keep": it freezes.

        Returns when no row moves any more. Requests that come later wait for resume().
        """
        self._check_open()
        self._paused = mode
        if mode == "abort":
            await self.abort_all()
        self._interrupt = True
        self._changed.unpark_all()
        await self._wait_until(lambda: self._is_still() and (mode == "keep" or not self._active))

    async def resume(self) -> None:
        """Opens admission; frozen requests go on. An update that was begun and not finished is given up."""
        self._check_open()
        self._paused = "update"
        self._end_update()
        await trio.lowlevel.checkpoint()

    async def abort_all(self) -> None:
        """Everything in flight or queued ends as it is. Returns when the rows are free."""
        self._check_open()
        for row in self._in_flight.values():
            self._end_early(row)
        await self._wait_until(self._is_still)

    async def weight_version(self) -> int:
        await trio.lowlevel.checkpoint()
        return self._current_version()

    async def health(self) -> bool:
        """Whether the engine is open and its device thread answers."""
        with suppress(Exception):  # whatever it is, the device does not answer
            await self._device_thread.submit(lambda: None)
            return not self._closed
        return False

    async def release_memory(self) -> None:
        """Gives the keys and values back. Raises EngineError while rows are active. They return with the next
        request.
        """
        self._check_open()
        if self._active:
            raise EngineError(
                f"release_memory with {len(self._active)} active requests; await pause('wait') or"
                " pause('abort') first"
            )
        await self._device_thread.submit(self._batch.reset)

    async def restore_memory(self) -> None:
        """Nothing to do: keys and values are allocated with the next request."""
        await trio.lowlevel.checkpoint()

    async def checksum(self) -> None:
        """None: the weights are this process's own, and the probe reads them directly."""
        await trio.lowlevel.checkpoint()

    def statistics(self) -> Numbers:
        """What is in flight now, how the model is run, and totals since the engine opened."""
        return {
            "running": sum(not row.leaving for row in self._active),
            "waiting": len(self._waiting) + len(self._listed),
            "fast_path": int(self.path in ("compiled", "fast")),
            "recomputes": int(self.path == "recompute"),
            **self._batch.totals,
        }

    # --- weights --------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Makes ready for buckets; an update that was begun and not finished is discarded. An engine that is
        not paused freezes until the end.
        """
        weights = self._updatable()
        if not self._paused:
            await self.pause("keep")
            self._paused = "update"
        weights.begin()

    def receive_bucket(self, bucket: Bucket) -> None:
        """A WeightSink, called on the device thread: copies one bucket aside."""
        self._updatable().add(bucket)

    async def finish_update(self, version: int) -> None:
        """All buckets become visible at once, as `version`. Raises EngineError, with the old weights in
        place, if a tensor is missing.
        """
        weights = self._updatable()
        if not weights.is_open:
            raise EngineError(f"finish_update({version}) without begin_update()")

        def apply() -> None:
            weights.apply()
            self._batch.note_new_weights()

        try:
            await self._run_to_end(apply)  # else weights and version could part
            self._version = version
        finally:
            self._end_update()

    async def copy_weights(self) -> dict[str, Tensor]:
        """Copies in host memory of the weights, or the adapter, that the engine has to itself, by name; tied
        ones once.

        Raises EngineError for an engine that shares the trainer's.
        """
        self._updatable()
        trained = list_trained(self._trained).items()
        return await self._run_to_end(
            lambda: {name: weight.detach().to("cpu", copy=True) for name, weight in trained}
        )

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Fields:
        """Loads a Hugging Face directory of safetensors as `version`; freezes what is active meanwhile.

        A shared engine has nothing to load. Raises WeightVersionError if `version` is not the trainer's;
        EngineError, with the old weights in place, for files that are missing, damaged or of another model.
        """
        if not self._weights:
            self._check_open()
            if version != self._current_version():
                raise WeightVersionError(
                    f"update to version {version} of an engine that shares the trainer's weights, which are"
                    f" at version {self._current_version()}; advance the trainer by set_weight_version, or"
                    " open the engine with mode='copied'"
                )
            return {"version": version}

        def stage() -> None:
            for bucket in read_checkpoint(path, self._model):
                self.receive_bucket(bucket)

        await self.begin_update()
        try:
            await self._run_to_end(stage)
        except EngineError:
            self._end_update()
            raise
        await self.finish_update(version)
        return {"version": version}

    # --- adapters -------------------------------------------------------------------------------------------

    async def add_adapter(self, name: str, adapter: Adapter | Path) -> None:
        """From now on requests may name it: an adapter of this model, which may go on training, or a copy of
        what lies in a directory of PEFT. Its tokens bear the engine's version.

        Rows of several adapters are decoded together where the model has no experts and runs by the fast
        path, else in turns. Raises EngineError for a name that is taken, or an adapter of another model.
        """
        self._check_open()

        def add() -> None:
            if not name or name in self._batch.adapters:
                raise EngineError(f"add_adapter({name!r}): the name must be new, and not empty")
            found = read_adapter(self._model, adapter) if isinstance(adapter, Path) else adapter
            if found.of is not find_adapters(self._model):  # it would do nothing in this one
                raise ModelError(f"it is an adapter of another model, the one of {found.of.base}")
            self._batch.adapters[name] = found

        try:
            await self._run_to_end(add)
        except ModelError as error:
            raise EngineError(f"add_adapter({name!r}): {error}") from error

    async def remove_adapter(self, name: str) -> None:
        """Requests may not name it any more. Raises EngineError while one in flight does."""
        # a cancelled caller is gone before its row is
        await self._wait_until(
            lambda: not any(row.leaving and row.request.adapter == name for row in self._active)
        )
        check_unused(name, self._batch.adapters, (row.request for row in self._in_flight.values()))
        del self._batch.adapters[name]

    def _end_update(self) -> None:
        if self._weights:
            self._weights.discard()
        if self._paused == "update":
            self._paused = None
            self._changed.unpark_all()

    def _updatable(self) -> StagedWeights:
        self._check_open()
        if not self._weights:
            raise EngineError(
                "an engine that shares the trainer's weights takes no update; open it with mode='copied'"
            )
        return self._weights

    def _current_version(self) -> int:
        return self._version if self._weights else self._trainer_version()

    # --- the scheduler --------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while not self._closed:
            if not self._has_work():
                await self._changed.park()
                continue
            # requests that are about to come are let in: all of them in deterministic mode, where a list must
            # be whole
            if self.features.deterministic and not self._active and not self._listed:
                await trio.testing.wait_all_tasks_blocked()
            else:
                await trio.lowlevel.checkpoint()
            if self._has_work():
                await self._run_job()

    def _has_work(self) -> bool:
        if any(row.leaving for row in self._active) or (self._paused == "wait" and self._active):
            return True
        return not self._paused and bool(self._active or self._listed or self._waiting)

    def _take_admissible(self) -> list[Row]:
        """The rows that become active now."""
        if self._paused:
            return []
        if not self.features.deterministic:
            self._listed += self._waiting
            self._waiting.clear()
        elif not self._active and not self._listed:
            self._listed = sorted(self._waiting, key=lambda row: row.request.request_id)
            self._waiting.clear()
        count = self._max_rows - len(self._active)
        if not self._batch.decoder.mixes:  # rows of one adapter at a time, in the order in which they came
            names = [row.request.adapter for row in (*self._active, *self._listed)]
            own = sum(1 for _ in takewhile(lambda name: name == names[0], names))
            count = min(count, own - len(self._active))
        admitted, self._listed = self._listed[:count], self._listed[count:]
        return admitted

    async def _run_job(self) -> None:
        """One device job, and the answers it brought."""
        admitted = self._take_admissible()
        self._active += admitted
        self._interrupt = False
        self._job_running = True
        job = partial(
            self._batch.run,
            admit=admitted,
            version=self._current_version(),
            decode=self._paused in (None, "wait"),
            interrupted=lambda: self._interrupt,
            others_wait=self._device_thread.has_queued,
        )
        try:
            ended = await self._run_to_end(job)  # within a step of an interrupt
            self._active = [row for row in self._active if row not in ended]
            for row in ended:
                row.answer()
        except Exception as error:  # whatever the device raised goes to every caller
            self._fail_calls(EngineError, f" failed on the device: {error}", error)
            with suppress(Exception):  # its state is unknown; a device thread that is closed keeps nothing
                await self._run_to_end(self._batch.reset)
        finally:
            self._job_running = False
            self._changed.unpark_all()

    def _end_early(self, row: Row) -> None:
        """A row that waits is answered as it is now, an active one when the scheduler has taken it out."""
        row.leaving = True
        for queue in (self._waiting, self._listed):
            if row in queue:
                queue.remove(row)
                row.answer()
        self._interrupt = True
        self._changed.unpark_all()

    def _is_still(self) -> bool:
        return not self._job_running and not any(row.leaving for row in self._active)

    def _close(self) -> None:
        self._closed = True
        self._interrupt = True
        self._fail_calls(EngineClosed, f": {CLOSED}")
        self._changed.unpark_all()

    def _fail_calls(self, kind: type[EngineError], why: str, cause: Exception | None = None) -> None:
        for rows in (self._active, self._listed, self._waiting):
            for row in rows:
                row.failure = kind(f"request {row.request.request_id!r}{why}")
                row.failure.__cause__ = cause
                row.answer()
            rows.clear()

    async def _run_to_end(self, work: Callable[[], Any]) -> Any:
        """What a device job returns. A job that was queued is never abandoned, whoever is cancelled."""
        with trio.CancelScope(shield=True):
            return await self._device_thread.submit(work)

    # --- waiting --------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(CLOSED)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds. Raises EngineClosed if the engine closes first."""
        await trio.lowlevel.checkpoint()
        while not condition():
            await self._changed.park()
            self._check_open()
