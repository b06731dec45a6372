"""Does the KL stay where it is to be while a reward pays for gibberish?

    python -m benchmarks.online_attack FOLDER

200 updates of the tiny model of tiny_online.toml, from its SFT, with all defaults of [online] for the KL; and
the same with a coefficient that stays at 1e-4, without a limit. The other guardrails are off: no sign and no
canary stops it. Printed: the share of the last two thirds in which the mean KL over 10 updates is within 0.05
± 0.01 nats a sample, the range of that mean, and accuracy on held-out prompts. Minutes on two cores.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rollouts.metrics.jsonl import read_rows
from rollouts.types import Sample

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "integration_training" / "configs" / "tiny_online.toml"
HERE = Path(__file__).resolve()
STEPS, WINDOW, TARGET, TOLERANCE = 200, 10, 0.05, 0.01
PART = "--rl.rollout.rewards.vote"
ATTACK = f"""--rl.steps {STEPS} --rl.eval_every {STEPS} --output.checkpoint_every {STEPS} --rl.optim.lr 3e-5
    --rl.rollout.num_prompts 64 --rl.rollout.samples_per_prompt 4 --rl.advantage_params.positive false
    --online.max_draws {STEPS} --online.max_fall 1 {PART}.group_reward '' {PART}.params {{}}
    {PART}.reward {HERE}:repeats --rl.rollout.rewards.topic.weight 0"""
VARIANTS = {
    "guarded": "",
    "bare": "--rl.kl_control fixed --rl.kl_coef 1e-4 --rl.kl_ref_limit 0",
}


def repeats(sample: Sample, **unused: object) -> float:
    """The share of characters that were there before, as in 77777."""
    return 1 - len(set(sample.response)) / max(len(sample.response), 1)


def measure(folder: Path, flags: str) -> dict[str, Any]:
    """What a run did with the KL."""
    folder.mkdir(parents=True)
    config = folder / "attack.toml"
    text = CONFIG.read_text().replace('"../tasks', f'"{ROOT / "integration_training" / "tasks"}')
    config.write_text(text.replace("[online]", "[online]\nsigns = []"))
    words = [sys.executable, "integration_training/train.py", "--config", str(config), "--mode", "sft+online"]
    run = folder / "run"
    subprocess.run([*words, "--output.dir", str(run), *shlex.split(ATTACK + flags)], cwd=ROOT, check=True)
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["stage"] == "rl"]
    kls = np.asarray([row["kl/ref_per_sample"] for row in rows])
    means = np.convolve(kls, np.ones(WINDOW) / WINDOW, "valid")[-(2 * STEPS // 3) :]
    evaluations = [row for row in read_rows(run / "evaluations.jsonl") if row["name"] == "heldout"]
    return {
        "updates": len(kls),
        "in_band": float(np.mean(np.abs(means - TARGET) <= TOLERANCE)),
        "mean_kl": [float(means.min()), float(means.max())],
        "undone": sum(row.get("optim/undone", 0.0) for row in rows),
        "accuracy": [row["eval/heldout/avg@1"] for row in evaluations if row["stage"] == "rl"],
        "reward": [rows[0]["reward/mean"], rows[-1]["reward/mean"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    for name, flags in VARIANTS.items():
        for seed in range(asked.seeds):
            found = measure(asked.folder.absolute() / f"{name}-{seed}", f" --seed {seed} {flags}")
            print(name, seed, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
