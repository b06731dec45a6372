"""An InferenceEngine in virtual time whose server suffers a fault plan: no socket, no disk, and the client
code that real engines run.

    generate() ──► EngineServer (gate, in flight, silence, abort) ──► _ProcessClient ──► SimulatedProcess
                   the same as in the engine of a server         raises what the HTTP client raises

Answers travel as bytes, spoiled where the plan says so, and become completions, or ReplyErrors, in
rollouts.engines.wire.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import trio

from rollouts.engines.http import HttpClient, HttpReply
from rollouts.engines.server import EngineServer
from rollouts.engines.wire import VersionSpan, make_completion, parse_version, show
from rollouts.errors import EngineError, EngineSilent, EngineUnreachable, ReplyError
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, FinishReason, GenerateRequest
from tests.support.fault_plan import NO_FAULTS, FaultPlan
from tests.support.simulated_process import (
    BASE_WEIGHTS,
    Answer,
    BadAnswer,
    ConnectionLost,
    ReadWeights,
    ServerSpeed,
    SimulatedProcess,
    WriteTokens,
    count_arriving,
    open_simulated_process,
    open_timers,
    spoil_body,
)


class _Reply(msgspec.Struct, frozen=True):
    token_ids: list[int]
    log_probs: list[float]
    spans: list[VersionSpan]
    finish: FinishReason
    prompt_log_probs: tuple[float, ...] = ()


@asynccontextmanager
async def open_faulty_engine(
    name: str = "faulty",
    plan: FaultPlan = NO_FAULTS,
    *,
    silence_s: float = 60.0,
    speed: ServerSpeed | None = None,
    vocab_size: int = 258,
    context_length: int = 4096,
    write_tokens: WriteTokens | None = None,
    read_weights: ReadWeights | None = None,
    base_weights: str = BASE_WEIGHTS,
) -> AsyncIterator[FaultyEngine]:
    """An engine over a server of its own, which serves `base_weights` under no version and suffers what
    `plan` has for `name`.

    `silence_s`: virtual seconds without an answer and without progress after which EngineSilent is raised.
    For the rest see open_simulated_process. Leaving ends the server; later calls raise EngineClosed.
    """
    opened = open_simulated_process(
        name,
        plan,
        speed=speed,
        vocab_size=vocab_size,
        context_length=context_length,
        write_tokens=write_tokens,
        read_weights=read_weights,
        base_weights=base_weights,
    )
    async with opened as process:
        engine = FaultyEngine(process, silence_s=silence_s)
        try:
            yield engine
        finally:
            engine.close()


class FaultyEngine:
    """An InferenceEngine. `restart` and `wait_exited` are what a fleet's Member takes. Made by
    open_faulty_engine.
    """

    def __init__(self, process: SimulatedProcess, *, silence_s: float) -> None:
        self.process = process
        self._server = EngineServer(
            cast(HttpClient, _ProcessClient(process)), name=process.name, silence_s=silence_s
        )
        self._features = EngineFeatures(
            vocab_size=process.vocab_size,
            context_length=process.context_length,
            in_memory_update=False,
            update_from_checkpoint=True,
            shares_weights=False,
            keep_pause=True,
            deterministic=False,
            name=process.name,
            checksum=True,
            gaps=("It takes weights from a snapshot only, not in memory.",),
        )

    @property
    def features(self) -> EngineFeatures:
        return self._features

    # --- InferenceEngine ------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._server.run(request, self._features, self._ask)

    async def _ask(self, request: GenerateRequest, server_id: str) -> Completion:
        client = cast(_ProcessClient, self._server.client)
        client.requests[server_id] = request
        try:
            body = await self._server.call_generate(f"/generate/{server_id}", None, self._read_progress)
        finally:
            del client.requests[server_id]
        where = f"{self.process.name}: POST /generate"
        reply = _decode(body, where=where)
        return make_completion(
            request,
            reply.token_ids,
            reply.log_probs,
            reply.spans,
            reply.finish,
            vocab_size=self._features.vocab_size,
            where=where,
            prompt_log_probs=reply.prompt_log_probs,
        )

    async def _read_progress(self) -> Hashable:
        return await self._server.call("GET", "/tokens")

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        """Loads and names. Raises RequestRefused when there is nothing at `path`, InfrastructureError; the
        version is then the old one.
        """
        await self._server.call("POST", "/load", str(path))
        await self._server.call("POST", "/version", str(version))
        return {"version": version}

    async def weight_version(self) -> int:
        return parse_version(msgspec.json.decode(await self._server.call("GET", "/version"), type=str))

    async def checksum(self) -> str | None:
        return msgspec.json.decode(await self._server.call("GET", "/checksum"), type=str)

    async def pause(self, mode: PauseMode) -> None:
        """If it fails, the engine is as open as before."""
        self._server.check_open()
        was_paused = self._server.paused
        self._server.close_gate(frozen=mode == "keep")
        try:
            await self._server.call("POST", "/pause", mode)
        except BaseException:
            if not was_paused:
                self._server.open_gate()
            raise
        self._server.close_gate()

    async def resume(self) -> None:
        await self._server.call("POST", "/resume")
        self._server.open_gate()

    async def abort_all(self) -> None:
        self._server.check_open()
        await self._server.abort(self._send_abort)

    async def _send_abort(self, server_ids: list[str]) -> None:
        await self._server.call("POST", "/abort", server_ids)

    async def health(self) -> bool:
        try:
            await self._server.call("GET", "/health")
        except EngineError:
            return False
        return True

    async def load(self) -> EngineLoad:
        return msgspec.json.decode(await self._server.call("GET", "/load"), type=EngineLoad)

    async def release_memory(self) -> None:
        """Frees nothing: there is nothing."""
        await self._server.call("GET", "/health")

    async def restore_memory(self) -> None:
        await self._server.call("GET", "/health")

    async def begin_update(self) -> None:
        await trio.lowlevel.checkpoint()
        self._refuse_memory()

    def receive_bucket(self, bucket: Sequence[tuple[str, Any]]) -> None:
        self._refuse_memory()

    async def finish_update(self, version: int) -> None:
        await trio.lowlevel.checkpoint()
        self._refuse_memory()

    def _refuse_memory(self) -> NoReturn:
        raise EngineError(
            f"{self.process.name} takes weights from a snapshot only; call update_weights_from_checkpoint"
        )

    def statistics(self) -> Mapping[str, float]:
        return self._server.statistics() | {
            "tokens": float(self.process.tokens),
            "faults": float(len(self.process.struck)),
        }

    def close(self) -> None:
        """Every request in flight and every later call raises EngineClosed."""
        self._server.close()

    # --- what a fleet's Member takes, and a test ------------------------------------------------------------

    async def restart(self) -> None:
        """Another process in place of this one, after speed.start_s: base weights, no version, not paused."""
        await self.process.restart()

    async def wait_exited(self) -> str:
        """Why the process ended, when it has; at once while there is none."""
        return await self.process.wait_exited()

    def crash(self, reason: str = "killed by signal 9") -> None:
        """Ends the process now."""
        self.process.crash(reason)

    @property
    def in_flight(self) -> int:
        """Requests that the server has not answered."""
        return self.process.in_flight


class _ProcessClient:
    """The part of HttpClient that EngineServer uses, over a process that is no process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._calls = 0  # that wait for an answer
        self._made = 0  # ever
        self.requests: dict[
            str, GenerateRequest
        ] = {}  # by server id; in place of the bodies of generate calls

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        silence_s: float = 60.0,
        on_silence: Callable[[], Awaitable[bool]] | None = None,
    ) -> HttpReply:
        """Raises EngineUnreachable, EngineSilent, ReplyError."""
        where = f"{method} {self._process.name}{path}"
        answered = trio.Event()
        replies: list[HttpReply | Exception] = []

        async def ask() -> None:
            try:
                replies.append(await self._answer(method, path, body))
            except (ConnectionLost, ReplyError) as error:
                replies.append(error)
            answered.set()

        self._calls += 1
        self._made += 1
        try:
            async with open_timers() as nursery:
                nursery.start_soon(ask)
                await _wait_answered(answered, silence_s=silence_s, on_silence=on_silence, where=where)
        finally:
            self._calls -= 1
        (reply,) = replies
        if isinstance(reply, ConnectionLost):
            raise EngineUnreachable(f"{where}: the connection broke: {reply}") from reply
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _answer(self, method: str, path: str, body: bytes | None) -> HttpReply:
        server_id = path.rpartition("/")[2]
        try:
            if server_id in self.requests:
                return self._send(await self._process.answer(self.requests[server_id], server_id), where=path)
            return HttpReply(
                200,
                {},
                msgspec.json.encode(
                    await self._control(method, path, None if body is None else msgspec.json.decode(body))
                ),
            )
        except BadAnswer as answer:
            headers = {} if answer.retry_after_s is None else {"retry-after": str(answer.retry_after_s)}
            return HttpReply(answer.status, headers, str(answer).encode())

    def _send(self, answer: Answer, *, where: str) -> HttpReply:
        record = {
            "token_ids": answer.token_ids,
            "log_probs": answer.log_probs,
            "finish": answer.finish,
            "prompt_log_probs": answer.prompt_log_probs,
        }
        if answer.spans is not None:
            record["spans"] = [msgspec.structs.asdict(span) for span in answer.spans]
        body = spoil_body(json.dumps(record).encode(), answer)
        arriving = count_arriving(body, answer)
        if arriving < len(body):
            raise ReplyError(f"{where}: the answer is cut after {arriving} of {len(body)} bytes")
        return HttpReply(200, {}, body)

    async def _control(self, method: str, path: str, value: Any) -> object:
        process = self._process
        match method, path:
            case "POST", "/load":
                return await process.load_weights(Path(value))
            case "POST", "/version":
                return await process.set_version(value)
            case "POST", "/pause":
                return await process.pause(value)
            case "POST", "/resume":
                return await process.resume()
            case "POST", "/abort":
                return await process.abort(value)
            case "GET", "/version":
                return await process.read_version()
            case "GET", "/checksum":
                return await process.checksum()
            case "GET", "/load":
                return await process.load()
            case "GET", "/tokens":
                return await process.read_tokens()
        assert (method, path) == ("GET", "/health"), (method, path)
        return await process.health()

    def statistics(self) -> dict[str, float]:
        return {"connections": float(self._calls), "idle": 0.0, "opened": float(self._made)}


async def _wait_answered(
    answered: trio.Event, *, silence_s: float, on_silence: Callable[[], Awaitable[bool]] | None, where: str
) -> None:
    """Raises EngineSilent after `silence_s`, unless on_silence() says to wait as long again."""
    while not answered.is_set():
        with trio.move_on_after(silence_s):
            await answered.wait()
        if not answered.is_set() and (on_silence is None or not await on_silence()):
            raise EngineSilent(f"{where}: nothing came for {silence_s:g} s")


def _decode(body: bytes, *, where: str) -> _Reply:
    """Python's own parser reads it, for it takes the NaN that some servers write; make_completion is to see
    it.
    """
    try:
        return msgspec.convert(json.loads(body), _Reply)
    except (ValueError, msgspec.ValidationError) as error:
        raise ReplyError(f"{where} answered {show(body)}: {error}") from error
