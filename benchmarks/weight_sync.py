"""New weights of SmolLM2-135M on their way from the trainer to engines, beside the cost of copying or writing
as many bytes.

    python -m benchmarks.weight_sync [--rounds 3] [--threads 2] [--quick]

The weights are those after real AdamW steps at learning rates of 1e-6 and 1e-5; 538 MB in float32, 269 MB in
bfloat16. Ours and the floor take turns A B B A in one run.

    shared     an embedded engine with the trainer's own parameters: nothing to move; seconds of a whole
               update
    copied     an embedded engine with a copy, updated in memory, against a copy of as many bytes into memory
               that is there already
    export     a snapshot on disk, against write and fsync of as many bytes; with the embedded engine loading
               it, against write, fsync and read
    vllm       an update of a vLLM server on this CPU through the fleet: snapshot, pause, load, probe,
               checksum; and the pause alone
    peer       the server's own reload of the same directory, nothing else: no export, no versions, no proof

What an engine says after an update, greedy tokens and log-probs, is asserted to be that of one which loaded
the snapshot afresh, bit for bit; of a vLLM server another one is started for it. Broadcasts in memory to a
vLLM server run over NCCL, so on a CPU they are not measured. An encoding of what changed does not exist; of
it only the share of bfloat16 values that one step changes is told. Files go where temporary files go
(TMPDIR).

Targets: copied <= 1.15 times the copy; disk (export and load) <= 1.3 times write, fsync and read; pause of
the server <= 0.2 of the update. `--quick`: one round, no server.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import torch
import trio

from benchmarks.forced_lengths import copy_in
from benchmarks.harness import Ratio, compute_ratio, finish, make_parser
from rollouts.backends.open import open_pytorch_backend
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.engines.fleet import Fleet, Member, open_fleet
from rollouts.engines.local import open_local_engine
from rollouts.engines.processes import EngineCommand, EngineProcess, open_engine_processes
from rollouts.engines.server import ServerEngine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.protocols import InferenceEngine
from rollouts.types import Completion, GenerateRequest, LossSpec, OptimParams, RolloutBatch, SamplingParams
from rollouts.weight_sync.snapshots import DiskSnapshots, export_snapshot, remove_snapshot
from rollouts.weight_sync.sync import WeightSync, stream_into
from rollouts.weight_sync.update import make_probe

MODEL = "bundled:smollm2-135m-instruct"
CHUNK_BYTES = 16 * 2**20
CONTEXT = 512
ANSWERS, ANSWER_TOKENS = 3, 24  # compared after an update
LEARNING_RATES = (1e-6, 1e-5)
VLLM_PYTHON = Path(".venv-vllm/bin/python")
TARGETS = {
    "copied_fp32_times_memcpy": "<= 1.15",
    "disk_fp32_times_floor": "<= 1.3",
    "disk_bf16_times_floor": "<= 1.3",
    "vllm_pause_share": "<= 0.2",
}


# --- floors -------------------------------------------------------------------------------------------------


class Floors:
    """What the machine needs for as many bytes, whatever is in them."""

    def __init__(self, size: int, folder: Path) -> None:
        self._content = torch.randint(0, 256, (size,), dtype=torch.uint8)
        self._room = torch.zeros_like(self._content)
        self._path = folder / "floor"

    def copy(self) -> None:
        """Into memory that is there."""
        self._room.copy_(self._content)

    def write(self) -> None:
        """A new file, on disk when this returns."""
        self._path.unlink(missing_ok=True)
        view = memoryview(self._content.numpy())  # pyright: ignore[reportArgumentType]
        with self._path.open("wb", buffering=0) as file:
            for start in range(0, len(view), CHUNK_BYTES):
                file.write(view[start : start + CHUNK_BYTES])
            os.fsync(file.fileno())

    def write_and_read(self) -> None:
        """The same, and read back into memory that is there."""
        self.write()
        with self._path.open("rb", buffering=0) as file:
            view = memoryview(self._room.numpy())  # pyright: ignore[reportArgumentType]
            at = 0
            while at < len(view):
                at += file.readinto(view[at : at + CHUNK_BYTES]) or len(view)


async def clock(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def in_thread(work: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    return lambda: trio.to_thread.run_sync(work)


class Comparison(NamedTuple):
    """Ours beside the floor: median seconds of both, and how many times the floor's ours are."""

    ours_s: float
    floor_s: float
    times: Ratio

    def __str__(self) -> str:
        return f"{self.ours_s:.3f} s, floor {self.floor_s:.3f} s: {self.times}"


async def take_turns(
    ours: Callable[[], Awaitable[object]], floor: Callable[[], Awaitable[object]], *, rounds: int
) -> Comparison:
    """`rounds` times A B B A, after a turn of each that does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    await ours()
    await floor()
    for _ in range(rounds):
        for side in (0, 1, 1, 0):
            seconds[side].append(await clock((ours, floor)[side]))
    own, least = seconds
    return Comparison(statistics.median(own), statistics.median(least), compute_ratio(least, own))


# --- the trainer --------------------------------------------------------------------------------------------


def make_training_batch(vocab_size: int) -> RolloutBatch:
    """8 rows of 64 random tokens, trained on as they are: the steps of AdamW that follow are of the size of
    its learning rate.
    """
    draw = np.random.default_rng(0)
    tokens = tuple(draw.integers(0, vocab_size, 64) for _ in range(8))
    masks = tuple(np.arange(64) >= 8 for _ in tokens)
    return RolloutBatch(tokens=tokens, loss_masks=masks)


async def train(backend: PyTorchTrainingBackend, batch: RolloutBatch, lr: float) -> None:
    future = backend.forward_backward(batch, LossSpec("sft"))
    step = backend.optim_step(OptimParams(lr=lr))
    await future.result()
    assert (await step.result()).skipped is None


async def measure_changes(backend: PyTorchTrainingBackend, batch: RolloutBatch) -> dict[str, float]:
    """Share of bfloat16 values that one step changes, after two steps at the same rate."""
    found: dict[str, float] = {}
    for lr in LEARNING_RATES:
        for _ in range(2):
            await train(backend, batch, lr)
        before = await backend.get_weights().result()
        await train(backend, batch, lr)
        after = await backend.get_weights().result()
        changed = sum(int((before[name].bfloat16() != after[name].bfloat16()).sum()) for name in before)
        found[f"changed_bf16_share_lr_{lr:.0e}".replace("e-0", "e-")] = round(
            changed / sum(weight.numel() for weight in before.values()), 5
        )
    return found


# --- the same answers ---------------------------------------------------------------------------------------


async def ask(engine: InferenceEngine, vocab_size: int) -> list[Completion]:
    """Greedy answers, one after the other, so that nothing is decoded together."""
    answers: list[Completion] = []
    for number in range(ANSWERS):
        prompt = np.random.default_rng(number).integers(0, vocab_size, 24)
        sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.0)
        request = GenerateRequest(
            request_id=f"greedy-{number}-{time.monotonic_ns()}", prompt_ids=prompt, sampling=sampling
        )
        answers.append(await engine.generate(request))
    return answers


def assert_same(answers: Sequence[Completion], fresh: Sequence[Completion]) -> None:
    for one, other in zip(answers, fresh, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids), (one.token_ids, other.token_ids)
        assert np.array_equal(one.log_probs, other.log_probs), np.abs(one.log_probs - other.log_probs).max()


async def ask_fresh(
    snapshot: Path, dtype: torch.dtype, device_thread: DeviceThread, vocab_size: int
) -> list[Completion]:
    model = await device_thread.submit(lambda: load_hf_model(snapshot, dtype=dtype))
    # a copy, for what comes out of a file may lie at addresses for which matrix products take other
    # instructions
    async with open_local_engine(
        model, device_thread=device_thread, mode="copied", max_context=CONTEXT
    ) as engine:
        return await ask(engine, vocab_size)


# --- embedded and disk --------------------------------------------------------------------------------------


async def measure_embedded(
    backend: PyTorchTrainingBackend,
    device_thread: DeviceThread,
    batch: RolloutBatch,
    folder: Path,
    dtype: torch.dtype,
    *,
    rounds: int,
) -> dict[str, float]:
    """copied, export and disk in one dtype."""
    label = "fp32" if dtype is torch.float32 else "bf16"
    size = dtype.itemsize * sum(parameter.numel() for parameter in backend.model.parameters())
    vocab_size, floors, numbers = backend.model.config.vocab_size, Floors(size, folder), iter(range(1, 1000))
    kept: list[Path] = []
    own = await device_thread.submit(lambda: copy_in(backend.model, dtype))
    async with open_local_engine(
        own, device_thread=device_thread, mode="given", max_context=CONTEXT
    ) as engine:

        async def stream() -> None:
            await stream_into(backend, engine, next(numbers))

        async def export() -> None:
            version = next(numbers)
            if kept:
                await trio.to_thread.run_sync(remove_snapshot, kept.pop())
            kept.append(folder / f"v{version}")
            await export_snapshot(backend, kept[0], dtype=dtype)

        async def export_and_load() -> None:
            await export()
            await engine.update_weights_from_checkpoint(kept[0], next(numbers))

        await train(backend, batch, LEARNING_RATES[1])
        copied = await take_turns(stream, in_thread(floors.copy), rounds=rounds)
        await train(backend, batch, LEARNING_RATES[1])
        exported = await take_turns(export, in_thread(floors.write), rounds=rounds)
        await stream()
        fresh = await ask_fresh(kept[0], dtype, device_thread, vocab_size)
        assert_same(await ask(engine, vocab_size), fresh)
        await train(backend, batch, LEARNING_RATES[0])
        disk = await take_turns(export_and_load, in_thread(floors.write_and_read), rounds=rounds)
        last = await ask(engine, vocab_size)
        assert_same(last, await ask_fresh(kept[0], dtype, device_thread, vocab_size))
        pairs = zip(last, fresh, strict=True)
        trained = any(not np.array_equal(one.log_probs, other.log_probs) for one, other in pairs)
        assert trained, "nothing was trained"
    shutil.rmtree(kept[0])
    table = f"  copied  {copied}\n  export  {exported}\n  disk    {disk}"
    print(f"{label}, {size / 1e6:.0f} MB\n{table}", flush=True)
    return {
        f"copied_{label}_s": round(copied.ours_s, 4),
        f"copied_{label}_times_memcpy": round(copied.times.median, 2),
        f"export_{label}_s": round(exported.ours_s, 3),
        f"export_{label}_times_write": round(exported.times.median, 2),
        f"disk_{label}_s": round(disk.ours_s, 3),
        f"disk_{label}_times_floor": round(disk.times.median, 2),
    }


async def measure_shared(
    backend: PyTorchTrainingBackend, device_thread: DeviceThread, vocab_size: int
) -> float:
    """Seconds of an update that moves nothing."""
    options = {
        "device_thread": device_thread,
        "mode": "shared",
        "trainer_version": lambda: backend.weight_version,
        "max_context": CONTEXT,
    }
    async with open_local_engine(backend.model, **options) as engine:
        sync = WeightSync(make_probe(vocab_size, tolerance=1e-3))
        seconds: list[float] = []
        for version in range(1, 4):
            await backend.set_weight_version(version).result()
            seconds.append(await clock(lambda version=version: sync(backend, [engine], version)))
    return statistics.median(seconds)


# --- a vLLM server ------------------------------------------------------------------------------------------


async def measure_vllm(
    backend: PyTorchTrainingBackend, model: Path, batch: RolloutBatch, folder: Path, *, rounds: int
) -> dict[str, float]:
    """Updates through fleet and WeightSync in float32; the server's own reload beside each."""
    vocab_size = backend.model.config.vocab_size
    size = 4 * sum(parameter.numel() for parameter in backend.model.parameters())
    floors = Floors(size, folder)
    totals, pauses, peers, least = [], [], [], []
    async with (
        run_server(model, folder) as process,
        open_engine(process, vocab_size) as engine,
        make_fleet(engine) as fleet,
    ):
        sync = WeightSync(
            make_probe(vocab_size, tolerance=1e-3),
            keeper=DiskSnapshots(folder / "weights"),
            fleet=fleet,
        )
        for version in range(1, 2 + 2 * rounds):
            await train(backend, batch, LEARNING_RATES[version % 2])
            await backend.set_weight_version(version).result()
            began = time.perf_counter()
            metrics = await sync(backend, [fleet], version)
            total = time.perf_counter() - began
            peer = await clock(partial(reload, process, folder / "weights" / f"v{version}"))
            floor = await clock(in_thread(floors.write_and_read))
            if version == 1:
                continue  # what is done once, and memory that is touched for the first time
            totals.append(total)
            pauses.append(metrics["time/weight_sync_pause"])
            peers.append(peer)
            least.append(floor)
        answers = await ask(engine, vocab_size)
        snapshot = next((folder / "weights").glob("v*"))
    for path in model.glob("*token*"):  # a server starts with a tokenizer, which an update does not need
        shutil.copy(path, snapshot)
    async with run_server(snapshot, folder) as process, open_engine(process, vocab_size) as fresh:
        assert_same(answers, await ask(fresh, vocab_size))
    print(
        f"vllm, {size / 1e6:.0f} MB: {statistics.median(totals):.2f} s, of which paused"
        f" {statistics.median(pauses):.2f} s; its reload alone {statistics.median(peers):.2f} s; write,"
        f" fsync, read {statistics.median(least):.2f} s",
        flush=True,
    )
    return {
        "vllm_s": round(statistics.median(totals), 3),
        "vllm_pause_s": round(statistics.median(pauses), 3),
        "vllm_pause_share": round(compute_ratio(totals, pauses).median, 3),
        "vllm_reload_s": round(statistics.median(peers), 3),
        "vllm_times_reload": round(compute_ratio(peers, totals).median, 2),
        "vllm_pause_times_reload": round(compute_ratio(peers, pauses).median, 2),
        "vllm_times_floor": round(compute_ratio(least, totals).median, 2),
    }


@asynccontextmanager
async def run_server(model: Path, folder: Path) -> AsyncIterator[EngineProcess]:
    """A server in float32 on this CPU."""
    flags = ("--max-model-len", str(CONTEXT), "--dtype", "float32")
    command = EngineCommand("vllm", VLLM_PYTHON.absolute(), model, flags)
    async with open_engine_processes(command, count=1, log_dir=folder / "logs") as (process,):
        yield process


def open_engine(process: EngineProcess, vocab_size: int) -> AbstractAsyncContextManager[ServerEngine]:
    return open_vllm_engine(
        process.url, name=process.name, api_key=process.api_key, vocab_size=vocab_size, context_length=CONTEXT
    )


def make_fleet(engine: InferenceEngine) -> AbstractAsyncContextManager[Fleet]:
    return open_fleet([Member(engine)], warn=lambda text: print(f"warning: {text}", file=sys.stderr))


async def reload(process: EngineProcess, path: Path) -> None:
    """The server's own call, past everything of ours."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    async with httpx.AsyncClient(
        timeout=600.0, headers={"Authorization": f"Bearer {process.api_key}"}
    ) as client:
        (await client.post(f"{process.url}/collective_rpc", json=body)).raise_for_status()


# --- the whole ----------------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, float | None]:
    rounds = 1 if options.quick else options.rounds
    model = resolve_model(MODEL)
    metrics: dict[str, float | None] = {}
    async with open_device_thread(name="benchmark", torch_threads=options.threads) as device_thread:
        optim = OptimConfig(lr=LEARNING_RATES[1])
        async with open_pytorch_backend(
            model, optim=optim, total_steps=1000, autocast="off", device_thread=device_thread
        ) as backend:
            batch = make_training_batch(backend.model.config.vocab_size)
            metrics |= await measure_changes(backend, batch)
            print(f"bfloat16 values that one step changes: {metrics}", flush=True)
            metrics["shared_s"] = round(
                await measure_shared(backend, device_thread, backend.model.config.vocab_size), 6
            )
            for dtype in (torch.float32, torch.bfloat16):
                metrics |= await measure_embedded(backend, device_thread, batch, folder, dtype, rounds=rounds)
            if options.quick or not VLLM_PYTHON.exists():
                print("no server: " + ("--quick" if options.quick else f"{VLLM_PYTHON} does not exist"))
                metrics |= {"vllm_s": None, "vllm_pause_share": None}
            else:
                metrics |= await measure_vllm(backend, model, batch, folder, rounds=rounds)
    return metrics


def main() -> int:
    parser = make_parser(__doc__, quick="one round, no server")
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A")
    parser.add_argument(
        "--threads", type=int, default=2, help="torch's, of the device thread and of the floors"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        metrics = trio.run(measure, options, Path(folder))
    return finish(
        "weight_sync",
        peer="memcpy; write, fsync and read; vLLM's own reload",
        metrics=metrics,
        targets=TARGETS,
    )


if __name__ == "__main__":
    sys.exit(main())
