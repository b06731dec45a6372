"""Programs that play trajectories at the endpoint, in processes of their own."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import trio

from rollouts.environments.proxy import check_agent
from rollouts.errors import ConfigError, EnvironmentFailed, TrajectoryLeftOut
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import Status
from tests.support.fake_tokenizer import FAKE_END
from tests.support.processes import is_alive, wait_until
from tests.support.text_tables import cases
from tests.unit.program_runs import SAMPLE, play

SYNC = """
import json, os, urllib.request
import openai
row = json.load(open(os.environ["ROLLOUTS_ROW"]))
client, said = openai.OpenAI(), [{"role": "user", "content": row["prompt"]}]
for turn in range(row["turns"]):
    with client.chat.completions.create(model="m", messages=said, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    said += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}?"}]
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"reward": {row["answer"]: turn + 1}}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["ROLLOUTS_REWARD_URL"], body, headers))
"""
ASYNC = """
import asyncio
import openai

async def play(row):
    async with openai.AsyncOpenAI() as client:
        said = [{"role": "user", "content": row["prompt"]}]
        asks = [client.chat.completions.create(model="m", messages=said, seed=seed) for seed in range(3)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asks)]

def main(row):
    print(asyncio.run(play(row)))
"""


@pytest.fixture
def write(tmp_path):
    """Gives the command that runs a text as a program."""

    def write_program(text):
        (tmp_path / "agent.py").write_text(text, "utf-8")
        return f"{sys.executable} {tmp_path}/agent.py"

    return write_program


async def test_a_command_plays_a_trajectory_and_rewards_its_turns(write):
    engine = ScriptedEngine()
    (sample,) = await play(write(SYNC), engine)
    first, second = (request.prompt_ids.tolist() for request in engine.requests)
    answer = [*b"ok", FAKE_END]
    assert sample.tokens.tolist() == [*second, *answer]
    assert second[: len(first) + 3] == [*first, *answer]
    assert bytes(first[1:14]) == "user\nSay €.".encode()
    trained = [begin + at for begin in (len(first), len(second)) for at in range(3)]
    assert sample.loss_mask.nonzero()[0].tolist() == trained
    assert (sample.reward, sample.rewards, sample.status) == (3.0, {"7": 3.0}, Status.COMPLETED)
    assert [turn["reward"] for turn in sample.metadata["trajectory"]["turns"]] == [1.0, 2.0]
    # the ids and seeds of an episode of our own
    assert [request.request_id for request in engine.requests] == [SAMPLE.id, f"{SAMPLE.id}#1"]
    assert engine.requests[0].sampling.seed == 1


async def test_a_function_may_have_an_event_loop_of_its_own(tmp_path):
    (tmp_path / "agent.py").write_text(ASYNC)
    assert [sample.response_length for sample in await play(f"{tmp_path}/agent.py:main")] == [3, 3, 3]


@cases("""
program                                          | said
import sys; print('no idea'); sys.exit(3)        | exit code 3.*no idea
raise LookupError('lost')                        | exit code 1.*LookupError: lost
import os, signal; os.kill(os.getpid(), 9)       | SIGKILL
pass                                             | had no answer of the model
""")
async def test_a_program_that_fails_is_no_policys_fault(program, said, write):
    with pytest.raises(EnvironmentFailed, match=f"(?s){said}"):
        await play(write(program))


async def test_a_program_that_fails_at_a_limit_has_played_until_there(write):
    command = write(SYNC)
    (sample,) = await play(command, max_turns=1)
    assert (sample.metadata["trajectory"]["end"], sample.status) == ("turns", Status.TRUNCATED)
    assert (sample.reward, sample.response_length) == (1.0, 3)
    with pytest.raises(TrajectoryLeftOut, match="turns"):
        await play(command, max_turns=1, at_limit={"turns": "drop"})


async def test_a_program_that_fails_after_an_answer_that_was_cut_has_failed(write):
    asks = "import openai; openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user',"
    command = write(f"{asks} 'content': '?'}}]); raise SystemExit('no idea')")
    with pytest.raises(EnvironmentFailed, match=r"(?s)exit code 1.*no idea"):
        await play(command, ScriptedEngine(lambda request: ScriptedReply("x" * 300)))


FORKS = """
import os, signal, subprocess, time, openai
openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open("PIDS.new", "w") as file:
    print(os.getpid(), other.pid, file=file)
os.rename("PIDS.new", "PIDS")
time.sleep(1000)
"""


@cases("cancelled: no yes")
async def test_what_a_program_started_ends_with_its_trajectory(tmp_path, write, cancelled: bool):
    pids, ended = tmp_path / "pids", []
    command = write(FORKS.replace("PIDS", str(pids)))

    async def run():
        ended.extend(await play(command, trajectory_timeout_s=600.0 if cancelled else 12.0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_until(pids.exists)
        if cancelled:
            nursery.cancel_scope.cancel()
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())
    ends = [(sample.metadata["trajectory"]["end"], sample.response_length) for sample in ended]
    assert ends == [] if cancelled else [("time", 3)]


async def test_a_trajectory_that_a_stop_cut_begins_anew(write):
    command = write(SYNC)
    stops = ScriptedEngine(lambda one: ScriptedReply(finish="abort" if "#" in one.request_id else "stop"))
    (cut,) = await play(command, stops)
    assert (cut.status, len(cut.tokens), len(stops.requests)) == (Status.ABORTED, 0, 2)
    (sample,) = await play(command, sample=cut)
    assert (sample.metadata["trajectory"]["restarts"], sample.response_length) == (1, 6)
    assert sample.metadata["answer"] == "7"


async def test_a_program_sees_no_secret_of_the_trainer(write, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "private")
    program = (
        "import os; raise SystemExit([os.environ.get(one) for one in ('SOME_API_KEY', 'OPENAI_BASE_URL')])"
    )
    with pytest.raises(EnvironmentFailed, match=r"None, 'http://127\.0\.0\.1:\d+/e/0/v1"):
        await play(write(program))


@cases("""
agent              | said
no_such_program x  | there is no program no_such_program
python 'x          | closing quotation
no_module:main     | No module named 'no_module'
json:no_function   | no no_function
env anything       |
json:loads         |
""")
def test_an_agent_that_cannot_run_is_named_before_the_run(agent, said):
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_agent(agent)


def test_the_servers_process_never_imports_asyncio(write):
    program = f"""
import sys, trio
from tests.unit.program_runs import play
samples = trio.run(play, {write(SYNC)!r})
print(samples[0].response_length, "asyncio" in sys.modules)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.check_output([sys.executable, "-c", program], env=env) == b"6 False\n"
