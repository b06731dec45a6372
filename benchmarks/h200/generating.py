"""The embedded engine: decode against the roofline of memory bandwidth, and the trainer's weights into it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.forced_lengths import copy_in, run_engine, run_generate
from benchmarks.h200.place import (
    NO_CEILINGS,
    Place,
    draw_tokens,
    make_backend,
    make_model,
    open_thread,
    read_clock,
    synchronize,
    time_job,
)
from benchmarks.h200.report import Report
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.device_thread import DeviceThread
from rollouts.engines.local import LocalEngine, open_local_engine
from rollouts.types import Completion, IntArray
from rollouts.weight_sync.sync import stream_into

LARGEST_ERROR = {
    torch.bfloat16: 0.05,
    torch.float32: 1e-4,
}  # nats, the mean; beyond it the tokens are another model's


# --- decoding -----------------------------------------------------------------------------------------------


DECODE = (
    "g3_tokens_per_s",
    "g3_of_roofline",
    "g3_one_row_tokens_per_s",
    "g3_one_row_of_roofline",
    "g3_mean_error",
    "g3_generate_tokens_per_s",
    "g3_generate_ratio",
)


async def measure_decode(place: Place, report: Report) -> None:
    """256 rows at 1k tokens of context, log-probs on, temperature 1; then one row; then `model.generate`.

    Of each, a long run less a short one on the same prompts, so that the prompts themselves are in neither.
    """
    rows, prompt, short, long = (8, 24, 2, 10) if place.tiny else (256, 960, 8, 136)
    shape, itemsize = place.shape, place.dtype.itemsize
    distinct = [draw_tokens(place, prompt, shape.vocab) for _ in range(rows // 8)]
    prompts = [distinct[row // 8] for row in range(rows)]
    context = prompt + (short + long) / 2
    weight_bytes = (shape.body_parameters + shape.head_parameters) * itemsize

    def add(name: str, tokens_per_s: float, count: int) -> None:
        report.add(f"{name}_tokens_per_s", tokens_per_s)
        bytes_of_step = weight_bytes + count * context * shape.kv_bytes(itemsize)
        share = None if place.copy_bytes is None else tokens_per_s * bytes_of_step / count / place.copy_bytes
        report.add_or_leave_out(f"{name}_of_roofline", share, NO_CEILINGS)

    async with open_thread(place) as thread:
        model = await thread.submit(lambda: make_model(shape, place, dtype=place.dtype))
        async with open_local_engine(
            model,
            device_thread=thread,
            mode="given",
            max_rows=rows,
            max_context=prompt + long + 8,
            autocast_dtype=None,
        ) as engine:
            print(f"  {engine.describe()}")

            async def seconds_of(count: int, length: int, name: str) -> float:
                began = await read_clock(thread, place)
                await run_engine(engine, prompts[:count], [length] * count, name)
                return await read_clock(thread, place) - began

            completions = await run_engine(engine, prompts, [long] * rows, "first")  # grows everything
            error = await thread.submit(lambda: compute_error(model, prompts, completions, place))
            report.add("g3_mean_error", error)
            assert error <= LARGEST_ERROR[place.dtype], (
                f"the engine's log-probs differ from the model's by {error:.1e} nats in the mean"
            )
            for count, name in ((rows, "g3"), (1, "g3_one_row")):
                if count == 1:
                    await seconds_of(1, long, "warm-up")
                differences: list[float] = []
                for turn in range(2):
                    short_s = await seconds_of(count, short, f"{name}-short{turn}")
                    differences.append(await seconds_of(count, long, f"{name}-long{turn}") - short_s)
                add(name, count * (long - short) / max(min(differences), 1e-9), count)
        steps = 4 if place.tiny else 16
        generated = await thread.submit(
            lambda: time_generate(model, prompts, place, short=short, long=short + steps)
        )
    report.add("g3_generate_tokens_per_s", rows * steps / max(generated, 1e-9))
    ours = report.metrics["g3_tokens_per_s"]
    assert ours is not None
    report.add("g3_generate_ratio", ours / (rows * steps / max(generated, 1e-9)))


def compute_error(
    model: Any, prompts: Sequence[IntArray], completions: Sequence[Completion], place: Place
) -> float:
    """Mean |engine - model| log-prob in nats, over four rows."""
    found: list[Tensor] = []
    for row in range(0, len(prompts), max(len(prompts) // 4, 1)):
        ids = torch.from_numpy(np.concatenate([prompts[row], completions[row].token_ids])).to(place.device)
        with torch.inference_mode():
            logits = (
                model(ids[None], use_cache=False, logits_to_keep=len(completions[row].token_ids) + 1)
                .logits[0, :-1]
                .float()
            )
        own = logits.log_softmax(-1).gather(1, ids[len(prompts[row]) :, None])[:, 0]
        found.append((own - torch.from_numpy(completions[row].log_probs).to(place.device)).abs())
    return float(torch.cat(found).mean())


def time_generate(model: Any, prompts: Sequence[IntArray], place: Place, *, short: int, long: int) -> float:
    """Seconds that `model.generate` takes for the tokens between `short` and `long` of every row."""
    ids = torch.from_numpy(np.stack(prompts)).to(place.device)

    def seconds_of(length: int) -> float:
        synchronize(place)
        began = time.perf_counter()
        run_generate(model, ids, length)
        synchronize(place)
        return time.perf_counter() - began

    seconds_of(2)
    return seconds_of(long) - seconds_of(short)


# --- weights ------------------------------------------------------------------------------------------------

SYNC = (
    "g4_gb",
    "g4_ms",
    "g4_first_ms",
    "g4_tb_per_s",
    "g4_floor_ms",
    "g4_over_floor",
    "g4_per_parameter_ms",
    "g4_pinned_ms",
    "g4_pinned_gb_per_s",
)


async def measure_sync(place: Place, report: Report) -> None:
    """The trainer's float32 weights into the engine's own copy in half precision, and into pinned memory of
    the host.

    From begin_update to the end of finish_update, during which the engine does not generate; `floor`: one job
    that only writes the values.
    """
    async with open_thread(place) as thread:
        model = await thread.submit(lambda: make_model(place.shape, place))
        backend = await thread.submit(
            lambda: make_backend(model, place, thread, micro_batch_tokens=256, compiled=False)
        )
        async with open_local_engine(
            await thread.submit(lambda: copy_in(model, place.dtype)),
            device_thread=thread,
            mode="given",
            trainer_version=lambda: 0,
            max_rows=8,
            max_context=128,
        ) as engine:
            await run_engine(engine, [draw_tokens(place, 16, place.shape.vocab)], [4], "before")
            times: list[float] = []
            for version in range(1, 7):
                await thread.submit(lambda: change_weights(model))
                began = await read_clock(thread, place)
                await stream_into(backend, engine, version)
                times.append(await read_clock(thread, place) - began)
                assert await engine.weight_version() == version
            await check_copied(model, engine, place)
            await run_engine(engine, [draw_tokens(place, 16, place.shape.vocab)], [4], "after")
            sync_s = float(np.median(times[1:]))
            num_bytes = sum(parameter.numel() for parameter in model.parameters()) * place.dtype.itemsize
            report.add("g4_gb", num_bytes / 1e9)
            report.add("g4_first_ms", times[0] * 1000)
            report.add("g4_ms", sync_s * 1000)
            report.add("g4_tb_per_s", num_bytes / sync_s / 1e12)
            floor_s, apart_s = await measure_floor(model, thread, place)
            report.add("g4_floor_ms", floor_s * 1000)
            report.add("g4_over_floor", sync_s / floor_s)
            report.add("g4_per_parameter_ms", apart_s * 1000)
            if place.device == "cpu":
                for name in ("g4_pinned_ms", "g4_pinned_gb_per_s"):
                    report.leave_out(name, "a CPU's weights are in the host's memory")
            else:  # pragma: gpu
                pinned_s = await time_pinned(backend, model, thread, place)
                report.add("g4_pinned_ms", pinned_s * 1000)
                report.add(
                    "g4_pinned_gb_per_s",
                    2 * sum(parameter.numel() for parameter in model.parameters()) / pinned_s / 1e9,
                )


def change_weights(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


async def check_copied(model: Any, engine: LocalEngine, place: Place) -> None:
    """Raises AssertionError unless the engine holds the model's weights, rounded once."""
    copied = await engine.copy_weights()
    wrong = [
        name
        for name, own in model.named_parameters()
        if not torch.equal(copied[name], own.detach().to(place.dtype).cpu())
    ]
    assert not wrong, f"the engine's weights differ from the trainer's: {wrong[:3]}"


async def measure_floor(model: Any, thread: DeviceThread, place: Place) -> tuple[float, float]:
    """Seconds of writing the values in one job, and in one job a parameter."""
    sources = [parameter.detach() for parameter in model.parameters()]
    targets = await thread.submit(lambda: [torch.empty_like(source, dtype=place.dtype) for source in sources])

    def write_all() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    floor_s = await thread.submit(lambda: time_job(write_all, place, repeats=5))
    began = await read_clock(thread, place)
    for source, target in zip(sources, targets, strict=True):
        await thread.submit(lambda source=source, target=target: target.copy_(source)).result()
    return floor_s, await read_clock(thread, place) - began


async def time_pinned(
    backend: PyTorchTrainingBackend, model: Any, thread: DeviceThread, place: Place
) -> float:  # pragma: gpu
    """Seconds until half-precision values of all weights are in pinned memory that was allocated before, by
    way of stream_weights.
    """
    make = {name: (parameter.shape, place.dtype) for name, parameter in model.named_parameters()}
    held = await thread.submit(
        lambda: {
            name: torch.empty(shape, dtype=dtype, pin_memory=True) for name, (shape, dtype) in make.items()
        }
    )

    def sink(bucket: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            held[name].copy_(tensor.to(place.dtype), non_blocking=True)

    await backend.stream_weights(sink).result()
    began = await read_clock(thread, place)
    await backend.stream_weights(sink).result()
    return await read_clock(thread, place) - began
