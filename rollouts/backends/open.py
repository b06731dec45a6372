"""A trainer's parts from a model directory, on one rank or many; and a backend of one process in one call."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from rollouts.backends.compiled import compile_and_prove
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.backends.sharding import (
    COMPILE_MEET_S,
    discard_iteration,
    plan_sharded_forward,
    run_unsharded,
    shard_model,
)
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.errors import ConfigError, ModelError
from rollouts.models.devices import use_device
from rollouts.models.directories import compute_model_digests
from rollouts.models.layers import checkpoint_layers
from rollouts.models.load import ModelHead, load_hf_model
from rollouts.models.log_probs import ForwardPlan
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.scalar_head import load_scalar_model, set_padding_token
from rollouts.models.sharded import load_sharded_weights, make_meta_model
from rollouts.ranks.group import AgreedFailure, Ranks, all_gather_bytes, meet_all, run_agreed
from rollouts.ranks.meet import find_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Autocast = Literal["off", "bfloat16", "auto"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """What every rank must know to open its part of a backend; rank 0 sends it."""

    model_path: str
    optim: Mapping[str, Any]  # of OptimConfig
    autocast: Autocast = "auto"
    threads: int = 0  # torch's in each of several ranks; 0: this machine's cores divided by its ranks
    deterministic: bool = False
    gradient_checkpointing: bool = False
    compile_backend: str | None = None  # of torch.compile; None: layers run as they are written
    cpu_offload: bool = False
    reduce_each_micro_batch: bool = False  # see Trainer; cpu_offload does it too
    seed: int | None = 0  # of torch's own generators, one for each rank; None: they are left alone
    dtype: Literal["float32", "float64"] = "float32"  # of the master weights; float64 shows what is rounding
    head: ModelHead = "tokens"


class TrainerParts(NamedTuple):
    """A model with a fresh optimizer."""

    model: PreTrainedModel
    optimizer: torch.optim.AdamW
    plan: ForwardPlan
    autocast_dtype: torch.dtype | None


def open_parts(options: TrainerOptions, ranks: Ranks) -> TrainerParts:
    """This rank's part; of several ranks no one holds the whole. Collective, on the device thread. Raises
    AgreedFailure.
    """
    if ranks.mesh is not None:
        cores = len(os.sched_getaffinity(0)) // ranks.local_world_size
        torch.set_num_threads(options.threads or max(cores, 1))
        digests = run_agreed(ranks, lambda: compute_model_digests(Path(options.model_path))).value
        way_out = "copy the model directory again, so that all machines have the same files"
        check_same(ranks, digests, way_out)
    torch.use_deterministic_algorithms(options.deterministic)
    use_device(ranks.device)
    model = run_agreed(ranks, lambda: load_model(options, ranks)).value
    optimizer = create_adamw_optimizer(model, OptimConfig.model_validate(options.optim))
    plan = plan_sharded_forward(model, ranks)
    fields = {field.name: repr(getattr(plan, field.name)) for field in dataclasses.fields(plan)}
    check_same(ranks, fields, "use machines with the same devices, drivers and libraries")
    autocast_dtype = choose_autocast_dtype(options.autocast, str(ranks.device))
    if options.compile_backend is not None:
        compile_together(model, plan, ranks, autocast_dtype, options.compile_backend)
    if options.seed is not None:  # loading draws, more or less of it, from one transformers to the next
        torch.manual_seed((options.seed + ranks.rank) % 2**63)
    return TrainerParts(model, optimizer, plan, autocast_dtype)


def load_model(options: TrainerOptions, ranks: Ranks) -> PreTrainedModel:
    """The whole model, or this rank's shards of it."""
    path, dtype = Path(options.model_path), getattr(torch, options.dtype)
    if ranks.mesh is None:
        load = load_scalar_model if options.head == "scalar" else load_hf_model
        loaded: Any = load(path, dtype=dtype)  # transformers types .to narrowly
        model = loaded.to(ranks.device)
    else:
        model = make_meta_model(path, dtype=dtype, head=options.head)
    if options.gradient_checkpointing:
        checkpoint_layers(model)
    if ranks.mesh is not None:
        shard_model(model, ranks, cpu_offload=options.cpu_offload)
        device = "cpu" if options.cpu_offload else ranks.device
        load_sharded_weights(model, path, device=device, buffer_device=ranks.device, new_head=True)
    return model


def compile_together(
    model: PreTrainedModel,
    plan: ForwardPlan,
    ranks: Ranks,
    autocast_dtype: torch.dtype | None,
    backend: str,
) -> None:
    """compile_and_prove on all ranks. Collective. Raises AgreedFailure if it fails on all alike; what fails
    on this rank alone, as it is.
    """

    def run(work: Callable[[], Tensor]) -> Tensor:
        try:
            return work() if plan.head == "whole" else run_unsharded(model, work)
        finally:
            discard_iteration(model)

    try:
        compile_and_prove(model, plan, autocast_dtype, backend=backend, run=run)
    except (ConfigError, ModelError) as error:
        if not meet_all(ranks, COMPILE_MEET_S):
            raise
        raise AgreedFailure(error) from error


def check_same(ranks: Ranks, values: Mapping[str, str], way_out: str) -> None:
    """Raises AgreedFailure with a ModelError naming the first of `values` that is another one on rank 0.
    Collective.
    """
    mine = json.dumps([socket.gethostname(), dict(values)]).encode()
    hosts, found = zip(*map(json.loads, all_gather_bytes(ranks, mine)), strict=True)
    difference = find_difference(found)
    if difference is not None:
        name, (other, *_) = difference
        raise AgreedFailure(
            ModelError(
                f"the model's {name} is {found[other].get(name)} on rank {other} on {hosts[other]} and"
                f" {found[0].get(name)} on rank 0 on {hosts[0]}; {way_out}"
            )
        )


def raise_own(work: Callable[[], T]) -> T:
    """What `work` returns. Raises the error of an AgreedFailure as it is."""
    try:
        return work()
    except AgreedFailure as failure:
        error = failure.error
    raise error


@asynccontextmanager
async def open_pytorch_backend(
    model_path: Path,
    *,
    optim: OptimConfig,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "cpu",
    autocast: Autocast = "auto",
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
    options = TrainerOptions(
        model_path=str(model_path),
        optim=optim.model_dump(),
        autocast=autocast,
        deterministic=deterministic,
        gradient_checkpointing=gradient_checkpointing,
        compile_backend=compile_backend,
        seed=seed if device_thread is None else None,
        head=head,
    )
    threads = threads or len(os.sched_getaffinity(0))
    own = open_device_thread(name="trainer", torch_threads=threads) if device_thread is None else None
    async with own or nullcontext(device_thread) as thread:
        assert thread is not None
        open_alone = partial(open_parts, options, Ranks(0, 1, 1, torch.device(device)))
        model, optimizer, plan, autocast_dtype = await thread.submit(lambda: raise_own(open_alone))
        if head == "scalar":
            set_padding_token(model, tokenizer)
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


def choose_autocast_dtype(autocast: Autocast, device: str) -> torch.dtype | None:
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
