"""What differs between two run directories that should be equal: everything is compared but clocks,
throughput, memory and the attempt.
"""

import json

from rollouts.checkpoints.load import compute_sha256, list_checkpoints
from rollouts.config.load import STAGES
from rollouts.metrics.jsonl import newest_attempts, read_rows
from rollouts.run_dir import RunDir, checkpoint_manifest

NOT_COMPARED = ("time/", "perf/")
ROW_FILES = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "contributions.jsonl")
OF_AN_ATTEMPT = ("time_unix", "attempt", "shard", "offset")


def comparable(row):
    """The row, and what is nested in it, without what may differ between two equal runs."""
    if isinstance(row, list):
        return [comparable(one) for one in row]
    if not isinstance(row, dict):
        return row
    return {
        key: comparable(value)
        for key, value in row.items()
        if not key.startswith(NOT_COMPARED) and key not in OF_AN_ATTEMPT
    }


def read_stage(path, stage="rl"):
    """The rows of a stage, in file order."""
    return [row for row in read_rows(path) if row["stage"] == stage]


def read_comparable(path):
    """The rows of the newest attempt at each step, or at each evaluation of a step, in file order where they
    are of the same one.
    """
    return sorted(
        (comparable(row) for row in newest_attempts(read_rows(path))),
        key=lambda row: (row["stage"], row["step"], str(row.get("name", "")), str(row.get("id", ""))),
    )


def weights_digest(checkpoint):
    """SHA-256 of a checkpoint's weights."""
    return compute_sha256(checkpoint / "model.safetensors")


def checkpoint_digests(checkpoint):
    """SHA-256 of every file of a checkpoint but its manifest, by relative path: weights, optimizer, random
    state, positions, the loop's state, and all of a critic's.
    """
    return {
        path.relative_to(checkpoint).as_posix(): compute_sha256(path)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path != checkpoint_manifest(checkpoint)
    }


def find_differences(left, right, *, stages=STAGES, stopped=False):
    """One line for each row file and each checkpoint in which the two run directories differ; empty if they
    are the same run.

    `stopped`: the right one was stopped on request, and may have the checkpoints of those moments besides.
    """
    found = []
    for name in ROW_FILES:
        found += _row_differences(name, read_comparable(left / name), read_comparable(right / name))
    for stage in stages:
        found += _checkpoint_differences(
            stage,
            RunDir(left).stage_checkpoints(stage),
            RunDir(right).stage_checkpoints(stage),
            stopped=stopped,
        )
    return found


def _row_differences(name, left, right):
    if len(left) != len(right):
        return [f"{name} has {len(left)} rows on the left, {len(right)} on the right"]
    for a, b in zip(left, right, strict=True):
        if a != b:
            keys = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
            pairs = {key: (a.get(key), b.get(key)) for key in keys}
            return [f"{name}, {a['stage']} step {a['step']}: {json.dumps(pairs)[:500]}"]
    return []


def _checkpoint_differences(stage, left, right, *, stopped):
    lefts, rights = dict(list_checkpoints(left)), dict(list_checkpoints(right))
    if not lefts.keys() <= rights.keys() or (lefts.keys() != rights.keys() and not stopped):
        return [f"{stage} has the checkpoints {sorted(lefts)} on the left, {sorted(rights)} on the right"]
    found = []
    for step, path in lefts.items():
        ours, theirs = checkpoint_digests(path), checkpoint_digests(rights[step])
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if names:
            found.append(f"{stage} step {step}: {', '.join(names)} differ")
    return found


def assert_same_run(left, right, *, stopped=False):
    """Rows, and every file of every checkpoint: weights, optimizer, random state, the loop's state."""
    differences = find_differences(left, right, stopped=stopped)
    assert not differences, "\n".join(differences)
