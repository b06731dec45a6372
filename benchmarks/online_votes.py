"""Does a model learn from its own votes? Runs of --mode online from one SFT checkpoint, beside controls.

    python -m benchmarks.online_votes FOLDER [--steps 20] [--seeds 3]

votes    the config as it is: no label is read anywhere but in held-out evaluations
truth    the same with answers as the reward: what labels give
coin     a reward without information: what any training gives
form     1 for a number alone: what the answer's form gives
misled   votes from a start whose majority is no better than its mean: SFT on answers, three of four one too
         large

Of each: mean@16 on the 529 held-out prompts of the start and of what is published at the end, and the paired
bootstrap interval of the difference, over the mean of the seeds. Adds to FOLDER/online_votes.json; runs and
evaluations that are there are not made again. Hours on two cores.
"""

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym

from rollouts.checkpoints.follow import list_publications
from rollouts.evaluation.intervals import compare_policies
from rollouts.metrics.jsonl import read_rows
from rollouts.run_dir import RunDir
from rollouts.types import Sample

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "integration_training" / "configs" / "online.toml"
PART = "--rl.rollout.rewards.vote"
HERE = Path(__file__).resolve()
SAMPLES = 16  # of each held-out prompt
VARIANTS = {
    "votes": "",
    "truth": f"--rl.data.columns.answer answer {PART}.group_reward final",
    "coin": f"{PART}.group_reward '' {PART}.reward {HERE}:coin",
    "form": f"{PART}.group_reward '' {PART}.reward {HERE}:form",
    "misled": "",
}


def coin(sample: Sample, **unused: object) -> float:
    """0 or 1, of the sample's id alone."""
    return float(hashlib.sha256(sample.id.encode()).digest()[0] % 2)


def form(sample: Sample, **unused: object) -> float:
    """1 for digits and nothing else."""
    return float(re.fullmatch(r"\s*\d+\s*", sample.response) is not None)


def mislead(*, size: int, seed: int, **params: object) -> list[dict[str, str]]:
    """Rows of SFT that are wrong in three of four."""
    made = reasoning_gym.create_dataset("basic_arithmetic", size=size, seed=seed, **params)
    return [
        {"prompt": one["question"], "answer": str(int(one["answer"]) + (index % 4 > 0))}
        for index, one in enumerate(made)
    ]


def run(*words: object) -> None:
    """A program of ours, whose exit code may tell that learning was stopped."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")


def train(folder: Path, mode: str, *flags: object) -> Path:
    """The directory of a run that has ended."""
    if not (folder / "done").exists():
        flags = ("--output.dir", folder, "--resume", *flags)
        run("integration_training/train.py", "--config", CONFIG, "--mode", mode, *flags)
        (folder / "done").touch()
    return folder


def evaluate(model: Path, folder: Path) -> list[list[float]]:
    """Rewards [P][16] of the held-out prompts."""
    if not (folder / "summary.json").exists():
        flags = f"--eval.samples_per_prompt {SAMPLES} --eval.temperature 1.0 --output.samples_per_step 100000"
        run("-m", "rollouts", "evaluate", model, "--config", CONFIG, "--output.dir", folder, *flags.split())
    found: dict[int, list[float]] = {}
    for row in read_rows(folder / "samples.jsonl"):
        found.setdefault(row["group_index"], []).append(row["reward"])
    return [found[index] for index in sorted(found)]


def newest_checkpoint(run_dir: Path, stage: str) -> Path:
    steps = (run_dir / "checkpoints" / stage).glob("step_*")
    return max(steps, key=lambda path: int(path.name.partition("_")[2]))


def measure(folder: Path, name: str, seeds: int, steps: int) -> dict[str, Any]:
    """What came of a variant."""
    taught = "misled" if name == "misled" else "sft"
    wrong = f"--sft.steps 40 --sft.data.kind python --sft.data.function {HERE}:mislead"
    start = newest_checkpoint(train(folder / taught, "sft", *wrong.split() * (name == "misled")), "sft")
    before = np.asarray(evaluate(start, folder / f"eval-{taught}"))
    ends, stopped = [], []
    for seed in range(seeds):
        out = folder / f"{name}-{seed}"
        flags = shlex.split(f"--seed {seed} --rl.steps {steps} {VARIANTS[name]}")
        train(out, "online", "--model.name", start, *flags)
        published = RunDir(out).published
        model = published / list_publications(published)[0].snapshot
        ends.append(evaluate(model, folder / f"eval-{name}-{seed}"))
        log = (out / "updates.log").read_text().splitlines()
        stopped += [line.partition("learning stops: ")[2] for line in log if "learning stops" in line]
    [majority] = majority_of(folder / f"eval-{taught}")
    after = np.asarray(ends)  # [seeds, P, 16]
    compared = compare_policies(before.mean(-1), after.mean((0, 2)), seed=0)
    return {
        "start": {"mean@16": float(before.mean()), "maj@16": majority},
        "mean@16": [float(one) for one in after.mean((1, 2))],
        "difference": [*compared.difference[:3]],
        "stopped": stopped,
    }


def majority_of(folder: Path) -> Sequence[float]:
    """maj@16 as the evaluation has it."""
    return [row[f"eval/heldout/maj@{SAMPLES}"] for row in read_rows(folder / "evaluations.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "online_votes.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in asked.variants.split(","):
        found[name] = measure(folder, name, asked.seeds, asked.steps)
        print(name, json.dumps(found[name]), flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
