"""How long a viewer takes on a long run: 100,000 steps of 60 metrics and 1,000,000 logged samples.

    python -m benchmarks.viewer [--quick] [--rounds 3] [--steps 100000] [--samples 1000000]

A run is made up in a temporary directory: metrics that drift, two attempts that overlap, sample rows of about
550 bytes with chat prompts, failures and old weights, in files of 256 MiB. Each command is a process of its
own, from its start to its end, output included:

    inspect   everything that it prints; its picture is up to date
    picture   the same, with the picture drawn anew, where matplotlib is installed
    samples   the ten highest rewards of one status; and the last ten that hold a text which one row in
              a thousand has
    report    the HTML file, and its size

The slowest of the rounds counts. Nothing is kept between commands: each reads the files through DuckDB.
Targets: inspect and samples <= 2 and 3 s, the report <= 20 s and 25 MiB. Peer: none. `--quick`: a twentieth
of the rows, two rounds.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import finish, make_parser

METRICS = 60
PART_BYTES = 256 << 20
BLOCK = 2000  # rows that are made at a time
NAMED = (  # metrics that viewers look for; the others are engine/eNN/load
    "reward/mean",
    "reward/std",
    "loss/total",
    "entropy/mean",
    "response_length/mean",
    "truncated/frac",
    "optim/grad_norm",
    "optim/lr",
    "kl/ref",
    "mismatch_kl/mean",
    "clip_ratio",
    "off_policy/mean",
    "off_policy/max",
    "groups/drawn",
    "groups/kept",
    "groups/zero_std_frac",
    "groups/dropped/zero_std",
    "fail/reward",
    "fail/generate",
    "time/generate",
    "time/train",
    "time/weight_sync",
    "time/step",
    "perf/generated_tokens_per_s",
    "perf/trained_tokens_per_s",
    "advantage/abs_mean",
    "ratio/mean",
    "ratio/max",
)
TEXT = (
    "the sum of both numbers is carried over to the next digit and then we add what is left to find that the"
    " answer must be even so it cannot be seven because a square has no such remainder"
)
RARE = "Quokka"  # one row in a thousand
TARGETS = {"inspect_s": "<= 2", "samples_s": "<= 3", "report_s": "<= 20", "report_mib": "<= 25"}


def make_metric_rows(first: int, last: int, attempt: int, rng: np.random.Generator) -> Iterator[bytes]:
    """Lines of steps `first` to `last`, both included, many at a time."""
    names = [*NAMED, *(f"engine/e{index:02d}/load" for index in range(METRICS - len(NAMED)))]
    assert len(names) == METRICS, len(names)
    encoder = msgspec.json.Encoder()
    for begin in range(first, last + 1, BLOCK):
        steps = np.arange(begin, min(begin + BLOCK, last + 1))
        drift = 1 - np.exp(-steps / 30_000)
        values = np.abs(rng.normal(1.0, 0.2, (len(steps), METRICS)) * drift[:, None])
        values[:, names.index("fail/reward")] = rng.random(len(steps)) < 0.01
        values[:, names.index("fail/generate")] = 0
        values[:, names.index("groups/dropped/zero_std")] = rng.integers(0, 2, len(steps))
        values[:, names.index("groups/drawn")] = 8
        values[:, names.index("time/step")] = sum(
            values[:, names.index(f"time/{phase}")] for phase in ("generate", "train", "weight_sync")
        )
        lines: list[bytes] = []
        for step, row in zip(steps.tolist(), values.tolist(), strict=True):
            head = {
                "schema": 1,
                "stage": "rl",
                "step": step,
                "policy_version": step - 1,
                "attempt": attempt,
                "time_unix": 1.7e9 + step,
            }
            lines.append(encoder.encode(head | dict(zip(names, row, strict=True))))
        yield b"\n".join(lines) + b"\n"


def make_sample_rows(samples: int, steps: int, rng: np.random.Generator) -> Iterator[bytes]:
    """Lines of so many samples, evenly over the steps, many at a time."""
    encoder = msgspec.json.Encoder()
    texts = [" ".join(rng.choice(TEXT.split(), size=32)) for _ in range(500)]
    for begin in range(0, samples, BLOCK):
        count = min(BLOCK, samples - begin)
        rewards = rng.random(count).round(4).tolist()
        draws = rng.integers(0, 1000, (count, 4)).tolist()
        lines: list[bytes] = []
        for place in range(count):
            number, draw = begin + place, draws[place]
            step = 1 + number * steps // samples
            failed = draw[0] < 5
            text = texts[draw[1] % len(texts)]
            row: dict[str, Any] = {
                "schema": 1,
                "stage": "rl",
                "step": step,
                "policy_version": step - 1,
                "attempt": 1,
                "time_unix": 1.7e9 + step,
                "id": f"g{number // 8:08d}-s{number % 8:03d}",
                "group_index": number // 8,
                "status": "failed" if failed else "truncated" if draw[0] < 100 else "completed",
                "prompt": [{"role": "user", "content": f"Calculate {draw[2]} + {draw[3]}."}],
                "response": f"{text} {RARE}" if number % 1000 == 0 else text,
                **(
                    {}
                    if failed
                    else {"reward": rewards[place], "rewards": {"exact": rewards[place], "well_formed": 1.0}}
                ),
                "tokens": 30 + draw[1] % 200,
                "response_length": 10 + draw[1] % 200,
                "weight_version_min": max(0, step - 1 - draw[0] % 3),
                "weight_version_max": step - 1,
                "metadata": {"answer": str(draw[2] + draw[3]), "prompt_id": f"row-{draw[1]}", "epoch": 0},
            }
            if failed:
                row["metadata"]["failure"] = {
                    "class": "reward",
                    "function": "grade",
                    "message": f"timed out after {draw[1]} ms",
                }
            lines.append(encoder.encode(row))
        yield b"\n".join(lines) + b"\n"


def write_parts(path: Path, blocks: Iterator[bytes]) -> None:
    """The lines in NAME.jsonl, NAME.1.jsonl, …, each begun when the one before has reached its size."""
    number, size = 0, 0
    for block in blocks:
        number, size = (number + 1, 0) if size >= PART_BYTES else (number, size)
        part = path if number == 0 else path.with_name(f"{path.stem}.{number}.jsonl")
        with part.open("ab") as file:
            file.write(block)
        size += len(block)


def write_run(root: Path, *, steps: int, samples: int) -> None:
    """A run of two attempts: the first reached 60 % of the steps, the second began again at 50 %."""
    root.mkdir()
    rng = np.random.default_rng(0)
    (root / "config.toml").write_text('name = "viewer"\nseed = 0\n')

    def both_attempts() -> Iterator[bytes]:
        yield from make_metric_rows(1, steps * 6 // 10, 1, rng)
        yield from make_metric_rows(steps // 2 + 1, steps, 2, rng)

    write_parts(root / "metrics.jsonl", both_attempts())
    write_parts(root / "samples.jsonl", make_sample_rows(samples, steps, rng))
    (root / "evaluations.jsonl").write_bytes(b"")


def time_command(*words: str) -> float:
    """Seconds from the start of `python -m rollouts WORDS` to its end. Raises CalledProcessError."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # a user's Python keeps what it has compiled
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "rollouts", *words], env=environment, check=True, stdout=subprocess.PIPE
    )
    return time.perf_counter() - begin


def time_slowest(rounds: int, *words: str) -> float:
    """The slowest of the rounds."""
    seconds = [time_command(*words) for _ in range(rounds)]
    print(f"  {' '.join(words)}: {', '.join(f'{value:.2f}' for value in seconds)} s", flush=True)
    return max(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is measured, and the object that `finish` makes; 1 if a target is missed."""
    parser = make_parser(__doc__, quick="a twentieth of the rows")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    share, rounds = (20, 2) if arguments.quick else (1, arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="viewer-") as folder:
        metrics = measure(
            Path(folder) / "run",
            steps=arguments.steps // share,
            samples=arguments.samples // share,
            rounds=rounds,
        )
    return finish(
        "viewer", peer="none", metrics=metrics, targets=TARGETS, packages=("msgspec", "rich", "matplotlib")
    )


def measure(root: Path, *, steps: int, samples: int, rounds: int) -> dict[str, float]:
    """Seconds and sizes, by name."""
    begin = time.perf_counter()
    write_run(root, steps=steps, samples=samples)
    sizes = {
        name: sum(path.stat().st_size for path in root.glob(f"{name}*.jsonl")) / 2**20
        for name in ("metrics", "samples")
    }
    print(
        f"{steps} steps, {samples} samples: {sizes['metrics']:.0f} and {sizes['samples']:.0f} MiB, made in"
        f" {time.perf_counter() - begin:.1f} s"
    )
    run = str(root)
    metrics = {"metrics_mib": round(sizes["metrics"], 1), "samples_mib": round(sizes["samples"], 1)}
    time_slowest(1, "inspect", run)  # draws the picture, which is up to date then
    metrics["inspect_s"] = time_slowest(rounds, "inspect", run)
    if importlib.util.find_spec("matplotlib") is not None:
        metrics["picture_s"] = time_slowest(rounds, "inspect", run, "--png", str(root.parent / "curves.png"))
    metrics["samples_filter_s"] = time_slowest(
        rounds, "samples", run, "--status", "truncated", "--sort", "reward", "--reverse"
    )
    metrics["samples_grep_s"] = time_slowest(rounds, "samples", run, "--grep", RARE.lower())
    metrics["samples_s"] = max(metrics["samples_filter_s"], metrics["samples_grep_s"])
    report = root.parent / "report.html"
    metrics["report_s"] = time_slowest(1, "report", run, "-o", str(report))
    metrics["report_mib"] = report.stat().st_size / 2**20
    return {name: round(value, 3) for name, value in metrics.items()}


if __name__ == "__main__":
    sys.exit(main())
