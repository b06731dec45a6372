"""What the tests of trackers share: files of a run, and a worker whose tracker fails as a file says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONFIG = 'name = "t"\nseed = 1\n[output]\n[engine.env]\nAPI_KEY = "planted-in-config"\n'
BEGAN = 1_800_000_000.0

# mode in FAULT: "refuse", "hang", "middle" (half of the rows, then an error), "kill" (after the rows, before
# the position), "die" (before them). Followed by a number, it holds for so many sends.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from rollouts.errors import SinkRefused, SinkUnavailable
from rollouts.trackers import sink_{tracker} as sink, worker
from rollouts.trackers.sinks import SinkKind

FAULT = Path({fault!r})

def next_fault():
    mode, _, left = (FAULT.read_text() if FAULT.exists() else "").partition(" ")
    if left:
        FAULT.write_text(f"{{mode}} {{int(left) - 1}}" if int(left) > 1 else "")
    return mode

class Faulty:
    def __init__(self, inner):
        self.inner = inner

    def send(self, rows):
        mode = next_fault()
        if mode == "refuse":
            raise SinkUnavailable("refused")
        if mode == "wrong-key":
            raise SinkRefused("wrong key")
        if mode == "hang":
            time.sleep(3600)
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "middle":
            self.inner.send(rows[: len(rows) // 2])
            raise SinkUnavailable("failed in the middle")
        mark = self.inner.send(rows)
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return mark

    def close(self):
        self.inner.close()

worker.LOOK_S = 0.05
kinds = {{"{tracker}": SinkKind("", ("metrics", "evaluations"), deadline_s={deadline_s}, batch_rows=7)}}
worker.leave(worker.main(sys.argv[1:], kinds=kinds, open_named=lambda name, run: Faulty(sink.open_sink(run))))
"""

SUPERVISOR = """
import sys
from rollouts.trackers import supervisor
supervisor.DRAIN_S = 10.0
sys.exit(supervisor.main(sys.argv[1:], command=[sys.executable, {worker!r}]))
"""


def make_run(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "config.toml").write_text(CONFIG)
    return root


def make_row(
    step: int, *, attempt: int = 1, stage: str = "rl", time_unix: float | None = None, **fields: object
) -> dict[str, object]:
    """A row as the run writes it; its time is BEGAN + a thousand seconds an attempt + a second a step."""
    time_unix = BEGAN + 1000 * attempt + step if time_unix is None else time_unix
    head = {
        "schema": 1,
        "stage": stage,
        "step": step,
        "policy_version": step - 1,
        "attempt": attempt,
        "time_unix": time_unix,
    }
    return (
        {**head, **fields}
        if fields
        else {**head, "loss/total": float(step * attempt), "reward/mean": 0.5 * step}
    )


def append(root: Path, *rows: dict[str, object], file: str = "metrics", part: int = 0) -> None:
    with (root / (f"{file}.{part}.jsonl" if part else f"{file}.jsonl")).open("a") as opened:
        opened.write("".join(json.dumps(row) + "\n" for row in rows))


def write_worker(
    folder: Path, tracker: str = "tensorboard", *, deadline_s: float = 1.0
) -> tuple[list[str], Path]:
    """(the command of a worker with faults, the file that says which)."""
    fault, script = folder / "fault", folder / "worker.py"
    script.write_text(WORKER.format(fault=str(fault), tracker=tracker, deadline_s=deadline_s))
    return [sys.executable, str(script)], fault


def write_supervisor(folder: Path) -> tuple[list[str], Path]:
    """(the command of a supervisor of such workers, the file that says which faults)."""
    worker, fault = write_worker(folder)
    script = folder / "supervisor.py"
    script.write_text(SUPERVISOR.format(worker=worker[1]))
    return [sys.executable, str(script)], fault


def read_events(root: Path, stage: str = "rl") -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a stage: (step, value) by tag, as its own reader says."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(root / "trackers" / "tensorboard" / stage), size_guidance={"tensors": 0, "scalars": 0}
    )
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
