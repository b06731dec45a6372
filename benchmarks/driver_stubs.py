"""What benchmarks.driver_scale puts around the driver: engines that only wait, and clocks on the logger and
the garbage collector.
"""

import gc
import json
import time
import types
import zlib
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks.stub_engine import IdleEngine
from rollouts.metrics.spans import Span
from rollouts.metrics.token_shards import UpdateRecord
from rollouts.metrics.writer import JsonlLogger
from rollouts.types import Completion, GenerateRequest, Sample, SamplingParams
from tests.support.fake_tokenizer import FakeTokenizer

TOKEN_S = 0.03  # virtual
ENGINES, GROUP = 8, 8
SHORTEST, LONGEST = 300, 1000  # tokens of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one run is of."""

    in_flight: int  # samples
    group: int = GROUP
    engines: int = ENGINES
    staleness: int = 0
    shortest: int = SHORTEST
    longest: int = LONGEST


class Answers:
    """Lengths and content of answers, the same for a request whoever asks it. Views of one pool: making an
    answer copies nothing.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        draw = np.random.default_rng(0)
        self._lengths = draw.integers(shortest, longest + 1, 1 << 16)
        self._tokens = draw.integers(97, 123, longest)  # letters
        self._log_probs = -draw.random(longest, dtype=np.float32)

    def length(self, request_id: str) -> int:
        return int(self._lengths[zlib.crc32(request_id.partition("@")[0].encode()) & 0xFFFF])

    def complete(self, request: GenerateRequest, count: int, version: int, *, stopped: bool) -> Completion:
        return Completion(
            request_id=request.request_id,
            token_ids=self._tokens[:count],
            log_probs=self._log_probs[:count],
            weight_versions=np.full(count, version),
            finish_reason="stop" if stopped else "abort",
        )


class StubEngine(IdleEngine):
    """Answers every request at once beside all others, each token TOKEN_S after the one before."""

    def __init__(self, name: str, answers: Answers) -> None:
        super().__init__(name, context_length=1 << 20)
        self.answered = 0  # requests that came to their end
        self._answers = answers
        self._aborts: set[trio.CancelScope] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        _, *done = request.request_id.split("@")
        left = max(1, self._answers.length(request.request_id) - sum(map(int, done)))
        began = trio.current_time()
        with trio.CancelScope() as scope:
            self._aborts.add(scope)
            try:
                await trio.sleep(left * TOKEN_S)
            finally:
                self._aborts.discard(scope)
        self.answered += not scope.cancelled_caught
        count = min(left, int((trio.current_time() - began) / TOKEN_S + 1e-6))
        return self._answers.complete(request, count, self.version, stopped=not scope.cancelled_caught)

    async def abort_all(self) -> None:
        for scope in self._aborts:
            scope.cancel()
        await trio.lowlevel.checkpoint()


def make_engines(shape: Shape) -> list[StubEngine]:
    answers = Answers(shape.shortest, shape.longest)
    return [StubEngine(f"stub-{index}", answers) for index in range(shape.engines)]


async def call_stubs(shape: Shape, count: int) -> None:
    """`count` requests, in_flight of them at once, straight to the stubs."""
    engines = make_engines(shape)
    numbers = iter(range(count))
    prompt = np.arange(32)
    sampling = SamplingParams(max_new_tokens=2 * shape.longest)

    async def worker() -> None:
        for number in numbers:
            request = GenerateRequest(request_id=f"g{number:08d}", prompt_ids=prompt, sampling=sampling)
            await engines[number % len(engines)].generate(request)

    async with trio.open_nursery() as nursery:
        for _ in range(shape.in_flight):
            nursery.start_soon(worker)


class LetterTokenizer(FakeTokenizer):
    """A letter a token: responses are text of a real length, and decoding costs next to nothing, as a real
    tokenizer's would not.
    """

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("ascii")


class TimedLogger:
    """A MetricsLogger that counts the CPU time of another, without that of tasks that run while it waits."""

    def __init__(self, logger: JsonlLogger) -> None:
        self._logger = logger
        self.cpu_s = 0.0

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Mapping[str, float],
        *,
        updates: Sequence[UpdateRecord] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        await self._time(
            self._logger.log_step(stage, step, policy_version, metrics, updates=updates, spans=spans)
        )

    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None:
        await self._time(self._logger.log_samples(stage, step, policy_version, samples))

    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]
    ) -> None:
        await self._time(self._logger.log_evaluation(stage, step, policy_version, name, metrics))

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        await self._time(self._logger.log_spans(stage, step, policy_version, spans))

    @types.coroutine
    def _time(self, call: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        answer = None
        while True:
            began = time.process_time()
            try:
                request = call.send(answer)
            except StopIteration:
                return
            finally:
                self.cpu_s += time.process_time() - began
            answer = yield request


@dataclass(slots=True)
class CollectorWatch:
    """What the garbage collector took."""

    cpu_s: float = 0.0
    began: float = 0.0

    def note(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self.began = time.process_time()
        else:
            self.cpu_s += time.process_time() - self.began


@contextmanager
def watch_collector() -> Iterator[CollectorWatch]:
    watch = CollectorWatch()
    gc.callbacks.append(watch.note)
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch.note)


def write_whole_records(path: Path, samples: Sequence[Sample]) -> None:
    """The peer: a record with all that is known of a rollout, dumped and flushed one by one."""
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            record = {
                "id": sample.id,
                "prompt": sample.prompt,
                "response": sample.response,
                "tokens": sample.tokens.tolist(),
                "loss_mask": sample.loss_mask.tolist(),
                "log_probs": sample.rollout_log_probs.tolist(),
                "weight_versions": sample.weight_versions.tolist(),
                "reward": sample.reward,
                "rewards": dict(sample.rewards),
                "group_index": sample.group_index,
                "status": sample.status.value,
                "metadata": dict(sample.metadata),
            }
            file.write(json.dumps(record) + "\n")
            file.flush()
