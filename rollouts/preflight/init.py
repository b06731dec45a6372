"""A task to begin with: a commented config and a file of functions. Both run as they are."""

from pathlib import Path

from rollouts.config.spelling import did_you_mean
from rollouts.errors import ConfigError, RunDirError

CONFIG = """# Begin here: this trains a random two-layer model in seconds. Then name a real one in [model].
# Every other setting with its default and meaning: python -m rollouts explain
#
#     python -m rollouts check {path} --call
#     python integration_training/train.py --config {path}
#     python -m rollouts inspect runs/{task}

name = "{task}"  # the run directory is runs/{task}

[model]
name = "tiny:byte"  # a model directory, or a name on the Hugging Face hub
threads = 1  # of torch, on the CPU

[output]
checkpoint_every = 20  # steps; --resume goes on from the newest
keep_checkpoints = 2

# Supervised fine-tuning: learns the answers of the rows.
[sft]
steps = 60
batch_size = 32
optim = {{ lr = 3e-3, warmup_steps = 5 }}
# or kind = "jsonl" with path = "rows.jsonl", or kind = "hf"; other fields than prompt reach the reward
data = {{ kind = "python", function = "task.py:make_rows", size = 400, seed = 1 }}

# Reinforcement learning: generates, rewards, trains.
[rl]
steps = 20
eval_every = 10
optim = {{ lr = 1e-3 }}
data = {{ kind = "python", function = "task.py:make_rows", size = 400, seed = 2 }}

[rl.rollout]
num_prompts = 16  # groups of a batch
samples_per_prompt = 8  # samples of a group, whose rewards are compared
over_sampling = 1.25  # groups that are started for each that is needed
max_new_tokens = {max_new_tokens}
reward = "task.py:reward"
filters = ["task.py:keep_group"]

# Held-out prompts: they are left out of both stages.
[eval]
max_new_tokens = {max_new_tokens}
reward = "task.py:is_right"
data = {{ kind = "python", function = "task.py:make_rows", size = 24, seed = 3 }}
"""

REWARD_AND_FILTER = '''

def reward(sample: Sample) -> RewardResult:
    """1 for the answer and nothing else; part of it for an answer that is near. Named parts are logged."""
    answer, response = str(sample.metadata["answer"]), sample.response.strip()
    exact = float(response == answer)
    return RewardResult(max(exact, 0.5 * nearness(response, answer)), {"exact": exact})


def is_right(sample: Sample) -> float:
    """1 for the answer and nothing else: what the evaluation counts."""
    return float(sample.response.strip() == str(sample.metadata["answer"]))


def keep_group(group: SampleGroup) -> FilterDecision:
    """Drops a group whose samples were all rewarded alike: there is nothing to learn from comparing them."""
    if group.rewards.max() > group.rewards.min():
        return FilterDecision(keep=True)
    return FilterDecision(keep=False, reason="all_alike")
'''

COUNTING = '''"""Counting: the prompt is a few letters, the answer is how many."""

import random
from collections.abc import Iterator

from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup


def make_rows(size: int, seed: int) -> Iterator[dict[str, str]]:
    """`size` rows. Any field beside prompt reaches the reward in sample.metadata; SFT trains on answer."""
    random_letters = random.Random(seed)
    for _ in range(size):
        count = random_letters.randint(1, 9)
        letters = "".join(random_letters.choice("abcdefgh") for _ in range(count))
        yield {"prompt": letters, "answer": str(count)}


def nearness(response: str, answer: str) -> float:
    """From 1, the right number, to 0: nine away, or no number."""
    is_number = response.isdecimal() and len(response) < 4
    return 1 - min(9, abs(int(response) - int(answer))) / 9 if is_number else 0.0
'''

REVERSING = '''"""Reversing: the prompt is a few letters, the answer is the same letters backwards."""

import random
from collections.abc import Iterator

from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup


def make_rows(size: int, seed: int) -> Iterator[dict[str, str]]:
    """`size` rows. Any field beside prompt reaches the reward in sample.metadata; SFT trains on answer."""
    random_letters = random.Random(seed)
    for _ in range(size):
        letters = "".join(random_letters.choice("abcdefgh") for _ in range(3))
        yield {"prompt": letters, "answer": letters[::-1]}


def nearness(response: str, answer: str) -> float:
    """The share of places that have the right letter."""
    same = sum(a == b for a, b in zip(response, answer, strict=False))
    return same / max(len(response), len(answer))
'''


# how the task file begins, and max_new_tokens
TASKS = {"counting": (COUNTING, 3), "reversing": (REVERSING, 5)}


def write_task(directory: Path, task: str) -> list[Path]:
    """The config and the task file that were written into `directory`, made if it is not there.

    Raises ConfigError for a task that does not exist, RunDirError if one of the files is there already, or
    cannot be written.
    """
    if task not in TASKS:
        raise ConfigError(f"--task {task} is none of {', '.join(TASKS)}{did_you_mean(task, list(TASKS))}")
    text, max_new_tokens = TASKS[task]
    config, source = directory / "config.toml", directory / "task.py"
    for path in (config, source):
        if path.exists():
            raise RunDirError(
                f"{path} is there already and is not overwritten; name another directory, or move it away"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        source.write_text(text + REWARD_AND_FILTER, "utf-8")
        config.write_text(CONFIG.format(task=task, path=config, max_new_tokens=max_new_tokens), "utf-8")
    except OSError as error:
        raise RunDirError(
            f"{directory} cannot be written ({error.strerror}); name another directory"
        ) from error
    return [config, source]
