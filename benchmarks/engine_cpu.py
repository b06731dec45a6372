"""The embedded engine against `model.generate`, transformers' continuous batching and vLLM: the same prompts
and forced response lengths.

    python -m benchmarks.engine_cpu [--quick] [--threads 2] [--vllm-python .venv-vllm/bin/python]
    [--vllm-eager] [--only generate] [--prompts 8] [--samples 8] [--precision float32]

P prompts x G samples, prompts of 64 tokens, response lengths lognormal around 45 (sigma 0.65), clipped to
16..128, no stop tokens, temperature 1. In bfloat16 the peers' weights are that, and the engine does what it
does where a run's products are rounded; its log-probs then have no target. Every side is credited with the
forced lengths. All take turns in the order A B C D D C B A.

    generate        one padded batch, decoded to the longest, as it must be; it returns no log-probs
    generate_batch  continuous batching of transformers, with log-probs
    vllm            LLM.generate in one process of the Python that has vLLM, with log-probs; compiled by its
                    default, unless --vllm-eager

All processes are pinned to the same `--threads` cores, so tokens per second and core compare as the wall
times do. The engine's log-probs are compared with the model's own before anything is timed.
`fraction_of_gemm`: 2 floating point operations a weight and token, against the rate of a 1536 x 1536 x 1536
product, rounded likewise, in the same run. `engine_busy`: CPU time of the engine's turns over their wall time
and the cores. Targets: ratio_generate >= 3; ratio_vllm_per_core >= 1.1, of fewer than 32 rows >= 0.8;
engine_busy >= 0.9; log_prob_difference_max <= 1e-4 nats. A peer that cannot run is None, and why is printed.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.forced_lengths import copy_in, run_engine, run_generate
from benchmarks.harness import Turn, compute_ratio, finish, make_parser, measure_gemm_rate
from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.engines.local import LocalEngine, open_local_engine
from rollouts.models.devices import rounding_products
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.types import Completion, IntArray

PROMPT_LENGTH = 64
SHORTEST, LONGEST = 16, 128
PAGE = 64  # tokens, of generate_batch
VLLM_START_S = 600.0
PEERS = ("generate", "generate_batch", "vllm")
TARGETS = {"ratio_generate": ">= 3", "engine_busy": ">= 0.9", "log_prob_difference_max": "<= 1e-4"}
MANY_ROWS = 32

Side = Callable[[], Awaitable[Turn]]


@dataclass(frozen=True, slots=True)
class Workload:
    """What every side generates."""

    prompts: IntArray  # [P, 64]
    lengths: IntArray  # [P, G] tokens to generate

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def rows(self) -> list[tuple[list[int], int]]:
        """Prompt and length of each (prompt, sample), in that order."""
        return [(prompt.tolist(), length) for prompt, length in zip(*self.requests(), strict=True)]

    def requests(self) -> tuple[list[IntArray], list[int]]:
        """Prompts and lengths of all (prompt, sample), in that order."""
        samples = self.lengths.shape[1]
        return [
            self.prompts[index // samples] for index in range(self.lengths.size)
        ], self.lengths.ravel().tolist()


def make_workload(*, num_prompts: int, samples: int, vocab_size: int) -> Workload:
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, vocab_size, (num_prompts, PROMPT_LENGTH))
    lengths = (
        rng.lognormal(np.log(45), 0.65, (num_prompts, samples))
        .round()
        .astype(np.int64)
        .clip(SHORTEST, LONGEST)
    )
    return Workload(prompts, lengths)


# --- the sides ----------------------------------------------------------------------------------------------


def run_padded(model: PreTrainedModel, workload: Workload) -> None:
    """The padded batch, decoded to the longest."""
    ids = torch.from_numpy(np.repeat(workload.prompts, workload.lengths.shape[1], axis=0))
    longest = int(workload.lengths.max())
    out = run_generate(model, ids, longest)
    assert out.shape[1] == PROMPT_LENGTH + longest, out.shape


def run_generate_batch(model: Any, workload: Workload) -> None:
    """Continuous batching of transformers, with as many pages as all rows need."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    rows = workload.rows()
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=len(rows) * -(-(PROMPT_LENGTH + LONGEST) // PAGE) + 1,
        max_batch_tokens=len(rows) * PROMPT_LENGTH,
        return_logprobs=True,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    left = len(rows)
    options = {
        "generation_config": settings,
        "continuous_batching_config": batching,
        "block": True,
        "warmup": False,
    }
    with torch.inference_mode(), model.continuous_batching_context_manager(**options) as manager:
        for index, (prompt, length) in enumerate(rows):
            manager.add_request(prompt, request_id=str(index), max_new_tokens=length)
        while left:
            answer = manager.get_result(timeout=1)
            if answer is None:
                assert manager.is_running(), "the thread of generate_batch ended"
            elif answer.is_finished():
                assert (
                    len(answer.generated_tokens) == len(answer.logprobs) == rows[int(answer.request_id)][1]
                ), answer.error
                left -= 1


async def take_device_turn(device_thread: DeviceThread, work: Callable[[], None]) -> Turn:
    wall, cpu = time.perf_counter(), time.process_time()
    await device_thread.submit(work)
    return Turn(time.perf_counter() - wall, time.process_time() - cpu)


@asynccontextmanager
async def open_vllm(
    python: Path, model: Path, workload: Workload, *, threads: int, eager: bool, dtype: str
) -> AsyncIterator[tuple[Side, str] | str]:
    """A side that runs vLLM, and its version; or why there is none."""
    if not python.is_file():
        yield f"there is no {python}"
        return
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all of its work in the process whose time is taken
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "workload.json"), Path(folder, "log")
        file.write_text(
            json.dumps(
                {
                    "prompts": [prompt for prompt, _ in workload.rows()],
                    "lengths": [length for _, length in workload.rows()],
                    "dtype": dtype,
                }
            )
        )
        command = [
            str(python),
            str(Path(__file__).with_name("engine_cpu_vllm.py")),
            str(model),
            str(file),
        ]
        async with await trio.open_file(log, "wb") as errors:
            process = await trio.lowlevel.open_process(
                [*command, "--eager"] if eager else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors.wrapped,
                env=environment,
            )
        try:
            ready: dict[str, Any] = {}
            with trio.move_on_after(VLLM_START_S):
                ready = await ask(process, "")
            if not ready:
                tail = log.read_text(errors="replace").strip().splitlines()[-3:]
                yield "vLLM did not start: " + " | ".join(tail)
                return

            async def take_turn() -> Turn:
                answer = await ask(process, "go\n")
                assert answer.get("tokens") == workload.tokens, answer
                return Turn(answer["wall_s"], answer["cpu_s"])

            yield take_turn, str(ready["ready"])
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def ask(process: trio.Process, line: str) -> dict[str, Any]:
    """Its next line of output, after one of input; empty if it ended."""
    assert process.stdin is not None and process.stdout is not None
    if line:
        await process.stdin.send_all(line.encode())
    answer = b""
    while not answer.endswith(b"\n"):
        received = await process.stdout.receive_some()
        if not received:
            return {}
        answer += received
    return json.loads(answer)


# --- what is compared ---------------------------------------------------------------------------------------


def compute_difference(model: PreTrainedModel, workload: Workload, completions: list[Completion]) -> float:
    """Largest |engine - model's own in float32| log-prob in nats over every eighth completion."""
    worst = 0.0
    for index, (prompt, length) in list(enumerate(workload.rows()))[::8]:
        assert len(completions[index].token_ids) == length
        ids = torch.from_numpy(np.concatenate([prompt, completions[index].token_ids]))
        with torch.inference_mode():
            logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - completions[index].log_probs).max()))
    return worst


def summarise(turns: dict[str, list[Turn]], workload: Workload, cores: int) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {}
    for name, of_side in turns.items():
        wall_s = float(np.median([turn.wall_s for turn in of_side]))
        metrics[f"{name}_tokens_per_s_per_core"] = round(workload.tokens / wall_s / cores, 1)
    busy = [turn.cpu_s / turn.wall_s / cores for turn in turns["engine"]]
    metrics["engine_busy"] = round(float(np.median(busy)), 3)
    for name in PEERS:
        metric = "ratio_vllm_per_core" if name == "vllm" else f"ratio_{name}"
        if name not in turns:
            metrics[metric] = None
            continue
        wall = compute_ratio([turn.wall_s for turn in turns["engine"]], [turn.wall_s for turn in turns[name]])
        cpu = compute_ratio([turn.cpu_s for turn in turns["engine"]], [turn.cpu_s for turn in turns[name]])
        metrics |= {
            metric: round(wall.median, 3),
            f"{metric}_lowest": round(wall.lowest, 3),
            f"{metric}_highest": round(wall.highest, 3),
        }
        metrics[f"{metric}_of_cpu_time"] = round(cpu.median, 3)
    return metrics


async def take_engine_turn(engine: LocalEngine, workload: Workload) -> Turn:
    wall, cpu = time.perf_counter(), time.process_time()
    await run_engine(engine, *workload.requests(), f"{time.monotonic_ns()}")
    return Turn(time.perf_counter() - wall, time.process_time() - cpu)


def measure_products(rounded: torch.dtype | None) -> float:
    """Floating point operations a second, of products rounded to that."""
    with rounding_products(rounded, torch.device("cpu")):
        return measure_gemm_rate(1536)


async def find_sides(
    peers: list[str], model: PreTrainedModel, workload: Workload, device_thread: DeviceThread
) -> dict[str, Side]:
    """The sides of transformers that are asked for and run."""
    sides: dict[str, Side] = {}
    if "generate" in peers:
        sides["generate"] = lambda: take_device_turn(device_thread, lambda: run_padded(model, workload))
    if "generate_batch" in peers:
        own = copy.deepcopy(model)  # whose attention it exchanges
        batching: Side = lambda: take_device_turn(  # noqa: E731
            device_thread, lambda: run_generate_batch(own, workload)
        )
        try:
            await batching()
            sides["generate_batch"] = batching
        except Exception as error:  # it was made for GPUs
            print(f"generate_batch does not run here: {type(error).__name__}: {error}")
    return sides


async def measure(arguments: argparse.Namespace) -> int:
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(arguments.threads)  # of threads that others start
    peers = [name for name in PEERS if name in arguments.only]
    path = resolve_model(arguments.model)
    model: PreTrainedModel = load_hf_model(path)
    prompts, samples, rounds = (
        (4, 4, 1) if arguments.quick else (arguments.prompts, arguments.samples, arguments.rounds)
    )
    workload = make_workload(num_prompts=prompts, samples=samples, vocab_size=model.config.vocab_size)
    rounded = torch.bfloat16 if arguments.precision == "bfloat16" else None
    plain = copy_in(model, rounded) if rounded else model
    turns, version = dict[str, list[Turn]](), None
    async with (
        open_device_thread(name="benchmark", torch_threads=arguments.threads) as device_thread,
        open_local_engine(
            model,
            device_thread=device_thread,
            mode="shared",
            trainer_version=lambda: 0,
            autocast_dtype=rounded,
        ) as engine,
        open_peers(peers, path, workload, arguments) as vllm,
    ):
        completions = await run_engine(engine, *workload.requests(), "compared")
        difference = await device_thread.submit(lambda: compute_difference(model, workload, completions))
        assert difference <= (1.0 if rounded else 1e-3), (
            f"the engine's log-probs are not the model's: {difference:.3g} nats"
        )

        gemm_rate = await device_thread.submit(partial(measure_products, rounded))
        sides = {"engine": lambda: take_engine_turn(engine, workload)}
        sides |= await find_sides(peers, plain, workload, device_thread)
        if isinstance(vllm, tuple):
            sides["vllm"], version = vllm
        for number in range(rounds):
            for name in (*sides, *reversed(sides)):
                turns.setdefault(name, []).append(turn := await sides[name]())
                took = f"{turn.wall_s:7.2f} s wall {turn.cpu_s:7.2f} s CPU"
                print(f"round {number}: {name:15s} {took}", flush=True)
        computed = engine.statistics()["prefill_tokens"]
    weights = sum(value.numel() for value in model.parameters())
    needed = 2 * weights * (workload.tokens + workload.prompts.size)  # operations
    engine_s = float(np.median([turn.wall_s for turn in turns["engine"]]))
    metrics: dict[str, float | str | None] = {
        "model": arguments.model,
        "vllm_version": version,
        "rows": workload.lengths.size,
        "tokens": workload.tokens,
        "threads": arguments.threads,
        **summarise(turns, workload, len(cores)),
        "precision": arguments.precision,
        "log_prob_difference_max": None if rounded else difference,
        "gemm_gflops": round(gemm_rate / 1e9, 1),
        "fraction_of_gemm": round(needed / engine_s / gemm_rate, 3),
        "prefill_tokens": computed,
    }
    targets = {"ratio_vllm_per_core": ">= 1.1" if workload.lengths.size >= MANY_ROWS else ">= 0.8", **TARGETS}
    return finish("engine_cpu", peer="model.generate; generate_batch; vLLM", metrics=metrics, targets=targets)


@asynccontextmanager
async def open_peers(
    peers: list[str], model: Path, workload: Workload, arguments: argparse.Namespace
) -> AsyncIterator[tuple[Side, str] | None]:
    """vLLM's side where it is asked for and runs."""
    if "vllm" not in peers:
        yield None
        return
    async with open_vllm(
        Path(arguments.vllm_python),
        model,
        workload,
        threads=arguments.threads,
        eager=arguments.vllm_eager,
        dtype=arguments.precision,
    ) as opened:
        if isinstance(opened, str):
            print(f"vllm: {opened}")
        yield None if isinstance(opened, str) else opened


def main() -> int:
    parser = make_parser(__doc__, quick="4 prompts x 4 samples, one round, generate alone")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2, help="and cores")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", nargs="*", choices=PEERS, help="these peers")
    parser.add_argument(
        "--vllm-python", default=os.environ.get("ROLLOUTS_VLLM_PYTHON", ".venv-vllm/bin/python")
    )
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without its compiler")
    arguments = parser.parse_args()
    if arguments.only is None:
        arguments.only = ["generate"] if arguments.quick else list(PEERS)
    return trio.run(measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
