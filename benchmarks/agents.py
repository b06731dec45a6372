"""Trajectories of four turns with a tool that takes time: how busy the engine stays, and what a turn costs.

    python -m benchmarks.agents [--quick]

Busy, in virtual time: the real manager and episode, 16 prompts of 8 samples, and an engine of 128 slots in
which a turn takes 2 s on average (lognormal, sigma 0.5). Between turns the tool takes 0, 0.5 or 2 times as
long on average (exponential). A trainer takes each batch as soon as there is one. What is begun and not
trained is bounded by max_staleness = s, to 16 (s + 1) prompts: they must be enough to fill the slots while
others wait.

    busy_*         share of its slots that the engine has in use, after a warm-up, over that without a wait,
                   at s = 5; target 0.9
    busy_2_at_3    the same at s = 3, where the bound on staleness is what limits

Prefill, on the embedded engine with SmolLM2-135M: each turn of 8 trajectories samples 16 tokens and is
answered by 24 more.

    prefill_*      tokens that the k-th turn of a trajectory computed before its first new one; those that it
                   had not seen are the tool's 24, the last sampled one and the prompt's in the first turn
    prefill_s_*    seconds of the k-th turn
    excess         the most that any later turn computed beyond its new tokens; target 0
"""

import sys
import time
from functools import partial
from typing import Any

import numpy as np
import trio
import trio.testing

from benchmarks.harness import finish, make_parser
from rollouts.config.rollout import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import LocalEngine, open_local_engine
from rollouts.environments.episode import make_agent_generate, make_formats
from rollouts.environments.protocol import Tool
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.testing.fakes import ScriptedEngine
from rollouts.types import Completion, GenerateRequest, Sample, SamplingParams
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer

SLOTS, TURNS, TURN_S = 128, 4, 2.0
ROWS = [{"prompt": f"Use wait, {index}."} for index in range(4096)]
SAMPLED, ANSWERED, TRAJECTORIES = 16, 24, 8


class BusyEngine(ScriptedEngine):
    """A turn holds one of the slots for a drawn time. The first turns call, the last does not."""

    def __init__(self) -> None:
        super().__init__(context_length=10**6)
        self.free, self.busy_s = trio.CapacityLimiter(SLOTS), 0.0

    async def generate(self, request: GenerateRequest) -> Completion:
        turn = int(request.request_id.partition("#")[2] or 0)
        text = b"call" if turn < TURNS - 1 else b"done"
        draw = np.random.default_rng([7, *request.request_id.encode()])
        seconds = TURN_S * float(np.exp(0.5 * draw.standard_normal() - 0.125))
        async with self.free:
            await trio.sleep(seconds)
            self.busy_s += seconds
        token_ids = np.asarray([*text, FAKE_END])
        return Completion(
            request_id=request.request_id,
            token_ids=token_ids,
            log_probs=np.full(5, -1, np.float32),
            weight_versions=np.full(5, self._version),
            finish_reason="stop",
        )


def read_turn(text: str) -> dict[str, Any]:
    called = text.startswith("call")
    return {"tool_calls": [{"function": {"name": "wait", "arguments": {}}}]} if called else {"content": text}


async def _run_busy(ratio: float, batches: int, staleness: int) -> float:
    draw, version = np.random.default_rng(3), [0]

    async def wait(arguments: Any) -> str:
        await trio.sleep(float(draw.exponential(ratio * TURN_S)) if ratio else 0.0)
        return "ok"

    async def reward(sample: Sample) -> float:
        return 1.0

    schema = {"type": "function", "function": {"name": "wait", "description": "", "parameters": {}}}
    config = RolloutConfig(num_prompts=16, samples_per_prompt=8, over_sampling=1.1)
    formats: Any = make_formats(FakeTokenizer(), read_turn=read_turn)  # type: ignore[arg-type]
    engine = BusyEngine()
    manager = AsyncRolloutManager(
        DataBuffer(ROWS, seed=0),
        engine,
        generate=make_agent_generate(formats, config, tools=[Tool("wait", schema, wait)]),
        config=config,
        reward=reward,
        sampling=SamplingParams(max_new_tokens=8, stop_token_ids=(FAKE_END,)),
        seed=0,
        policy_version=lambda: version[0],
        max_staleness=staleness,
    )
    began, busy = 0.0, 0.0
    async with manager.generating():
        for batch in range(batches):
            if batch == batches // 3:
                began, busy = trio.current_time(), engine.busy_s
            await manager.generate_batch()
            version[0] += 1
            engine.set_version(version[0])
            manager.engines_updated(version[0])
        return (engine.busy_s - busy) / (SLOTS * (trio.current_time() - began))
    raise AssertionError("the block returns")


def measure_busy(ratio: float, batches: int, staleness: int) -> float:
    """Share of the slots in use."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(partial(_run_busy, ratio, batches, staleness), clock=clock)


async def measure_prefill() -> tuple[list[float], list[float]]:
    """Tokens that each turn of a trajectory computed before its first new token, and seconds of all turns."""
    model_dir = resolve_model("bundled:smollm2-135m-instruct")
    async with open_device_thread(name="benchmark") as thread:
        model: Any = await thread.submit(partial(load_hf_model, model_dir))
        async with open_local_engine(model, device_thread=thread, mode="given", max_rows=8) as engine:
            return await _take_turns(engine)
    raise AssertionError("the block returns")


async def _take_turns(engine: LocalEngine) -> tuple[list[float], list[float]]:
    rng, counts, seconds = np.random.default_rng(0), list[float](), list[float]()
    prompts = [rng.integers(100, 40_000, 120) for _ in range(TRAJECTORIES)]

    async def take_turn(index: int, turn: int) -> None:
        request = GenerateRequest(
            request_id=f"{index}#{turn}",
            prompt_ids=prompts[index],
            sampling=SamplingParams(max_new_tokens=SAMPLED, seed=turn),
            trajectory=str(index),
        )
        answer = await engine.generate(request)
        new = rng.integers(100, 40_000, ANSWERED)
        prompts[index] = np.concatenate([prompts[index], answer.token_ids, new])

    for turn in range(TURNS):
        before, began = engine.statistics()["prefill_tokens"], time.perf_counter()
        async with trio.open_nursery() as nursery:
            for index in range(TRAJECTORIES):
                nursery.start_soon(take_turn, index, turn)
        seconds.append(time.perf_counter() - began)
        counts.append((engine.statistics()["prefill_tokens"] - before) / TRAJECTORIES)
    return counts, seconds


def main() -> int:
    parser = make_parser(__doc__, quick="20 batches instead of 60")
    arguments = parser.parse_args()
    metrics: dict[str, float | str | None] = {}
    batches = 20 if arguments.quick else 60
    whole = measure_busy(0.0, batches, 5)
    for name, ratio, staleness in (("busy_0_5", 0.5, 5), ("busy_2", 2.0, 5), ("busy_2_at_3", 2.0, 3)):
        metrics[name] = round(measure_busy(ratio, batches, staleness) / whole, 4)
        print(f"{name}: {metrics[name]} of that without a wait, {whole:.3f}")
    counts, seconds = trio.run(measure_prefill)
    for turn, (count, second) in enumerate(zip(counts, seconds, strict=True), 1):
        metrics |= {f"prefill_{turn}": count, f"prefill_s_{turn}": round(second, 3)}
    metrics["excess"] = max(count - (ANSWERED + 1) for count in counts[1:])
    print(f"prefill by turn: {counts}; new are {ANSWERED} and the last sampled token")
    return finish(
        "agents",
        peer="the same without a wait; a prefill of the whole history",
        metrics=metrics,
        targets={"busy_0_5": ">= 0.9", "busy_2": ">= 0.9", "excess": "<= 0"},
    )


if __name__ == "__main__":
    sys.exit(main())
