"""Where the suite runs and what its parts share: shapes of models, random weights made on the device,
batches, clocks, FLOPs.
"""

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from rollouts.backends.compiled import compile_and_prove
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.models.devices import use_device
from rollouts.models.directories import quiet_transformers
from rollouts.models.forward_plan import describe_plan, plan_forward
from rollouts.models.layers import checkpoint_layers
from rollouts.models.optim import create_adamw_optimizer
from rollouts.types import IntArray, LossSpec, RolloutBatch

SHEET_FLOPS = 989e12  # dense bf16 of an H100 or H200 (SXM), by the datasheet
GIB = 2**30
LOSS = LossSpec("ppo_clip")
LARGE_MEMORY = 100 * GIB  # of a device; below it micro-batches are half as large


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes. All here have gated feed-forward blocks and tied embeddings."""

    name: str
    kind: Literal["qwen2", "qwen3"]
    hidden: int
    layers: int
    feed_forward: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def body_parameters(self) -> int:
        """Weights of the layers' matrices, each of which multiplies every token once."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head_parameters(self) -> int:
        """Weights of the head, which multiplies the positions that predict."""
        return self.vocab * self.hidden

    def kv_bytes(self, itemsize: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def train_flops(self, lengths: Sequence[int] | IntArray, trained: int) -> float:
        """Forward and backward of rows of these lengths, `trained` of whose tokens have log-probs; nothing
        counted twice for recomputation.

        6 · weights a token, and causal attention 6 · layers · heads · head_dim · T a token of a row of T.
        """
        tokens = np.asarray(lengths, np.float64)
        attention = 6.0 * self.layers * self.heads * self.head_dim * float((tokens**2).sum())
        return (
            6.0 * self.body_parameters * float(tokens.sum())
            + 6.0 * self.head_parameters * trained
            + attention
        )


QWEN_1_5B = Shape("Qwen2.5-1.5B", "qwen2", 1536, 28, 8960, 151936, 12, 2, 128)
QWEN_0_6B = Shape("Qwen3-0.6B", "qwen3", 1024, 28, 3072, 151936, 16, 8, 128)
TINY_1_5B = Shape("tiny Qwen2", "qwen2", 64, 2, 128, 512, 4, 2, 16)
TINY_0_6B = Shape("tiny Qwen3", "qwen3", 64, 2, 96, 512, 4, 2, 16)


@dataclass(slots=True)
class Place:
    """The machine: filled by the part `ceilings`, read by the others."""

    device: Literal["cuda", "cpu"]
    tiny: bool  # every size is that of a test; numbers mean nothing
    gemm_flops: float | None = None  # measured, a second
    copy_bytes: float | None = None  # measured, bytes read and written a second
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def dtype(self) -> torch.dtype:
        """Of what is multiplied."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.device == "cuda" else None

    def share_of_sheet(self, flops: float) -> float | None:
        """Of the rate of the GPU's datasheet; None on a CPU."""
        return flops / SHEET_FLOPS if self.device == "cuda" else None

    @property
    def compile_backend(self) -> str:
        """Of torch.compile; programs for a CPU would take longer to make than all else here."""
        return "inductor" if self.device == "cuda" else "eager"

    @property
    def shape(self) -> Shape:
        """Of the large model."""
        return TINY_1_5B if self.tiny else QWEN_1_5B

    @property
    def small_shape(self) -> Shape:
        """Of the small model."""
        return TINY_0_6B if self.tiny else QWEN_0_6B

    @property
    def micro_batch_tokens(self) -> int:
        """Of a training step whose layers keep their activations."""
        if self.tiny:
            return 256
        return 16384 if torch.cuda.get_device_properties(0).total_memory >= LARGE_MEMORY else 8192


# --- models and batches -------------------------------------------------------------------------------------


def make_model(shape: Shape, place: Place, *, dtype: torch.dtype = torch.float32) -> Any:
    """A causal LM of transformers with random weights, made on the device. In evaluation mode."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "vocab_size": shape.vocab,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.Qwen2Config(**sizes) if shape.kind == "qwen2" else transformers.Qwen3Config(**sizes)
    torch.manual_seed(0)
    with quiet_transformers(), torch.device(place.device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model.eval()


def draw_lengths(place: Place, *, tokens: int, mean: float, longest: int) -> IntArray:
    """Lengths of rows, lognormal with sigma 0.8 around `mean`, of `tokens` tokens in all."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = int(place.rng.lognormal(math.log(mean) - 0.32, 0.8))  # exp(mu + sigma² / 2) is the mean
        lengths.append(min(max(drawn, 8), longest, max(tokens - sum(lengths), 8)))
    return np.asarray(lengths, np.int64)


def make_batch(
    rows: Sequence[IntArray], prompt_lengths: Sequence[int], place: Place, *, vocab: int, group_size: int = 1
) -> RolloutBatch:
    """Rows that train behind their prompts, sampled as from a uniform distribution, with random advantages.
    [B] rows.
    """
    masks = [np.arange(len(row)) >= prompt for row, prompt in zip(rows, prompt_lengths, strict=True)]
    advantages = [np.where(mask, place.rng.normal(), 0.0).astype(np.float32) for mask in masks]
    return RolloutBatch(
        tokens=tuple(rows),
        loss_masks=tuple(masks),
        rollout_log_probs=tuple(np.where(mask, -math.log(vocab), 0.0).astype(np.float32) for mask in masks),
        advantages=tuple(advantages),
        group_indices=np.arange(len(rows)) // group_size,
    )


def draw_tokens(place: Place, length: int, vocab: int) -> IntArray:
    """Token ids that are no special ones."""
    return place.rng.integers(3, vocab, length)


def shared_rows(
    place: Place, *, groups: int, samples: int, prompt: int, answer_lengths: IntArray, vocab: int
) -> list[IntArray]:
    """groups x samples rows: a prompt for each group, an answer for each row."""
    prompts = [draw_tokens(place, prompt, vocab) for _ in range(groups)]
    return [
        np.concatenate([prompts[row // samples], draw_tokens(place, int(length), vocab)])
        for row, length in enumerate(answer_lengths)
    ]


# --- clocks -------------------------------------------------------------------------------------------------


def synchronize(place: Place) -> None:
    """Waits for everything that was submitted to the device."""
    if place.device == "cuda":  # pragma: gpu
        torch.cuda.synchronize()


def time_job(work: Callable[[], object], place: Place, *, repeats: int, warm_up: int = 1) -> float:
    """Seconds of one call, the mean of `repeats` after the warm-up: by CUDA's events, or by the clock on a
    CPU. On the device thread.
    """
    for _ in range(warm_up):
        work()
    synchronize(place)
    if place.device == "cuda":  # pragma: gpu
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            work()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1000.0 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


async def read_clock(thread: DeviceThread, place: Place) -> float:
    """Seconds, once the device has done everything that was submitted."""
    await thread.submit(lambda: synchronize(place))
    return time.perf_counter()


def reset_peak(place: Place) -> int:
    """Bytes in use on the device, from which the next peak is counted; 0 on a CPU."""
    if place.device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()  # pragma: gpu
    return torch.cuda.memory_allocated()  # pragma: gpu


def read_peak_gib(place: Place) -> float | None:
    """The most memory in use on the device since reset_peak; None on a CPU, where nobody counts it."""
    return torch.cuda.max_memory_allocated() / GIB if place.device == "cuda" else None


NO_PEAK = "memory is counted by CUDA's allocator, and this is a CPU"
NO_CEILINGS = "the part `ceilings` did not run"
NO_SHEET = "a CPU has no figure of a datasheet here"


# --- the project's own backend on a model that is there already ---------------------------------------------


@asynccontextmanager
async def open_thread(place: Place) -> AsyncIterator[DeviceThread]:
    """A device thread that computes at the place."""
    async with open_device_thread(
        name="benchmark", torch_threads=None if place.device == "cuda" else 1
    ) as thread:
        await thread.submit(lambda: use_device(torch.device(place.device)))
        yield thread


def make_backend(
    model: Any,
    place: Place,
    thread: DeviceThread,
    *,
    micro_batch_tokens: int,
    share_prefix: bool = True,
    compiled: bool = True,
    recompute: bool = False,
) -> PyTorchTrainingBackend:
    """What open_pytorch_backend makes of a directory, of a model in memory. On the device thread."""
    optim = OptimConfig(lr=1e-6)
    if recompute:
        checkpoint_layers(model)
    optimizer, plan = create_adamw_optimizer(model, optim), plan_forward(model)
    print(f"  {describe_plan(model, plan)}", flush=True)
    if compiled:
        compile_and_prove(model, plan, place.autocast_dtype, backend=place.compile_backend)
    return PyTorchTrainingBackend(
        model,
        optimizer,
        thread,
        optim=optim,
        total_steps=1000,
        plan=plan,
        autocast_dtype=place.autocast_dtype,
        micro_batch_tokens=micro_batch_tokens,
        share_prefix=share_prefix,
    )


async def take_step(backend: PyTorchTrainingBackend, batch: RolloutBatch) -> float:
    """One optimizer step on the batch; the norm of its gradient. Raises AssertionError if the step was
    skipped.
    """
    first, second = backend.forward_backward(batch, LOSS), backend.optim_step()
    await first.result()
    done = await second.result()
    assert done.skipped is None and done.grad_norm is not None, done
    return done.grad_norm
