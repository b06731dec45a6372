"""A framework from PyPI trains as its authors wrote it, through the endpoint."""

from dataclasses import replace

import pytest

from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from tests.unit.program_runs import SAMPLE, play

AGENT = '''
import os
import httpx
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import REMOVE_PARAMETER

@tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: the first
        b: the second
    """
    return a + b

def main(row):
    # it wants to force calls, and an engine cannot
    model = OpenAIModel("policy", tool_choice=REMOVE_PARAMETER)
    answer = ToolCallingAgent(tools=[add], model=model, verbosity_level=0).run(row["prompt"], max_steps=4)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    reward = {"right": float(str(answer) == row["answer"])}
    httpx.post(os.environ["ROLLOUTS_REWARD_URL"], json={"reward": reward}, headers=headers).raise_for_status()
'''


@pytest.mark.slow
async def test_an_agent_of_smolagents_trains(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    texts = iter(['add{"a": 3, "b": 4}', 'final_answer{"answer": "7"}'])
    engine = ScriptedEngine(lambda request: ScriptedReply(next(texts)), context_length=100_000)
    sample = replace(SAMPLE, prompt="What is 3+4?")
    samples = await play(f"{tmp_path}/agent.py:main", engine, sample=sample, max_trajectory_tokens=100_000)
    # it tells the model of its calls in words of its own, so that each turn has a history to itself
    assert [one.response_length for one in samples] == [20, 28]
    for one, request in zip(samples, engine.requests, strict=True):
        assert one.tokens[~one.loss_mask].tolist() == request.prompt_ids.tolist()
    assert b"Observation:\n7" in bytes(token % 256 for token in samples[1].tokens)
    assert (samples[-1].metadata["trajectory"]["end"], samples[-1].rewards) == ("done", {"right": 1.0})
