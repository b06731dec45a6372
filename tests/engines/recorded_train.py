"""train.py, but that the file named by RECORD gets a line for each of these, in the order in which they
happen, and that agent_task is told of launches and updates.

    seated      a request is given a server; `serving` are those that were in service
    asked       it is sent: `tokens`, as they stand in the body
    answered    `tokens`, `log_probs` and the `versions` of the tokens, as they stand in the answer
    loaded      a server has loaded the weights of `version`, and does not generate yet
"""

import json
import os
import runpy
import sys
from contextvars import ContextVar
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tests, also in worker processes

import rollouts.engines.fleet  # noqa: E402
import rollouts.generation.collector  # noqa: E402
from rollouts.engines.fleet_members import choose_member  # noqa: E402
from rollouts.engines.server import ServerEngine  # noqa: E402
from rollouts.engines.wire import Server  # noqa: E402
from rollouts.generation.async_rollout_manager import AsyncRolloutManager  # noqa: E402
from rollouts.generation.group import start_group  # noqa: E402
from rollouts.types import GenerateRequest  # noqa: E402
from tests.engines.agent_task import GROUP, UPDATES  # noqa: E402

PATHS = ("/inference/v1/generate", "/generate")
REQUEST = ContextVar[GenerateRequest | None]("request", default=None)
LINES = Path(os.environ["RECORD"]).open("a", buffering=1)  # noqa: SIM115 (until the program ends)

call, generate = Server.call, ServerEngine.generate
load, engines_updated = ServerEngine.update_weights_from_checkpoint, AsyncRolloutManager.engines_updated


def record(event, server, request=None, **values):
    who = {} if request is None else {"request": request.request_id, "trajectory": request.trajectory}
    LINES.write(json.dumps({"event": event, "server": server, **who, **values}) + "\n")


def choose_and_record(members, asked, last):
    known = list(members)
    chosen = choose_member(known, asked, last)
    if chosen is not None:
        serving = [member.name for member in known if member.in_service]
        record("seated", chosen.name, asked.request, serving=serving)
    return chosen


async def generate_for_trajectory(self, request):
    """What is called from here on, and the tools that the trajectory calls afterwards, know whose it is."""
    REQUEST.set(request)
    if request.affinity:
        GROUP.set(int(request.affinity.removeprefix("g")))
    return await generate(self, request)


async def call_and_record(self, method, path, body=None, **options):
    request = REQUEST.get()
    if path not in PATHS or request is None:
        return await call(self, method, path, body, **options)
    sent = body["token_ids"] if "token_ids" in body else body["input_ids"]
    record("asked", self.name, request, url=self.client.url, tokens=sent)
    answer = await call(self, method, path, body, **options)
    record("answered", self.name, request, **read_answer(json.loads(answer)))
    return answer


def read_answer(answer):
    if "choices" in answer:  # vLLM's
        (choice,) = answer["choices"]
        tokens, spans = choice["token_ids"], choice["weight_versions"]
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    else:
        tokens, meta = answer["output_ids"], answer["meta_info"]
        spans, log_probs = meta["weight_versions"], [entry[0] for entry in meta["output_token_logprobs"]]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    return {"tokens": tokens, "log_probs": log_probs, "versions": versions}


async def load_and_record(self, path, version):
    loaded = await load(self, path, version)
    record("loaded", self.features.name, version=version)
    return loaded


def start_and_tell(index, *rest):
    UPDATES.launched[index] = UPDATES.version
    return start_group(index, *rest)


def update_and_tell(self, version):
    engines_updated(self, version)
    UPDATES.publish(version)


rollouts.engines.fleet.choose_member = choose_and_record
rollouts.generation.collector.start_group = start_and_tell
ServerEngine.generate = generate_for_trajectory
ServerEngine.update_weights_from_checkpoint = load_and_record
Server.call = call_and_record
AsyncRolloutManager.engines_updated = update_and_tell
runpy.run_path(str(ROOT / "integration_training/train.py"), run_name="__main__")
