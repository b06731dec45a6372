"""A backend from a model directory in one call, made only of tier-1 parts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from rollouts.backends.compiled import compile_and_prove
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.errors import ConfigError
from rollouts.models.devices import use_device
from rollouts.models.forward_plan import plan_forward
from rollouts.models.gradient_checkpointing import checkpoint_layers
from rollouts.models.load import ModelHead, load_hf_model
from rollouts.models.log_probs import ForwardPlan
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.scalar_head import load_scalar_model, set_padding_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@asynccontextmanager
async def open_pytorch_backend(
    model_path: Path,
    *,
    optim: OptimConfig,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "cpu",
    autocast: Literal["off", "bfloat16", "auto"] = "auto",
    threads: int = 0,
    deterministic: bool = False,
    micro_batch_tokens: int = 8192,
    share_prefix: bool = True,
    skip_zero_advantage: bool = False,
    gradient_checkpointing: bool = False,
    compile_backend: str | None = None,
    seed: int = 0,
    head: ModelHead = "tokens",
    device_thread: DeviceThread | None = None,
) -> AsyncIterator[PyTorchTrainingBackend]:
    """A backend with float32 master weights from `model_path` and a fresh AdamW; `total_steps` is where its
    schedule ends.

    device: "cpu", "cuda" (the thread's first) or "cuda:N". threads: torch's, 0 for one per core this process
    may use. deterministic: only algorithms that give the same bits every time. skip_zero_advantage: see
    PyTorchTrainingBackend. gradient_checkpointing: layers keep their input only and are computed again for
    the gradient: the same gradients for less memory and about a third more time. compile_backend: of
    torch.compile, which then runs the layers ("inductor"), after it took its time to make their programs;
    log-probs and gradients are the same to rounding. seed: of torch's own generator, from which only a user's
    loss may draw: the model is in evaluation mode, so dropout is off. Which layout of a batch is exact for it
    is found out here, with a few tokens. head: "scalar" makes a critic or a reward model of it, with one
    number for each position; of a causal model's directory the head is new, and 0. device_thread: another
    backend's, which stays open for longer; `threads` and `seed` are then that one's. Raises ModelError if the
    directory cannot be trained, ConfigError for settings that do not go together.
    """
    check_head(head, skip_zero_advantage=skip_zero_advantage)
    autocast_dtype = choose_autocast_dtype(autocast, device)
    own = (
        open_device_thread(name="trainer", torch_threads=threads or len(os.sched_getaffinity(0)))
        if device_thread is None
        else None
    )
    async with own or nullcontext(device_thread) as thread:
        assert thread is not None

        def load() -> tuple[PreTrainedModel, torch.optim.AdamW, ForwardPlan]:
            torch.use_deterministic_algorithms(deterministic)
            use_device(device)
            made = load_scalar_model(model_path) if head == "scalar" else load_hf_model(model_path)
            loaded = made.to(device)  # pyright: ignore[reportArgumentType]  (transformers types .to narrowly)
            if head == "scalar":
                set_padding_token(loaded, tokenizer)
            if gradient_checkpointing:
                checkpoint_layers(loaded)
            parts = loaded, create_adamw_optimizer(loaded, optim), plan_forward(loaded)
            if compile_backend is not None:
                compile_and_prove(loaded, parts[2], autocast_dtype, backend=compile_backend)
            if own is not None:
                torch.manual_seed(
                    seed
                )  # loading draws, more or less of it, from one release of transformers to the next
            return parts

        model, optimizer, plan = await thread.submit(load)
        yield PyTorchTrainingBackend(
            model,
            optimizer,
            thread,
            optim=optim,
            total_steps=total_steps,
            plan=plan,
            tokenizer=tokenizer,
            autocast_dtype=autocast_dtype,
            micro_batch_tokens=micro_batch_tokens,
            share_prefix=share_prefix,
            skip_zero_advantage=skip_zero_advantage,
        )


def check_head(head: ModelHead, *, skip_zero_advantage: bool) -> None:
    """Raises ConfigError if a setting is not for this head."""
    if head == "scalar" and skip_zero_advantage:
        raise ConfigError(
            "skip_zero_advantage=True with head='scalar': a critic learns from rows without an advantage too;"
            " leave it out"
        )


def choose_autocast_dtype(autocast: Literal["off", "bfloat16", "auto"], device: str) -> torch.dtype | None:
    """bfloat16 or None for float32. auto: bfloat16 on a GPU that has it and on a CPU that multiplies it
    natively; elsewhere it is slower.
    """
    if autocast == "auto":
        native = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if torch.device(device).type == "cuda"
            else cpu_multiplies_bfloat16()
        )
        return torch.bfloat16 if native else None
    return torch.bfloat16 if autocast == "bfloat16" else None


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AVX-512 BF16 or AMX)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
