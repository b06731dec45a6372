"""A running server as an InferenceEngine. What vLLM, SGLang and OpenAI-compatible endpoints do differently is
in a Dialect; what is the same is here.

    generate   check ──► gate ──► dialect.ask ──► Completion
               refuses    closed between pause() and resume(); abort_all() answers whoever waits there
    pause      gate closed, everyone answered (abort, wait) or left in flight (keep), then the server frozen
    update     the snapshot checked against the server's model, then dialect.load_weights; pause first
               an adapter: what is in flight answered with what it has, then dialect.load_adapter

A server is asked under ids of our own making: fixed-width hex, because SGLang aborts every id that begins
with the one it is given. What would kill a server (an id outside the vocabulary) or be refused by it (a
prompt too long) never leaves this process.
"""

import math
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import trio

from rollouts.engines.http import Transport, open_http_client
from rollouts.engines.wire import (
    START_S,
    NamedAdapters,
    Server,
    TensorShapes,
    ask_watched,
    check_same_model,
    make_adapter_name,
    make_empty_completion,
    parse_version,
    read_tensor_shapes,
)
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
    ModelError,
    RequestRefused,
)
from rollouts.models.directories import is_adapter
from rollouts.models.limits import check_new, check_request
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, Fields, GenerateRequest, SamplingParams, live

# for a server to answer what it was told to abort; after it the connection is closed, which aborts too
ABORT_GRACE_S = 5.0
ABORT_AGAIN_S = 1.0  # an abort that overtook its request on the way names nobody; it is said again
LOADING = "loading"  # the version's name while weights are exchanged: no number, so it is read as −1
SILENT = (
    f"; its log may say why. Until its first answer a server has {START_S:g} s, for it may have to compile:"
    " let it compile less by engine.args (vLLM: --enforce-eager), or ask it for a token before the run"
)
LOST = re.compile(" gave 404|LoRA")  # in what a server says that does not know an adapter
NEVER_NAMED = "default"  # the version's name in a server that was started and not updated since
Calls = Mapping[str, tuple[str, Any]]  # path and body by what the call does


@live
class Dialect:
    """What one kind of server is asked, and how; the defaults are an endpoint's that nobody controls.
    Everything raises EngineError.
    """

    server: Server
    features: EngineFeatures
    _: KW_ONLY
    shapes: TensorShapes | None = None  # of the server's model; None: unknown here
    # the server's name for the one that is its version, and so what requests use; None: whole weights
    adapter: str | None = None
    named: dict[str, str] = field(default_factory=dict)  # its names for those that requests name
    abort_grace_s = ABORT_GRACE_S  # 0: requests are aborted by closing their connections
    adapter_calls = ""  # the beginning of the paths by which adapters come and go

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion: ...
    async def send_adapter(self, name: str, path: Path, kind: Any = None) -> Any:
        """The server has the adapter in `path` from now on, as `name`. A `kind` is of what it answers."""
        body = {"lora_name": name, "lora_path": str(path)}
        return await self.server.control(f"{self.adapter_calls}/load_lora_adapter", body, kind)

    async def drop_adapter(self, name: str) -> None:
        """The server has it no more: one that was started again has lost it."""
        with suppress(EngineError):
            await self.server.control(f"{self.adapter_calls}/unload_lora_adapter", {"lora_name": name})

    async def ask_first(self, token: int, temperature: float = 1.0) -> Completion:
        """One token after `token`, for a handshake. Raises EngineSilent after START_S."""
        request = GenerateRequest(
            request_id="handshake",
            prompt_ids=np.asarray([token]),
            sampling=SamplingParams(max_new_tokens=1, temperature=temperature),
        )
        with trio.move_on_after(START_S):
            return await self.ask(request, uuid.uuid4().hex)
        raise EngineSilent(f"{self.server.name}: no answer to its first request within {START_S:g} s{SILENT}")

    async def read_work(self) -> object:
        """Differs from what it was if the server did anything since."""
        return trio.current_time()

    async def abort(self, server_ids: Sequence[str]) -> None: ...
    @property
    def calls(self) -> Calls:
        """What tell() sends. freeze: the server generates nothing until it thaws; what is in flight goes on
        then. release, restore: its memory, where features say so.
        """
        return {}

    async def tell(self, what: str) -> None:
        """Sends one of `calls`, if the server has it."""
        if what in self.calls:
            await self.server.control(*self.calls[what], repeats=what in ("freeze", "thaw"))

    async def read_version_name(self) -> str:
        return ""

    async def checksum(self) -> str | None: ...

    # Called only where features say so.
    async def load_weights(self, path: Path, version: int) -> None:
        """The snapshot in `path` is loaded and bears `version`; requests use no adapter any more."""

    async def load_adapter(self, path: Path, version: int) -> None:
        """Requests use the adapter in `path`, and it bears `version`. Nothing is in flight.

        Each is loaded under a new name: both servers bind a request to the adapter that it came with.
        """


@live
class _InFlight:
    request: GenerateRequest
    server_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    asked: bool = False  # it passed the gate
    aborted: bool = False


class ServerEngine:
    """One server. Made by open_vllm_engine, open_sglang_engine and open_openai_engine."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._in_flight: dict[str, _InFlight] = {}
        self._adapters = NamedAdapters()
        self._paused = False  # new requests wait at the gate
        self._frozen = False  # what is at the server stands still: its silence says nothing
        self._released = False  # its memory
        self._closed = False
        self._changed = trio.lowlevel.ParkingLot()
        self._work: tuple[float, object] = (-math.inf, None)  # when it was asked for, and the answer

    @property
    def features(self) -> EngineFeatures:
        """While it serves an adapter it has no checksum: the servers' are of the base alone."""
        features = self.dialect.features
        return replace(features, checksum=False) if self.dialect.adapter else features

    # --- requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion. Cancelling the caller frees its row. Raises RequestRefused before anything is sent,
        EngineClosed, InfrastructureError.
        """
        self._check_open()
        features, where = self.features, f"{self.features.name}, request {request.request_id!r}"
        check_request(request, vocab_size=features.vocab_size, max_context=features.context_length)
        check_new(request, self._in_flight, self._adapters.paths)
        if request.prompt_targets is not None or request.prompt_draws:
            raise RequestRefused(
                f"{where} has prompt_targets or prompt_draws; only an embedded engine has them"
            )
        entry = self._in_flight[request.request_id] = _InFlight(request)
        try:
            with entry.scope:
                while self._paused and not entry.aborted:
                    await self._changed.park()
                if not entry.aborted:
                    entry.asked, server = True, self.dialect.server
                    answer = await ask_watched(
                        lambda: self._ask(request, entry.server_id),
                        partial(self._works, trio.current_time()),
                        silence_s=server.silence_s,
                        where=where,
                        way_out=SILENT,
                    )
                    server.cold = False
                    return answer
        finally:
            del self._in_flight[request.request_id]
            entry.done.set()
        self._check_open()
        return make_empty_completion(request)

    async def _ask(self, request: GenerateRequest, server_id: str) -> Completion:
        """The server's answer, which is given the adapter first, or again, if it was started again since."""
        name, named = request.adapter, self.dialect.named
        used = named.get(name)
        try:
            if used or not name:
                return await self.dialect.ask(request, server_id)
        except EngineError as error:
            if not used or not LOST.search(str(error)):
                raise
        async with self._adapters.changing:
            if named.get(name) == used:  # else another request was here before
                await self._send_adapter(name)
        return await self.dialect.ask(request, server_id)

    async def _works(self, sent_at: float) -> bool:
        """Whether the server did any work since it was last asked; asked once for all who wait. A frozen
        server need not, nor one that may still get ready for its first answer.
        """
        now, (asked_s, before), server = trio.current_time(), self._work, self.dialect.server
        if self._frozen or now - asked_s < server.silence_s / 2 or now - sent_at < server.cold * START_S:
            return True
        server.cold = False
        self._work = (now, None)  # whoever comes while we ask waits another round
        try:
            work = await self.dialect.read_work()
        except InfrastructureError as error:
            raise EngineSilent(
                f"{self.features.name} is silent and does not say how far it is: {error}{SILENT}"
            ) from error
        self._work = (now, work)
        return before is None or work != before

    async def abort_all(self) -> None:
        """Answers everyone: who waits at the gate with nothing, who is at the server with what it has.

        A server that does not answer within abort_grace_s loses the connection, and the tokens. Nobody is in
        flight any more even if it raises, which it does if the server failed at the last abort call.
        """
        self._check_open()
        for entry in self._in_flight.values():
            entry.aborted = True
        self._changed.unpark_all()
        failure, sent = None, self._sent()
        with trio.move_on_after(self.dialect.abort_grace_s):
            while left := [entry.server_id for entry in sent if not entry.done.is_set()]:
                try:
                    await self.dialect.abort(left)
                    failure = None
                except EngineError as error:
                    failure = error
                with trio.move_on_after(ABORT_AGAIN_S):
                    await _wait_done(sent)
        for entry in sent:
            entry.scope.cancel()
        await _wait_done(sent)
        if failure:
            raise failure

    # --- flow

    async def pause(self, mode: PauseMode) -> None:
        """Closes the gate here, then stops the server. Returns when nothing is generated any more. If it
        fails, the gate is as it was. With an adapter "keep" is "abort": no request outlives a change of it.
        """
        self._check_open()
        if mode == "keep" and not self.features.keep_pause:
            raise EngineError(f'{self.features.name} cannot freeze requests; pause("wait") or pause("abort")')
        paused, frozen = self._paused, self._frozen
        self._set_gate(True, mode != "wait")
        try:
            if mode == "wait":  # a server's own "wait" keeps what it has queued
                if paused:
                    await self.dialect.tell("thaw")  # what an earlier pause froze has to finish
                await _wait_done(self._sent())
            elif mode == "abort" or self.dialect.adapter:  # frozen, SGLang's lose their tokens
                await self.abort_all()
            await self.dialect.tell("freeze")
        except BaseException:
            self._set_gate(paused, frozen)
            raise
        self._frozen = True

    async def resume(self) -> None:
        """Requests in flight go on and waiting ones are sent. The gate opens even if that fails: behind a
        gate that nobody opens again, requests would wait for ever, while the server answers them, or fails
        to, within silence_s.
        """
        try:
            await self.dialect.tell("thaw")
        finally:
            self._set_gate(False, False)

    def _set_gate(self, paused: bool, frozen: bool) -> None:
        self._paused, self._frozen = paused, frozen
        self._work = (-math.inf, None)  # what stood still while it was paused may begin anew
        self._changed.unpark_all()

    def _sent(self) -> list[_InFlight]:
        return [entry for entry in self._in_flight.values() if entry.asked]

    # --- weights

    async def weight_version(self) -> int:
        """The version whose weights it serves; −1 while it serves weights that were never named."""
        self._check_open()
        return parse_version(await self.dialect.read_version_name())

    async def checksum(self) -> str | None:
        """A fingerprint of all weights, in the server's own names and shapes; None with an adapter."""
        self._check_open()
        return None if self.dialect.adapter else await self.dialect.checksum()

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Fields:
        """Loads a directory of safetensors, which the server must see under the same path, as `version`.
        Pause first, in any mode; requests frozen by pause("keep") go on with the new weights.

        A directory with PEFT's adapter_config.json is an adapter, upon the whole weights that the server has.
        Whatever is in flight when one comes or goes is answered with what it has: it would go on with the
        adapter that it began with, or with none, under the name of the new version.

        Raises EngineError, with nothing sent, for a directory that is damaged or of another model (loading a
        cut file, a server would end), and if the server fails; WeightVersionError if the server names another
        version afterwards; EngineSetupError for a server that came back with settings that would falsify
        training.
        """
        self._check_open()
        if not self.features.update_from_checkpoint:
            self._refuse_update()
        path, dialect = path.absolute(), self.dialect
        adapted = is_adapter(path)
        if adapted:
            self._check_takes(path)
        if adapted or dialect.adapter:
            if not self._paused:
                raise EngineError(f"{self.features.name} generates; call pause() before its adapter changes")
            await self.abort_all()
        if adapted:  # one that is damaged harms no server: it is read before anything is changed
            await dialect.load_adapter(path, version)
        else:
            try:
                shapes = await trio.to_thread.run_sync(read_tensor_shapes, path)
                if dialect.shapes is not None:
                    check_same_model(shapes, dialect.shapes, path=path)
            except ModelError as error:
                raise EngineError(f"{self.features.name} was sent nothing: {error}") from error
            await dialect.load_weights(path, version)
        return {"version": version}

    def _refuse_update(self, *args: object, **options: object) -> NoReturn:
        way_out = "update it from a checkpoint, or by weight_sync.broadcast"
        if not self.features.update_from_checkpoint:
            way_out = "train with engine.kind local, vllm or sglang"
        raise EngineError(f"{self.features.name} takes no such update; {way_out}")

    begin_update = receive_bucket = finish_update = _refuse_update

    # --- adapters by name

    async def add_adapter(self, name: str, adapter: Path) -> None:
        """From now on requests may name the LoRA adapter in a directory of PEFT, which the server must see
        under the same path. Its tokens bear the engine's version.

        A server that cannot be reached gets it with the first request that names it, and so does one that was
        started again. Raises EngineError for a name that is taken, and in the words of a server that refuses.
        """
        self._check_open()
        self._check_takes(adapter)
        async with self._adapters.adding(name, adapter):
            with suppress(EngineUnreachable, EngineSilent):
                await self._send_adapter(name)

    async def _send_adapter(self, name: str) -> None:
        server_name = make_adapter_name("named")
        await self.dialect.send_adapter(server_name, self._adapters.paths[name])
        self.dialect.named[name] = server_name

    async def remove_adapter(self, name: str) -> None:
        """Requests may not name it any more. Raises EngineError while one in flight does."""
        async with self._adapters.removing(name, (entry.request for entry in self._in_flight.values())):
            if server_name := self.dialect.named.pop(name, ""):
                await self.dialect.drop_adapter(server_name)

    def _check_takes(self, adapter: Path) -> None:
        if not self.features.max_adapter_rank:
            raise EngineError(
                f"{self.features.name} cannot load the adapter {adapter}."
                f" {' '.join(gap for gap in self.features.gaps if 'adapter' in gap)}"
            )

    # --- the rest

    async def health(self) -> bool:
        return not self._closed and await self.dialect.server.health()

    async def release_memory(self) -> None:
        """Gives memory back. Raises EngineError where the server cannot, and unless it is paused and idle."""
        if not self.features.frees_memory:
            raise EngineError(
                f"{self.features.name} keeps its memory."
                f" {' '.join(gap for gap in self.features.gaps if 'emory' in gap)}"
            )
        if not self._paused or self._sent():
            raise EngineError(f"{self.features.name} has requests, or takes some; pause('wait') it first")
        await self.dialect.tell("release")
        self._released = True

    async def restore_memory(self) -> None:
        """Weights and an empty cache are there again; the engine is as paused as it was."""
        if self._released:
            await self.dialect.tell("restore")
            if self._paused:
                await self.dialect.tell("freeze")  # vLLM's waking up resumes its scheduler
            self._released = False

    def statistics(self) -> Mapping[str, int]:
        sent = len(self._sent())
        return {"running": sent, "waiting": len(self._in_flight) - sent}

    # --- life

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"{self.features.name} is closed; use it inside its `async with`")

    def close(self) -> None:
        """Whoever waits, and every later call, gets EngineClosed."""
        self._closed = True
        for entry in self._in_flight.values():
            entry.scope.cancel()


async def _wait_done(entries: Sequence[_InFlight]) -> None:
    for entry in entries:
        await entry.done.wait()


# --- opening ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_server_engine(
    shake_hands: Callable[[Server, int, int | None], Awaitable[Dialect]],
    kind: str,
    health_path: str,
    url: str,
    *,
    vocab_size: int,
    context_length: int | None = None,
    name: str = "",
    api_key: str | None = None,
    silence_s: float = 60.0,
    transport: Transport | None = None,
) -> AsyncIterator[ServerEngine]:
    """The engine of the server behind `url`, as `shake_hands` describes it, until the block ends.

    vocab_size: the trainer's; ids outside it are refused both ways. context_length: at least this many tokens
    must fit; None: what the server has. name: what errors and metrics call it; "kind-host:port" unless given.
    api_key: what the server was started with. silence_s: without an answer and without progress, an answer is
    given up. transport: how requests travel; None: over the network. Raises what `shake_hands` raises, and
    EngineSetupError for a url or a key that cannot be used.
    """
    async with open_http_client(url, api_key=api_key, transport=transport) as client:
        name = name or f"{kind}-{client.headers['host']}"
        server = Server(client, name, silence_s, health_path)
        engine = ServerEngine(await shake_hands(server, vocab_size, context_length))
        try:
            yield engine
        finally:
            engine.close()
