"""Fakes at the protocols, in numpy and virtual time: an engine that follows a script, a backend that only
counts.

They keep every promise of their protocol (order of futures, pause modes, versions per token, failures).
"""

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import trio

from rollouts.errors import (
    BackendClosed,
    BackendError,
    EarlierStepFailed,
    EngineClosed,
    EngineError,
    RequestRefused,
    RolloutsError,
    StepInterrupted,
)
from rollouts.protocols import Bucket, PauseMode, WeightSink
from rollouts.types import (
    Completion,
    EngineFeatures,
    Fields,
    FinishReason,
    FloatRows,
    ForwardBackwardResult,
    GenerateRequest,
    LossSpec,
    Numbers,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    Total,
    live,
)

ResultT = TypeVar("ResultT")
NAT, ZERO = np.float32(-1), np.float32(0)  # log-probs of what trains and of what does not
FEATURES = EngineFeatures(258, 4096, in_memory_update=True, checksum=True, name="scripted")


# --- engine -------------------------------------------------------------------------------------------------


class ScriptedReply(NamedTuple):
    """What the engine does with one request."""

    # its bytes are the sampled ids, followed by the first stop token if finish is "stop" and there is one
    text: str = "ok"
    token_s: float = 0.0  # seconds per token
    finish: FinishReason = "stop"
    error: Exception | None = None  # raised after the tokens


Script = Callable[[GenerateRequest], ScriptedReply]


@live
class _Running:
    """A request that has no answer yet."""

    started: bool = False  # admitted: "wait" lets it finish
    aborted: bool = False


class ScriptedEngine:
    """An InferenceEngine that answers as its script says, one token at a time; pauses fall between tokens.

    A token's log-prob depends on the request's seed, the token's position and the weight version, and is
    between −2 and 0. Updates take any bucket and remember the names.
    """

    def __init__(
        self, script: Script = lambda request: ScriptedReply(), *, version: int = 0, **features: Any
    ) -> None:
        """`features`: those of EngineFeatures that are others than in FEATURES."""
        self._script, self._version, self.features = script, version, replace(FEATURES, **features)
        self._running: dict[str, _Running] = {}
        self._paused: PauseMode | None = None
        self._updating = self._closed = False
        self._changed = trio.lowlevel.ParkingLot()
        self.requests: list[GenerateRequest] = []  # every request that was taken, in order of arrival
        self.received: list[str] = []  # names of the tensors of the last update

    @property
    def in_flight(self) -> int:
        """Requests that have no answer yet."""
        return len(self._running)

    async def generate(self, request: GenerateRequest) -> Completion:
        await self._look()
        sampling, most = request.sampling, self.features.context_length
        total = len(request.prompt_ids) + sampling.max_new_tokens
        known = request.request_id in self._running
        if known or not len(request.prompt_ids) or total > most:
            why = "is in flight already" if known else f"needs {total} tokens; the context is {most}"
            raise RequestRefused(f"request {request.request_id!r} {why}")
        reply = self._script(request)
        running = self._running[request.request_id] = _Running()
        self.requests.append(request)
        ends = [at + len(stop) for stop in sampling.stop_texts if (at := reply.text.find(stop)) >= 0]
        finish = "stop" if ends else reply.finish
        stop = sampling.stop_token_ids[:1] if finish == "stop" and not ends else ()
        planned, versions = [*reply.text[: min(ends, default=None)].encode(), *stop], list[int]()
        finish = "length" if len(planned) > sampling.max_new_tokens else finish
        try:
            await self._wait_until(lambda: self._paused is None or running.aborted)
            running.started = True
            for _ in planned[: sampling.max_new_tokens]:
                await trio.sleep(reply.token_s)  # a checkpoint if 0
                await self._wait_until(lambda: self._paused in (None, "wait") or running.aborted)
                if running.aborted:
                    finish = "abort"
                    break
                versions.append(self._version)
            else:
                if reply.error:
                    raise reply.error
        finally:
            del self._running[request.request_id]
            self._changed.unpark_all()
        log_probs = [-2.0 * fake_uniform(sampling.seed, *each) for each in enumerate(versions)]
        return Completion(
            request_id=request.request_id,
            token_ids=np.asarray(planned[: len(versions)], np.int64),
            log_probs=np.asarray(log_probs, np.float32),
            weight_versions=np.asarray(versions, np.int64),
            finish_reason=finish,
        )

    async def weight_version(self) -> int:
        await trio.lowlevel.checkpoint()
        return self._version

    def set_version(self, version: int) -> None:
        """What an update does, at once; tokens sampled from now on carry `version`."""
        self._version = version

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Fields:
        await self._look()
        if not path.is_dir():
            raise EngineError(f"{path} is not a directory")
        self._version = version
        return {"version": version}

    async def pause(self, mode: PauseMode) -> None:
        await self._look()
        self._paused = mode
        for running in self._running.values():
            running.aborted |= mode == "abort"
        self._changed.unpark_all()
        if mode != "keep":
            await self._wait_until(lambda: not any(running.started for running in self._running.values()))

    async def resume(self) -> None:
        await self._look()
        self._paused = None
        self._changed.unpark_all()

    async def abort_all(self) -> None:
        await self._look()
        waiting = {*self._running.values()}
        for running in waiting:
            running.aborted = True
        self._changed.unpark_all()
        await self._wait_until(lambda: waiting.isdisjoint(self._running.values()))

    async def health(self) -> bool:
        await trio.lowlevel.checkpoint()
        return not self._closed

    async def checksum(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return f"weights of version {self._version}"

    async def release_memory(self) -> None:
        await self._look()

    restore_memory = release_memory

    async def begin_update(self) -> None:
        await self._look()
        self._updating, self.received = True, []

    def receive_bucket(self, bucket: Bucket) -> None:
        if not self._updating:
            raise EngineError("receive_bucket outside an update; await begin_update() first")
        self.received += [name for name, _ in bucket]

    async def finish_update(self, version: int) -> None:
        if not self._updating:
            raise EngineError(f"finish_update({version}) without begin_update()")
        await trio.lowlevel.checkpoint()
        self._updating, self._version = False, version

    def statistics(self) -> Numbers:
        return {"running": len(self._running), "requests": len(self.requests)}

    def close(self) -> None:
        """Every request in flight and every later call raises EngineClosed."""
        self._closed = True
        self._changed.unpark_all()

    async def _look(self) -> None:
        """A checkpoint of an engine that is open."""
        if self._closed:
            raise EngineClosed("the engine is closed")
        await trio.lowlevel.checkpoint()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not (self._closed or condition()):
            await self._changed.park()
        if self._closed:
            raise EngineClosed("the engine is closed")


def fake_uniform(*key: object) -> float:
    """A number in [0, 1) that depends on the key and nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big") / 2**32


# --- backend ------------------------------------------------------------------------------------------------


@live
class FakeFuture(Generic[ResultT]):
    """A TrainFuture whose work is done at a point in time; its result is known when it is queued."""

    _result: ResultT | None
    failure: RolloutsError | None
    done_at: float
    before: Any  # the backend's state, and how many batches it had, when this was queued
    has_pieces: bool  # an interrupt can end it
    awaited: bool = False

    async def result(self) -> ResultT:
        self.awaited = True
        await trio.sleep_until(self.done_at)
        if self.failure:
            raise self.failure
        return self._result  # pyright: ignore[reportReturnType]  (None only where ResultT is None)

    def __await__(self) -> Generator[Any, Any, ResultT]:
        return self.result().__await__()

    def done(self) -> bool:
        return trio.current_time() >= self.done_at


@asynccontextmanager
async def open_fake_backend(**options: Any) -> "AsyncIterator[FakeBackend]":
    """A FakeBackend with these options. Leaving raises the first failure nobody awaited."""
    backend = FakeBackend(**options)
    yield backend
    backend._closed = True
    await trio.lowlevel.checkpoint()
    for future in backend._futures:
        if not (future.awaited or isinstance(future.failure, EarlierStepFailed | StepInterrupted | None)):
            raise future.failure


@live
class FakeBackend:
    """A TrainingBackend whose weights are the number of optimizer steps done and not undone. Made by
    open_fake_backend.
    """

    step_s: float = 0.0  # that a piece of work takes
    micro_batch_s: float = 0.0  # after which an interrupt is felt
    failures: Mapping[int, RolloutsError] = field(default_factory=dict)  # of the i-th piece submitted, from 0
    batches: list[RolloutBatch] = field(default_factory=list)  # of every forward_backward that did not fail
    _futures: list[FakeFuture[Any]] = field(default_factory=list)
    _free_at: float = 0.0  # when the last piece of work is done
    _failed: RolloutsError | None = None
    _closed: bool = False
    _state: dict[str, int] = field(default_factory=lambda: {"version": 0, "steps": 0, "weight": 0})

    @property
    def weight_version(self) -> int:
        return self._state["version"]

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> FakeFuture[ForwardBackwardResult]:
        def run() -> ForwardBackwardResult:
            self.batches.append(batch)
            tokens = float(batch.response_lengths.sum())
            units = {"tokens": tokens, "constant": loss.constant or 1.0}
            return ForwardBackwardResult(
                loss=1.0 / (1 + self._state["steps"]),
                denominator=units.get(loss.unit, len(batch)),
                metrics={"loss/tokens": Total(tokens)},
            )

        return self._submit(run, has_pieces=True)

    def optim_step(self, params: OptimParams | None = None) -> FakeFuture[OptimStepResult]:
        def run() -> OptimStepResult:
            self._state["steps"] += 1
            self._state["weight"] += 1
            lr = params.lr if params else 1e-3
            return OptimStepResult(step=self._state["steps"], lr=lr, grad_norm=1.0, clipped=False)

        return self._submit(run)

    def hold(self) -> FakeFuture[None]:
        return self._submit(lambda: self._state.update(held=self._state["weight"]))

    def revert(self) -> FakeFuture[None]:
        def run() -> None:
            if "held" not in self._state:
                raise BackendError("revert() needs a hold() before it, and each its own")
            self._state["weight"] = self._state.pop("held")

        return self._submit(run)

    def forward(self, batch: RolloutBatch) -> FakeFuture[FloatRows]:
        rows = tuple(np.where(mask, NAT, ZERO) for mask in batch.loss_masks)
        return self._submit(lambda: rows, has_pieces=True)

    def stream_weights(self, sink: WeightSink) -> FakeFuture[None]:
        return self._submit(lambda: sink([*self._weights().items()]))

    def get_weights(self) -> FakeFuture[Fields]:
        return self._submit(self._weights)

    def load_weights(self, weights: Fields) -> FakeFuture[None]:
        return self._submit(partial(self._state.update, weight=int(weights["weight"][0])))

    def save(self, path: Path) -> FakeFuture[None]:
        def run() -> None:
            path.mkdir(parents=True, exist_ok=True)
            (path / "fake.json").write_text(json.dumps(self._state))

        return self._submit(run)

    def load(self, path: Path) -> FakeFuture[None]:
        return self._submit(lambda: self._state.update(json.loads((path / "fake.json").read_text())))

    def interrupt(self) -> None:
        undecided = [future for future in self._futures if not future.failure and not future.done()]
        while undecided and not undecided[0].has_pieces:
            del undecided[0]
        if not undecided:
            return
        state, count = undecided[0].before
        self._state.update(state)
        del self.batches[count:]
        failure = self._failed = StepInterrupted("the step was interrupted between two micro-batches")
        self._free_at = trio.current_time() + self.micro_batch_s
        for future in undecided:  # who waits already is told at the time it expected
            future.failure, future.done_at = failure, self._free_at
            failure = EarlierStepFailed("an earlier step was interrupted; call reset()")

    def reset(self) -> FakeFuture[None]:
        self._failed = None
        return self._submit(lambda: None, takes_s=0.0)

    def set_weight_version(self, version: int) -> FakeFuture[None]:
        return self._submit(partial(self._state.update, version=version))

    def statistics(self) -> Numbers:
        return {"submitted": len(self._futures), "steps": self._state["steps"]}

    def _weights(self) -> Fields:  # arrays in place of tensors
        return {"weight": np.full(2, self._state["weight"], np.float32)}

    def _submit(
        self, run: Callable[[], ResultT], *, has_pieces: bool = False, takes_s: float | None = None
    ) -> FakeFuture[ResultT]:
        if self._closed:
            raise BackendClosed("the backend is closed; use it inside its `async with open_fake_backend(…)`")
        before = dict(self._state), len(self.batches)
        result, failure = None, self.failures.get(len(self._futures))
        if self._failed:
            failure = EarlierStepFailed(f"a step before this one failed ({self._failed}); call reset()")
        elif not failure:
            try:
                result = run()
            except RolloutsError as error:
                failure = error
        self._failed = self._failed or failure
        duration_s = self.step_s if takes_s is None else takes_s
        self._free_at = max(self._free_at, trio.current_time()) + duration_s
        future = FakeFuture(result, failure, self._free_at, before, has_pieces)
        self._futures.append(future)
        return future
