"""What the tests of trackers share: files of a run, and a follower whose tracker fails as a file says."""

import json
import sys

from rollouts.metrics.record import make_head

CONFIG = 'name = "t"\nseed = 1\n[engine.env]\nAPI_KEY = "planted-in-config"\n'
BEGAN = 1_800_000_000.0

# mode in FAULT: "refuse", "wrong-key", "hang", "middle" (half of the rows, then an error), "kill" (after the
# rows, before the position). Followed by a number, it holds for so many sends.
FOLLOWER = """
import os, signal, sys, time
from pathlib import Path
from rollouts.errors import SinkRefused, SinkUnavailable
from rollouts.trackers import follower, sink_tensorboard, sinks  # imported here, for its deadline is short

FAULT = Path({fault!r})

class Faulty:
    def __init__(self, inner):
        self.inner = inner

    def send(self, rows):
        mode, _, left = (FAULT.read_text() if FAULT.exists() else "").partition(" ")
        if left:
            FAULT.write_text(f"{{mode}} {{int(left) - 1}}" if int(left) > 1 else "")
        if mode == "refuse":
            raise SinkUnavailable("refused")
        if mode == "wrong-key":
            raise SinkRefused("wrong key")
        if mode == "hang":
            time.sleep(3600)
        if mode == "middle":
            self.inner.send(rows[: len(rows) // 2])
            raise SinkUnavailable("failed in the middle")
        mark = self.inner.send(rows)
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return mark

    def close(self):
        self.inner.close()

def open_named(name, run):
    sink = sinks.open_sink(name, run)
    return Faulty(sink) if name == 'tensorboard' else sink

follower.LOOK_S = 0.05
follower.SINKS = {{
    name: kind._replace(deadline_s=4.0, batch_rows=7) for name, kind in sinks.SINKS.items()
}}
follower.open_sink = open_named
follower.main(sys.argv[1:])
"""


def make_run(root):
    root.mkdir(parents=True)
    (root / "config.toml").write_text(CONFIG)
    return root


def make_row(step, *, attempt=1, stage="rl", time_unix=None, **fields):
    """A row as the run writes it; its time is BEGAN + a thousand seconds an attempt + a second a step."""
    if time_unix is None:
        time_unix = BEGAN + 1000 * attempt + step
    head = make_head(stage, step, step - 1, attempt, time_unix)
    return {**head, **(fields or {"loss/total": -float(step * attempt), "reward/mean": 0.5 * step})}


def make_span(step, **fields):
    return make_row(
        step, **{"name": "train", "track": "trainer", "start_unix": BEGAN, "duration_s": 1.5, **fields}
    )


def append(root, *rows, file="metrics", part=0):
    with (root / (f"{file}.{part}.jsonl" if part else f"{file}.jsonl")).open("a") as opened:
        opened.write("".join(json.dumps(row) + "\n" for row in rows))


def write_follower(folder):
    """(the command of a follower whose tracker has faults, the file that says which)."""
    fault, script = folder / "fault", folder / "follower.py"
    script.write_text(FOLLOWER.format(fault=str(fault)))
    return [sys.executable, str(script)], fault


def read_events(root, stage="rl"):
    """What TensorBoard shows of a stage: (step, value) by tag, as its own reader says."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(root / "trackers/tensorboard" / stage)
    events = EventAccumulator(folder, size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
