"""The long tail of response lengths: slots kept busy by the rollout manager, compared with a barrier and with
the ideal. Virtual time.

    python -m benchmarks.rollout_tail [--batches 100] [--sigmas 0.5 0.8 1.0] [--slots-per-engine 32] [--quick]

8 stub engines decode one token per slot and step of 20 ms; what they have no slot for waits in order. P = 32
groups of 8 samples make a batch, lengths are lognormal with a mean of 400 tokens, a filter drops 30 % of the
groups by their index. The manager runs as it does in training, with a new version after every batch and
max_staleness so large that nothing must be waited for; training itself takes no time. The barrier launches P
groups on the same slots and waits for all of them, again and again (what TRL does). The ideal keeps all slots
decoding and delivers every token that the filter lets through.

    efficiency     tokens of delivered samples / (slots * makespan)
    of ideal       efficiency / (1 - share of the drawn tokens that the filter drops)
    length         mean length of delivered samples / mean length of all that were launched and pass the
                   filter, also those that still run
    waste          tokens decoded that are neither delivered, nor of a filtered group, nor held for the next
                   batch / tokens decoded
    end            tokens held at the end / tokens decoded: the run stops there, so efficiency lacks them

Prefill is free in this model, also that of a sample that goes on. The last part sends the same load through
the fleet while 1 % of the requests break in the middle: `fault_loss` is the throughput lost. Targets, for
every sigma: of_ideal >= 0.92, times_barrier >= 2.5 (sigma 0.8 and more), bias (how far the mean length is
from that of all) <= 0.02, waste <= 0.03; fault_loss <= 0.03.
"""

import argparse
import heapq
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio
import trio.testing

from benchmarks.harness import finish, make_parser
from benchmarks.stub_engine import IdleEngine
from rollouts.config.rollout import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.engines.fleet import Member, open_fleet
from rollouts.errors import EngineUnreachable
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.protocols import InferenceEngine
from rollouts.testing.fakes import fake_uniform
from rollouts.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Sample,
    SampleGroup,
    SamplingParams,
)
from tests.support.fake_tokenizer import FakeTokenizer

ENGINES = 8
NUM_PROMPTS = 32
SAMPLES_PER_PROMPT = 8
OVER_SAMPLING = 1.05  # a few requests wait at the engines, so that a slot that becomes free has work at once
MEAN_TOKENS = 400
MAX_NEW_TOKENS = 40 * MEAN_TOKENS
FILTER_RATE = 0.3
MAX_STALENESS = 64
TOKEN_S = 0.02
FAULT_RATE = 0.01
TARGETS = {"of_ideal": ">= 0.92", "times_barrier": ">= 2.5", "bias": "<= 0.02", "waste": "<= 0.03"}
BARRIER_SIGMA = 0.8  # below it the lengths differ too little for a barrier to cost as much


class SilentTokenizer(FakeTokenizer):
    """Response texts are not looked at."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return ""


class Lengths:
    """Lognormal lengths [tokens] with mean MEAN_TOKENS, cut at MAX_NEW_TOKENS; drawn by group, so that they
    depend on nothing else.
    """

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._of_group: dict[int, np.ndarray] = {}

    def of_group(self, group_index: int) -> np.ndarray:
        if group_index not in self._of_group:
            draw = np.random.default_rng([group_index, round(1000 * self._sigma)])
            lengths = draw.lognormal(
                math.log(MEAN_TOKENS) - self._sigma**2 / 2, self._sigma, SAMPLES_PER_PROMPT
            )
            self._of_group[group_index] = np.clip(np.ceil(lengths), 1, MAX_NEW_TOKENS).astype(int)
        return self._of_group[group_index]

    def of_sample(self, sample_id: str) -> int:
        return int(self.of_group(int(sample_id[1:9]))[int(sample_id[11:14])])


def is_filtered(group_index: int) -> bool:
    return fake_uniform("filter", group_index) < FILTER_RATE


# --- the stub -----------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Running:
    started: trio.Event = field(default_factory=trio.Event)
    aborted: trio.Event = field(default_factory=trio.Event)


class SlotEngine(IdleEngine):
    """`slots` requests decode side by side, each a token every TOKEN_S; the others wait in order of
    arrival.
    """

    def __init__(self, name: str, slots: int, lengths: Lengths, *, fault_rate: float = 0.0) -> None:
        super().__init__(name, context_length=10 * MAX_NEW_TOKENS)
        self.slots = slots
        self.decoded = 0  # tokens
        self.requests = 0
        self._lengths = lengths
        self._fault_rate = fault_rate
        self._phase_s = TOKEN_S * fake_uniform("phase", name)
        self._running: set[_Running] = set()
        self._waiting: deque[_Running] = deque()
        self._decoding = 0

    @property
    def outstanding(self) -> int:
        return len(self._running)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests += 1
        sample_id, *done = request.request_id.split("@")
        left = self._lengths.of_sample(sample_id) - sum(map(int, done))
        is_broken = fake_uniform("fault", self.features.name, self.requests) < self._fault_rate
        running = _Running()
        self._running.add(running)
        try:
            count = await self._decode(running, left // 2 if is_broken else left)
        finally:
            self._running.discard(running)
        if is_broken and not running.aborted.is_set():
            raise EngineUnreachable(f"{self.features.name}: the connection broke")
        return _complete(request, count, self.version, "stop" if count == left else "abort")

    async def _decode(self, running: _Running, limit: int) -> int:
        """Tokens decoded, at most `limit`."""
        if self._decoding >= self.slots:
            self._waiting.append(running)
            try:
                await running.started.wait()
            except trio.Cancelled:
                self._leave(running)
                raise
            if running.aborted.is_set():
                return 0
        else:
            self._decoding += 1
        began, count = self._next_step_at(), 0
        try:
            with trio.move_on_at(began + limit * TOKEN_S) as scope:
                await running.aborted.wait()
            count = (
                limit
                if scope.cancelled_caught
                else max(0, min(limit, int((trio.current_time() - began) / TOKEN_S + 1e-6)))
            )
        finally:
            steps = math.ceil(
                (trio.current_time() - began) / TOKEN_S - 1e-6
            )  # the one that an abort cuts short included
            self.decoded += max(0, min(limit, steps))
            self._free_slot()
        return count

    def _next_step_at(self) -> float:
        """When the engine's next step begins: a request joins between steps, and the steps of two engines
        don't coincide.
        """
        return math.ceil((trio.current_time() - self._phase_s) / TOKEN_S - 1e-6) * TOKEN_S + self._phase_s

    def _leave(self, running: _Running) -> None:
        if running in self._waiting:
            self._waiting.remove(running)
        elif not running.aborted.is_set():
            self._free_slot()

    def _free_slot(self) -> None:
        if self._waiting:
            self._waiting.popleft().started.set()
        else:
            self._decoding -= 1

    async def abort_all(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for running in self._running:
            running.aborted.set()
        for running in waiting:
            running.started.set()
        await trio.lowlevel.checkpoint()


class LeastOutstanding(SlotEngine):
    """The engines as one, without the fleet: each request goes to the one with the fewest."""

    def __init__(self, engines: Sequence[SlotEngine]) -> None:
        super().__init__("all", 0, engines[0]._lengths)
        self._engines = engines

    async def generate(self, request: GenerateRequest) -> Completion:
        return await min(self._engines, key=lambda engine: engine.outstanding).generate(request)

    async def abort_all(self) -> None:
        for engine in self._engines:
            await engine.abort_all()

    async def weight_version(self) -> int:
        return await self._engines[0].weight_version()


def _complete(request: GenerateRequest, count: int, version: int, finish: FinishReason) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=np.zeros(count, np.int64),
        log_probs=np.zeros(count, np.float32),
        weight_versions=np.full(count, version),
        finish_reason=finish,
    )


# --- one run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of one run."""

    efficiency: float
    of_ideal: float
    length: float
    waste: float
    end: float
    lag_mean: float
    lag_max: int
    stale: float  # groups
    makespan_s: float  # virtual
    cpu_s: float


async def run_manager(
    sigma: float, *, slots: int, batches: int, through_fleet: bool, fault_rate: float
) -> Run:
    cpu = time.process_time()
    lengths, version = Lengths(sigma), [0]
    engines = [SlotEngine(f"stub-{index}", slots, lengths, fault_rate=fault_rate) for index in range(ENGINES)]
    async with AsyncExitStack() as stack:
        front: InferenceEngine = LeastOutstanding(engines)
        fleet: Any = None
        if through_fleet:
            members = [Member(engine=engine) for engine in engines]
            fleet = front = await stack.enter_async_context(open_fleet(members, warn=lambda text: None))

        def publish() -> None:
            for engine in engines:
                engine.version = version[0]
                if fleet is not None:
                    fleet.close_admission(engine)
                    fleet.commit(engine, version[0])
            if fleet is not None:
                fleet.publish(version[0])

        manager = make_manager(front, version)
        publish()
        delivered: list[int] = []
        lags: list[int] = []
        for _ in range(batches):
            batch = await manager.generate_batch()
            for sample in batch.samples:
                delivered.append(sample.response_length)
                lags.append(version[0] - (sample.oldest_version or 0))
            version[0] += 1
            publish()
        return summarise(
            manager, engines, lengths, delivered, lags, slots=slots, cpu_s=time.process_time() - cpu
        )


def make_manager(engine: InferenceEngine, version: list[int]) -> AsyncRolloutManager:
    async def reward(sample: Sample) -> float:
        return 1.0

    async def keep(group: SampleGroup) -> bool:
        return not is_filtered(group.group_index)

    return AsyncRolloutManager(
        DataBuffer([{"prompt": f"p{index}"} for index in range(4096)], seed=0),
        engine,
        generate=make_chat_generate(SilentTokenizer()),
        config=RolloutConfig(
            num_prompts=NUM_PROMPTS, samples_per_prompt=SAMPLES_PER_PROMPT, over_sampling=OVER_SAMPLING
        ),
        reward=reward,
        filters=[keep],
        sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
        seed=0,
        policy_version=lambda: version[0],
        max_staleness=MAX_STALENESS,
    )


def summarise(
    manager: AsyncRolloutManager,
    engines: Sequence[SlotEngine],
    lengths: Lengths,
    delivered: list[int],
    lags: list[int],
    *,
    slots: int,
    cpu_s: float,
) -> Run:
    state, statistics = manager.state_dict(), manager.statistics()
    held_groups = {group["group_index"] for group in [*state["held"], *state["unfinished"]]}
    held = sum(
        sum(sample["loss_mask"])
        for group in [*state["held"], *state["unfinished"]]
        for member in group["members"]
        for sample in member["segments"] or [member["partial"]]
        if sample is not None
    )
    launched = range(state["next_group_index"])
    filtered = sum(
        int(lengths.of_group(index).sum())
        for index in launched
        if is_filtered(index) and index not in held_groups
    )
    drawn = sum(int(lengths.of_group(index).sum()) for index in launched)
    drawn_filtered = sum(int(lengths.of_group(index).sum()) for index in launched if is_filtered(index))
    passing = np.concatenate([lengths.of_group(index) for index in launched if not is_filtered(index)])
    decoded = sum(engine.decoded for engine in engines)
    efficiency = sum(delivered) * TOKEN_S / (slots * ENGINES * trio.current_time())
    return Run(
        efficiency=efficiency,
        of_ideal=efficiency / (1 - drawn_filtered / drawn),
        length=float(np.mean(delivered) / passing.mean()),
        waste=(decoded - sum(delivered) - filtered - held) / decoded,
        end=held / decoded,
        lag_mean=float(np.mean(lags)),
        lag_max=max(lags),
        stale=statistics.get("dropped/stale", 0.0),
        makespan_s=trio.current_time(),
        cpu_s=cpu_s,
    )


def run_barrier(sigma: float, *, slots: int, batches: int) -> float:
    """Efficiency of launching P groups and waiting for all, on the same lengths and filter."""
    lengths = Lengths(sigma)
    seconds, useful = 0.0, 0
    for batch in range(batches):
        groups = range(batch * NUM_PROMPTS, (batch + 1) * NUM_PROMPTS)
        free = [0] * (slots * ENGINES)  # steps at which slots become free
        for length in np.concatenate([lengths.of_group(index) for index in groups]):
            heapq.heapreplace(free, free[0] + int(length))
        seconds += max(free) * TOKEN_S
        useful += sum(int(lengths.of_group(index).sum()) for index in groups if not is_filtered(index))
    return useful * TOKEN_S / (slots * ENGINES * seconds)


def simulate(
    sigma: float, *, slots: int, batches: int, through_fleet: bool = False, fault_rate: float = 0.0
) -> Run:
    async def main() -> Run:
        return await run_manager(
            sigma, slots=slots, batches=batches, through_fleet=through_fleet, fault_rate=fault_rate
        )

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="40 batches, sigma 0.8; the end of the run then weighs more")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    parser.add_argument(
        "--slots-per-engine",
        type=int,
        default=NUM_PROMPTS * SAMPLES_PER_PROMPT // ENGINES,
        help="default: a slot for every sample",
    )
    options = parser.parse_args()
    if options.quick:
        options.batches, options.sigmas = 40, [0.8]
    return options


def main() -> int:
    options = parse_options()
    batches, sigmas = options.batches, options.sigmas
    slots = options.slots_per_engine
    metrics: dict[str, float | None] = {"slots": slots * ENGINES}
    targets: dict[str, str] = {}
    shape = f"P={NUM_PROMPTS} G={SAMPLES_PER_PROMPT} engines={ENGINES} slots={slots * ENGINES}"
    print(f"{shape} batches={batches} max_staleness={MAX_STALENESS}")
    print("sigma  efficiency  of ideal  barrier  x barrier  length  waste    end  lag mean/max  stale  cpu s")
    for sigma in sigmas:
        run, barrier = (
            simulate(sigma, slots=slots, batches=batches),
            run_barrier(sigma, slots=slots, batches=batches),
        )
        times = run.efficiency / barrier
        print(
            f"{sigma:5.1f}  {run.efficiency:10.3f}  {run.of_ideal:8.3f}  {barrier:7.3f}  {times:9.2f} "
            f" {run.length:6.3f}  {run.waste:5.2%}  {run.end:5.2%}  {run.lag_mean:4.2f} / {run.lag_max:3d} "
            f" {run.stale:5.0f}  {run.cpu_s:5.0f}",
            flush=True,
        )
        name = f"{sigma:g}".replace(".", "_")
        values = {
            "efficiency": run.efficiency,
            "of_ideal": run.of_ideal,
            "barrier": barrier,
            "times_barrier": times,
            "bias": abs(run.length - 1),
            "waste": run.waste,
            "end": run.end,
            "lag_mean": run.lag_mean,
            "lag_max": run.lag_max,
        }
        metrics |= {f"{metric}_{name}": round(value, 4) for metric, value in values.items()}
        targets |= {
            f"{metric}_{name}": target
            for metric, target in TARGETS.items()
            if metric != "times_barrier" or sigma >= BARRIER_SIGMA
        }
    calm = simulate(0.8, slots=slots, batches=batches, through_fleet=True)
    faulty = simulate(0.8, slots=slots, batches=batches, through_fleet=True, fault_rate=FAULT_RATE)
    loss = 1 - faulty.efficiency / calm.efficiency
    print(
        f"fleet, sigma 0.8: of ideal {calm.of_ideal:.3f}; {FAULT_RATE:.0%} of the requests break:"
        f" {faulty.of_ideal:.3f}, loss {loss:.2%}"
    )
    metrics |= {"fleet_of_ideal": round(calm.of_ideal, 4), "fault_loss": round(loss, 4)}
    return finish(
        "rollout_tail",
        peer="a barrier after every batch, as TRL's",
        metrics=metrics,
        targets=targets | {"fault_loss": "<= 0.03"},
    )


if __name__ == "__main__":
    sys.exit(main())
