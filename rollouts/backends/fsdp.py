"""Training on several ranks with PyTorch's FSDP2, behind the TrainingBackend that one process has.

    rank 0                                                        ranks 1 … W−1
    FSDPTrainingBackend ─► job on the device thread                serve_fsdp_rank: waits on the control channel
                             ├─ Command (name, numbers) ──────────► the same method on its own device thread
                             └─ ShardedTrainer.method ◄─ collectives ─► ShardedTrainer.method

A command goes out when rank 0's job begins, not when it is submitted: the others never wait inside a
collective for rank 0's earlier work, and a job that is dropped was never heard of. What writes a checkpoint
is no job: a rank does it when it hears of it, beside whatever its device thread is in, so that rank 0, which
waits for it, never waits for a collective that it has left itself. Versions, schedule, counts and whether a
step failed are kept by rank 0 alone.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import trio
from torch import Tensor

from rollouts.backends.held_checkpoint import HeldCheckpoint, write_held
from rollouts.backends.open import check_head, choose_autocast_dtype
from rollouts.backends.open_sharded import ShardedOptions, count_threads, open_trainer
from rollouts.backends.sharded_capture import HeldPart
from rollouts.backends.sharded_trainer import ShardedTrainer
from rollouts.backends.shares import Portion, Share, deal_portions, find_attention_cost, make_portion
from rollouts.backends.steps import (
    OptimizerSteps,
    PackingOptions,
    PreparedBatch,
    StepQueue,
    prepare_batch,
    with_skipped,
)
from rollouts.backends.token_traces import collect_token_arrays
from rollouts.config.schema import OptimConfig
from rollouts.crash_points import reach
from rollouts.data.packing import MICRO_BATCH_COST, MicroBatch, spread_to_rows
from rollouts.device_thread import DeviceFuture, DeviceThread, open_device_thread
from rollouts.distributed.commands import Command
from rollouts.distributed.hub import describe_error
from rollouts.distributed.process_group import AgreedFailure, Ranks
from rollouts.errors import BackendError, ConfigError
from rollouts.models.forward_plan import log_plan
from rollouts.models.load import ModelHead
from rollouts.models.scalar_head import set_padding_token
from rollouts.protocols import WeightSink
from rollouts.types import (
    FloatArray,
    ForwardBackwardResult,
    LossSpec,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
FIRST, BESIDE = (
    0,
    1,
)  # numbers of the backends that are open on the ranks: a policy or whatever trains, a critic beside it
WAITING = "waiting for rank 0"
OPENING = "opening the model"


class CommandSender(Protocol):
    """Rank 0's end of the control channel, as far as a backend needs it."""

    def send(self, command: Command) -> None: ...
    def set_phase(self, text: str) -> None: ...
    async def wait_answers(self, name: str) -> Mapping[int, str]:
        """What every other rank has answered to what a command calls `name`, by rank."""
        ...


class CommandReceiver(Protocol):
    """Another rank's end."""

    async def receive(self) -> Command:
        """The next command. Raises trio.EndOfChannel after rank 0 has closed the channel."""
        ...

    def set_phase(self, text: str) -> None: ...
    def answer(self, name: str, text: str) -> None: ...
    def fail(self, text: str) -> None:
        """Tells rank 0 that this rank cannot go on, before it has ended."""
        ...


# --- rank 0 -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_fsdp_backend(
    model_path: Path,
    *,
    hub: CommandSender,
    ranks: Ranks,
    optim: OptimConfig,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    autocast: Literal["off", "bfloat16", "auto"] = "auto",
    threads: int = 0,
    deterministic: bool = False,
    micro_batch_tokens: int = 8192,
    share_prefix: bool = True,
    skip_zero_advantage: bool = False,
    gradient_checkpointing: bool = False,
    compile_backend: str | None = None,
    seed: int = 0,
    reduce_each_micro_batch: bool = False,
    cpu_offload: bool = False,
    dtype: Literal["float32", "float64"] = "float32",
    head: ModelHead = "tokens",
    device_thread: DeviceThread | None = None,
) -> AsyncIterator[FSDPTrainingBackend]:
    """A backend whose model, gradients and optimizer are spread over `ranks`; on rank 0, while the others are
    in serve_fsdp_rank.

    Settings as of open_pytorch_backend. micro_batch_tokens: of one rank. reduce_each_micro_batch: see
    ShardedTrainer. cpu_offload: weights, gradients and moments wait in host memory, where AdamW runs; GPUs
    hold what a micro-batch needs. device_thread: that of a backend which is open on these ranks and stays
    open for longer; a second one then trains beside it, a critic beside a policy, and no third. Raises
    ModelError, and ConfigError for settings that do not go together.
    """
    assert ranks.rank == 0, f"rank {ranks.rank} takes commands: use serve_fsdp_rank"
    check_head(head, skip_zero_advantage=skip_zero_advantage)
    if cpu_offload and ranks.device.type == "cpu":
        raise ConfigError(
            "distributed.cpu_offload=true, but the ranks train on CPUs: all they have is in host memory;"
            " leave it out, or set model.device='cuda'"
        )
    options = ShardedOptions(
        model_path=str(model_path),
        optim=optim.model_dump(),
        autocast=(
            "bfloat16" if choose_autocast_dtype(autocast, str(ranks.device)) else "off"
        ),  # rank 0's choice: machines may be unlike
        threads=threads,
        deterministic=deterministic,
        gradient_checkpointing=gradient_checkpointing,
        compile_backend=compile_backend,
        cpu_offload=cpu_offload,
        reduce_each_micro_batch=reduce_each_micro_batch,
        seed=seed,
        dtype=dtype,
        head=head,
    )
    number = FIRST if device_thread is None else BESIDE
    async with open_trainers(hub, ranks, options, number=number, device_thread=device_thread) as (
        trainer,
        thread,
    ):
        if head == "scalar":
            set_padding_token(trainer.model, tokenizer)
        log_plan(trainer.model, trainer.plan)
        packing = PackingOptions(
            micro_batch_tokens=micro_batch_tokens,
            micro_batch_cost=MICRO_BATCH_COST if ranks.device.type == "cpu" else micro_batch_tokens,
            share_prefix=share_prefix,
            skip_zero_advantage=skip_zero_advantage,
            attention_cost=find_attention_cost(trainer.model),
        )
        yield FSDPTrainingBackend(
            trainer,
            hub,
            thread,
            optim=optim,
            total_steps=total_steps,
            packing=packing,
            tokenizer=tokenizer,
            number=number,
        )


@asynccontextmanager
async def open_trainers(
    hub: CommandSender,
    ranks: Ranks,
    options: ShardedOptions,
    *,
    number: int,
    device_thread: DeviceThread | None,
) -> AsyncIterator[tuple[ShardedTrainer, DeviceThread]]:
    """This rank's trainer, while every other rank has its own under the same number, and the device thread: a
    new one where none is given.
    """
    token, told = trio.lowlevel.current_trio_token(), False  # the other ranks

    def tell() -> None:
        nonlocal told
        hub.send(Command("open_backend", {"options": dataclasses.asdict(options), "backend": number}))
        told = True

    def open_together(check_open: Callable[[], None]) -> ShardedTrainer:
        trio.from_thread.run_sync(tell, trio_token=token)
        return unwrap_agreed(lambda: open_trainer(options, ranks, check_open))

    own = (
        open_device_thread(name="trainer", torch_threads=count_threads(options.threads, ranks))
        if device_thread is None
        else None
    )
    hub.set_phase(OPENING)
    try:
        async with own or nullcontext(device_thread) as thread:
            assert thread is not None
            trainer = await wait_opened(
                thread.submit(lambda: open_together(thread.check_open)), thread_stays=own is None
            )
            yield trainer, thread
    finally:
        if told:
            hub.send(Command("close_backend", {"backend": number}))


async def wait_opened(opening: DeviceFuture[ShardedTrainer], *, thread_stays: bool) -> ShardedTrainer:
    """What was opened. Where the thread stays open, what it was given is over also when this is cancelled:
    the others hear then that it is closed.
    """
    try:
        return await opening
    except trio.Cancelled:
        if thread_stays:
            with trio.CancelScope(shield=True):
                await opening
        raise


def unwrap_agreed(work: Callable[[], T]) -> T:
    """`work()`; of an AgreedFailure the error itself."""
    try:
        return work()
    except AgreedFailure as failure:
        error = failure.error
    raise error


class FSDPTrainingBackend:
    """A TrainingBackend (see rollouts.protocols for its rules) over several ranks; lives on rank 0. Made by
    open_fsdp_backend.
    """

    def __init__(
        self,
        trainer: ShardedTrainer,
        hub: CommandSender,
        device_thread: DeviceThread,
        *,
        optim: OptimConfig,
        total_steps: int,
        packing: PackingOptions,
        tokenizer: PreTrainedTokenizerBase | None = None,
        number: int = FIRST,
    ) -> None:
        self._number = number
        self.model = trainer.model
        self.ranks = trainer.ranks
        self.device_thread = device_thread
        self._trainer = trainer
        self._hub = hub
        self._token = trio.lowlevel.current_trio_token()
        self._packing = packing
        self._tokenizer = tokenizer
        self._tokenizer_copy: PreTrainedTokenizerBase | None = (
            None  # made when a checkpoint is first written beside training
        )
        self._captures = itertools.count(1)
        self._steps = OptimizerSteps(optim, total_steps)
        self._queue = StepQueue(device_thread, self._steps.discard_pending)

    @property
    def weight_version(self) -> int:
        """Version of the weights after everything queued so far."""
        return self._queue.weight_version

    def statistics(self) -> Mapping[str, float]:
        """As PyTorchTrainingBackend's, over all ranks; the device thread's are rank 0's."""
        return {
            **self._steps.statistics(),
            **self.device_thread.statistics(),
            "ranks": float(self.ranks.world_size),
        }

    def interrupt(self) -> None:
        """forward_backward and forward queued so far end at their next micro-batch, with StepInterrupted.
        Returns at once.
        """
        self.device_thread.interrupt()

    def reset(self) -> DeviceFuture[None]:
        """Discards accumulated gradients and forgets an earlier failure. Counters and torch's random states
        are as after the last step.

        Raises BackendError if the ranks are out of step.
        """

        def work() -> None:
            self._steps.reset()
            self._together("reset", self._trainer.reset)

        return self._queue.reset(work)

    def _together(self, name: str, work: Callable[[], T], **fields: Any) -> T:
        """`work()`, while the other ranks do what the command `name` says. On the device thread."""
        met = self.device_thread.out_of_step
        if met is not None:
            raise BackendError(f"the ranks are out of step since {met!r}; start them all again") from met
        phase = f"{name} of step {self._steps.steps + 1}{'' if self._number == FIRST else ' of the critic'}"
        command = Command(name, {"phase": phase, "backend": self._number, **fields})
        trio.from_thread.run_sync(self._hub.send, command, trio_token=self._token)
        self._hub.set_phase(phase)
        try:
            return work()
        except AgreedFailure as failure:
            self._trainer.discard()
            error = failure.error
        # on this rank alone: the others are, or soon will be, in a collective that this one never comes to
        except BaseException as raised:
            self.device_thread.out_of_step = raised
            raise
        raise error

    # --- training

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> DeviceFuture[ForwardBackwardResult]:
        """Adds the batch's gradient of sum / denominator to what has accumulated since the last optim_step."""
        return self._queue.submit(lambda: self._forward_backward(batch, loss))

    def optim_step(self, params: OptimParams | None = None) -> DeviceFuture[OptimStepResult]:
        """One step of AdamW with the accumulated gradients; lr and clipping are the schedule's, or those of
        `params`.
        """
        return self._queue.submit(lambda: self._optim_step(params))

    def forward(self, batch: RolloutBatch) -> DeviceFuture[tuple[FloatArray, ...]]:
        """Log-probs [T_i] of every row's trained tokens at batch.temperature; of a scalar head its values
        before them. 0.0 elsewhere.
        """
        return self._queue.submit(lambda: self._forward(batch))

    def _make_shares(
        self, batch: RolloutBatch, spec: LossSpec | None, dealt: list[PreparedBatch | list[list[Portion]]]
    ) -> list[Share]:
        """One share for each rank. `dealt` is told the prepared batch and [rank][round] portions."""
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        prepared = prepare_batch(batch, spec, self._trainer.plan, self._packing, vocab_size=vocab_size)
        world, packing = self.ranks.world_size, self._packing
        portions = deal_portions(
            [make_portion(micro_batch, batch) for micro_batch in prepared.pack(world)],
            world,
            micro_batch_cost=packing.micro_batch_cost,
            attention_cost=packing.attention_cost,
        )
        dealt += [prepared, portions]
        return [
            Share(tuple(mine), batch.temperature, spec, prepared.denominator, prepared.expected_count)
            for mine in portions
        ]

    def _count(self, dealt: Sequence[Any], *, trains: bool) -> tuple[PreparedBatch, list[list[Portion]]]:
        prepared, portions = dealt
        self._steps.add_batch(
            prepared, sum(one.micro_batch.computed_tokens for mine in portions for one in mine), trains=trains
        )
        return prepared, portions

    def _forward_backward(self, batch: RolloutBatch, spec: LossSpec) -> ForwardBackwardResult:
        steps, dealt = self._steps, []
        result = self._together(
            "forward_backward",
            lambda: self._trainer.forward_backward(lambda: self._make_shares(batch, spec, dealt)),
        )
        prepared, portions = self._count(dealt, trains=True)
        steps.pending_batches += 1
        if steps.poisoned is None and not math.isfinite(result.total):
            steps.poisoned = f"the loss is {result.total}"
        if steps.poisoned is not None:
            return ForwardBackwardResult(
                loss=None, denominator=prepared.denominator, metrics={}, skipped=steps.poisoned
            )
        steps.counts["trained_tokens"] += float(batch.response_lengths.sum())
        reach("train.after_forward_backward")
        return ForwardBackwardResult(
            loss=result.total / prepared.denominator,
            denominator=prepared.denominator,
            metrics=with_skipped(result.metrics, prepared),
            per_token=collect_token_arrays(portions, result.traces, batch) if spec.per_token else None,
        )

    def _optim_step(self, params: OptimParams | None) -> OptimStepResult:
        params = self._steps.choose_params(params)
        if self._steps.poisoned is not None:
            self._together("skip_step", self._trainer.skip_step)
            return self._steps.skip_step(self._steps.poisoned, params.lr)
        lr, limit = params.lr, params.max_grad_norm
        norm = self._together(
            "optim_step", lambda: self._trainer.optim_step(lr, limit), lr=lr, max_grad_norm=limit
        )
        if not math.isfinite(norm):
            return self._steps.skip_step(f"the gradient norm is {norm}", lr)
        return self._steps.finish_step(lr, norm, clipped=limit is not None and norm > limit)

    def _forward(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        dealt: list[Any] = []
        blocks = self._together(
            "forward", lambda: self._trainer.forward(lambda: self._make_shares(batch, None, dealt))
        )
        assert blocks is not None
        _, portions = self._count(dealt, trains=False)
        parts: list[MicroBatch] = []
        values: list[FloatArray] = []
        for mine, block in zip(portions, blocks, strict=True):
            at = 0
            for portion in mine:
                parts.append(portion.micro_batch)
                values.append(block[at : at + len(portion.micro_batch.targets)])
                at += len(portion.micro_batch.targets)
        return spread_to_rows(parts, values, batch.tokens)

    # --- weights

    def set_weight_version(self, version: int) -> DeviceFuture[None]:
        """Names the weights as they are after everything queued so far."""
        return self._queue.set_weight_version(version)

    def stream_weights(self, sink: WeightSink) -> DeviceFuture[None]:
        """Hands every parameter, whole, to `sink` in buckets of some MiB (a larger parameter alone). Tied
        weights come once.
        """
        return self._queue.submit(
            lambda: self._together("stream_weights", lambda: self._trainer.stream_weights(sink))
        )

    def get_weights(self) -> DeviceFuture[dict[str, Tensor]]:
        """Copies of all parameters on the CPU, by Hugging Face name. Tied weights come once."""

        def work() -> dict[str, Tensor]:
            weights: dict[str, Tensor] = {}

            def keep(bucket: Sequence[tuple[str, Tensor]]) -> None:
                weights.update({name: tensor.to("cpu", copy=True) for name, tensor in bucket})

            self._together("stream_weights", lambda: self._trainer.stream_weights(keep))
            return weights

        return self._queue.submit(work)

    def load_weights(self, weights: Mapping[str, Tensor]) -> DeviceFuture[None]:
        """Replaces all parameters. Raises BackendError naming what is missing, unknown or of another shape,
        before anything is copied.
        """
        return self._queue.submit(
            lambda: self._together("load_weights", lambda: self._trainer.load_weights(weights))
        )

    def save(self, path: Path) -> DeviceFuture[None]:
        """Writes the model directory and, in `state/`, everything an exact resume needs; each rank writes
        about as much, and none holds the whole. Not atomic: see rollouts.checkpoints.save.
        """

        def work() -> None:
            position = self._steps.position(self._queue.version)
            self._together(
                "save", lambda: self._trainer.save(path, position, self._tokenizer), path=str(path)
            )

        return self._queue.submit(work)

    def capture(self) -> DeviceFuture[HeldCheckpoint | None]:
        """What save() would write now, in equal parts in the host memory of the ranks; None if one has no
        room for its part.

        The result writes it to a directory that all ranks see, once, each rank its own files in a thread of
        its own, while steps run; where nothing is written, drop() it.
        """
        name = f"checkpoint {next(self._captures)}{'' if self._number == FIRST else ' of the critic'}"

        def work() -> HeldCheckpoint | None:
            if self._tokenizer_copy is None and self._tokenizer is not None:
                self._tokenizer_copy = copy.deepcopy(
                    self._tokenizer
                )  # generation uses the other while this one is written
            position = self._steps.position(self._queue.version)
            held = self._together("capture", lambda: self._trainer.capture(position, self._tokenizer_copy))
            return None if held is None else HeldCheckpoint(self._hub, name, held, backend=self._number)

        return self._queue.submit(work)

    def held_bytes(self) -> int:
        """0: capture() looks by itself whether the machines of all ranks have room."""
        return 0

    def state_bytes(self) -> int:
        """Size of what save() writes, on all ranks together: parameters and AdamW's two moments."""
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def load(self, path: Path) -> DeviceFuture[None]:
        """Restores what save() wrote, on any number of ranks; accumulated gradients are discarded. Raises
        CheckpointError naming what is wrong.
        """

        def work() -> None:
            position = self._together("load", lambda: self._trainer.load(path), path=str(path))
            self._queue.version = self._steps.restore(position)

        return self._queue.submit(work)


# --- the other ranks ----------------------------------------------------------------------------------------


async def serve_fsdp_rank(link: CommandReceiver, ranks: Ranks) -> None:
    """Does what rank 0's backends ask of this rank, one backend after the other, until rank 0 closes the
    channel.

    Raises whatever this rank alone has met: the job must end then, for the others wait for it.
    """
    while (command := await receive(link)) is not None:
        assert command.name == "open_backend", command.name
        await serve_backend(link, ranks, ShardedOptions(**command.fields["options"]))


async def receive(link: CommandReceiver) -> Command | None:
    """The next command; None after the last."""
    try:
        return await link.receive()
    except trio.EndOfChannel:
        return None


FindPath = Callable[[str], Path]
"""A model directory of rank 0's as this machine has it. Blocks."""


async def serve_backend(
    link: CommandReceiver, ranks: Ranks, options: ShardedOptions, *, find_path: FindPath = Path
) -> None:
    """This rank's part in one backend, and in one that is opened beside it, until rank 0 closes the first."""
    async with open_device_thread(
        name="trainer", torch_threads=count_threads(options.threads, ranks)
    ) as device_thread:
        trainers = {FIRST: await open_part(link, ranks, options, device_thread)}
        jobs_in, jobs = trio.open_memory_channel[Job](math.inf)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_commands, link, jobs_in, nursery)
            async for job in jobs:
                with telling_failure(link):
                    await do_job(job, trainers, link, ranks, device_thread, find_path)


@contextmanager
def telling_failure(link: CommandReceiver) -> Iterator[None]:
    """Rank 0 hears of a failure before it leaves: the nursery waits for what is being written; the others,
    for this rank, need not.
    """
    try:
        yield
    except Exception as error:
        link.fail(describe_error(error))
        raise


async def do_job(
    job: Job,
    trainers: dict[int, ShardedTrainer | None],
    link: CommandReceiver,
    ranks: Ranks,
    device_thread: DeviceThread,
    find_path: FindPath,
) -> None:
    """Does one command of rank 0's. `trainers`, by the backend's number, changes in place. What a capture
    leaves is kept by its channel alone.
    """
    command, number = job.command, job.command.fields["backend"]
    if command.name == "close_backend":
        trainers.pop(number, None)
    elif command.name == "open_backend":
        assert number not in trainers, f"backend {number} is open: leave it before another is opened"
        options = ShardedOptions(**command.fields["options"])
        path = await trio.to_thread.run_sync(find_path, options.model_path)
        trainers[number] = await open_part(
            link, ranks, dataclasses.replace(options, model_path=str(path)), device_thread
        )
    else:
        trainer = trainers[number]
        assert trainer is not None, f"{command.name} for a backend that did not open"
        link.set_phase(command.fields["phase"])
        found = await device_thread.submit(lambda: follow(trainer, command))
        if isinstance(found, HeldPart):
            job.held.send_nowait(found)
        link.set_phase(WAITING)


async def open_part(
    link: CommandReceiver, ranks: Ranks, options: ShardedOptions, device_thread: DeviceThread
) -> ShardedTrainer | None:
    """This rank's part of a model; None where all ranks have failed alike."""
    link.set_phase(OPENING)
    trainer = await device_thread.submit(
        lambda: ignore_agreed(lambda: open_trainer(options, ranks, device_thread.check_open))
    )
    link.set_phase(WAITING)
    return trainer


class Job(NamedTuple):
    """A command for the device thread."""

    command: Command
    held: trio.MemorySendChannel[HeldPart]  # takes what a capture leaves to be written


async def take_commands(
    link: CommandReceiver, jobs: trio.MemorySendChannel[Job], writing: trio.Nursery
) -> None:
    """Hands on what the device thread is to do, and starts in `writing` what only writes, until rank 0 closes
    the first backend.
    """
    held_in, held = {}, {}  # of each backend: where its last capture goes
    for number in (FIRST, BESIDE):
        held_in[number], held[number] = trio.open_memory_channel[HeldPart](1)
    async with jobs:
        while (command := await receive(link)) is not None:
            number = command.fields["backend"]
            if command.name == "close_backend" and number == FIRST:
                return
            if command.name == "write_held":
                writing.start_soon(
                    write_held, link, held[number], Path(command.fields["path"]), command.fields["name"]
                )
                continue
            if command.name == "drop_held":
                writing.start_soon(held[number].receive)  # once it is captured; nobody keeps what comes
                continue
            if command.name == "capture":
                held_in[number], held[number] = trio.open_memory_channel[HeldPart](
                    1
                )  # of one that was never written nothing is kept
            jobs.send_nowait(Job(command, held_in[number]))


def ignore_agreed(work: Callable[[], T]) -> T | None:
    """`work()`; None when all ranks have failed alike, which rank 0 reports."""
    try:
        return work()
    except AgreedFailure:
        return None


def follow(trainer: ShardedTrainer, command: Command) -> object:
    """This rank's part in one command, and what came of it; None where all have failed alike."""
    fields = command.fields
    work: dict[str, Callable[[], object]] = {
        "reset": trainer.reset,
        "skip_step": trainer.skip_step,
        "forward_backward": lambda: trainer.forward_backward(None),
        "forward": lambda: trainer.forward(None),
        "optim_step": lambda: trainer.optim_step(fields["lr"], fields["max_grad_norm"]),
        "stream_weights": lambda: trainer.stream_weights(None),
        "load_weights": lambda: trainer.load_weights(None),
        "save": lambda: trainer.save(Path(fields["path"]), {}, None),
        "capture": lambda: trainer.capture({}, None),
        "load": lambda: trainer.load(Path(fields["path"])),
    }
    try:
        return work[command.name]()
    except AgreedFailure:
        trainer.discard()
        return None
