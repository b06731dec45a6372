"""How the memory of a run grows over 1,000 steps of RL. CPU.

    python -m benchmarks.memory [--quick]

tiny.toml, whose model takes no memory to speak of, in two processes, one after the other:

    shared   the engine generates with the trainer's weights
    copied   the engine has a copy of its own, which takes new weights at each update, and every 20 steps a
             checkpoint is written beside training, from a copy of weights and moments

Nothing is filtered out: a tiny model soon answers alike, and then no batch would be filled. The resident set
of the process is read after every 50th step.

    …_growth   the largest resident set from step 200 on, over that after step 200; target <= 1.05
    …_curve    step: MiB

--quick: 200 steps, growth from step 100. The last line is JSON; exit status 1 if a target is missed.
"""

import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.harness import finish, make_parser
from rollouts.errors import RunDirError
from rollouts.metrics.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "integration_training/train.py --config integration_training/configs/tiny.toml --mode sft+rl"
VARIANTS = {"shared": "", "copied": "--engine.mode copied --output.checkpoint_every 20"}
EVERY = 50
TARGETS = {"shared_growth": "<= 1.05", "copied_growth": "<= 1.05"}


def measure(folder: Path, flags: str, *, steps: int) -> dict[int, float]:
    """The resident set in MiB after each EVERY-th step of RL."""
    words = shlex.split(f"{TRAIN} {flags} --rl.steps {steps} --rl.rollout.filters []")
    curve: dict[int, float] = {}
    with subprocess.Popen([sys.executable, *words, "--output.dir", str(folder)], cwd=ROOT) as child:
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
            try:
                done = sum(row["stage"] == "rl" for row in read_rows(folder / "metrics.jsonl"))
                if done // EVERY * EVERY not in {0, *curve}:
                    curve[done // EVERY * EVERY] = psutil.Process(child.pid).memory_info().rss / 2**20
            except (RunDirError, psutil.NoSuchProcess):
                continue  # not begun, or it has ended
    assert child.returncode == 0, f"the run ended with {child.returncode}"
    return curve


def main() -> int:
    asked = make_parser(__doc__, quick="200 steps").parse_args()
    steps, settled = (200, 100) if asked.quick else (1000, 200)
    metrics: dict[str, float | str | None] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, flags in VARIANTS.items():
            curve = measure(Path(scratch) / name, flags, steps=steps)
            grown = max(mib for step, mib in curve.items() if step >= settled)
            metrics[f"{name}_mib"] = round(curve[settled], 1)
            metrics[f"{name}_growth"] = round(grown / curve[settled], 4)
            metrics[f"{name}_curve"] = ", ".join(f"{step}: {mib:.0f}" for step, mib in curve.items())
    return finish("memory", peer="the same run after step 200", metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
