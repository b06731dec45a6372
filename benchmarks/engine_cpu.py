"""Embedded engine against `model.generate`: the same prompts, the same forced response lengths, one process, taken in turns A B B A.

    python -m benchmarks.engine_cpu [--quick] [--bar 2.5] [--model NAME]

P prompts x G samples, prompts of 64 tokens, response lengths lognormal around 45 (sigma 0.65), clipped to 16..128, no stop tokens,
temperature 1, float32. Both sides are credited with the forced lengths; `generate` decodes its padded batch to the longest, as it
must. Only the engine returns log-probs; they are compared with the model's own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.engines.local import LocalEngine, open_local_engine
from rollouts.errors import ModelError
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.types import Completion, GenerateRequest, IntArray, SamplingParams

PROMPT_LENGTH = 64
SHORTEST, LONGEST = 16, 128


@dataclass(frozen=True, slots=True)
class Workload:
    """What both sides generate."""

    prompts: IntArray  # [P, 64]
    lengths: IntArray  # [P, G] tokens to generate

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def make_workload(*, num_prompts: int, samples: int, vocab_size: int) -> Workload:
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, vocab_size, (num_prompts, PROMPT_LENGTH))
    lengths = rng.lognormal(np.log(45), 0.65, (num_prompts, samples)).round().astype(np.int64).clip(SHORTEST, LONGEST)
    return Workload(prompts, lengths)


def load_model(name: str) -> tuple[PreTrainedModel, str]:
    """The named model, or random weights of SmolLM2-135M's shape: speed does not depend on the values."""
    try:
        return load_hf_model(resolve_model(name)), name
    except ModelError as error:
        print(f"random weights of the same shape, for: {error}")
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval(), "random"


async def run_engine(engine: LocalEngine, workload: Workload, name: str) -> list[Completion]:
    """One completion per (prompt, sample), in that order."""
    completions: dict[int, Completion] = {}
    samples = workload.lengths.shape[1]

    async def generate_one(index: int) -> None:
        length = int(workload.lengths[index // samples, index % samples])
        sampling = SamplingParams(max_new_tokens=length)
        request = GenerateRequest(request_id=f"{name}-{index}", prompt_ids=workload.prompts[index // samples], sampling=sampling)
        completions[index] = await engine.generate(request)

    async with trio.open_nursery() as nursery:
        for index in range(workload.lengths.size):
            nursery.start_soon(generate_one, index)
    return [completions[index] for index in range(workload.lengths.size)]


async def run_generate(model: PreTrainedModel, device_thread: DeviceThread, workload: Workload) -> None:
    """The padded batch, decoded to the longest."""
    ids = torch.from_numpy(np.repeat(workload.prompts, workload.lengths.shape[1], axis=0))
    longest = int(workload.lengths.max())

    def generate_all() -> None:
        with torch.inference_mode():
            out = model.generate(  # pyright: ignore[reportCallIssue]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out.shape[1] == PROMPT_LENGTH + longest, out.shape

    await device_thread.submit(generate_all)


async def seconds_of(work: Callable[[], Awaitable[object]], clock: Callable[[], float]) -> float:
    started = clock()
    await work()
    return clock() - started


async def largest_difference(model: PreTrainedModel, device_thread: DeviceThread, workload: Workload, completions: list[Completion]) -> float:
    """Largest |engine - model| log-prob in nats over every eighth completion."""

    def compare() -> float:
        worst = 0.0
        for index in range(0, len(completions), 8):
            prompt = workload.prompts[index // workload.lengths.shape[1]]
            ids = torch.from_numpy(np.concatenate([prompt, completions[index].token_ids]))
            with torch.inference_mode():
                logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
            worst = max(worst, float(np.abs(expected - completions[index].log_probs).max()))
        return worst

    return await device_thread.submit(compare)


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    model, model_name = load_model(arguments.model)
    samples, rounds = (4, 1) if arguments.quick else (8, arguments.rounds)
    workload = make_workload(num_prompts=samples, samples=samples, vocab_size=model.config.vocab_size)
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    ratios: list[float] = []
    engine_s: list[float] = []
    generate_s: list[float] = []
    async with (
        open_device_thread(name="benchmark", torch_threads=arguments.threads) as device_thread,
        open_local_engine(model, device_thread=device_thread, mode="shared", trainer_version=lambda: 0) as engine,
    ):
        warm_up = Workload(workload.prompts[:, :8], np.minimum(workload.lengths, 2))
        await run_engine(engine, warm_up, "warm-up")
        for number in range(rounds):
            first = await seconds_of(lambda number=number: run_engine(engine, workload, f"{number}a"), clock)
            second = await seconds_of(lambda: run_generate(model, device_thread, workload), clock)
            third = await seconds_of(lambda: run_generate(model, device_thread, workload), clock)
            fourth = await seconds_of(lambda number=number: run_engine(engine, workload, f"{number}b"), clock)
            engine_s += [first, fourth]
            generate_s += [second, third]
            ratios += [second / first, third / fourth]
            print(f"round {number}: engine {first:.2f} {fourth:.2f} s, generate {second:.2f} {third:.2f} s")
        completions = await run_engine(engine, workload, "compared")
        difference = await largest_difference(model, device_thread, workload, completions)
        counters = engine.statistics()
    return {
        "benchmark": "engine_cpu",
        "model": model_name,
        "rows": int(workload.lengths.size),
        "tokens": workload.tokens,
        "threads": arguments.threads,
        "clock": arguments.clock,
        "engine_tokens_per_s": round(workload.tokens / statistics.median(engine_s), 1),
        "generate_tokens_per_s": round(workload.tokens / statistics.median(generate_s), 1),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "log_prob_difference_max": difference,
        "prefill_tokens_saved": counters["prefill_tokens_saved"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: of the process, for a shared machine; with --threads 1")
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A")
    parser.add_argument("--quick", action="store_true", help="4 prompts x 4 samples, one round")
    parser.add_argument("--bar", type=float, default=0.0, help="exit 1 below this ratio, or above 1e-4 nats of difference")
    arguments = parser.parse_args()
    result = trio.run(measure, arguments)
    print(f"engine / generate: {result['ratio_median']} ({result['ratio_min']}..{result['ratio_max']})")
    print(json.dumps(result))
    missed = float(str(result["ratio_median"])) < arguments.bar or float(str(result["log_prob_difference_max"])) > 1e-4
    return 1 if arguments.bar and missed else 0


if __name__ == "__main__":
    sys.exit(main())
