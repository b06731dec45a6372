"""An environment of verifiers, in its own Python, behind an endpoint."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rollouts.environments.adapters import verifiers_agent
from rollouts.messages import checked_messages
from tests.adapters.programs import FOLDER, VERIFIERS, run_server

pytestmark = pytest.mark.adapters
PROMPT = [{"role": "system", "content": "One letter."}, {"role": "user", "content": "After a?"}]


def run_agent(*arguments: str, **settings: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "HF_HUB_OFFLINE": "1", **settings}
    command = [VERIFIERS, verifiers_agent.__file__, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_training_data_are_rows_of_a_run():
    printed = run_agent("rows", "guess-words")
    rows = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [row["answer"] for row in rows] == ["b", "c"], printed.stderr
    assert checked_messages(rows[0]["prompt"], "prompt") == PROMPT


@pytest.mark.parametrize(
    ("key", "arguments", "asked", "said"),
    [
        ("k", "{}", 3, ""),
        ("k", '{"breaks": true}', 2, "the judge is away"),
        ("refused", "{}", 1, "the trajectory failed"),
    ],
)
def test_a_trajectory_is_played_and_its_reward_sent_where_there_is_one(
    tmp_path, key, arguments, asked: int, said
):
    row = {"prompt": PROMPT, "answer": "b", "example_id": 0, "prompt_id": "row-0", "epoch": 0}
    (tmp_path / "row.json").write_text(json.dumps(row))
    with run_server(sys.executable, "fake_openai.py") as (port, server):
        ended = run_agent(
            *("play", "guess-words", arguments),
            OPENAI_BASE_URL=f"http://127.0.0.1:{port}/v1",
            OPENAI_API_KEY=key,
            ROLLOUTS_REWARD_URL=f"http://127.0.0.1:{port}/reward",
            ROLLOUTS_ROW=str(tmp_path / "row.json"),
        )
        server.kill()
        bodies = [json.loads(line) for line in server.stdout or ()]
    assert (ended.returncode, len(bodies)) == (int(bool(said)), asked), ended.stderr
    assert said in ended.stderr
    if not said:
        turns = [message["content"] for message in bodies[1]["messages"]]
        assert turns == ["One letter.", "After a?", "a", "No. Again."]
        assert bodies[2] == {"reward": 0.5}  # right at the second guess
