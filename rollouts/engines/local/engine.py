"""LocalEngine: generation in this process, on the device thread that the trainer uses too.

    generate() ──► waiting ──► active ──► finished.set() ──► its caller
                      └───────────┴──── the scheduler task: one device job at a time
    pause, resume, abort_all, updates ──► change the state and wake it

Every wait is for `_changed`, an event that is set and replaced whenever the state changes. Nobody polls.
While a job runs, the rows belong to the device thread; between jobs they belong to the scheduler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import trio
import trio.testing
from torch import Tensor

from rollouts.engines.local.batch import DecodeBatch, Row
from rollouts.engines.local.interface import ForwardPath
from rollouts.engines.local.opening import DEFAULT_CONTEXT, OpenedDecoder, open_decoder
from rollouts.engines.local.weights import StagedWeights, copy_model, read_checkpoint
from rollouts.errors import EngineClosed, EngineError, RequestRefused, WeightVersionError
from rollouts.models.draws import stream_key
from rollouts.models.limits import check_request, find_context_limit
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollouts.device_thread import DeviceThread

ResultT = TypeVar("ResultT")
CLOSED = "the engine is closed; generate inside its `async with open_local_engine(…)`"


@dataclass(slots=True, eq=False)
class _Call:
    """One caller of generate()."""

    row: Row
    finished: trio.Event = field(default_factory=trio.Event)
    completion: Completion | None = None
    failure: EngineError | None = None


@asynccontextmanager
async def open_local_engine(
    model: PreTrainedModel,
    *,
    device_thread: DeviceThread,
    mode: Literal["shared", "copied", "given"],
    trainer_version: Callable[[], int] | None = None,
    max_rows: int = 128,
    max_context: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    copy_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    seed: int = 0,
) -> AsyncIterator[LocalEngine]:
    """An engine on a causal language model of transformers, run the fastest way that agrees with it (see
    opening.py, `path`).

    Requests wait in memory without limit; `max_rows` are decoded at once.

    mode "shared" generates with `model` itself, which is never changed; its version is `trainer_version()`,
    read when a job is queued on the device thread, behind everything the trainer queued before. mode "copied"
    owns a copy (in `copy_dtype`, if given), which starts at `trainer_version()`, or 0, and follows updates;
    mode "given" does so with `model` itself, which nobody else may use then. `max_context` defaults to the
    model's own, and to 8192 where its config sets no limit.

    deterministic: requests are taken as lists. A list is what waits, sorted by request id, when the engine is
    idle and every other task is blocked; the next list is taken when the last row of this one has finished.
    The same lists give the same bits.

    `seed` and a request's own seed, or else its id, fix the random numbers of its tokens, whatever it is
    decoded with. Raises ModelError for a model that it cannot run exactly, EngineError for settings that do
    not fit together.
    """
    limit = find_context_limit(model.config)
    max_context = (limit or DEFAULT_CONTEXT) if max_context is None else max_context
    if max_context <= 1 or (limit is not None and max_context > limit):
        at_most = "" if limit is None else f" and at most the model's max_position_embeddings={limit}"
        raise EngineError(f"max_context={max_context}; it must be above 1{at_most}")
    if max_rows < 1:
        raise EngineError(f"max_rows={max_rows}; it must be at least 1")
    if mode == "shared" and trainer_version is None:
        raise EngineError(
            "mode='shared' needs trainer_version: a shared engine has the trainer's weights, so it reports"
            " the trainer's version"
        )
    if mode != "copied" and copy_dtype is not None:
        raise EngineError(
            f"copy_dtype={copy_dtype} with mode={mode!r}; such an engine makes no copy: use mode='copied' or"
            " autocast_dtype"
        )

    def open_on_device() -> tuple[PreTrainedModel, OpenedDecoder]:
        own = copy_model(model, copy_dtype) if mode == "copied" else model
        return own, open_decoder(own, max_context=max_context, autocast_dtype=autocast_dtype)

    own_model, opened = await device_thread.submit(open_on_device)
    engine = LocalEngine(
        opened,
        device_thread=device_thread,
        own_model=None if mode == "shared" else own_model,
        trainer_version=trainer_version or (lambda: 0),
        max_rows=max_rows,
        max_context=max_context,
        deterministic=deterministic,
        seed=seed,
    )
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine._schedule)
        try:
            yield engine
        except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
            failure = error
        finally:
            engine._close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class LocalEngine:
    """An InferenceEngine. Made by open_local_engine."""

    def __init__(
        self,
        opened: OpenedDecoder,
        *,
        device_thread: DeviceThread,
        own_model: PreTrainedModel | None,
        trainer_version: Callable[[], int],
        max_rows: int,
        max_context: int,
        deterministic: bool,
        seed: int,
    ) -> None:
        self._batch = DecodeBatch(opened.decoder, max_rows=max_rows, max_context=max_context)
        self._opened = opened
        self._device_thread = device_thread
        self._own_model = own_model
        self._trainer_version = trainer_version
        self._max_rows = max_rows
        self._seed = seed
        self._version = trainer_version()  # of the copy; a shared engine asks the trainer every time
        self._features = EngineFeatures(
            vocab_size=opened.decoder.vocab_size,
            context_length=max_context,
            in_memory_update=own_model is not None,
            update_from_checkpoint=own_model is not None,
            shares_weights=own_model is None,
            keep_pause=True,
            deterministic=deterministic,
        )
        self._waiting: dict[str, _Call] = {}
        self._active: dict[str, _Call] = {}
        self._listed: list[str] = []  # deterministic mode: ids of the current list not admitted yet
        self._leaving: list[Row] = []  # rows to take out before the next decode step
        self._paused: PauseMode | None = None
        self._weights = None if own_model is None else StagedWeights(own_model)
        self._resume_after_update = False
        self._job_running = False
        self._interrupt = False  # read by the device thread between steps
        self._closed = False
        self._changed = trio.Event()
        self._requests_finished = 0
        self._requests_aborted = 0

    # --- what callers see -----------------------------------------------------------------------------------

    @property
    def features(self) -> EngineFeatures:
        return self._features

    @property
    def path(self) -> ForwardPath:
        """How the model is run; see opening.py."""
        return self._opened.path

    def describe(self) -> str:
        """How the model is run, for people: what it costs, and why no faster way does. Print it where `path`
        is not "fast".
        """
        return self._opened.describe()

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion; "abort" with what there is after pause("abort") or abort_all(). Waits while the
        engine is paused.

        Cancelling the caller frees its row before the next decode step. Raises RequestRefused, EngineClosed,
        and EngineError when the device failed, with the cause.
        """
        self._check_open()
        check_request(
            request, vocab_size=self._features.vocab_size, max_context=self._features.context_length
        )
        request_id = request.request_id
        if request_id in self._waiting or request_id in self._active:
            raise RequestRefused(
                f"request {request_id!r}: request_id is in flight already; ids are unique in a run"
            )
        call = _Call(Row(request, stream_key(self._seed, request_id, request.sampling.seed)))
        self._waiting[request_id] = call
        if not self._features.deterministic and self._paused is None and len(self._active) < self._max_rows:
            self._interrupt = True
        self._notify()
        try:
            await call.finished.wait()
        finally:
            if not call.finished.is_set():
                self._withdraw(call)
        if call.failure is not None:
            raise call.failure
        assert call.completion is not None
        return call.completion

    async def pause(self, mode: PauseMode) -> None:
        """Closes admission. "abort": everything in flight or queued ends as it is; "wait": what is active
        finishes; "keep": it freezes.

        Returns when no row moves any more. Requests that come later wait for resume().
        """
        self._check_open()
        self._paused = mode
        self._resume_after_update = False
        if mode == "abort":
            self._abort_calls()
        self._interrupt = True
        self._notify()
        await self._wait_until(
            lambda: not self._job_running and not self._leaving and (mode == "keep" or not self._active)
        )

    async def resume(self) -> None:
        """Opens admission; frozen requests go on. An update that was begun and not finished is given up."""
        self._check_open()
        self._resume_after_update = True
        self._end_update()
        await trio.lowlevel.checkpoint()

    async def abort_all(self) -> None:
        """Everything in flight or queued ends as it is. Returns when the rows are free."""
        self._check_open()
        self._abort_calls()
        await self._wait_until(lambda: not self._job_running and not self._leaving)

    async def weight_version(self) -> int:
        await trio.lowlevel.checkpoint()
        return self._current_version()

    async def health(self) -> bool:
        """Whether the engine is open and its device thread answers."""
        if self._closed:
            return False
        try:
            return bool(await self._device_thread.submit(lambda: True))
        except Exception:  # whatever it is, the device does not answer
            return False

    async def release_memory(self) -> None:
        """Gives the keys and values back. Raises EngineError while rows are active. They return with the next
        request.
        """
        self._check_open()
        if self._active or self._job_running:
            raise EngineError(
                f"release_memory with {len(self._active)} active requests; await pause('wait') or"
                " pause('abort') first"
            )
        await self._device_thread.submit(self._batch.kv.drop)

    async def restore_memory(self) -> None:
        """Nothing to do: keys and values are allocated with the next request."""
        self._check_open()
        await trio.lowlevel.checkpoint()

    async def load(self) -> EngineLoad:
        await trio.lowlevel.checkpoint()
        return EngineLoad(running=len(self._active), waiting=len(self._waiting))

    async def checksum(self) -> str | None:
        """None: the weights are this process's own, and the probe reads them directly."""
        await trio.lowlevel.checkpoint()
        return None

    def statistics(self) -> Mapping[str, float]:
        """Totals since the engine opened, and what is in flight now."""
        counters = {name: float(value) for name, value in asdict(self._batch.counters).items()}
        return {
            "running": float(len(self._active)),
            "waiting": float(len(self._waiting)),
            "requests_finished": float(self._requests_finished),
            "requests_aborted": float(self._requests_aborted),
            "kv_bytes": float(self._batch.kv.num_bytes),
            "fast_path": float(self.path in ("compiled", "fast")),
            "recomputes": float(self.path == "recompute"),
            **counters,
        }

    # --- weights --------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Makes ready for buckets; an update that was begun and not finished is discarded. An engine that is
        not paused freezes until the end.
        """
        weights = self._updatable()
        if self._paused is None:
            await self.pause("keep")
            self._resume_after_update = True
        weights.begin()

    def receive_bucket(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
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
            self._batch.weights_epoch += 1

        try:
            await self._run_to_end(apply)  # else weights and version could part
            self._version = version
        finally:
            self._end_update()

    async def copy_weights(self) -> dict[str, Tensor]:
        """Copies in host memory of the weights that the engine has to itself, by Hugging Face name; tied ones
        once.

        Raises EngineError for an engine that shares the trainer's.
        """
        self._updatable()
        assert self._own_model is not None
        parameters = dict(self._own_model.named_parameters())
        return await self._run_to_end(
            lambda: {name: weight.detach().to("cpu", copy=True) for name, weight in parameters.items()}
        )

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        """Loads a Hugging Face directory of safetensors as `version`; freezes what is active meanwhile.

        A shared engine has nothing to load. Raises WeightVersionError if `version` is not the trainer's;
        EngineError, with the old weights in place, for files that are missing, damaged or of another model.
        """
        if self._own_model is None:
            self._check_open()
            if version != self._current_version():
                raise WeightVersionError(
                    f"update to version {version} of an engine that shares the trainer's weights, which are"
                    f" at version {self._current_version()}; advance the trainer by set_weight_version, or"
                    " open the engine with mode='copied'"
                )
            return {"version": version, "tensors": 0}
        model = self._own_model

        def stage() -> int:
            return sum(self.receive_bucket(bucket) or len(bucket) for bucket in read_checkpoint(path, model))

        await self.begin_update()
        try:
            tensors = await self._run_to_end(stage)
        except EngineError:
            self._end_update()
            raise
        await self.finish_update(version)
        return {"version": version, "tensors": tensors}

    def _end_update(self) -> None:
        if self._weights is not None:
            self._weights.discard()
        if self._resume_after_update:
            self._resume_after_update = False
            self._paused = None
            self._notify()

    def _updatable(self) -> StagedWeights:
        self._check_open()
        if self._weights is None:
            raise EngineError(
                "an engine that shares the trainer's weights takes no update; open it with mode='copied'"
            )
        return self._weights

    def _current_version(self) -> int:
        return self._trainer_version() if self._own_model is None else self._version

    # --- the scheduler --------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while not self._closed:
            if not self._has_work():
                await self._changed.wait()
                continue
            await self._settle()
            await self._run_job()

    def _has_work(self) -> bool:
        if self._leaving:
            return True
        if self._paused is None:
            return bool(self._active or self._waiting)
        return self._paused == "wait" and bool(self._active)

    async def _settle(self) -> None:
        """Lets the tasks that are about to submit requests do so: all of them in deterministic mode, where a
        list must be whole.
        """
        if self._features.deterministic and not self._active and not self._listed:
            await trio.testing.wait_all_tasks_blocked()
        else:
            await trio.lowlevel.checkpoint()

    def _take_admissible(self) -> list[_Call]:
        """The waiting calls that get a row now, moved to the active ones."""
        if self._paused is not None:
            return []
        if self._features.deterministic:
            self._listed = [request_id for request_id in self._listed if request_id in self._waiting]
            if not self._active and not self._listed:
                self._listed = sorted(self._waiting)
            order: Iterable[str] = self._listed
        else:
            order = self._waiting
        admitted = list(order)[: self._max_rows - len(self._active)]
        self._listed = [request_id for request_id in self._listed if request_id not in set(admitted)]
        calls = [self._waiting.pop(request_id) for request_id in admitted]
        self._active.update(zip(admitted, calls, strict=True))
        return calls

    async def _run_job(self) -> None:
        """One device job, and the completions it brought."""
        leaving, self._leaving = self._leaving, []
        admitted = self._take_admissible()
        decode = bool(self._active) and self._paused in (None, "wait")
        if not leaving and not admitted and not decode:
            return
        self._interrupt = False
        self._job_running = True
        job = partial(
            self._batch.run,
            admit=[call.row for call in admitted],
            remove=leaving,
            version=self._current_version(),
            decode=decode,
            interrupted=lambda: self._interrupt,
            others_wait=self._device_thread.has_queued,
        )
        try:
            finished = await self._run_to_end(job)  # ends within a step of an interrupt
        except Exception as error:  # whatever the device raised goes to every caller
            await self._fail_calls(error)
            return
        finally:
            self._job_running = False
            self._notify()
        for row in (*finished, *leaving):
            self._finish(row)

    def _finish(self, row: Row) -> None:
        """Answers the caller of a row that has left the batch, unless the caller has gone."""
        call = self._active.get(row.request.request_id)
        if call is None or call.row is not row:
            return
        del self._active[row.request.request_id]
        self._answer(call)

    def _answer(self, call: _Call) -> None:
        call.completion = call.row.completion()
        self._requests_finished += 1
        self._requests_aborted += call.row.finish_reason is None
        call.finished.set()

    def _abort_calls(self) -> None:
        """Queued calls are answered now, active ones when the scheduler has taken their rows out."""
        for call in self._waiting.values():
            self._answer(call)
        self._waiting.clear()
        self._listed.clear()
        self._leaving.extend(call.row for call in self._active.values() if call.row not in self._leaving)
        self._interrupt = True
        self._notify()

    def _withdraw(self, call: _Call) -> None:
        """A caller went away: its place in the queue is free now, its row before the next decode step."""
        request_id = call.row.request.request_id
        if self._waiting.get(request_id) is call:
            del self._waiting[request_id]
        elif self._active.get(request_id) is call:
            del self._active[request_id]
            self._leaving.append(call.row)
            self._interrupt = True
        self._notify()

    async def _fail_calls(self, cause: Exception) -> None:
        """Every caller gets an EngineError; the batch starts afresh, for its state is unknown."""
        self._end_calls(lambda who: EngineError(f"{who} failed on the device: {cause}"), cause)
        with suppress(Exception):  # a device thread that is closed keeps nothing
            await self._run_to_end(self._batch.reset)

    def _close(self) -> None:
        self._closed = True
        self._interrupt = True
        self._end_calls(lambda who: EngineClosed(f"{who}: {CLOSED}"))
        self._notify()

    def _end_calls(self, describe: Callable[[str], EngineError], cause: Exception | None = None) -> None:
        calls = [*self._active.values(), *self._waiting.values()]
        for held in (self._active, self._waiting, self._listed, self._leaving):
            held.clear()
        for call in calls:
            call.failure = describe(f"request {call.row.request.request_id!r}")
            call.failure.__cause__ = cause
            call.finished.set()

    async def _run_to_end(self, work: Callable[[], ResultT]) -> ResultT:
        """What a device job returns. A job that was queued is never abandoned, whoever is cancelled."""
        results: list[ResultT] = []
        with trio.CancelScope(shield=True):
            results.append(await self._device_thread.submit(work))
        return results[0]

    # --- waiting --------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(CLOSED)

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds. Raises EngineClosed if the engine closes first."""
        await trio.lowlevel.checkpoint()
        while not condition():
            await self._changed.wait()
            self._check_open()
