"""One step of the demo's RL against what the machine allows: where its seconds go, and what is left of each
part above its limit. CPU.

    python -m benchmarks.roofline [--steps 6] [--threads 2] [--autocast auto] [--quick]

The demo (demo.toml, SmolLM2-135M) in this process, with two steps of SFT, few held-out problems, and clocks
around the functions that compute. The first two steps are left out; numbers are medians over the others. A
limit is what the part's arithmetic takes at the rate of a product of square float32 matrices (1536), rounded
to bfloat16 where the run does that, or its bytes at the rate at which 256 MiB are copied, read and written,
whichever is longer; both are measured here, before the run and after it, and the better counts. N weights,
of which H are the head's:

    prefill    2 (N − H) operations a prompt token, of each distinct prompt once, and 2 H for each prompt
    decode     for each forward pass of B rows: 2 N B operations, or the bytes of all weights and of the rows'
               keys and values
    draw       the bytes of the logits, once
    train      forward and backward: 6 (N − H) operations for each token of the batch, prompts of a group
               once, and 6 H for each that trains, equal beginnings once
    adamw      weights, gradients and two moments read, all but gradients written, gradients read once more
               for their norm: 32 bytes a weight
    log_probs  of the trainer before the step; the demo needs none
    record     rows of metrics and samples: nothing
    wait       the step less all these: rewards in their workers, the loop, moving rows in the cache, Python;
               nothing

    step_ratio    seconds of the step over the sum of its limits; target <= 1.5
    train_ratio   the same of forward and backward; target <= 1.25

The last line is JSON; exit status 1 if a target is missed.
"""

import functools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.harness import finish, make_parser, measure_copy_rate, measure_gemm_rate
from integration_training.train import main as train
from rollouts.backends.open import choose_autocast_dtype
from rollouts.backends.trainer import Shares, Trainer
from rollouts.metrics.writer import JsonlLogger
from rollouts.models.decoding.batch import DecodeBatch
from rollouts.models.decoding.decoder import FastDecoder
from rollouts.models.devices import rounding_products
from rollouts.models.load import load_hf_model, resolve_model

CONFIG = "integration_training/configs/demo.toml"
MODEL = "bundled:smollm2-135m-instruct"
LEFT_OUT = 2  # steps
PARTS = ("prefill", "decode", "draw", "log_probs", "train", "adamw", "record")
TARGETS = {"step_ratio": "<= 1.5", "train_ratio": "<= 1.25"}
Work = tuple[float, float]  # operations, bytes
Count = Callable[..., Work]


class Meter:
    """Seconds and work of each part of the step under way, and of those that ended."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._seconds = defaultdict[str, float](float)
        self._calls = defaultdict[str, list[Work]](list)
        self.work: list[dict[str, list[Work]]] = []
        self._began = time.perf_counter()

    def clock(self, part: str, count: Count, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are a part's."""

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._calls[part].append(count(*args, **options))
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._seconds[part] += time.perf_counter() - began

        return timed

    def clock_record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """log_step or log_samples; the row of a step of RL ends that step."""

        @functools.wraps(function)
        async def timed(logger: JsonlLogger, stage: str, *args: Any, **options: Any) -> None:
            began = time.perf_counter()
            await function(logger, stage, *args, **options)
            now = time.perf_counter()
            self._seconds["record"] += now - began
            if function.__name__ == "log_step":
                if stage == "rl":
                    self.steps.append({**self._seconds, "step": now - self._began})
                    self.work.append(dict(self._calls))
                self._seconds.clear()
                self._calls = defaultdict(list)
                self._began = now

        return timed


def install(meter: Meter, stack: ExitStack, weights: int, head: int) -> None:
    """Puts the clocks around what computes."""
    body = weights - head

    def prefill(_: object, prompts: Any, *more: Any) -> Work:
        return 2.0 * (body * sum(map(len, prompts)) + head * len(prompts)), 4.0 * weights

    def decode(decoder: Any, ids: Any, positions: Any) -> Work:
        cached = sum(one[:, 0, :, 0].numel() for one in decoder._kv) * float(positions.sum() + len(ids))
        return 2.0 * weights * len(ids), 4.0 * (weights + cached)

    def draw(_: object, logits: Any, *more: Any) -> Work:
        return 0.0, 4.0 * logits.numel()

    def trains(_: object, shares: Shares, **more: Any) -> Work:
        batches = [portion.micro_batch for share in shares or () for portion in share.portions]
        computed = sum(batch.computed_tokens for batch in batches)
        return 6.0 * (body * computed + head * sum(len(one.predictors) for one in batches)), 0.0

    def scores(_: object, shares: Shares, **more: Any) -> Work:
        operations, _bytes = trains(_, shares)
        return operations / 3, 0.0

    def adamw(*_: object, **more: Any) -> Work:
        return 0.0, 32.0 * weights

    for owner, name, part, count in (
        (FastDecoder, "prefill", "prefill", prefill),
        (FastDecoder, "decode", "decode", decode),
        (DecodeBatch, "_draw", "draw", draw),
        (Trainer, "forward_backward", "train", trains),
        (Trainer, "forward", "log_probs", scores),
        (Trainer, "optim_step", "adamw", adamw),
    ):
        wrapped = meter.clock(part, count, getattr(owner, name))
        stack.enter_context(patch.object(owner, name, wrapped))
    for name in ("log_step", "log_samples"):
        wrapped = meter.clock_record(getattr(JsonlLogger, name))
        stack.enter_context(patch.object(JsonlLogger, name, wrapped))


def main() -> int:
    parser = make_parser(__doc__, quick="three steps, of which one is measured")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--autocast", choices=["auto", "off", "bfloat16"], default="auto")
    asked = parser.parse_args()
    asked.steps = LEFT_OUT + 1 if asked.quick else asked.steps
    torch.set_num_threads(asked.threads)
    model: Any = load_hf_model(resolve_model(MODEL))
    weights, head = sum(one.numel() for one in model.parameters()), model.lm_head.weight.numel()
    del model
    device = torch.device("cpu")
    dtype = choose_autocast_dtype(asked.autocast, device)

    def measure_rates() -> tuple[float, float]:
        with rounding_products(dtype, device):
            return measure_gemm_rate(1536), measure_copy_rate(256 << 20)

    meter, rates = Meter(), [measure_rates()]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        install(meter, stack, weights, head)
        words = ["--config", CONFIG, "--mode", "sft+rl", "--sft.steps", "2", "--rl.steps", str(asked.steps)]
        words += ["--eval.data.size", "8", "--model.threads", str(asked.threads)]
        words += ["--model.autocast", "bfloat16" if dtype else "off"]
        assert train([*words, "--output.dir", str(Path(scratch) / "run")]) == 0
    rates.append(measure_rates())
    gemm, copied = map(max, zip(*rates, strict=True))
    metrics: dict[str, float | str | None] = {
        "products": "bfloat16" if dtype else "float32",
        "gemm_gflops": round(gemm / 1e9, 1),
        "copy_gib_s": round(copied / 2**30, 2),
    }
    steps, works = meter.steps[LEFT_OUT:], meter.work[LEFT_OUT:]
    seconds = {part: median(step.get(part, 0.0) for step in steps) for part in (*PARTS, "step")}
    seconds["wait"] = median(step["step"] - sum(step.get(part, 0.0) for part in PARTS) for step in steps)
    limits = {
        part: median(
            sum(max(operations / gemm, moved / copied) for operations, moved in work.get(part, ()))
            for work in works
        )
        for part in PARTS
    }
    whole = sum(limits.values())
    for part in (*PARTS, "wait"):
        metrics[f"{part}_s"] = round(seconds[part], 4)
        metrics[f"{part}_limit_s"] = round(limits.get(part, 0.0), 4)
    metrics |= {
        "step_s": round(seconds["step"], 3),
        "limit_s": round(whole, 3),
        "step_ratio": round(seconds["step"] / whole, 3),
        "train_ratio": round(seconds["train"] / limits["train"], 3),
    }
    return finish("roofline", peer="the sum of its limits", metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
