"""TensorBoard: event files in RUN/trackers/tensorboard/STAGE, which `tensorboard --logdir
RUN/trackers/tensorboard` shows as one run a stage.

A row is one event, of the row's time, step and metrics. The mark is how long each file was: what a killed
follower wrote beyond it is cut off before it is written again, so no row is there twice. Each sink begins a
file of each stage that it gets rows of.

Steps that a resumed run repeats: the first of them begins a session, at which TensorBoard forgets what it had
from that step on. It shows the newest attempt.
"""

import os
import re

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from rollouts.trackers.sinks import Batch, Mark, RunInfo, Sink

Event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
Summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
START = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # pyright: ignore[reportAttributeAccessIssue]


def open_sink(run: RunInfo) -> Sink:
    """Appends to an event file of each stage. Raises OSError for a disk that refuses; what it took is cut off
    again when the next sink opens.
    """
    root, owner = run.root / "trackers" / "tensorboard", run.id[:8]
    sizes = run.mark.get("sizes", {})  # by path below root
    attempts = run.mark.get("attempts", {})  # the newest of each stage
    files = {}  # by stage: path below root
    for path in root.glob(f"*/events.out.tfevents.*.{owner}.*"):
        size = sizes.get(path.relative_to(root).as_posix(), 0)
        if not size:
            path.unlink()
        elif path.stat().st_size > size:
            os.truncate(path, size)

    def send(rows: Batch) -> Mark:
        for tracked in rows:
            row, stage = tracked.row, str(tracked.row["stage"])
            place = {"wall_time": row["time_unix"], "step": row["step"]}
            events = []
            if stage not in files:
                events.append({"file_version": "brain.Event:2"})
                # TensorBoard reads the files of a stage in the order of their names
                folder = re.sub(r"[^A-Za-z0-9_.-]", "_", stage)
                name = (
                    f"{folder}/events.out.tfevents.{int(row['time_unix']):010d}.{owner}"
                    f".{sum(other.startswith(f'{folder}/') for other in sizes)}"
                )
                (root / folder).mkdir(parents=True, exist_ok=True)
                files[stage] = name, (root / name).open("wb")
            if tracked.file == "metrics" and row["attempt"] > attempts.setdefault(stage, row["attempt"]):
                events.append({"session_log": START})
                attempts[stage] = row["attempt"]
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tracked.metrics().items()]
            writer = RecordWriter(files[stage][1])
            for event in [*events, {"summary": Summary(value=values)}]:
                writer.write(Event(**place, **event).SerializeToString())
        for name, file in files.values():
            file.flush()
            sizes[name] = file.tell()
        return {"sizes": sizes, "attempts": attempts}

    def close() -> None:
        for _, file in files.values():
            file.close()

    return Sink(send, close)
