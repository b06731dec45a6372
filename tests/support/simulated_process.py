"""The process of an inference server, without the process: slots, a rate, pauses, versions, weights, and the
faults of a plan.

    answer() ──► queue ──► slot ──► one token per token_s ──► Answer
                   │ opens when not paused     │ frozen while paused "keep" or hung
                   └ abort: nothing            └ abort: what it has      crash: ConnectionLost, everywhere

fault_server.py puts vLLM's and SGLang's HTTP around it. Every call below is one call to the server: it raises
ConnectionLost where a client's connection breaks, BadAnswer where a client reads a status that is no success,
and waits where a client would.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import trio

from rollouts.engines.wire import VersionSpan
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import PauseMode
from rollouts.testing.fakes import fake_uniform
from rollouts.types import FinishReason
from tests.support.fault_plan import (
    BadReply,
    BadStatus,
    Crash,
    CutBody,
    Fault,
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


class ConnectionLost(Exception):
    """Nobody is at the other end: the process has crashed, or is not started."""


class BadAnswer(Exception):
    """The server answers with a status that is no success."""

    def __init__(self, status, message, *, retry_after_s=None):
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpeed:
    """How long things take, in seconds."""

    slots: int = 8  # requests decoded at a time
    token_s: float = 0.01
    control_s: float = 0.0  # any call but generate and load
    load_s: float = 0.0  # a load of weights
    start_s: float = 0.0  # from restart() to serving


@dataclass(slots=True, eq=False)
class Answer:
    """What a server says of one request."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] | None = field(default_factory=list)  # None: left out
    finish: FinishReason = "abort"
    prompt_log_probs: list[float] = field(default_factory=list)
    cut_at: int | None = None  # bytes of the body that arrive
    replaced_by: bytes | None = None  # what is sent instead


@dataclass(slots=True, eq=False)
class _Running:
    has_slot: bool = False
    stop: trio.Event = field(default_factory=trio.Event)  # aborted, or the process is gone
    lost: bool = False  # what it has so far


class SimulatedProcess:
    """One server. Made by open_simulated_process; changes with every call, and with its plan."""

    def __init__(
        self,
        name,
        plan,
        nursery,
        *,
        speed=None,
        vocab_size=258,
        context_length=4096,
        read_weights=None,
    ):
        self.name, self.speed = name, speed or ServerSpeed()
        self.vocab_size, self.context_length = vocab_size, context_length
        self.pending = [fault for fault in plan if fault.engine == name]
        self.struck: list[Fault] = []  # faults that have happened, in order
        self.requests = self.loads = self.tokens = self.prompt_tokens = 0  # ever
        self.incarnation = 0
        self.running: dict[str, _Running] = {}  # in order of arrival
        self._read_weights = read_weights or read_snapshot
        self._nursery = nursery
        self._changed = trio.Event()
        self._start()

    def _start(self):
        self.up = True
        self.weights, self.version_name = BASE_WEIGHTS, BASE_VERSION
        self.adapters: dict[str, str] = {}  # by name what they make of the model, in order of their loading
        self.paused: PauseMode | None = None
        self._hung_until = self._slow_until = -math.inf
        self._slow_factor = 1.0
        self._update: Literal["none", "loaded", "resumed"] = "none"  # a resume, a probe come next
        self._refused: list[UpdatePhase] = []  # calls that fail too, if they come next
        self.notify()

    # --- life

    def crash(self):
        """Ends the process now: whoever waits for an answer gets ConnectionLost."""
        self.up = False
        self.incarnation += 1
        for running in self.running.values():
            running.stop.set()
        self.running = {}
        self.notify()

    async def wait_exited(self):
        """Why, when the process has ended; at once while there is none."""
        while self.up:
            await self._changed.wait()
        return f"{self.name}: killed by signal 9"

    async def restart(self, after_s=0.0):
        """Another process, which serves after `after_s` and speed.start_s: base weights, not named."""
        if self.up:
            self.crash()
        incarnation = self.incarnation
        await trio.sleep(after_s + self.speed.start_s)
        if self.incarnation == incarnation and not self.up:
            self._start()

    @property
    def waiting(self):
        """Requests without a slot, in order of arrival."""
        return [one for one in self.running.values() if not one.has_slot]

    @property
    def hung(self):
        return trio.current_time() < self._hung_until

    def strike(self, fault):
        """A fault of the whole process happens, or is noted as having happened."""
        self.struck.append(fault)
        if fault in self.pending:
            self.pending.remove(fault)
        match fault.what:
            case Crash(restart_after_s=after_s):
                self.crash()
                if after_s is not None:
                    self._nursery.start_soon(self.restart, after_s)
            case Hang(for_s=for_s):
                self.hang(for_s)
            case Slow(factor=factor, for_s=for_s):
                self._slow_factor, self._slow_until = factor, trio.current_time() + for_s

    def hang(self, for_s=math.inf):
        """From now on calls are accepted and not answered, and nothing is decoded."""
        self._hung_until = trio.current_time() + for_s
        if for_s < math.inf:
            self._nursery.start_soon(self._wake_at, self._hung_until)

    async def _wake_at(self, when):
        await trio.sleep_until(when)
        self.notify()

    async def strike_later(self, fault, at_s):
        await trio.sleep(at_s)
        if self.up:
            self.strike(fault)

    def _take(self, moment, index, *kinds):
        """The fault that is due and of one of these kinds, which strikes; None if there is none."""
        for fault in self.pending:
            at = getattr(fault, moment)
            if at is not None and at <= index and isinstance(fault.what, kinds):
                self.strike(fault)
                return fault.what
        return None

    # --- requests

    async def answer(self, request, server_id, *, adapter=None):
        """What the server says, with an adapter that it has if one is named. Cancelling is what a closed
        connection is: the request ends there. Raises ConnectionLost, BadAnswer.
        """
        await self.enter()
        index = self.requests
        self.requests += 1
        self.prompt_tokens += len(request.prompt_ids)
        if self._update == "resumed":
            self._update = "none"
            await self._fail_phase("probe", self.loads - 1)
        status = self._take("at_request", index, BadStatus, Slow, Hang)
        if isinstance(status, BadStatus):
            raise BadAnswer(status.status, "the plan says so", retry_after_s=status.retry_after_s)
        await self.enter()
        total = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not len(request.prompt_ids) or total > self.context_length or server_id in self.running:
            raise BadAnswer(400, f"{total} tokens for {self.context_length}, or a duplicate id {server_id}")
        running = self.running[server_id] = _Running()
        try:
            answer = await self._decode(request, running, index, adapter and self.adapters[adapter])
        finally:
            if self.running.get(server_id) is running:  # else the process has crashed
                del self.running[server_id]
                self.notify()
        return answer

    async def _decode(self, request, running, index, adapter):
        answer = Answer()
        await self.wait_until(lambda: running.stop.is_set() or self._may_run(running))
        running.has_slot = True
        self.notify()
        versions = []
        limit, stops = request.sampling.max_new_tokens, request.sampling.stop_token_ids
        planned = draw_tokens(request, self.vocab_size)
        for token in planned[:limit]:
            slow = self._slow_factor if trio.current_time() < self._slow_until else 1.0
            with trio.move_on_after(self.speed.token_s * slow):
                await running.stop.wait()
            await self.wait_until(lambda: running.stop.is_set() or not (self.paused == "keep" or self.hung))
            if self._take("at_request", index, Crash):
                raise ConnectionLost
            if running.stop.is_set():
                if running.lost:
                    answer, versions = Answer(), []
                break
            position = len(request.prompt_ids) + len(versions)
            answer.ids.append(token)
            answer.log_probs.append(
                weights_log_prob(adapter or self.weights, position, token, request.sampling.temperature)
            )
            versions.append(self.version_name)
            self.tokens += 1
            self.notify()
        else:
            answer.finish = "stop" if len(planned) <= limit and planned[-1] in stops else "length"
        answer.spans = find_spans(versions)
        answer.prompt_log_probs = compute_log_probs(adapter or self.weights, request.prompt_ids).tolist()
        if answer.ids:  # an abort that has nothing gives nothing to spoil
            match self._take("at_request", index, CutBody, BadReply):
                case CutBody(at_byte=at_byte):
                    answer.cut_at = at_byte
                case BadReply(kind=kind):
                    spoil_answer(answer, kind, self.vocab_size, limit)
        return answer

    def _may_run(self, running):
        if self.paused is not None or self.hung:
            return False
        return self.waiting[0] is running and len(self.running) - len(self.waiting) < self.speed.slots

    # --- control

    async def pause(self, mode):
        """abort: answers all with what they have; wait: returns when what is in a slot is done; keep: freezes
        at once.
        """
        await self.enter(self.speed.control_s)
        await self._fail_phase("pause", self.loads)
        self.paused = mode
        if mode == "abort":
            await self.abort(list(self.running))
        if mode != "keep":
            await self.wait_until(lambda: len(self.waiting) == len(self.running))

    async def resume(self):
        await self.enter(self.speed.control_s)
        if self._update == "loaded":
            await self._fail_phase("resume", self.loads - 1)
            self._update = "resumed"
        self.paused = None
        self.notify()

    async def load_weights(self, path):
        """Serves what read_weights() finds at `path`, under the old version. Raises BadAnswer(400) if there
        is nothing.
        """
        self.weights = await self._read(path) or self.weights

    async def load_adapter(self, name, path):
        """As load_weights, upon the weights, for requests that name it. Stale: it is what the last one is."""
        if name in self.adapters:
            raise BadAnswer(400, f"{name} is already loaded")
        last = next(reversed(self.adapters.values()), self.weights)
        self.adapters[name] = await self._read(path) or last

    async def _read(self, path):
        await self.enter()
        index = self.loads
        self.loads += 1
        self._update = "loaded"
        await self._fail_phase("load", index)
        weights = self._read_weights(path)
        await self.enter(self.speed.load_s)
        return None if self._take("at_update", index, StaleWeights) else weights

    async def set_version(self, name):
        """Names the weights; tokens from now on carry the name."""
        await self.enter(self.speed.control_s)
        if name.isdecimal():
            await self._fail_phase("set_version", self.loads - 1)
            wrong = self._take("at_update", self.loads - 1, WrongVersion)
            name = name if wrong is None else str(max(int(name) + wrong.shift, 0))
        self.version_name = name

    async def checksum(self):
        await self.enter(self.speed.control_s)
        return hashlib.sha256(self.weights.encode()).hexdigest()

    async def abort(self, server_ids, *, lost=False):
        """Answers these requests with what they have, or with nothing; SGLang aborts every id that begins
        with one of them.
        """
        await self.enter(self.speed.control_s)
        for name, running in self.running.items():
            if name.startswith(tuple(server_ids)):
                running.lost = lost
                running.stop.set()
        self.notify()

    async def _fail_phase(self, phase, index):
        """Does what the plan says of this phase of the index-th update."""
        refused, self._refused = self._refused, []
        if phase in refused:
            self._refused = refused[1:]
            raise BadAnswer(500, f"the phase {phase} fails again")
        for fault in [*self.pending]:
            what, at = fault.what, fault.at_update
            if at is None or at > index or not isinstance(what, UpdateFails) or what.phase != phase:
                continue
            self.strike(fault)
            if what.how == "error":
                self._refused = [phase] * 2
                raise BadAnswer(500, f"the plan fails the phase {phase} of update {index}")
            self.crash()
            raise ConnectionLost

    # --- waiting

    def notify(self):
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def enter(self, seconds=0.0):
        """The way in of every call."""
        with trio.move_on_after(seconds):
            await self.wait_until(lambda: False)
        await self.wait_until(lambda: not self.hung)

    async def wait_until(self, condition):
        """Returns when `condition()` holds. Raises ConnectionLost."""
        incarnation = self.incarnation
        await trio.lowlevel.checkpoint()
        while self.up and self.incarnation == incarnation:
            if condition():
                return
            await self._changed.wait()
        raise ConnectionLost


@asynccontextmanager
async def open_simulated_process(name="a", plan=(), **options):
    """A server that serves BASE_WEIGHTS, version "default", and suffers the faults of `plan` that bear its
    name. The options are those of SimulatedProcess; its `read_weights` says what a path holds (default:
    read_snapshot).
    """
    async with open_plain_nursery() as nursery:
        process = SimulatedProcess(name, plan, nursery, **options)
        for fault in process.pending:
            if fault.at_s is not None:
                nursery.start_soon(process.strike_later, fault, fault.at_s)
        try:
            yield process
        finally:
            process.crash()


# --- what is said


def weights_log_prob(weights, position, token_id, temperature=1.0):
    """A number between −2 and 0, times the temperature (0 counts as 1), that depends on all four and nothing
    else, rounded to float32.

    `position` counts from the first prompt token. A trainer that knows the weights and the tokens can say it
    too, so a probe shows whether an engine serves other weights than it should.
    """
    return float(np.float32(-2.0 * fake_uniform(weights, position, token_id) * (temperature or 1.0)))


def compute_log_probs(weights, tokens):
    """[T] weights_log_prob of every token of a sequence at temperature 1, the first included."""
    values = [weights_log_prob(weights, position, int(token)) for position, token in enumerate(tokens)]
    return np.asarray(values, np.float32)


def draw_tokens(request, vocab_size):
    """Ids that depend on the sampling seed, or on the prompt where there is none or the temperature is 0; not
    on the weights. With a stop token, 1 to max_new_tokens + 1 ids of which the last is the stop token.
    """
    sampling = request.sampling
    greedy = sampling.seed is None or sampling.temperature == 0
    key = tuple(request.prompt_ids.tolist()) if greedy else sampling.seed
    count = sampling.max_new_tokens
    if sampling.stop_token_ids:
        count = int(fake_uniform(key, "count") * (count + 1))
    ids = [int(fake_uniform(key, position) * vocab_size) for position in range(count)]
    return ids + list(sampling.stop_token_ids[:1])


def find_spans(versions):
    """The runs of equal versions, as spans over the tokens."""
    starts = [at for at in range(len(versions)) if not at or versions[at] != versions[at - 1]]
    ends = [*starts[1:], len(versions)]
    return [VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=False)]


def spoil_answer(answer, kind, vocab_size, limit):
    """The answer, which has tokens, as a server that is broken in this way gives it."""
    count = len(answer.ids)
    match kind:
        case "log_prob_nan" | "log_prob_positive":
            answer.log_probs[-1] = math.nan if kind == "log_prob_nan" else 0.5
        case "id_too_large":
            answer.ids[-1] = vocab_size
        case "log_probs_short":
            answer.log_probs.pop()
        case "no_tokens":
            answer.ids, answer.log_probs, answer.spans, answer.finish = [], [], [], "stop"
        case "too_many_tokens":
            answer.ids, answer.log_probs = [1] * (limit + 1), [-1.0] * (limit + 1)
            answer.spans = find_spans([BASE_VERSION] * (limit + 1))
        case "malformed_json":
            answer.replaced_by = b'{"request_id": 1,'
        case "wrong_type":
            answer.replaced_by = b'["what?"]'
        case "spans_missing":
            answer.spans = None
        case "spans_short":
            answer.spans = find_spans(["7"] * (count - 1))
        case "spans_falling":
            answer.ids, answer.log_probs = answer.ids[:1] * 2, answer.log_probs[:1] * 2
            answer.spans = find_spans(["9", "8"])


def read_snapshot(path):
    """What a snapshot directory holds: the hash of its manifest, or of its safetensors files if it has none.
    Reads no tensor.
    """
    manifest = path / "manifest.json"
    files = [manifest] if manifest.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise BadAnswer(400, f"{path} holds neither manifest.json nor *.safetensors")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
