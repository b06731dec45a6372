"""The demo on two processes: loops, rollouts, rewards and the record here, the model behind `rollouts serve`.

    python -m benchmarks.served_demo --config FILE --mode sft+rl […]

The command line is train.py's. Each stage trains a run of its own of the service (the whole model, or the
adapter of [model.lora]) over rollouts.client: weights come down for checkpoints and go up where the next
stage begins. What differs from train.py: micro-batches are the service's, rows of a group do not share
their prompt, and rows without an advantage are computed.
"""

import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import trio
from safetensors.torch import load_file

from benchmarks.service import KEY, open_server
from integration_training import stages, train
from integration_training.opening import Run, Stage, completed_steps
from rollouts.checkpoints.load import is_complete
from rollouts.checkpoints.save import save_checkpoint
from rollouts.client.engine import open_served_engine
from rollouts.client.service import open_service_client
from rollouts.config.load import stage_config, training_digest
from rollouts.loops.algorithm import count_updates


@dataclass
class Checkpoints:
    """The stage's checkpoints, each as the service has it; no step is held beside training."""

    run: Run
    stage: str
    backend: Any

    async def save(self, step: int, state: Any, *, last: bool = False, write_more: object = ()) -> None:
        await save_checkpoint(
            self.run.run_dir.checkpoint(self.stage, step),
            write_model=lambda path: self.backend.save(path).result(),
            state=state,
            stage=self.stage,
            step=step,
            config_hash=training_digest(self.run.config),
        )

    async def is_saved(self, step: int) -> bool:
        path = self.run.run_dir.checkpoint(self.stage, step)
        return step == 0 or await trio.to_thread.run_sync(is_complete, path)

    def take_metrics(self) -> dict[str, float]:
        return {}


@asynccontextmanager
async def open_stage(run: Run, stage: str, start: Path, newest: Path | None) -> AsyncIterator[Stage]:
    """What integration_training.opening.open_stage opens, with a run of the service as the backend."""
    section: Any = stage_config(run.config, stage)
    updates = count_updates(section) if stage == "rl" else 1
    async with open_service_client(os.environ["SERVED_DEMO_URL"], KEY) as service:
        backend: Any = await service.create_training_client(
            lora=run.config.model.lora, optim=section.optim, total_steps=section.steps * updates
        )
        if start != run.base_model:  # of the stage before
            weights = await trio.to_thread.run_sync(load_file, next(start.glob("*.safetensors")))
            await backend.load_weights(weights)
        async with open_served_engine(backend) as (engine, sync):
            completed, checkpoints = completed_steps(newest), cast(Any, Checkpoints(run, stage, backend))
            yield Stage(
                stage, section, start, newest, completed, backend, None, engine, sync, checkpoints, {}
            )


if __name__ == "__main__":
    stages.open_stage = open_stage
    command = train.parse_command_line(sys.argv[1:])
    model = train.load_config(command.config, command.overrides).model.name
    with tempfile.TemporaryDirectory() as folder, open_server(model, Path(folder)) as url:
        os.environ["SERVED_DEMO_URL"] = url
        code = train.main()
    raise SystemExit(code)
