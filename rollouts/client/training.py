"""A run of a training service as a TrainingBackend.

    method() ─► RemoteFuture, at once ─► queue ─► one task sends in order, WINDOW beyond the last result
                     ▲                                  └► accepted ─► polled ─► its files fetched
                     └── settled in the order of submission ◄──────────────────────────┘

A call has its number before it is sent, and is sent again with it when the connection is lost, so that the
service does it once. A call that cannot be sent at all ends the client, and nothing behind it is done.
"""

import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from functools import partial, partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Generic, cast

import httpx
import msgspec
import trio

from rollouts import errors
from rollouts.codec import (
    BLOCK,
    FILE_NAME,
    WEIGHTS,
    Answer,
    Call,
    Forwarded,
    RunState,
    decode,
    encode,
    unpack_result,
)
from rollouts.engines.http import HttpClient
from rollouts.errors import (
    BackendClosed,
    CheckpointError,
    EarlierStepFailed,
    InfrastructureError,
    MessageRefused,
    RolloutsError,
    ServiceFailed,
    ServiceRefused,
    StepInterrupted,
)
from rollouts.protocols import WeightSink
from rollouts.types import (
    Fields,
    FloatRows,
    ForwardBackwardResult,
    LossSpec,
    Numbers,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    T,
    live,
)

if TYPE_CHECKING:
    from torch import Tensor

PENDING = 408  # of a poll: there is no result yet
BUSY = (429, 502, 503, 504)
RETRY_S, RETRY_CAP_S = 0.1, 5.0
WINDOW = 32  # calls that are with the service at once, beside the one whose result is awaited


# --- requests to a service, asked again while it cannot be reached ----------------------------------------


@live
class Connection:
    """A service, and how long it may be away."""

    http: HttpClient
    patience_s: float

    async def ask(
        self, method: str, path: str, body: bytes | None = None, *, silence_s: float = 60.0
    ) -> httpx.Response:
        """The answer, of status 200 or PENDING. What is asked must be the same however often it is asked.

        Raises the service's own error; ServiceFailed when it has been away, or too busy, for patience_s.
        """
        give_up_at, wait_s = trio.current_time() + self.patience_s, RETRY_S
        while True:
            try:
                reply = await self.http.request(method, path, body=body, silence_s=silence_s)
                if reply.status_code in (200, PENDING):
                    return reply
                failure = read_error(reply)
                if reply.status_code not in BUSY:
                    raise failure
            except InfrastructureError as error:
                failure = error
            if trio.current_time() >= give_up_at:
                raise ServiceFailed(
                    f"{method} {self.http.url}{path} got no answer for {self.patience_s:g} s ({failure});"
                    " start the service again, or give the client a longer patience_s"
                ) from failure
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_CAP_S)

    async def read_run(self, run_id: str) -> RunState:
        """Where the run is."""
        return decode((await self.ask("GET", f"/runs/{run_id}")).content, RunState)

    async def post(self, path: str, **fields: Any) -> Any:
        """The answer's JSON."""
        return msgspec.json.decode((await self.ask("POST", path, msgspec.json.encode(fields))).content)


def read_error(reply: httpx.Response) -> RolloutsError:
    """The error in an answer, of the class of ours that it names; ServiceFailed for any other."""
    try:
        said = msgspec.json.decode(reply.content, type=Fields)
        name, text = str(said["type"]), str(said["error"])
    except (msgspec.MsgspecError, KeyError):
        return ServiceFailed(f"the service answered with status {reply.status_code}: {reply.text[:200]}")
    kind: Any = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RolloutsError):
        with suppress(TypeError):  # some take more than a message
            return kind(text.removeprefix(f"{name}: "))
    return ServiceFailed(text)


# --- a run --------------------------------------------------------------------------------------------------


@live
class RemoteFuture(Generic[T]):
    """A TrainFuture of a call to the service."""

    call: Call
    upload: Callable[[int], Awaitable[None]] | None  # sends files for its number, before it
    read: Callable[[int, Answer], Awaitable[T]] | None  # None: the result is in the answer
    pending: (
        "dict[RemoteFuture[Any], None]"  # futures that are not done, and failures that nobody awaited yet
    )
    request: str = ""  # its id at the service, empty while there is none
    failure: Exception | None = None  # why the call could not be made
    on_record: trio.Event = field(default_factory=trio.Event)  # at the service, or it has failed
    _finished: trio.Event = field(default_factory=trio.Event)
    _found: T | Exception | None = None

    def done(self) -> bool:
        """Whether its result is here, or its failure."""
        return self._finished.is_set()

    async def accepted(self) -> "RemoteFuture[T]":
        """Itself, once the service has the call on record, or it has failed."""
        await self.on_record.wait()
        return self

    async def result(self) -> T:
        """What the service answered. Raises its error; BackendClosed if the client was left by an error."""
        await self._finished.wait()
        if isinstance(self._found, Exception):
            self.pending.pop(self, None)
            raise self._found.with_traceback(None)  # it would grow with every waiter
        return cast(T, self._found)

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()

    def settle(self, found: T | Exception | None) -> None:
        """It is done, with a value or an error, unless it was before."""
        if not self.done():
            self._found = found
            if not isinstance(found, Exception):
                del self.pending[self]
            self.on_record.set()
            self._finished.set()


AnyFuture = RemoteFuture[Any]
NoFuture = RemoteFuture[None]  # of a call that answers nothing


@live
class TrainingClient:
    """A TrainingBackend (see rollouts.protocols for its rules) whose model a service has. Made by a
    ServiceClient.
    """

    run_id: str
    connection: Connection
    next_seq: int

    def __post_init__(self) -> None:
        self._sender, self._queue = trio.open_memory_channel[AnyFuture](math.inf)
        self._ended = trio.Event()
        self._pending: dict[AnyFuture, None] = {}
        self._failure: Exception | None = None  # of the step that failed since the last reset
        self._lost: RolloutsError | None = None  # why nothing can be sent any more
        self._version = 0
        self._statistics: Numbers = {}
        self._interrupted = -1  # calls up to this one are

    # --- the queue

    def _submit(self, method: str, *, upload: Any = None, read: Any = None, **fields: Any) -> AnyFuture:
        call = Call(seq_id=self.next_seq, method=method, **fields)
        future = AnyFuture(call, upload, read, self._pending)
        try:
            self._sender.send_nowait(future)
        except trio.ClosedResourceError as error:
            raise BackendClosed(
                f"the client of {self.run_id} is closed; call it inside its `async with`"
            ) from error
        self.next_seq += 1
        self._pending[future] = None
        return future

    async def run(self) -> None:
        """Sends what is queued until the client is closed, and everything has ended."""
        sender, sent = trio.open_memory_channel[AnyFuture](WINDOW)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._collect, sent)
            async with sender:
                async for future in self._queue:
                    await self._send(future)
                    await sender.send(future)
        self._ended.set()

    async def _send(self, future: AnyFuture) -> None:
        """It has its request then, or the reason why the call could not be made."""
        seq, ask = future.call.seq_id, partial(self.connection.ask, "POST", f"/runs/{self.run_id}/calls")
        future.failure = self._lost
        if self._lost is not None:
            return
        try:
            try:
                if future.upload is not None:
                    await future.upload(seq)
                reply = await ask(encode(replace(future.call, interrupted=self._interrupted)))
            except (MessageRefused, ServiceRefused, CheckpointError, OSError) as error:
                future.failure = error  # those behind it wait for its number
                reply = await ask(encode(Call(seq_id=seq, method="give_up")))
            future.request = reply.json()["request_id"]
            future.on_record.set()
        except RolloutsError as error:
            self._lost = future.failure = error

    async def _collect(self, sent: trio.MemoryReceiveChannel[AnyFuture]) -> None:
        """Settles each future when its result is here."""
        async for future in sent:
            value, failure, method = None, future.failure, future.call.method
            try:
                if future.request:
                    answer = await self._poll(future.request)
                    self._version, self._statistics = answer.weight_version, answer.statistics
                    found = getattr(answer, method, None)
                    value = unpack_result(found) if isinstance(found, Forwarded) else found
                    if future.read:
                        value = await future.read(future.call.seq_id, answer)
            except Exception as error:  # also of a disk, or of a sink: whoever awaits the future hears of it
                failure = failure or error
            if isinstance(failure, EarlierStepFailed):
                failure.__cause__ = self._failure
            elif method == "reset":
                self._failure = None
            self._failure = self._failure or failure
            future.settle(failure or value)

    async def _poll(self, name: str) -> Answer:
        body = msgspec.json.encode({"request_id": name})
        while True:
            reply = await self.connection.ask("POST", "/api/v1/retrieve_future", body)
            if reply.headers.get("content-type") == "application/msgpack":
                return decode(reply.content, Answer)
            if reply.status_code != PENDING:
                raise read_error(reply)

    def interrupt(self) -> None:
        """forward_backward and forward queued so far that the service has not begun fail with
        StepInterrupted. Returns at once.
        """
        self._interrupted = self.next_seq - 1
        self.look()  # the next call that is sent says so, and there is one

    def statistics(self) -> Numbers:
        """Of the backend, as of the last result; and calls that are not finished (`queued`)."""
        return {**self._statistics, "queued": float(sum(not one.done() for one in self._pending))}

    # --- training: see TrainingBackend

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> RemoteFuture[ForwardBackwardResult]:
        """The batch goes without its samples and their metadata, which no backend reads."""
        return self._submit("forward_backward", batch=replace(batch, samples=(), metadata=()), loss=loss)

    def forward(self, batch: RolloutBatch) -> RemoteFuture[FloatRows]:
        """Log-probs."""
        return self._submit("forward", batch=replace(batch, samples=(), metadata=()))

    def optim_step(self, params: OptimParams | None = None) -> RemoteFuture[OptimStepResult]:
        """One step."""
        return self._submit("optim_step", params=params)

    hold = partialmethod(_submit, "hold")  # a copy, at the service
    revert = partialmethod(_submit, "revert")  # to the copy
    reset = partialmethod(_submit, "reset")  # forgets a failure of the run; not that the service was lost
    look = partialmethod(
        _submit, "look"
    )  # nothing is done; weight_version and statistics() are as of now then

    @property
    def weight_version(self) -> int:
        """Version of the weights after everything queued so far."""
        named = [
            one.call.version
            for one in self._pending
            if one.call.method == "set_weight_version" and not one.done()
        ]
        return named[-1] if named and self._failure is None else self._version

    def set_weight_version(self, version: int) -> NoFuture:
        """Names the weights after everything queued so far."""
        return self._submit("set_weight_version", version=version)

    def publish(self, version: int) -> NoFuture:
        """The weights after everything queued so far are, as `version`, what the run's engine serves."""
        return self._submit("publish", version=version)

    # --- weights and checkpoints: see TrainingBackend

    def stream_weights(self, sink: WeightSink) -> NoFuture:
        """All weights are fetched first, to a temporary directory; `sink` is called in a thread, with each
        as a bucket of its own.
        """

        def pour(weights: "dict[str, Tensor]") -> None:
            for bucket in weights.items():
                sink([bucket])

        return self._fetch_weights(pour)

    def get_weights(self) -> "RemoteFuture[dict[str, Tensor]]":
        """Copies on the CPU."""
        return self._fetch_weights(dict)

    def _fetch_weights(self, take: "Callable[[dict[str, Tensor]], T]") -> RemoteFuture[T]:
        from rollouts.client.weights import read_weights

        async def read(seq: int, answer: Answer) -> T:
            with TemporaryDirectory(prefix="rollouts-") as folder:
                await self._download(Path(folder), seq, answer)
                return await trio.to_thread.run_sync(lambda: take(read_weights(Path(folder))))

        return self._submit("get_weights", read=read)

    def load_weights(self, weights: "Mapping[str, Tensor]") -> NoFuture:
        """They are read when their turn comes."""
        from rollouts.models.export import write_safetensors

        async def upload(seq: int) -> None:
            with TemporaryDirectory(prefix="rollouts-") as folder:
                await trio.to_thread.run_sync(write_safetensors, Path(folder, WEIGHTS), weights)
                await self._upload(Path(folder), seq)

        return self._submit("load_weights", upload=upload)

    def save(self, path: Path) -> NoFuture:
        """Files on this machine."""
        return self._submit("save", read=partial(self._download, path))

    def load(self, path: Path) -> NoFuture:
        """Files of this machine."""
        return self._submit("load", upload=partial(self._upload, path))

    async def _download(self, folder: Path, seq: int, answer: Answer) -> None:
        home = f"/runs/{self.run_id}/files/{seq}"
        for name, size in answer.files.items():
            if not FILE_NAME.fullmatch(name):
                raise ServiceFailed(f"the service has a file {name!r:.80}, which may not be written here")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            async with await trio.open_file(folder / name, "wb") as file:
                while (offset := await file.tell()) < size:
                    part = (await self.connection.ask("GET", f"{home}/{name}?offset={offset}")).content
                    if not part:
                        raise ServiceFailed(f"{name} ends after {offset} of {size} bytes; save it again")
                    await file.write(part)
        await self.connection.ask("DELETE", home)

    async def _upload(self, folder: Path, seq: int) -> None:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if not files:
            raise CheckpointError(f"{folder} holds no file; name a directory that save() has written")
        for path in files:
            where = f"/runs/{self.run_id}/files/{seq}/{path.relative_to(folder)}"
            async with await trio.open_file(path, "rb") as file:
                for offset in range(0, max(path.stat().st_size, 1), BLOCK):
                    part = await file.read(BLOCK)
                    await self.connection.ask("PUT", f"{where}?offset={offset}", part)

    # --- awaited twice: until the service has the call on record, then for its result

    async def forward_backward_async(
        self, batch: RolloutBatch, loss: LossSpec
    ) -> RemoteFuture[ForwardBackwardResult]:
        """As forward_backward."""
        return await self.forward_backward(batch, loss).accepted()

    async def optim_step_async(self, params: OptimParams | None = None) -> RemoteFuture[OptimStepResult]:
        """As optim_step."""
        return await self.optim_step(params).accepted()

    # --- the end

    async def drain(self) -> list[Exception]:
        """Waits for everything queued; the failures that nobody awaited."""
        self._sender.close()
        await self._ended.wait()
        # what did not run because of an earlier failure adds nothing, and an interrupt was asked for
        failures: list[Any] = [one._found for one in self._pending]
        return [error for error in failures if not isinstance(error, EarlierStepFailed | StepInterrupted)]

    def drop(self) -> None:
        """Futures that are not settled raise BackendClosed. What the service has accepted it does."""
        self._sender.close()
        for future in self._pending:
            future.settle(BackendClosed(f"the client of {self.run_id} was left by an error"))
