"""A run directory written row by row, for tests of reports: fast, always the same, with everything in it that
a page could trip over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NASTY = (
    "</script><script>document.title = 'broken'</script> <!-- \u2028 & {{script}} \\u003c 'quoted' \"too\""
)
CONFIG = """name = "written"
[rl]
steps = {steps}
[rl.optim]
lr = {lr}
[engine]
kind = "local"
urls = ["http://user:pass@127.0.0.1:1"]
password = "hunter2"
[[rl.changes]]
at = 3
[[rl.changes]]
at = 9
"""


def head(stage: str, step: int, attempt: int = 1) -> dict[str, Any]:
    return {
        "schema": 1,
        "stage": stage,
        "step": step,
        "policy_version": step - 1,
        "attempt": attempt,
        "time_unix": 1_800_000_000.0 + 10 * step,
    }


def make_metrics(steps: int) -> list[dict[str, Any]]:
    """`sft` and `rl` steps; the reward rises by a hundredth a step, one sample fails in every fifth."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        times = {"time/step": 2.0, "time/generate": 1.25, "time/train": 0.5}
        rows.append(
            head("rl", step)
            | {"reward/mean": step / 100, "loss/total": 1 / step, "response_length/mean": 5.0}
            | times
        )
        rows[-1] |= {"off_policy/max": float(step % 3), "off_policy/mean": 0.5}
        if step % 5 == 0:
            rows[-1] |= {"fail/reward": 1.0, "groups/dropped/stale": 2.0}
    return [
        head("sft", step) | {"loss/total": 3.0 - step / 10, "time/step": 0.5} for step in range(1, 6)
    ] + rows


def make_samples(steps: int, per_step: int) -> list[dict[str, Any]]:
    """Of step s, samples 0, 1, …: rewards (sample % 4) / 4; the last of every fifth step has failed."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        for number in range(per_step):
            row = head("rl", step) | {
                "id": f"s{step}-{number}",
                "group_index": step * 10 + number // 2,
                "status": "completed",
            }
            row |= {
                "prompt": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": f"What is {step} + {number}? {NASTY}"},
                ]
            }
            row |= {"response": f"It is {step + number}. <b>{'word ' * number}</b>", "tokens": 12 + number}
            row |= {"reward": (number % 4) / 4, "rewards": {"exact": 0.0, "form": 1.0}}
            row |= {
                "response_length": 4 + number,
                "weight_version_min": max(0, step - 1 - number % 3),
                "weight_version_max": step - 1,
            }
            row |= {"metadata": {"answer": str(step + number), "note": NASTY}}
            if step % 5 == 0 and number == per_step - 1:
                row["status"] = "failed"
                failure = {
                    "class": "reward",
                    "function": "tasks:judge",
                    "message": f"no answer after {step} s",
                    "traceback": NASTY,
                }
                row["metadata"]["failure"] = failure
                del row["reward"]
            rows.append(row)
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_run(root: Path, *, steps: int = 20, per_step: int = 4, lr: float = 1e-3) -> Path:
    """The run directory `root`, of a finished run."""
    root.mkdir(parents=True)
    (root / "config.toml").write_text(CONFIG.format(steps=steps, lr=lr), encoding="utf-8")
    write_rows(root / "metrics.jsonl", make_metrics(steps))
    write_rows(root / "samples.jsonl", make_samples(steps, per_step))
    evaluations = [
        head("rl", step) | {"name": "heldout", "eval/heldout/avg@1": step / 50, "eval/heldout/failed": 0.0}
        for step in (1, steps)
    ]
    write_rows(root / "evaluations.jsonl", evaluations)
    summary = {
        "mode": "sft+rl",
        "device": "cpu",
        "accuracy": {"base": 0.02},
        "seed": 0,
        "versions": {"torch": "2"},
    }
    (root / "summary.json").write_text(json.dumps(summary))
    (root / "updates.log").write_text(
        "".join(make_update_line(step) for step in range(1, steps + 1)), encoding="utf-8"
    )
    return root


def make_update_line(step: int) -> str:
    skipped = "  skipped: the loss is not finite" if step == 7 else ""
    return (
        f"2027-01-15T08:00:{step:02d}Z  attempt 1   rl            step {step:>6d}  update   0  version"
        f" {step:>6d}  loss +1.000000e-02  kl          -  beta         -  grad_norm 1.000e+00 clipped  lr"
        f" 1.000e-03  samples     4  zero_advantage     1  tokens       20{skipped}\n"
    )
