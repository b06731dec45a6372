"""train.py, but that its server is killed once it has given the first answer under the second update."""

import os
import runpy
import signal
from pathlib import Path

from rollouts.engines.processes import EngineProcess
from rollouts.engines.server import ServerEngine
from rollouts.types import Completion, GenerateRequest

STARTED: list[EngineProcess] = []
restart, generate = EngineProcess.restart, ServerEngine.generate


async def restart_and_tell(self: EngineProcess):
    await restart(self)
    STARTED.append(self)


async def generate_and_kill(self: ServerEngine, request: GenerateRequest) -> Completion:
    answer = await generate(self, request)
    if not request.score_prompt and answer.weight_versions[-1:].tolist() == [2] and len(STARTED) == 1:
        STARTED.append(STARTED[0])
        os.kill(STARTED[0].process.pid, signal.SIGKILL)
    return answer


EngineProcess.restart = restart_and_tell
ServerEngine.generate = generate_and_kill
runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "integration_training" / "train.py"), run_name="__main__"
)
