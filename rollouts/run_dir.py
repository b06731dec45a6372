"""Every path inside a run directory, in one place.

    runs/NAME/
      config.toml            as resolved
      metrics.jsonl          one row a step
      samples.jsonl          one row a sample
      evaluations.jsonl      one row an evaluation
      contributions.jsonl    one row a trained sample of an update
      spans.jsonl            one row a timed piece of work
      updates.log            one line an update of the weights
      summary.json           written last
      run.lock               held by the process that runs, and who that is
      checkpoints/STAGE/step_N/          Hugging Face model directory, training state in state/, manifest.json
                                         written last
      weights/vN/                        snapshots for engines that read from disk
      engines/NAME.log                   what started servers said
      published/             what online learning serves: published.json names the newest of the snapshots vN/
      asked/asked.jsonl      what those were asked
      stdin/                 prompts that standard input gave, as JSON lines
      stream.jsonl           which prompts online learning had taken in after how many draws
      tokens/STAGE-ATTEMPT-N.bin         per-token arrays of trained samples
      trackers/NAME.json                 how far a tracker has followed

A .jsonl file that has grown to its limit goes on in the next part: metrics.jsonl, metrics.1.jsonl,
metrics.2.jsonl, …
"""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from rollouts.errors import RunDirError, StorageError
from rollouts.types import Fields

STEP_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")  # one name for each step
STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class _Inside(NamedTuple):
    """A path in a run directory. With `own` RunDirError is raised when it is a symbolic link that leads out
    of it: what is pruned there may be another's.
    """

    name: str
    own: bool = False

    def __get__(self, run_dir: "RunDir", owner: "type[RunDir]") -> Path:
        path = run_dir.root / self.name
        if self.own:
            check_inside(run_dir.root, path)
        return path


class RunDir(NamedTuple):
    """Paths of one run. Makes nothing on disk."""

    root: Path

    config = _Inside("config.toml")
    metrics = _Inside("metrics.jsonl")
    samples = _Inside("samples.jsonl")
    evaluations = _Inside("evaluations.jsonl")
    contributions = _Inside("contributions.jsonl")
    spans = _Inside("spans.jsonl")
    updates_log = _Inside("updates.log")
    summary = _Inside("summary.json")
    lock = _Inside("run.lock")
    checkpoints = _Inside("checkpoints")
    weights = _Inside("weights", own=True)
    tokens = _Inside("tokens", own=True)
    trackers = _Inside("trackers", own=True)
    published = _Inside("published", own=True)
    asked = _Inside("asked", own=True)
    stdin = _Inside("stdin", own=True)
    stream_log = _Inside("stream.jsonl")
    engine_logs = _Inside("engines")

    @property
    def row_files(self) -> tuple[Path, ...]:
        """The first part of every .jsonl file."""
        return self.metrics, self.samples, self.evaluations, self.contributions, self.spans

    def stage_checkpoints(self, stage: str) -> Path:
        """Raises RunDirError for a name that is more than a folder's, or when a symbolic link on the way
        leads out of the run directory.
        """
        if STAGE_NAME.fullmatch(stage) is None:
            raise RunDirError(
                f"stage {stage!r} is to name a folder of checkpoints; use letters, digits, _ and -"
            )
        path = self.checkpoints / stage
        check_inside(self.root, path)
        return path

    def checkpoint(self, stage: str, step: int) -> Path:
        """Raises RunDirError like stage_checkpoints, also for a step below 0."""
        path = self.stage_checkpoints(stage) / f"step_{step}"
        if parse_step(path.name) is None:
            raise RunDirError(f"step {step} has no checkpoint; steps are counted from 0")
        check_inside(self.root, path)
        return path


def check_links(run_dir: RunDir) -> None:
    """Raises RunDirError when one of the run's files or directories is a symbolic link that leads out of the
    run directory.
    """
    paths = [getattr(run_dir, name) for name, value in vars(RunDir).items() if isinstance(value, _Inside)]
    for path in paths:
        for part in (path, *list_parts(path)):
            check_inside(run_dir.root, part)


def list_parts(path: Path) -> list[Path]:
    """The parts of the .jsonl file `path` that exist, in the order in which they were written; none where its
    directory is not there.
    """
    try:
        names = [entry.name for entry in os.scandir(path.parent)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = sorted(number for name in names if (number := parse_part(path, name)) is not None)
    return [part_path(path, number) for number in numbers]


def part_path(path: Path, number: int) -> Path:
    """Where part `number`, from 0, of the .jsonl file `path` lies: part 0 is `path` itself."""
    assert number >= 0, number
    return path if number == 0 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def parse_part(path: Path, name: str) -> int | None:
    """N if a file called `name` is part N of the .jsonl file `path`, None for any other."""
    stem, suffix = re.escape(path.stem), re.escape(path.suffix)
    match = re.fullmatch(rf"{stem}(?:\.([1-9][0-9]{{0,8}}))?{suffix}", name)
    return int(match[1] or 0) if match else None


def open_run_dir(root: Path) -> RunDir:
    """The paths of the run at `root`. Raises RunDirError if it is not a run directory."""
    run_dir = RunDir(root)
    known = (run_dir.config, run_dir.metrics, run_dir.evaluations, run_dir.summary)
    if not any(path.exists() for path in known):
        raise RunDirError(
            f"{root} is not a run directory: it has none of {', '.join(path.name for path in known)}"
        )
    return run_dir


def replace_file(path: Path, chunks: Iterable[bytes], *, way_out: str = "free space") -> None:
    """The whole content is on disk under this name when this returns; until then, after a power cut too, what
    was there is. Raises StorageError, with the way out.
    """
    partial = path.with_name(f".tmp-{path.name}")
    try:
        if path.exists() and not path.is_file():  # as root even /dev/null would be replaced
            raise FileExistsError("it is no plain file")
        with partial.open("wb") as file:
            file.writelines(chunks)
        fsync_path(partial)
        partial.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); {way_out}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Returns once the file's bytes, or the directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_state_dir(checkpoint: Path) -> Path:
    """Where a checkpoint keeps training state, beside the model files."""
    return checkpoint / "state"


def checkpoint_manifest(checkpoint: Path) -> Path:
    """The file that makes a checkpoint complete; written last."""
    return checkpoint / "manifest.json"


def check_inside(root: Path, path: Path) -> None:
    """Raises RunDirError when `path`, with .. and symbolic links followed, lies outside `root`, with its own
    followed, or links lead in a circle. Need not exist.
    """
    try:
        end, inside = path.resolve(), root.resolve()
    except (OSError, RuntimeError) as error:  # pathlib: RuntimeError for links that lead in a circle
        raise RunDirError(
            f"{path} cannot be followed ({error}); remove the symbolic link that leads nowhere, or name"
            " another output.dir"
        ) from error
    if not end.is_relative_to(inside):
        raise RunDirError(
            f"{path} leads to {end}, outside {root}; remove that link, or point output.dir itself at the"
            " other disk"
        )


def parse_step(name: str) -> int | None:
    """N of `step_N`, None for any other name."""
    match = STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


# --- whether a run is at work -------------------------------------------------------------------------------


class Activity(NamedTuple):
    """Whether a run is at work in a directory, as far as this machine can tell."""

    state: Literal["running", "perhaps running", "finished", "stopped"]
    host: str = ""  # that used the directory last, empty where nothing says so
    elsewhere: bool = False  # that is another machine, and the run there goes on, or may

    @property
    def may_go_on(self) -> bool:
        """Whether a run is at work, or may be."""
        return self.state.endswith("running")

    @property
    def certain(self) -> bool:
        return self.state != "perhaps running"


def find_activity(run_dir: RunDir) -> Activity:
    """Whether a run is at work in the directory, by its lock, by the machine that the lock's file names, and
    by its summary. Only reads.

    The lock of another machine may not be seen here, and some file systems have none: such a run may be at
    work until it has a summary.
    """
    locked, finished = is_locked(run_dir), run_dir.summary.exists()
    named = str(read_holder(run_dir).get("host", ""))
    host = ascii(named)[1:-1]  # shown on terminals, which the file shall not steer
    elsewhere = named not in ("", socket.gethostname())
    if locked:
        return Activity("running", host, elsewhere)
    if finished or not run_dir.lock.exists() or (locked is False and not elsewhere):
        return Activity("finished" if finished else "stopped", host)
    return Activity("perhaps running", host, elsewhere)


def describe_activity(activity: Activity) -> str:
    """The state, where, if not here, and why it is not certain."""
    where = f" on {activity.host}" if activity.elsewhere else ""
    why = ", whose lock may not be seen here" if where else ": its lock cannot be asked"
    return f"{activity.state}{where}{'' if activity.certain else why}"


def is_locked(run_dir: RunDir) -> bool | None:
    """Whether a process holds the lock, as this machine sees it. False where nobody has ever locked it; None
    where it cannot be asked.

    Asking takes a shared lock for a moment, which never keeps a run from starting: it tries again.
    """
    try:
        with run_dir.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    return False


def read_holder(run_dir: RunDir) -> Fields:
    """What the file of the lock says of the process that locked it last; nothing where it cannot be read."""
    try:
        holder = json.loads(run_dir.lock.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}
