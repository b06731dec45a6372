"""Our side of benchmarks.train_step, and both of the first part of benchmarks.lora: open_pytorch_backend,
forward_backward and optim_step, a turn at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from benchmarks.e2e.children import (
    Stopwatch,
    read_memory,
    read_question,
    take_stdout,
    trim_heap,
    try_restart_peak,
)
from benchmarks.e2e.step_batch import (
    CLIP,
    LR,
    MAX_GRAD_NORM,
    OFF_POLICY,
    StepBatch,
    to_rollout_batch,
)
from benchmarks.harness import read_status_bytes
from rollouts.config.tables import OptimConfig
from rollouts.models.lora import Adapter

if TYPE_CHECKING:
    from rollouts.backends.pytorch import PyTorchTrainingBackend
    from rollouts.types import LossSpec, RolloutBatch


async def write_gradients(
    backend: PyTorchTrainingBackend, batch: RolloutBatch, spec: LossSpec, path: str
) -> dict[str, Any]:
    from safetensors.torch import save_file

    loss = (await backend.forward_backward(batch, spec).result()).loss

    def write() -> None:
        named = backend.model.named_parameters()
        save_file({name: value.grad for name, value in named if value.grad is not None}, path)

    await backend.device_thread.submit(write)
    await backend.reset().result()
    return {"loss": loss}


async def write_snapshot(backend: PyTorchTrainingBackend, path: str) -> dict[str, Any]:
    """What engines load after a step."""
    from rollouts.weight_sync.snapshots import export_snapshot

    watch = Stopwatch()
    snapshot = await export_snapshot(backend, Path(path))
    return {**watch.read(), "weight_bytes": snapshot.weight_bytes}


def measure_base(backend: PyTorchTrainingBackend) -> int:
    """Resident bytes of the process with its model, without the adapter that is there too."""
    trim_heap()
    try_restart_peak()
    trained = backend.trained
    adapter = sum(one.nbytes for one in trained.weights.values()) if isinstance(trained, Adapter) else 0
    return read_status_bytes("VmRSS") - adapter


async def serve(arguments: argparse.Namespace) -> None:
    from rollouts.backends.open import open_pytorch_backend
    from rollouts.types import LossSpec

    answers = take_stdout()
    optim = OptimConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM)
    spec = LossSpec("ppo_clip", {"clip_low": CLIP, "clip_high": CLIP})
    batch_path = Path(arguments.batch)

    async def step(backend: PyTorchTrainingBackend) -> dict[str, Any]:
        rollouts = to_rollout_batch(StepBatch.load(batch_path))
        watch = Stopwatch()
        trained, stepped = backend.forward_backward(rollouts, spec), backend.optim_step()
        loss, grad_norm = (await trained.result()).loss, (await stepped.result()).grad_norm
        return {
            **watch.read(),
            "loss": loss,
            "grad_norm": grad_norm,
            "computed_tokens": backend.statistics()["computed_tokens"],
        }

    async def add_old_log_probs(backend: PyTorchTrainingBackend) -> dict[str, Any]:
        batch = StepBatch.load(batch_path)
        rng, old = np.random.default_rng(1), np.zeros_like(batch.old_log_probs)
        for row, values in enumerate(await backend.forward(to_rollout_batch(batch)).result()):
            own = values[batch.prompts.shape[1] :]
            old[row, : len(own)] = own + rng.normal(0, OFF_POLICY, len(own))
        StepBatch(batch.prompts, batch.lengths, batch.responses, batch.advantages, old).save(batch_path)
        return {}

    async def gradients(backend: PyTorchTrainingBackend, path: str) -> dict[str, Any]:
        return await write_gradients(backend, to_rollout_batch(StepBatch.load(batch_path)), spec, path)

    async with open_pytorch_backend(
        Path(arguments.model),
        optim=optim,
        total_steps=10**6,
        autocast="off",
        threads=arguments.threads,
        micro_batch_tokens=arguments.micro_batch_tokens,
        share_prefix=arguments.share_prefix,
        skip_zero_advantage=arguments.skip_zero_advantage,
        gradient_checkpointing=arguments.gradient_checkpointing,
        lora=json.loads(arguments.lora) if arguments.lora else None,
    ) as backend:
        base_bytes = await backend.device_thread.submit(lambda: measure_base(backend))
        while (question := await trio.to_thread.run_sync(read_question)) is not None:
            handlers: dict[str, Any] = {
                "step": step,
                "old_log_probs": add_old_log_probs,
                "gradients": gradients,
                "snapshot": write_snapshot,
            }
            name = question.pop("do")
            if name == "memory":
                answer = {**read_memory(), "base_bytes": base_bytes}
            else:
                answer = await handlers[name](backend, **question)
            answers.write(json.dumps(answer) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, required=True)
    parser.add_argument("--share-prefix", action="store_true")
    parser.add_argument("--skip-zero-advantage", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--lora", default="", help="JSON of a LoraConfig")
    trio.run(serve, parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
