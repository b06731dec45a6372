"""Ceilings of the machine, and training steps of the project's own backend: packed rows, one long row, shared
prefixes.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.h200.place import (
    LOSS,
    NO_CEILINGS,
    NO_PEAK,
    NO_SHEET,
    Place,
    Shape,
    draw_lengths,
    draw_tokens,
    make_backend,
    make_batch,
    make_model,
    open_thread,
    read_clock,
    read_peak_gib,
    reset_peak,
    shared_rows,
    take_step,
    time_job,
)
from benchmarks.h200.report import Report
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.device_thread import DeviceThread
from rollouts.types import RolloutBatch

GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative, of all gradients together


# --- ceilings -----------------------------------------------------------------------------------------------

CEILINGS = ("gemm_tflops", "gemm_of_sheet", "copy_tb_per_s")


async def measure_ceilings(place: Place, report: Report) -> None:
    """A product of square bf16 matrices, and a copy on the device, of random data."""
    side, copied = (256, 2**22) if place.tiny else (8192, 4 * 2**30)

    def measure() -> tuple[float, float]:
        left, right = (torch.randn(side, side, device=place.device, dtype=place.dtype) for _ in range(2))
        gemm_s = time_job(lambda: left @ right, place, repeats=10, warm_up=3)
        source = torch.randint(0, 255, (copied,), device=place.device, dtype=torch.uint8)
        target = torch.empty_like(source)
        return gemm_s, time_job(lambda: target.copy_(source), place, repeats=10, warm_up=3)

    async with open_thread(place) as thread:
        gemm_s, copy_s = await thread.submit(measure)
    place.gemm_flops, place.copy_bytes = 2 * side**3 / gemm_s, 2 * copied / copy_s
    report.add("gemm_tflops", place.gemm_flops / 1e12)
    report.add("copy_tb_per_s", place.copy_bytes / 1e12)
    report.add_or_leave_out("gemm_of_sheet", place.share_of_sheet(place.gemm_flops), NO_SHEET)


# --- training steps -----------------------------------------------------------------------------------------


async def time_steps(
    backend: PyTorchTrainingBackend, batch: RolloutBatch, thread: DeviceThread, place: Place, *, steps: int
) -> tuple[float, float | None]:
    """Seconds of a step, the mean of `steps` after one, and the peak of memory in GiB."""
    await take_step(backend, batch)
    await thread.submit(lambda: reset_peak(place))
    began = await read_clock(thread, place)
    for _ in range(steps):
        await take_step(backend, batch)
    return (await read_clock(thread, place) - began) / steps, read_peak_gib(place)


def add_step(
    report: Report, place: Place, prefix: str, *, step_s: float, tokens: int, flops: float, peak: float | None
) -> None:
    """What a training step says: tokens a second, share of the sheet's and of the measured rate, memory."""
    report.add(f"{prefix}_tokens_per_s", tokens / step_s)
    report.add_or_leave_out(f"{prefix}_mfu", place.share_of_sheet(flops / step_s), NO_SHEET)
    of_gemm = None if place.gemm_flops is None else flops / step_s / place.gemm_flops
    report.add_or_leave_out(f"{prefix}_of_gemm", of_gemm, NO_CEILINGS)
    report.add_or_leave_out(f"{prefix}_peak_gib", peak, NO_PEAK)


def names_of(prefix: str) -> tuple[str, ...]:
    """Metrics of add_step."""
    return tuple(f"{prefix}_{name}" for name in ("tokens_per_s", "mfu", "of_gemm", "peak_gib"))


def draw_packed_batch(place: Place, shape: Shape) -> RolloutBatch:
    """Four micro-batches of rows of 1.5k tokens on average, which train all tokens but their first."""
    budget = place.micro_batch_tokens
    lengths = draw_lengths(place, tokens=4 * budget, mean=48 if place.tiny else 1536, longest=budget)
    return make_batch(
        [draw_tokens(place, int(length), shape.vocab) for length in lengths],
        [1] * len(lengths),
        place,
        vocab=shape.vocab,
    )


TRAIN = (
    *names_of("g1"),
    "g1_step_s",
    "g1_compile_s",
    "g1_useful_tokens",
    "g1_micro_batch_tokens",
    "g1_padded_ratio",
)


async def measure_train(place: Place, report: Report) -> None:
    """Compiled layers that keep their activations; then the same rows padded, with whole logits, by
    transformers alone.
    """
    shape, batch = place.shape, draw_packed_batch(place, place.shape)
    lengths = [len(row) - 1 for row in batch.tokens]  # the last token predicts nothing
    report.add("g1_micro_batch_tokens", place.micro_batch_tokens)
    async with open_thread(place) as thread:
        began = time.perf_counter()
        model = await thread.submit(lambda: make_model(shape, place))
        backend = await thread.submit(
            lambda: make_backend(model, place, thread, micro_batch_tokens=place.micro_batch_tokens)
        )
        await take_step(backend, batch)
        report.add("g1_compile_s", await read_clock(thread, place) - began)
        before = dict(backend.statistics())
        step_s, peak = await time_steps(backend, batch, thread, place, steps=2 if place.tiny else 3)
        after = backend.statistics()
        flops = shape.train_flops(lengths, int(batch.response_lengths.sum()))
        add_step(report, place, "g1", step_s=step_s, tokens=sum(lengths), flops=flops, peak=peak)
        report.add("g1_step_s", step_s)
        steps = (after["trained_tokens"] - before["trained_tokens"]) / float(batch.response_lengths.sum())
        report.add(
            "g1_useful_tokens", steps * sum(lengths) / (after["computed_tokens"] - before["computed_tokens"])
        )
        try:
            padded_s = await thread.submit(
                lambda: time_padded(model, batch, place, rows=2 if place.tiny else 4)
            )
        except torch.OutOfMemoryError as error:  # pragma: gpu
            report.leave_out(
                "g1_padded_ratio", f"padded rows with whole logits do not fit: {str(error)[:100]}"
            )
        else:
            report.add("g1_padded_ratio", padded_s / step_s)


def time_padded(model: Any, batch: RolloutBatch, place: Place, *, rows: int) -> float:
    """Seconds of forward and backward of all rows, `rows` at a time, padded to the longest of them, by the
    whole logits: the form of TRL's GRPO.

    The rows are those of the first quarter of the batch, whose time is counted four times. Without an
    optimizer step, which flatters it.
    """
    tokens = batch.tokens[: max(len(batch) // 4, 1)]

    def run() -> None:
        for start in range(0, len(tokens), rows):
            part = tokens[start : start + rows]
            ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.int64)
            for row, own in enumerate(part):
                ids[row, : len(own)] = torch.from_numpy(own)
            ids, real = ids.to(place.device), torch.tensor([len(own) for own in part], device=place.device)
            mask = torch.arange(ids.shape[1], device=place.device) < real[:, None]
            with torch.autocast(
                place.device, dtype=place.autocast_dtype, enabled=place.autocast_dtype is not None
            ):
                logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(log_probs * mask[:, 1:]).sum() / len(tokens)).backward()
            del logits, log_probs
        model.zero_grad(set_to_none=True)

    seconds = time_job(run, place, repeats=1, warm_up=1)
    return seconds * sum(map(len, batch.tokens)) / sum(map(len, tokens))


RECOMPUTED = names_of("g1_recomputed")


async def measure_recomputed(place: Place, report: Report) -> None:
    """The same step when every layer keeps its input only. The work done twice does not count as useful."""
    shape, batch = place.shape, draw_packed_batch(place, place.shape)
    lengths = [len(row) - 1 for row in batch.tokens]  # the last token predicts nothing
    async with open_thread(place) as thread:
        model = await thread.submit(lambda: make_model(shape, place))
        backend = await thread.submit(
            lambda: make_backend(
                model, place, thread, micro_batch_tokens=place.micro_batch_tokens, recompute=True
            )
        )
        await take_step(backend, batch)
        step_s, peak = await time_steps(backend, batch, thread, place, steps=2)
        flops = shape.train_flops(lengths, int(batch.response_lengths.sum()))
        add_step(report, place, "g1_recomputed", step_s=step_s, tokens=sum(lengths), flops=flops, peak=peak)


LONG = names_of("g1b")


async def measure_long(place: Place, report: Report) -> None:
    """One row of 16,384 tokens in a small model, every layer keeping its input only."""
    shape, length = place.small_shape, 512 if place.tiny else 16384
    batch = make_batch([draw_tokens(place, length, shape.vocab)], [1], place, vocab=shape.vocab)
    async with open_thread(place) as thread:
        model = await thread.submit(lambda: make_model(shape, place))
        backend = await thread.submit(
            lambda: make_backend(model, place, thread, micro_batch_tokens=length, recompute=True)
        )
        await take_step(backend, batch)
        step_s, peak = await time_steps(backend, batch, thread, place, steps=2)
    add_step(
        report,
        place,
        "g1b",
        step_s=step_s,
        tokens=length,
        flops=shape.train_flops([length], length - 1),
        peak=peak,
    )


# --- shared prefixes ----------------------------------------------------------------------------------------

SHARING = ("g5_speed_up", "g5_ideal", "g5_of_ideal", "g5_gradient_error")


async def measure_sharing(place: Place, report: Report) -> None:
    """Groups of 8 answers of 256 tokens to a prompt of 1,024, the prompt computed once or eight times.
    Gradients are compared first.
    """
    shape = place.shape
    groups, samples, prompt, answer = (2, 4, 96, 16) if place.tiny else (4, 8, 1024, 256)
    rows = shared_rows(
        place,
        groups=groups,
        samples=samples,
        prompt=prompt,
        answer_lengths=np.full(groups * samples, answer),
        vocab=shape.vocab,
    )
    batch = make_batch(rows, [prompt] * len(rows), place, vocab=shape.vocab, group_size=samples)
    ideal = compute_ideal(shape, samples=samples, prompt=prompt, answer=answer)
    budget = 512 if place.tiny else place.micro_batch_tokens
    async with open_thread(place) as thread:
        model = await thread.submit(lambda: make_model(shape, place))
        plain = await thread.submit(
            lambda: make_backend(
                model, place, thread, micro_batch_tokens=budget, share_prefix=False, compiled=False
            )
        )
        shared = await thread.submit(
            lambda: make_backend(model, place, thread, micro_batch_tokens=budget)
        )  # compiles the layers of both
        error = await compare_gradients(model, shared, plain, batch, thread)
        report.add("g5_gradient_error", error)
        assert error <= GRADIENT_TOLERANCE[place.dtype], (
            f"gradients with and without sharing differ by {error:.1e} of their norm"
        )
        times: dict[str, list[float]] = {"shared": [], "plain": []}
        for name in ("shared", "plain", "plain", "shared") * (1 if place.tiny else 3):
            backend = shared if name == "shared" else plain
            began = await read_clock(thread, place)
            await forward_backward(backend, batch)
            times[name].append(await read_clock(thread, place) - began)
            await backend.reset().result()
    speed_up = float(np.median(times["plain"]) / np.median(times["shared"]))
    report.add("g5_speed_up", speed_up)
    report.add("g5_ideal", ideal)
    report.add("g5_of_ideal", speed_up / ideal)


def compute_ideal(shape: Shape, *, samples: int, prompt: int, answer: int) -> float:
    """FLOPs of a group without sharing over those with it; the head sees the answers only, either way."""
    apart = shape.train_flops([prompt + answer] * samples, samples * answer)
    repeated = shape.train_flops([prompt] * (samples - 1), 0)
    return apart / (apart - repeated)


async def forward_backward(backend: PyTorchTrainingBackend, batch: RolloutBatch) -> None:
    """Adds the batch's gradient."""
    await backend.forward_backward(batch, LOSS).result()


async def compare_gradients(
    model: Any,
    one: PyTorchTrainingBackend,
    other: PyTorchTrainingBackend,
    batch: RolloutBatch,
    thread: DeviceThread,
) -> float:
    """Norm of the difference of all gradients over their norm. Leaves none behind."""

    def take() -> list[Tensor]:
        return [parameter.grad.clone() for parameter in model.parameters()]

    found: list[Sequence[Tensor]] = []
    for backend in (one, other):
        await forward_backward(backend, batch)
        found.append(await thread.submit(take))
        await backend.reset().result()

    def compare() -> float:
        differences = [mine - theirs for mine, theirs in zip(*found, strict=True)]
        return float(torch.nn.utils.get_total_norm(differences) / torch.nn.utils.get_total_norm(found[1]))

    return await thread.submit(compare)
