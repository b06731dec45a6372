"""A trainer's part of a backend from a model directory, on one rank or many; and a backend of one process in
one call.
"""

import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, cast

import torch
import trio
from torch import Tensor

from rollouts.backends.compiled import compile_and_prove
from rollouts.backends.pytorch import BackendSettings, PyTorchTrainingBackend, RankedTrainingBackend
from rollouts.backends.trainer import (
    COMPILE_MEET_S,
    Trainer,
    discard_iteration,
    plan_sharded_forward,
    run_unsharded,
    shard_model,
)
from rollouts.config.model import LoraConfig
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.errors import ConfigError, ModelError
from rollouts.models.devices import LEAST_GAIN, measure_rounding, use_device
from rollouts.models.directories import ModelHead, compute_model_digests, has_own_scalar_head
from rollouts.models.forward_plan import log_plan
from rollouts.models.layers import checkpoint_layers, set_padding_token
from rollouts.models.lora import Adapter, copy_adapter, load_adapter, make_adapter, prepare_places
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.sharded import load_sharded_weights, make_meta_model
from rollouts.ranks.channel import NoOtherRanks, RankChannel
from rollouts.ranks.meet import (
    AgreedFailure,
    Ranks,
    all_gather_bytes,
    describe_difference,
    meet_all,
    run_agreed,
)
from rollouts.reference.quantize import Bits, quantize_model
from rollouts.types import Fields, Texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Autocast = Literal["off", "bfloat16", "auto"]
OPENING = "opening the model"
# of a frozen model's matrices, by lora.base
BITS: Mapping[str, Bits] = {"bfloat16": 16, "8bit": 8, "4bit": 4}
NUMBERS = itertools.count(1)  # of backends that are opened beside the first


class TrainerOptions(TypedDict, total=False):
    """How every rank opens its part of a backend; rank 0 sends it."""

    autocast: Autocast  # "auto"
    # torch's; 0, the default: this machine's cores divided by its ranks; None: those of a device thread that
    # is open
    threads: int | None
    deterministic: bool
    gradient_checkpointing: bool
    compile_backend: str | None  # of torch.compile; None, the default: layers run as they are written
    cpu_offload: bool
    reduce_each_micro_batch: bool  # see Trainer; cpu_offload does it too
    seed: int | None  # 0; of torch's own generators, one for each rank; None: they are left alone
    dtype: Literal["float32", "float64"]  # "float32"; of the master weights; float64 shows what is rounding
    head: ModelHead  # "tokens"
    lora: Fields | None  # of a LoraConfig: an adapter trains, and the model does not


class OpenSettings(BackendSettings, TrainerOptions, total=False):
    """What openings take by name."""


# --- a backend ----------------------------------------------------------------------------------------------


class OpenTrainer(NamedTuple):
    """What a backend is made of."""

    trainer: Trainer
    thread: DeviceThread
    number: int  # of the backend on its ranks
    settings: BackendSettings


@asynccontextmanager
async def open_trainer_thread(
    model_path: Path,
    channel: RankChannel,
    ranks: Ranks,
    device_thread: DeviceThread | None,
    beside: RankedTrainingBackend | None,
    settings: OpenSettings,
) -> AsyncIterator[OpenTrainer]:
    """Rank 0's trainer on a device thread of its own, or on another backend's, which stays open for longer;
    `beside` one, with its model. The other ranks open theirs. Raises ModelError, and ConfigError for settings
    that do not go together.
    """
    own, options = divide_settings(settings, ranks)
    if device_thread:
        options |= {"threads": None, "seed": None}
    device_thread = beside.device_thread if beside else device_thread
    number = next(NUMBERS) if device_thread else 0

    def open_part() -> Trainer:
        channel.phase = OPENING
        channel.send(
            {
                "name": "open_backend",
                "backend": number,
                "model_path": str(model_path),
                "optim": own["optim"].model_dump(),
                "options": options,
                "beside": beside and beside.number,
            }
        )
        try:
            return open_trainer(
                model_path,
                own["optim"],
                options,
                ranks,
                thread.check_open,
                beside=beside and beside.trainer,
            )
        except AgreedFailure as failure:
            error = failure.error
        raise error

    thread_context = nullcontext(device_thread) if device_thread else open_device_thread(name="trainer")
    try:
        async with thread_context as thread:
            opening = thread.submit(open_part)
            with trio.CancelScope(shield=True):  # else the others would open a backend that nobody has
                await opening
            trainer = await opening
            if options.get("head") == "scalar" and not trainer.adapter:
                set_padding_token(trainer.model, own.get("tokenizer"))
            yield OpenTrainer(trainer, thread, number, own)
    finally:
        channel.send({"name": "close_backend", "backend": number})


def divide_settings(settings: OpenSettings, ranks: Ranks) -> tuple[Any, Any]:
    """(BackendSettings, TrainerOptions). Raises ConfigError for settings that do not go together."""
    options: Any = dict(settings)
    own: Any = {name: options.pop(name) for name in BackendSettings.__annotations__ if name in options}
    # rank 0 chooses the precision: machines may be unlike
    dtype = choose_autocast_dtype(options.get("autocast", "auto"), ranks.device)
    options["autocast"] = "bfloat16" if dtype else "off"
    if options.get("head") == "scalar" and own.get("skip_zero_advantage"):
        raise ConfigError(
            "skip_zero_advantage=True with head='scalar': a critic learns from rows without an advantage too;"
            " leave it out"
        )
    return own, options


@asynccontextmanager
async def open_pytorch_backend(
    model_path: Path,
    *,
    device: str = "cpu",
    device_thread: DeviceThread | None = None,
    beside: PyTorchTrainingBackend | None = None,
    **settings: Unpack[OpenSettings],
) -> AsyncIterator[PyTorchTrainingBackend]:
    """A backend with float32 master weights from `model_path` and a fresh AdamW.

    device: "cpu", "cuda" (the thread's first) or "cuda:N". device_thread: another backend's, which stays open
    for longer; `threads` and `seed` are then that one's. Settings, of which `optim` and `total_steps` must be
    given, beside those of BackendSettings: autocast: what the trainer multiplies in ("off", "bfloat16",
    "auto"). threads: torch's, 0 for one per core this process may use. deterministic: only algorithms that
    give the same bits every time. gradient_checkpointing: layers keep their input only and are computed again
    for the gradient: the same gradients for less memory and about a third more time. compile_backend: of
    torch.compile, which then runs the layers ("inductor"), after it took its time to make their programs;
    log-probs and gradients are the same to rounding. seed: of a new adapter, and of torch's own generator,
    from which only a user's loss and an adapter's dropout draw: the model is in evaluation mode. head:
    "scalar" makes a critic or a reward model of it, with one number for each position; of a causal model's
    directory the head is new, and 0. lora: an adapter of the model trains, from lora.init_from if that is set
    (see rollouts.models.lora). beside: another adapter's backend, whose model this one shares; adapters are
    opened and closed while others train. Which layout of a batch is exact for the model is found out here,
    with a few tokens. Raises ModelError if the directory cannot be trained, ConfigError for settings that do
    not go together.
    """
    async with open_trainer_thread(
        model_path, NoOtherRanks(), Ranks(0, 1, 1, torch.device(device)), device_thread, beside, settings
    ) as opened:
        trainer, thread, _, own = opened
        yield PyTorchTrainingBackend(trainer.model, trainer.optimizer, thread, trainer=trainer, **own)


# --- a rank's part ------------------------------------------------------------------------------------------


def open_trainer(
    model_path: Path,
    optim: OptimConfig,
    options: TrainerOptions,
    ranks: Ranks,
    check_open: Callable[[], None],
    *,
    beside: Trainer | None = None,
) -> Trainer:
    """This rank's part of a backend; of several ranks no one holds the whole model. Collective, on the device
    thread. beside: whose model an adapter is of. Raises AgreedFailure.
    """
    if beside:
        assert beside.adapter, "only adapters share a model"
        return train_adapter(beside, optim, options)
    threads, seed = options.get("threads", 0), options.get("seed", 0)
    if threads is not None:
        torch.set_num_threads(threads or max(len(os.sched_getaffinity(0)) // ranks.local_world_size, 1))
    if ranks.mesh:
        digests = run_agreed(ranks, lambda: compute_model_digests(model_path)).value
        check_same(ranks, digests, "copy the model directory again, so that all machines have the same files")
    torch.use_deterministic_algorithms(options.get("deterministic", False))
    use_device(ranks.device)
    model = run_agreed(ranks, lambda: load_model(model_path, options, ranks)).value
    plan = plan_sharded_forward(model, ranks)
    autocast = options.get("autocast", "auto")
    fields = {name: repr(value) for name, value in plan._asdict().items()}
    check_same(ranks, fields, "use machines with the same devices, drivers and libraries")
    if ranks.rank == 0:
        log_plan(model, plan)
    trainer = Trainer(
        model,
        cast(Any, None) if options.get("lora") else create_adamw_optimizer(model, optim),
        ranks,
        plan,
        check_open=check_open,
        autocast_dtype=run_agreed(ranks, lambda: choose_autocast_dtype(autocast, ranks.device)).value,
        reduce_each=bool(options.get("reduce_each_micro_batch") or options.get("cpu_offload")),
    )
    if options.get("lora"):
        trainer = train_adapter(trainer, optim, options)
    if backend := options.get("compile_backend"):
        compile_together(trainer, backend)
    if seed is not None:  # loading draws, more or less of it, from one transformers to the next
        torch.manual_seed((seed + ranks.rank) % 2**63)
    return trainer


def train_adapter(trainer: Trainer, optim: OptimConfig, options: TrainerOptions) -> Trainer:
    """One that trains a new adapter of the trainer's model. Collective. Raises AgreedFailure."""
    config, model = LoraConfig.model_validate(options.get("lora")), trainer.model
    seed, scalar = options.get("seed") or 0, options.get("head") == "scalar"

    def open_adapter() -> Adapter:
        # the model's own head is whole inside, and where it computes
        made = run_unsharded(model, partial(make_adapter, model, config, seed=seed, scalar=scalar))
        if config.init_from:
            load_adapter(made, Path(config.init_from))
        return made

    try:
        adapter = run_agreed(trainer.ranks, open_adapter).value
    finally:
        discard_iteration(model)
    return replace(
        trainer,
        optimizer=create_adamw_optimizer(adapter, optim),
        plan=trainer.find_plan()._replace(head="scalar") if scalar else trainer.plan,
        adapter=adapter,
        start=copy_adapter(adapter) if config.init_from else None,
    )


def load_model(path: Path, options: TrainerOptions, ranks: Ranks) -> "PreTrainedModel":
    """The whole model, or this rank's shards of it; one that adapters train is frozen."""
    dtype, offload = getattr(torch, options.get("dtype", "float32")), options.get("cpu_offload", False)
    head, lora = options.get("head", "tokens"), options.get("lora")
    if lora and head == "scalar" and not has_own_scalar_head(path):
        head = "tokens"  # the adapter brings one
    model = make_meta_model(path, dtype=dtype, head=head)
    bits = BITS.get(lora["base"]) if lora else None
    if lora:
        prepare_places(model.requires_grad_(False), path)
    if bits:  # whole, in this rank's host memory, before it is divided
        load_sharded_weights(model, path, new_head=True)
        quantize_model(model, bits)
    if options.get("gradient_checkpointing"):
        checkpoint_layers(model)
    if ranks.mesh:
        shard_model(model, ranks, cpu_offload=offload)
    if bits:
        return cast(Any, model).to("cpu" if offload else ranks.device)
    load_sharded_weights(model, path, device=ranks.device, offload=offload, new_head=True)
    return model


def compile_together(trainer: Trainer, backend: str) -> None:
    """compile_and_prove on all ranks. Collective. Raises AgreedFailure if it fails on all alike; what fails
    on this rank alone, as it is.
    """
    model, plan = trainer.model, trainer.find_plan()

    def run(work: Callable[[], Tensor]) -> Tensor:
        try:
            return work() if plan.head == "whole" else run_unsharded(model, work)
        finally:
            discard_iteration(model)

    try:
        compile_and_prove(model, plan, trainer.autocast_dtype, backend=backend, run=run)
    except (ConfigError, ModelError) as error:
        if not meet_all(trainer.ranks, COMPILE_MEET_S):
            raise
        raise AgreedFailure(error) from error


def check_same(ranks: Ranks, values: Texts, way_out: str) -> None:
    """Raises AgreedFailure with a ModelError naming the first of `values` that is another one on rank 0.
    Collective.
    """
    mine = json.dumps([socket.gethostname(), dict(values)]).encode()
    hosts, found = zip(*map(json.loads, all_gather_bytes(ranks, mine)), strict=True)
    if difference := describe_difference(hosts, found):
        raise AgreedFailure(ModelError(f"the model's {difference}; {way_out}"))


def choose_autocast_dtype(autocast: Autocast, device: torch.device) -> torch.dtype | None:
    """bfloat16 or None for float32. auto: bfloat16 on a GPU that has it and on a CPU that is found to be
    faster with it. Raises ConfigError for bfloat16 on a CPU that does not know it.
    """
    if autocast == "off":
        return None
    if device.type == "cuda":
        native = autocast == "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else None
    known, gain = measure_rounding()
    if autocast == "bfloat16" and not known:
        raise ConfigError(
            "model.autocast='bfloat16', but this CPU's products of float32 matrices cannot be rounded to it;"
            " set 'off', which computes in float32"
        )
    return torch.bfloat16 if known and (autocast == "bfloat16" or gain > LEAST_GAIN) else None
