"""A task to begin with: a config with every setting and its meaning, and a file of three functions. Both run
as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollouts.config.explain import ConfigKey, config_keys, format_value
from rollouts.config.spelling import nearest
from rollouts.errors import ConfigError, RunDirError

CONFIG_NAME, TASK_NAME = "config.toml", "task.py"
SAID_ALREADY = {
    "rl.data": "sft.data",
    "eval.data": "sft.data",
    "rl.optim": "sft.optim",
}  # tables alike, written out once
RESULT_NOTE = """# Begin here: this trains a random two-layer model in seconds, so that you see everything
# work; then name a real one in [model]. A line that begins with # is a setting with its default. What a
# setting means: python -m rollouts explain KEY
#
#     python -m rollouts check {config} --call
#     python integration_training/train.py --config {config} --mode sft+rl
#     python -m rollouts inspect runs/{name}
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

COUNTING = (
    '''"""Counting: the prompt is a few letters, the answer is how many."""

from __future__ import annotations

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
    + REWARD_AND_FILTER
)

REVERSING = (
    '''"""Reversing: the prompt is a few letters, the answer is the same letters backwards."""

from __future__ import annotations

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
    + REWARD_AND_FILTER
)


@dataclass(frozen=True, slots=True)
class StarterTask:
    """What `init` writes."""

    source: str  # of the task file
    max_new_tokens: int


TASKS: Mapping[str, StarterTask] = {
    "counting": StarterTask(COUNTING, 3),
    "reversing": StarterTask(REVERSING, 5),
}


def write_task(directory: Path, task: str) -> list[Path]:
    """The config and the task file that were written into `directory`, made if it is not there.

    Raises ConfigError for a task that does not exist, RunDirError if one of the files is there already, or
    cannot be written.
    """
    if task not in TASKS:
        close = nearest(task, list(TASKS))
        raise ConfigError(
            f"--task {task}: there is no such task{f'; did you mean {close}?' if close else ''} Tasks:"
            f" {', '.join(TASKS)}"
        )
    config, source = directory / CONFIG_NAME, directory / TASK_NAME
    for path in (config, source):
        if path.exists():
            raise RunDirError(
                f"{path} is there already and is not overwritten; name another directory, or move it away"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        source.write_text(TASKS[task].source, encoding="utf-8")
        config.write_text(make_config(task, config), encoding="utf-8")
    except OSError as error:
        raise RunDirError(
            f"{directory} cannot be written ({error.strerror}); name another directory"
        ) from error
    return [config, source]


def make_config(task: str, path: Path) -> str:
    """A config of every setting: those of the task set, the others commented out with their defaults, each
    with its meaning.
    """
    values = _values_of(task)
    parts = [RESULT_NOTE.format(config=path, name=task), _format_table("", values)]
    left_out = list_left_out(values)
    for key in config_keys().values():
        if key.is_table and not _is_in(key.key, left_out):
            header = f"[[{key.key}]]" if key.is_list else f"[{key.key}]"
            parts.append(f"# {key.meaning}\n{header}\n" + _format_table(key.key, values))
    tables = ", ".join(f"[{table}]" for table in left_out)
    return "\n".join(
        [
            *parts,
            f"# Not written out, for this run has none of them: {tables}; python -m rollouts explain TABLE\n",
        ]
    )


def list_left_out(values: Mapping[str, object]) -> list[str]:
    """Tables that a run may do without and that `values` set nothing of: written out they would add a stage,
    a critic or a change.
    """
    tables = [
        key for key in config_keys().values() if key.is_table and (key.default == "unset" or key.is_list)
    ]
    found: list[str] = []
    for key in tables:
        if not _is_in(key.key, found) and not any(name.startswith(f"{key.key}.") for name in values):
            found.append(key.key)
    return found


def _is_in(key: str, tables: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{table}.") for table in tables)


def _values_of(task: str) -> dict[str, object]:
    rows = {"kind": "python", "function": f"{TASK_NAME}:make_rows"}
    data: dict[str, object] = {}
    for stage, size, seed in (("sft", 400, 1), ("rl", 400, 2), ("eval", 24, 3)):
        data |= {
            f"{stage}.data.{name}": value for name, value in {**rows, "size": size, "seed": seed}.items()
        }
    length = TASKS[task].max_new_tokens
    return {
        **data,
        "name": task,
        "model.name": "tiny:byte",
        "model.threads": 1,
        "output.checkpoint_every": 20,
        "output.keep_checkpoints": 2,
        "sft.steps": 60,
        "sft.batch_size": 32,
        "sft.optim.lr": 3e-3,
        "sft.optim.warmup_steps": 5,
        "rl.steps": 20,
        "rl.eval_every": 10,
        "rl.optim.lr": 1e-3,
        "rl.rollout.num_prompts": 16,
        "rl.rollout.samples_per_prompt": 8,
        "rl.rollout.over_sampling": 1.25,
        "rl.rollout.max_new_tokens": length,
        "rl.rollout.reward": f"{TASK_NAME}:reward",
        "rl.rollout.filters": [f"{TASK_NAME}:keep_group"],
        "eval.max_new_tokens": length,
        "eval.reward": f"{TASK_NAME}:is_right",
    }


def _format_table(table: str, values: Mapping[str, object]) -> str:
    keys = [key for key in config_keys().values() if key.table == table and not key.is_table]
    if table in SAID_ALREADY:
        return (
            "".join(_format_setting(key, values) for key in keys if key.key in values)
            + f"# the other settings: as in {SAID_ALREADY[table]}\n"
        )
    return "".join(_format_setting(key, values) for key in keys)


def _format_setting(key: ConfigKey, values: Mapping[str, object]) -> str:
    if key.key in values:
        return f"{key.name} = {format_value(values[key.key])}  # {key.meaning}\n"
    if key.default == "unset":
        return f"# {key.name}: unset; {key.type_text}; {key.meaning}\n"
    return f"# {key.name} = {key.default}  # {key.meaning}\n"
