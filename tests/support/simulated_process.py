"""The process of an inference server, without the process: slots, a rate, pauses, versions, weights, and the
faults of a plan.

    answer() ──► queue ──► slot ──► one token per token_s ──► Answer
                   │ opens when not paused     │ frozen while paused "keep" or hung
                   └ abort: nothing            └ abort: what it has      crash: ConnectionLost, everywhere

FaultyEngine (in virtual time, no socket) and the fault server (HTTP) both stand on it, so that a fault looks
the same from both. Every call below is one call to the server: it raises ConnectionLost where a client's
connection breaks, BadAnswer where a client reads a status that is no success, and waits where a client would.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import trio

from rollouts.engines.wire import VersionSpan
from rollouts.protocols import PauseMode
from rollouts.testing.fakes import fake_uniform
from rollouts.types import EngineLoad, FinishReason, FloatArray, GenerateRequest, IntArray
from tests.support.fault_plan import (
    NO_FAULTS,
    BadReply,
    BadStatus,
    Crash,
    CutBody,
    Fault,
    FaultPlan,
    Hang,
    Slow,
    StaleWeights,
    UpdateFails,
    UpdatePhase,
    WrongVersion,
)

BASE_WEIGHTS = "base"
BASE_VERSION = "default"  # what both servers call weights that nobody has named

ReadWeights = Callable[[Path], str]
"""What the weights in a snapshot directory are, in one word: equal for equal weights. Raises
BadAnswer(400) if there are none.
"""
WriteTokens = Callable[[GenerateRequest], Sequence[int]]
"""All that a server would sample for a request, its stop token included; max_new_tokens cuts it."""


class ConnectionLost(Exception):
    """Nobody is at the other end: the process has crashed, or is not started."""


class BadAnswer(Exception):
    """The server answers with a status that is no success."""

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpeed:
    """How long things take, in seconds."""

    slots: int = 8  # requests decoded at a time
    token_s: float = 0.01
    first_token_s: float = 0.0  # before the first token, in the slot
    control_s: float = 0.0  # any call but generate and load
    load_s: float = 0.0  # a load of weights
    start_s: float = 0.0  # from restart() to serving


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says of one request, spoiled if the plan says so."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    spans: tuple[VersionSpan, ...] | None  # None: left out
    finish: FinishReason
    spoil: BadReply | None = None  # already in the fields, or for spoil_body()
    cut_at: int | None = None  # bytes of the body that arrive
    prompt_log_probs: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerateRequest
    server_id: str
    go: trio.Event = field(default_factory=trio.Event)  # it has a slot
    stop: trio.Event = field(default_factory=trio.Event)  # aborted, or the process is gone
    lost: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


class SimulatedProcess:
    """One server. Made by open_simulated_process; changes with every call, and with its plan."""

    def __init__(
        self,
        name: str,
        plan: FaultPlan,
        nursery: trio.Nursery,
        *,
        speed: ServerSpeed,
        vocab_size: int,
        context_length: int,
        write_tokens: WriteTokens,
        read_weights: ReadWeights,
        base_weights: str,
    ) -> None:
        self.name = name
        self.speed = speed
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._write_tokens = write_tokens
        self._read_weights = read_weights
        self._base_weights = base_weights
        self._nursery = nursery
        self._pending = [
            fault for fault in plan.of_engine(name) if fault.at_s is None
        ]  # those with a time have tasks
        self.struck: list[Fault] = []  # faults that have happened, in order
        self.requests: list[GenerateRequest] = []  # every request that came, in order
        self.loads = 0  # of weights, begun
        self.prompt_tokens = 0  # of all requests
        self.tokens = 0  # decoded, ever
        self.incarnation = 0
        self._up = False
        self._exit_reason = ""
        self._exited = trio.Event()
        self._gone = trio.Event()  # for calls that wait in a process that dies
        self._started = trio.Event()
        self._start()

    def _start(self) -> None:
        self._up = True
        self._exited, self._gone = trio.Event(), trio.Event()
        self._started.set()
        self.weights = self._base_weights
        self.version_name = BASE_VERSION
        self.paused: PauseMode | None = None
        self.aborts_frozen = True  # False: what pause("keep") froze outlives an abort
        self._hung_until: float | None = None  # None: it answers
        self._slow: tuple[float, float] = (1.0, -math.inf)  # factor, until
        self._running: dict[str, _Running] = {}
        self._queue: deque[_Running] = deque()
        self._changed = trio.Event()
        self._bad_statuses: deque[BadStatus] = deque()
        self._loaded = False  # since the last resume
        self._probe_comes = False  # resumed after a load: the next request is the probe

    # --- life -----------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether there is a process. One that hangs is there."""
        return self._up

    @property
    def hung(self) -> bool:
        return self._hung_until is not None

    def crash(self, reason: str = "killed by signal 9") -> None:
        """Ends the process now: whoever waits for an answer gets ConnectionLost."""
        if not self._up:
            return
        self._up = False
        self._exit_reason = f"{self.name}: {reason}"
        self.incarnation += 1
        self._started = trio.Event()
        for running in self._running.values():
            running.lost = True
            running.stop.set()
            running.go.set()
        self._gone.set()
        self._exited.set()
        self._notify()

    async def wait_exited(self) -> str:
        """Why, when the process has ended; at once while there is none."""
        await self._exited.wait()
        return self._exit_reason

    async def wait_started(self) -> None:
        """Returns when there is a process; at once if there is one."""
        await self._started.wait()

    async def restart(self) -> None:
        """Ends the process if there is one and starts another, which serves after speed.start_s: base
        weights, version "default".
        """
        self.crash("ended to be started again")
        incarnation = self.incarnation
        await trio.sleep(self.speed.start_s)
        if self.incarnation == incarnation and not self._up:
            self._start()

    def hang(self, for_s: float = math.inf) -> None:
        """From now on calls are accepted and not answered, and nothing is decoded."""
        self._hung_until = trio.current_time() + for_s
        if for_s < math.inf:
            self._nursery.start_soon(self._end_hang, self._hung_until, self.incarnation)

    async def _end_hang(self, until: float, incarnation: int) -> None:
        await trio.sleep_until(until)
        if self.incarnation == incarnation and self._hung_until == until:
            self._hung_until = None
            self._admit()
            self._notify()

    async def _restart_later(self, after_s: float) -> None:
        incarnation = self.incarnation
        await trio.sleep(after_s)
        if self.incarnation == incarnation and not self._up:
            await self.restart()

    def add_fault(self, fault: Fault) -> None:
        """One more thing that goes wrong, at a request or an update; one whose moment is past strikes at the
        next.
        """
        assert fault.engine == self.name and fault.at_s is None, fault
        self._pending.append(fault)

    async def strike_later(self, fault: Fault) -> None:
        """What the process does about a fault that has a time."""
        assert fault.at_s is not None
        await trio.sleep(fault.at_s)
        if self._up:
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        """A fault of the whole process happens."""
        self.struck.append(fault)
        match fault.what:
            case Crash(restart_after_s=after_s):
                self.crash()
                if after_s is not None:
                    self._nursery.start_soon(self._restart_later, after_s)
            case Hang(for_s=for_s):
                self.hang(for_s)
            case Slow(factor=factor, for_s=for_s):
                self._slow = (factor, trio.current_time() + for_s)
            case BadStatus() as status:
                self._bad_statuses.extend([status] * status.count)

    def _take(self, fault: Fault) -> None:
        """A fault that waited for an update happens."""
        self._pending.remove(fault)
        self.struck.append(fault)

    # --- requests -------------------------------------------------------------------------------------------

    async def answer(self, request: GenerateRequest, server_id: str) -> Answer:
        """What the server says. Cancelling is what a closed connection is: the request ends there. Raises
        ConnectionLost, BadAnswer.
        """
        await self._enter()
        fault = self._next_request_fault(len(self.requests))
        self.requests.append(request)
        self.prompt_tokens += len(request.prompt_ids)
        try:
            return await self._answer(request, server_id, fault)
        finally:
            if fault is not None and not any(fault is struck for struck in self.struck):
                self._pending.insert(0, fault)  # the request ended before it could: the next one is struck

    async def _answer(self, request: GenerateRequest, server_id: str, fault: Fault | None) -> Answer:
        await self._check_probe()
        if fault is not None and isinstance(fault.what, Slow | BadStatus | Hang):
            await self._strike_request(fault)
        if self._bad_statuses:
            status = self._bad_statuses.popleft()
            raise BadAnswer(status.status, "the plan says so", retry_after_s=status.retry_after_s)
        self._check_request(request, server_id)
        running = self._running[server_id] = _Running(request, server_id)
        self._queue.append(running)
        self._admit()
        self._notify()
        try:
            return await self._decode(running, fault)
        finally:
            if (
                self._running.get(server_id) is running
            ):  # else the process has crashed, and this is another one
                del self._running[server_id]
                if running in self._queue:
                    self._queue.remove(running)
                self._admit()
                self._notify()

    async def _strike_request(self, fault: Fault) -> None:
        if isinstance(fault.what, Hang) and fault.what.only_this_request:
            self.struck.append(fault)
            await self._never()
        self._strike(fault)
        await self._while_hung()

    def _next_request_fault(self, index: int) -> Fault | None:
        due = [fault for fault in self._pending if fault.at_request is not None and fault.at_request <= index]
        if not due:
            return None
        self._pending.remove(due[0])
        return due[0]

    async def _check_probe(self) -> None:
        if not self._probe_comes:
            return
        self._probe_comes = False
        await self._fail_phase("probe", self.loads - 1)

    def _check_request(self, request: GenerateRequest, server_id: str) -> None:
        total = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not len(request.prompt_ids) or total > self.context_length:
            raise BadAnswer(400, f"{total} tokens for a context of {self.context_length}")
        if server_id in self._running:
            raise BadAnswer(400, f"Duplicate request ID detected: {server_id}")

    async def _decode(self, running: _Running, fault: Fault | None) -> Answer:
        await running.go.wait()
        await self._spend(running, self.speed.first_token_s)
        limit = running.request.sampling.max_new_tokens
        planned = self._write_tokens(running.request) if not running.stop.is_set() else ()
        crash = fault if fault is not None and isinstance(fault.what, Crash) else None
        for token in planned[:limit]:
            await self._spend(running, self.speed.token_s)
            if (
                crash is not None
                and isinstance(crash.what, Crash)
                and len(running.token_ids) >= crash.what.after_tokens
            ):
                self._strike(crash)
            if running.stop.is_set():
                break
            self._take_token(running, token)
        if crash is not None and not running.lost:
            self._strike(crash)
        if running.lost:
            raise ConnectionLost(self._exit_reason)
        finish: FinishReason = (
            "abort" if running.stop.is_set() else "length" if len(planned) > limit else "stop"
        )
        if finish == "stop" and (not planned or planned[-1] not in running.request.sampling.stop_token_ids):
            finish = "length"
        scored = compute_log_probs(self.weights, running.request.prompt_ids)
        answer = Answer(
            tuple(running.token_ids),
            tuple(running.log_probs),
            find_spans(running.versions),
            finish,
            prompt_log_probs=tuple(scored.tolist()),
        )
        return answer if fault is None else self._spoil(answer, fault, limit=limit)

    async def _spend(self, running: _Running, seconds: float) -> None:
        """Lets a step of decoding pass, however long it takes; returns early if the request is to end."""
        factor, until = self._slow
        with trio.move_on_after(seconds * (factor if trio.current_time() < until else 1.0)):
            await running.stop.wait()
        while (self.paused == "keep" or self.hung) and not running.stop.is_set():
            await self._changed.wait()

    def _take_token(self, running: _Running, token: int) -> None:
        position = len(running.request.prompt_ids) + len(running.token_ids)
        running.token_ids.append(token)
        running.log_probs.append(
            weights_log_prob(self.weights, position, token, running.request.sampling.temperature)
        )
        running.versions.append(self.version_name)
        self.tokens += 1
        self._notify()

    def _spoil(self, answer: Answer, fault: Fault, *, limit: int) -> Answer:
        if isinstance(fault.what, CutBody):
            self.struck.append(fault)
            return replace(answer, cut_at=fault.what.at_byte)
        if (
            isinstance(fault.what, BadReply) and answer.token_ids
        ):  # an abort that has nothing gives nothing to spoil
            self.struck.append(fault)
            return spoil_answer(answer, fault.what, vocab_size=self.vocab_size, limit=limit)
        return answer

    def _admit(self) -> None:
        if self.paused is not None or self.hung:
            return
        busy = sum(running.go.is_set() for running in self._running.values())
        while self._queue and busy < self.speed.slots:
            self._queue.popleft().go.set()
            busy += 1

    # --- control --------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """abort: answers all with what they have; wait: returns when what is in a slot is done; keep: freezes
        at once.
        """
        await self._enter(self.speed.control_s)
        await self._fail_phase("pause", self.loads)
        self.paused = mode
        if mode == "abort":
            self._stop(list(self._running))
        if mode != "keep":
            await self.wait_until(lambda: not any(running.go.is_set() for running in self._running.values()))

    async def resume(self) -> None:
        await self._enter(self.speed.control_s)
        if self._loaded:
            await self._fail_phase("resume", self.loads - 1)
            self._loaded, self._probe_comes = False, True
        self.paused = None
        self._admit()
        self._notify()

    async def load_weights(self, path: Path) -> None:
        """Serves what read_weights() finds at `path`, under the old version. Raises BadAnswer(400) if there
        is nothing.
        """
        await self._enter()
        index = self.loads
        self.loads += 1
        self._loaded = True
        await self._fail_phase("load", index)
        weights = self._read_weights(path)
        stale = False
        for fault in self._due_at_update(index, (StaleWeights, Crash, Hang)):
            if isinstance(fault.what, StaleWeights):
                stale = True
                self._take(fault)
            else:
                self._pending.remove(fault)
                self._strike(fault)
                await self._while_hung()
        await self._sleep(self.speed.load_s)
        if not stale:
            self.weights = weights

    async def set_version(self, version_name: str) -> None:
        """Names the weights; tokens from now on carry the name."""
        await self._enter(self.speed.control_s)
        await self._fail_phase("set_version", self.loads - 1)
        due = self._due_at_update(self.loads - 1, (WrongVersion,)) if version_name.isdecimal() else []
        for fault in due:
            self._take(fault)
            if isinstance(fault.what, WrongVersion):
                version_name = str(max(int(version_name) + fault.what.shift, 0))
        self.version_name = version_name

    async def read_version(self) -> str:
        await self._enter(self.speed.control_s)
        return self.version_name

    async def checksum(self) -> str:
        await self._enter(self.speed.control_s)
        return hashlib.sha256(self.weights.encode()).hexdigest()

    async def load(self) -> EngineLoad:
        """Requests in slots and requests that wait for one."""
        await self._enter(self.speed.control_s)
        running = len(self._running) - len(self._queue)
        return EngineLoad(
            running=running, waiting=len(self._queue), cache_usage=min(1.0, running / self.speed.slots)
        )

    async def read_tokens(self) -> int:
        """Tokens decoded since the process began: a counter that stands still when nothing moves."""
        await self._enter(self.speed.control_s)
        return self.tokens

    async def health(self) -> None:
        await self._enter(self.speed.control_s)

    async def abort(self, server_ids: Sequence[str] | None = None, *, prefixes: bool = False) -> None:
        """Answers these requests, or all, with what they have. With `prefixes`, every request whose id begins
        with one of them.
        """
        await self._enter(self.speed.control_s)
        names = list(self._running)
        if server_ids is not None and prefixes:
            names = [
                name for name in names if any(name.startswith(prefix) for prefix in server_ids if prefix)
            ]
        elif server_ids is not None:
            names = [name for name in names if name in server_ids]
        if self.paused == "keep" and not self.aborts_frozen:
            names = [name for name in names if not self._running[name].go.is_set()]
        self._stop(names)

    async def wait_idle(self) -> None:
        """Returns when no request is in flight."""
        await self.wait_until(lambda: not self._running)

    @property
    def in_flight(self) -> int:
        """Requests that have no answer yet."""
        return len(self._running)

    def _stop(self, names: Sequence[str]) -> None:
        for name in names:
            running = self._running[name]
            running.stop.set()
            if running in self._queue:
                self._queue.remove(running)
            running.go.set()
        self._notify()

    # --- waiting and failing --------------------------------------------------------------------------------

    async def _enter(self, seconds: float = 0.0) -> None:
        """The way in of every call."""
        if not self._up:
            await trio.lowlevel.checkpoint()
            raise ConnectionLost(self._exit_reason)
        await self._sleep(seconds)
        await self._while_hung()

    async def _sleep(self, seconds: float) -> None:
        gone = self._gone
        with trio.move_on_after(seconds):
            await gone.wait()
        await trio.lowlevel.checkpoint()
        if gone.is_set():
            raise ConnectionLost(self._exit_reason)

    async def _while_hung(self) -> None:
        gone = self._gone
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.hung and not gone.is_set():
            await self._changed.wait()
        if gone.is_set():
            raise ConnectionLost(self._exit_reason)

    async def _never(self) -> None:
        await self._gone.wait()
        raise ConnectionLost(self._exit_reason)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition()` holds; it is asked after every request that comes or goes, and every
        token. Raises ConnectionLost.
        """
        gone = self._gone
        await trio.lowlevel.checkpoint()
        while not gone.is_set() and not condition():
            await self._changed.wait()
        if gone.is_set():
            raise ConnectionLost(self._exit_reason)

    async def _fail_phase(self, phase: UpdatePhase, index: int) -> None:
        """Does what the plan says of this phase of the index-th update."""
        for fault in self._due_at_update(index, (UpdateFails,)):
            if not isinstance(fault.what, UpdateFails) or fault.what.phase != phase:
                continue
            self._take(fault)
            if fault.what.count > 1:
                self._pending.insert(0, replace(fault, what=replace(fault.what, count=fault.what.count - 1)))
            if fault.what.how == "crash":
                self.crash(f"killed by signal 9 in the phase {phase} of update {index}")
                raise ConnectionLost(self._exit_reason)
            if fault.what.how == "error":
                raise BadAnswer(500, f"the plan fails the phase {phase} of update {index}")
            self.hang()
            await self._while_hung()

    def _due_at_update(self, index: int, kinds: tuple[type, ...]) -> list[Fault]:
        return [
            fault
            for fault in self._pending
            if fault.at_update is not None and fault.at_update <= index and isinstance(fault.what, kinds)
        ]

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


@asynccontextmanager
async def open_simulated_process(
    name: str,
    plan: FaultPlan = NO_FAULTS,
    *,
    speed: ServerSpeed | None = None,
    vocab_size: int = 258,
    context_length: int = 4096,
    write_tokens: WriteTokens | None = None,
    read_weights: ReadWeights | None = None,
    base_weights: str = BASE_WEIGHTS,
) -> AsyncIterator[SimulatedProcess]:
    """A server that serves `base_weights`, version "default", and suffers the faults of `plan` that bear its
    name.

    `write_tokens` decides what is sampled (default: draw_tokens), `read_weights` what a path holds (default:
    read_snapshot).
    """
    async with open_timers() as nursery:
        process = SimulatedProcess(
            name,
            plan,
            nursery,
            speed=speed or ServerSpeed(),
            vocab_size=vocab_size,
            context_length=context_length,
            write_tokens=write_tokens or (lambda request: draw_tokens(request, vocab_size)),
            read_weights=read_weights or read_snapshot,
            base_weights=base_weights,
        )
        for fault in plan.of_engine(name):
            if fault.at_s is not None:
                nursery.start_soon(process.strike_later, fault)
        try:
            yield process
        finally:
            process.crash("ended: its context was left")


@asynccontextmanager
async def open_timers() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that end with the context and raise nothing; what the body raises comes out as it
    is, not in a group.
    """
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__


# --- what is said -------------------------------------------------------------------------------------------


def weights_log_prob(weights: str, position: int, token_id: int, temperature: float = 1.0) -> float:
    """A number between −2 and 0, times the temperature (0 counts as 1), that depends on all four and nothing
    else, rounded to float32.

    `position` counts from the first prompt token. A trainer that knows the weights and the tokens can say it
    too, so a probe shows whether an engine serves other weights than it should.
    """
    return float(np.float32(-2.0 * fake_uniform(weights, position, token_id) * (temperature or 1.0)))


def compute_log_probs(weights: str, tokens: IntArray, temperature: float = 1.0) -> FloatArray:
    """[T] weights_log_prob of every token of a sequence, the first included."""
    return np.asarray(
        [
            weights_log_prob(weights, position, int(token), temperature)
            for position, token in enumerate(tokens)
        ],
        np.float32,
    )


def draw_tokens(request: GenerateRequest, vocab_size: int) -> tuple[int, ...]:
    """Ids that depend on the sampling seed, or on the prompt where there is none or the temperature is 0; not
    on the weights.

    With a stop token, 1 to max_new_tokens ids of which the last is the stop token, or one id too many: it is
    cut then.
    """
    sampling = request.sampling
    key = (
        sampling.seed
        if sampling.seed is not None and sampling.temperature > 0
        else tuple(request.prompt_ids.tolist())
    )
    if not sampling.stop_token_ids:
        return tuple(_draw_id(key, position, vocab_size) for position in range(sampling.max_new_tokens))
    count = int(fake_uniform(key, "count") * (sampling.max_new_tokens + 1))
    return (*(_draw_id(key, position, vocab_size) for position in range(count)), sampling.stop_token_ids[0])


def _draw_id(key: object, position: int, vocab_size: int) -> int:
    return int(fake_uniform(key, position) * vocab_size)


def find_spans(versions: Sequence[str]) -> tuple[VersionSpan, ...]:
    """The runs of equal versions, as spans over the tokens."""
    spans: list[VersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(VersionSpan(version, index, index + 1))
    return tuple(spans)


def spoil_answer(answer: Answer, spoil: BadReply, *, vocab_size: int, limit: int) -> Answer:
    """The answer as a server that is broken in this way gives it. One without tokens keeps the fields where a
    token would be spoiled.
    """
    ids, log_probs = list(answer.token_ids), list(answer.log_probs)
    spans, finish = answer.spans or (), answer.finish
    count = len(ids)
    at = min(spoil.token, count - 1)
    bad_values: Mapping[str, float | None] = {
        "log_prob_nan": math.nan,
        "log_prob_null": None,
        "log_prob_infinite": -math.inf,
        "log_prob_positive": 0.5,
    }
    if count and spoil.kind in bad_values:
        log_probs[at] = bad_values[spoil.kind]
    elif count and spoil.kind == "id_too_large":
        ids[at] = vocab_size
    elif count and spoil.kind == "id_negative":
        ids[at] = -1
    elif count and spoil.kind == "log_probs_short":
        log_probs.pop()
    elif spoil.kind == "log_probs_long":
        log_probs.append(-1.0)
    elif spoil.kind == "no_tokens":
        ids, log_probs, spans, finish = [], [], (), "stop"
    elif spoil.kind == "too_many_tokens":
        more = limit + 1 - count
        ids, log_probs = ids + [1] * more, log_probs + [-1.0] * more
        spans = (VersionSpan(spans[-1].version if spans else BASE_VERSION, 0, limit + 1),)
    elif spoil.kind.startswith("spans"):
        spans = _spoil_spans(spoil.kind, answer)
    return replace(
        answer, token_ids=tuple(ids), log_probs=tuple(log_probs), spans=spans, finish=finish, spoil=spoil
    )


def _spoil_spans(kind: str, answer: Answer) -> tuple[VersionSpan, ...] | None:
    count = len(answer.token_ids)
    spans = answer.spans or ()
    last = spans[-1].version if spans else BASE_VERSION
    if kind == "spans_missing":
        return None
    if kind == "spans_short":
        return (VersionSpan(last, 0, count - 1),) if count else (VersionSpan(last, 0, 1),)
    if kind == "spans_gap":
        return (VersionSpan(last, 1, count + 1),)
    if kind == "spans_overlap":
        return (VersionSpan(last, 0, count), VersionSpan(last, max(count - 1, 0), count + 1))
    return (
        VersionSpan("9", 0, max(count - 1, 1)),
        VersionSpan("8", max(count - 1, 1), max(count, 2)),
    )  # falling


def spoil_body(body: bytes, answer: Answer) -> bytes:
    """The bytes of an answer as they leave the server; what is cut off is cut by the connection, see
    count_arriving().
    """
    kind = answer.spoil.kind if answer.spoil is not None else ""
    if kind == "malformed_json":
        return body[:-1] + b","
    if kind == "wrong_type":
        return b'["' + b"x" * 20 + b'"]'
    return body


def count_arriving(body: bytes, answer: Answer) -> int:
    """Bytes of the body that arrive before the connection closes; all of them if it is not cut."""
    return len(body) if answer.cut_at is None else min(answer.cut_at, len(body) - 1)


def read_snapshot(path: Path) -> str:
    """What a snapshot directory holds: the hash of its manifest, or of its safetensors files if it has none.
    Reads no tensor.
    """
    manifest = path / "manifest.json"
    files = [manifest] if manifest.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise BadAnswer(400, f"{path} holds neither manifest.json nor *.safetensors")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
