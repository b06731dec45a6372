"""Environments of verifiers (its v0 API) as programs behind the endpoint of a trajectory. A Python that has
verifiers 0.2.1 or 0.3.1 and the environment's package runs this file; it imports nothing of rollouts.

    VENV/bin/python verifiers_agent.py rows NAME > rows.jsonl    a source of kind "jsonl"
    agent = "VENV/bin/python verifiers_agent.py play NAME"       in [rl.rollout]

A third argument holds keyword arguments of load_environment, as JSON. `play` plays the row of the file
ROLLOUTS_ROW and sends the rubric's reward to ROLLOUTS_REWARD_URL. It ends with 1, and no reward, where the
model could not be asked or a function of the rubric raised. Each trajectory loads the environment anew, which
takes seconds.
"""

import json
import logging
import os
import sys
from logging.handlers import BufferingHandler
from pathlib import Path

import httpx


def main(work: str, name: str, arguments: str = "{}") -> None:
    """Prints the training data, or plays a trajectory."""
    from verifiers import ClientConfig, load_environment  # pyright: ignore[reportMissingImports]

    env = load_environment(name, **json.loads(arguments))
    if work == "rows":
        print(*map(json.dumps, env.get_dataset()), sep="\n")
        return
    if env.requires_group_rollouts:
        sys.exit("the rubric compares the samples of a group, and a trajectory is played alone")
    errors = BufferingHandler(1000)
    errors.setLevel(logging.ERROR)
    logging.getLogger("verifiers").addHandler(errors)  # a rubric logs what its functions raise, and scores 0
    row = json.loads(Path(os.environ["ROLLOUTS_ROW"]).read_text())
    client = ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"])
    (played,) = env.generate_sync([row], client, model="policy", independent_scoring=True)["outputs"]
    if problem := played["error"] or errors.buffer:
        sys.exit(f"the trajectory failed: {problem}")
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    reward = {"reward": played["reward"]}
    httpx.post(os.environ["ROLLOUTS_REWARD_URL"], json=reward, headers=headers).raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
