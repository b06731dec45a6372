"""From a command to the demo's first step, and where that time goes. CPU, with a warm file cache.

    python -m benchmarks.startup [--rounds 3] [--threads 2] [--quick]

Each number is the median of rounds of programs of their own, whose files are in the system's cache:

    help_s        `python -m rollouts --help`; target <= 0.3
    imports_s     what train.py imports until its first model
    load_s        the model: read, made and checked
    probe_s       the embedded engine, which proves its way to run that model
    dry_run_s     `train.py --dry-run` as a whole: imports, reading of the data, preflight
    first_step_s  `train.py` from the command until the first step begins, without the evaluation before it;
                  target <= 10

The last line is JSON; exit status 1 if a target is missed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.harness import finish, make_parser

TRAIN = ["integration_training/train.py", "--config", "integration_training/configs/demo.toml"]
TARGETS = {"help_s": "<= 0.3", "first_step_s": "<= 10"}
OPENING = """
import json, sys, time
began = time.perf_counter()
import torch
import integration_training.opening, integration_training.run
from rollouts.models.decoding.batch import open_decoder
from rollouts.models.load import load_hf_model, resolve_model
from transformers import LlamaForCausalLM
torch.set_num_threads(int(sys.argv[1]))
times = [time.perf_counter() - began]
for work in (lambda: load_hf_model(resolve_model("bundled:smollm2-135m-instruct")),
             lambda: open_decoder(model, 2048)):
    began = time.perf_counter()
    model = work()
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


def run(*words: str) -> str:
    """What a Python program prints. Raises CalledProcessError where it fails."""
    return subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout


def measure(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_first_step(threads: int) -> float:
    """Seconds from the command to the first step, the evaluation before it left out."""
    words = ["--mode", "sft", "--sft.steps", "1", "--eval.data.size", "8", "--model.threads", str(threads)]
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = Path(scratch) / "run", time.time()
        run(*TRAIN, *words, "--output.dir", str(folder))
        (step,) = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
        spans = map(json.loads, (folder / "spans.jsonl").read_text("utf-8").splitlines())
        first = step["time_unix"] - step["time/step"]
        held_out = sum(
            span["duration_s"] for span in spans if span["name"] == "evaluate" and span["start_unix"] < first
        )
    return first - began - held_out


def main() -> int:
    parser = make_parser(__doc__, quick="one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    threads = str(asked.threads)
    run("-c", OPENING, threads)  # warms the cache
    found: dict[str, list[float]] = {}
    for _ in range(1 if asked.quick else asked.rounds):
        parts = dict(
            zip(("imports_s", "load_s", "probe_s"), json.loads(run("-c", OPENING, threads)), strict=True)
        )
        parts |= {
            "help_s": measure(lambda: run("-m", "rollouts", "--help")),
            "dry_run_s": measure(lambda: run(*TRAIN, "--mode", "sft", "--dry-run")),
            "first_step_s": measure_first_step(asked.threads),
        }
        for name, seconds in parts.items():
            found.setdefault(name, []).append(seconds)
    metrics = {name: round(median(seconds), 3) for name, seconds in found.items()}
    return finish("startup", peer="none", metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
