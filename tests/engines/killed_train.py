"""train.py, but that its server is killed by the first answer under the second update. All that it answered
under that update is lost with it, also what had arrived: only its next start can complete the batch.
"""

import os
import runpy
import signal
from pathlib import Path

from rollouts.engines.processes import EngineProcess
from rollouts.engines.server import ServerEngine

STARTED: list[EngineProcess] = []
restart, generate = EngineProcess.restart, ServerEngine.generate


async def restart_and_tell(self):
    await restart(self)
    STARTED.append(self)


async def generate_and_kill(self, request):
    answer = await generate(self, request)
    if request.score_prompt or answer.weight_versions[-1:].tolist() != [2] or len(STARTED) > 2:
        return answer
    if len(STARTED) == 1:
        STARTED.append(STARTED[0])
        os.kill(STARTED[0].process.pid, signal.SIGKILL)
    return await generate(self, request)


EngineProcess.restart = restart_and_tell
ServerEngine.generate = generate_and_kill
runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "integration_training/train.py"), run_name="__main__"
)
