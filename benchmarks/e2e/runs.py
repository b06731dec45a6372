"""Whole runs of both sides of benchmarks.e2e_reward and benchmarks.lora, each a program of its own, and the
memory of its process tree.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.e2e.tasks import make_rows
from benchmarks.harness import read_status_bytes
from rollouts.data.data_buffer import DataBuffer

ROWS = 96  # of a task; 12 steps draw each once
SAMPLE_S = 0.2  # between two looks at the processes beside the trainer


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides get."""

    task: str
    model: str  # a directory
    steps: int
    lr: float
    seed: int
    threads: int
    micro_batch_rows: int  # of TRL's
    prompts_per_step: int = 8
    samples: int = 8
    max_new_tokens: int = 16
    clip_high: float = 0.2  # the lower one is 0.2
    beta2: float = 0.999
    precision: str = "float32"  # or bfloat16, that products of matrices are made in
    continuous: bool = False  # TRL generates with transformers' continuous batching
    lora: Mapping[str, Any] | None = None  # rank, alpha and targets; None: the model trains

    @property
    def rows_per_step(self) -> int:
        return self.prompts_per_step * self.samples


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run."""

    wall_s: float
    generate_s: float
    reward: float
    tied: float  # share of groups whose rewards are all equal


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run."""

    startup_s: float  # from the program's start to its first step
    steps: tuple[Step, ...]
    peak_bytes: int  # of the program and its children
    prompt_ids: tuple[int, ...]  # of the first prompt
    stop_ids: tuple[int, ...]


def all_rows(setting: Setting) -> list[dict[str, Any]]:
    """The rows of the task."""
    return make_rows(setting.task, count=ROWS, seed=setting.seed)


def order_rows(setting: Setting) -> list[dict[str, Any]]:
    """As many rows as the run draws, in the order in which our buffer draws them."""
    drawn = DataBuffer(all_rows(setting), seed=setting.seed).get_prompts(
        setting.prompts_per_step * setting.steps
    )
    return [{"prompt": row.row["prompt"], "answer": row.row["answer"]} for row in drawn]


# --- a program and its memory -------------------------------------------------------------------------------


def run_program(command: Sequence[str], log: Path) -> tuple[float, int]:
    """Unix time at which the program started, and the most memory of it and its children in bytes: what the
    kernel noted of the largest process, and of the others the most that was seen together. Raises
    RuntimeError with the end of its log if it fails.
    """
    own = others = 0
    with log.open("w", encoding="utf-8") as output:
        started = time.time()
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
            while process.returncode is None:
                own = max(own, read_status_bytes("VmHWM", process.pid))
                others = max(
                    others,
                    sum(read_status_bytes("RssAnon", child) for child in find_descendants(process.pid)),
                )
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SAMPLE_S)
    if process.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text('utf-8')[-4000:]}"
        )
    return started, own + others


def find_descendants(pid: int) -> list[int]:
    """Children, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text("utf-8").split()]
        except OSError:
            continue
        for child in children:
            found += [child, *find_descendants(child)]
    return found


# --- ours ---------------------------------------------------------------------------------------------------


def run_ours(setting: Setting, folder: Path) -> RunResult:
    """integration_training/train.py with its embedded engine."""
    from rollouts.data.chat import tokenize_prompt
    from rollouts.models.load import load_tokenizer, stop_token_ids

    folder.mkdir()
    rows, config, run_dir = folder / "rows.jsonl", folder / "run.toml", folder / "run"
    rows.write_text("".join(json.dumps(row) + "\n" for row in all_rows(setting)), encoding="utf-8")
    config.write_text(make_config(setting, rows, run_dir), encoding="utf-8")
    command = [sys.executable, "integration_training/train.py", "--config", str(config), "--mode", "rl"]
    started, peak = run_program(command, folder / "log.txt")
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    tokenizer, model = load_tokenizer(Path(setting.model)), Path(setting.model)
    return RunResult(
        startup_s=steps[0]["time_unix"] - steps[0]["time/step"] - started,
        steps=tuple(read_step(step) for step in steps),
        peak_bytes=peak,
        prompt_ids=tuple(tokenize_prompt(order_rows(setting)[0]["prompt"], tokenizer).tolist()),
        stop_ids=stop_token_ids(tokenizer, model),
    )


def read_step(row: Mapping[str, Any]) -> Step:
    """A row of metrics.jsonl."""
    return Step(
        row["time/step"],
        row["time/generate"],
        row["reward/mean"],
        row["groups/zero_std_frac"],
    )


def make_config(setting: Setting, rows: Path, run_dir: Path) -> str:
    """The TOML of our run: TRL's settings by our names."""
    width = 128  # tokens of a row at most, so that a micro-batch holds what TRL's does
    return f"""
name = "e2e"
seed = {setting.seed}

[model]
name = {json.dumps(setting.model)}
autocast = "{"off" if setting.precision == "float32" else setting.precision}"
threads = {setting.threads}

{make_lora_table(setting)}
[output]
dir = {json.dumps(str(run_dir))}
checkpoint_every = 0

[engine]
max_rows = {setting.rows_per_step}

[rl]
steps = {setting.steps}
advantage = "grpo"
clip_low = 0.2
clip_high = {setting.clip_high}
advantage_params = {{ std_epsilon = 1e-4 }}
micro_batch_tokens = {setting.micro_batch_rows * width}

[rl.data]
kind = "jsonl"
path = {json.dumps(str(rows))}

[rl.rollout]
num_prompts = {setting.prompts_per_step}
samples_per_prompt = {setting.samples}
max_new_tokens = {setting.max_new_tokens}
reward = "benchmarks.e2e.tasks:reward_{setting.task}"

[rl.optim]
lr = {setting.lr}
beta2 = {setting.beta2}
"""


def make_lora_table(setting: Setting) -> str:
    """[model.lora], or nothing."""
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in (setting.lora or {}).items()]
    return "".join(["[model.lora]\n", *lines]) if lines else ""


# --- TRL's --------------------------------------------------------------------------------------------------


def run_trl(setting: Setting, folder: Path) -> RunResult:
    """GRPOTrainer.train()."""
    folder.mkdir()
    settings, result = folder / "settings.json", folder / "result.json"
    settings.write_text(json.dumps({**asdict(setting), "rows": order_rows(setting)}), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "benchmarks.e2e.reward_trl",
        "--settings",
        str(settings),
        "--result",
        str(result),
    ]
    _, peak = run_program(command, folder / "log.txt")
    found = json.loads(result.read_text("utf-8"))
    steps = tuple(
        Step(step["wall_s"], step["generate_s"], step["reward"], step["tied"]) for step in found["steps"]
    )
    return RunResult(found["startup_s"], steps, peak, tuple(found["prompt_ids"]), tuple(found["stop_ids"]))
