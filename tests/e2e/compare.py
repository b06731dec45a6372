"""What must be equal between two runs in deterministic mode: everything but clocks, throughput, memory and the attempt."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rollouts.metrics.jsonl import newest_attempts, read_rows

NOT_COMPARED = ("time/", "perf/")


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(NOT_COMPARED) and key not in ("time_unix", "attempt")}


def read_comparable(path: Path) -> list[dict[str, Any]]:
    """The newest attempt's rows, in file order within a step."""
    rows = read_rows(path)
    newest = {(row["stage"], row["step"]): row["attempt"] for row in newest_attempts(rows)}
    return sorted(
        (comparable(row) for row in rows if row["attempt"] == newest[row["stage"], row["step"]]),
        key=lambda row: (row["stage"], row["step"], str(row.get("id", ""))),
    )


def weights_digest(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


def assert_same_run(left: Path, right: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        left_rows, right_rows = read_comparable(left / name), read_comparable(right / name)
        assert len(left_rows) == len(right_rows), name
        for a, b in zip(left_rows, right_rows, strict=True):
            assert a == b, (name, json.dumps(a)[:2000], json.dumps(b)[:2000])
    for stage in ("sft", "rl"):
        steps = sorted(path.name for path in (left / "checkpoints" / stage).iterdir())
        for step in steps:
            assert weights_digest(left / "checkpoints" / stage / step) == weights_digest(right / "checkpoints" / stage / step), (stage, step)
