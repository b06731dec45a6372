"""One rank's part of a backend over several ranks: made without any rank ever holding the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rollouts.backends.open import choose_autocast_dtype
from rollouts.backends.same_ranks import check_same_model, check_same_plan
from rollouts.backends.sharded_model import compile_sharded, plan_sharded_forward, shard_model
from rollouts.backends.sharded_trainer import ShardedTrainer
from rollouts.config.schema import OptimConfig
from rollouts.distributed.process_group import Ranks, run_agreed
from rollouts.models.devices import use_device
from rollouts.models.gradient_checkpointing import checkpoint_layers
from rollouts.models.load import ModelHead
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.sharded import load_sharded_weights, make_meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedOptions:
    """What every rank must know to open its part of a backend; rank 0 sends it."""

    model_path: str
    optim: Mapping[str, Any]  # of OptimConfig
    autocast: Literal["off", "bfloat16", "auto"] = "auto"
    # of torch in each rank; 0: the cores that this process may use, divided by the ranks on this machine
    threads: int = 0
    deterministic: bool = False
    gradient_checkpointing: bool = False
    compile_backend: str | None = None  # of torch.compile; None: layers run as they are written
    cpu_offload: bool = False
    reduce_each_micro_batch: bool = False
    seed: int = 0  # of torch's own generators, one for each rank
    dtype: Literal["float32", "float64"] = "float32"  # of the master weights; float64 shows what is rounding
    head: ModelHead = "tokens"


def open_trainer(options: ShardedOptions, ranks: Ranks, check_open: Callable[[], None]) -> ShardedTrainer:
    """This rank's part of a model with a fresh optimizer; no rank holds the whole. Collective. Raises
    AgreedFailure.
    """
    torch.use_deterministic_algorithms(options.deterministic)
    use_device(ranks.device)
    path = Path(options.model_path)

    def load() -> PreTrainedModel:
        model = make_meta_model(path, dtype=getattr(torch, options.dtype), head=options.head)
        if options.gradient_checkpointing:
            checkpoint_layers(model)
        shard_model(model, ranks, cpu_offload=options.cpu_offload)
        device = "cpu" if options.cpu_offload else ranks.device
        load_sharded_weights(model, path, device=device, buffer_device=ranks.device, new_head=True)
        return model

    check_same_model(ranks, path)
    model = run_agreed(ranks, load).value
    optimizer, plan = (
        create_adamw_optimizer(model, OptimConfig.model_validate(options.optim)),
        plan_sharded_forward(model, ranks),
    )
    check_same_plan(ranks, plan)
    autocast_dtype = choose_autocast_dtype(options.autocast, str(ranks.device))
    if options.compile_backend is not None:
        compile_sharded(model, plan, ranks, autocast_dtype, backend=options.compile_backend)
    torch.manual_seed((options.seed + ranks.rank) % 2**63)
    return ShardedTrainer(
        model,
        optimizer,
        ranks,
        plan,
        check_open=check_open,
        autocast_dtype=autocast_dtype,
        reduce_each_micro_batch=options.reduce_each_micro_batch,
    )


def count_threads(threads: int, ranks: Ranks) -> int:
    """torch's threads in this rank."""
    return threads or max(len(os.sched_getaffinity(0)) // ranks.local_world_size, 1)
