"""The process that follows a run for one tracker. The supervisor starts it, and again when it dies.

    files ──► read_batch ──► position: sending ──► sink.send ──► position: taken ──► …
    a failure          ──► the sink is opened anew from the stored position, after a wait that doubles
    rows refused       ──► sent in halves, down to the row at fault: that one is said, counted and left out
    a sink that hangs  ──► the system's alarm ends the process: nothing else ends a blocked call
    stdin              ──► a byte: the run is over; its end: the supervisor is gone, end now

Everything here blocks: the process has nothing else to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from rollouts.errors import RowsRefused, RunDirError, SinkUnavailable, TrackerError
from rollouts.run_dir import RunDir
from rollouts.trackers.position import (
    Batch,
    LeftOut,
    Position,
    advance,
    open_position,
    position_path,
    read_batch,
    write_position,
)
from rollouts.trackers.secrets import remove_secrets
from rollouts.trackers.sinks import SINKS, RunInfo, Sink, SinkKind, TrackedRow, open_sink

# between two looks at the files: nothing tells a process that another has written, but for what each system
# has of its own
LOOK_S = 0.5
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0  # after a failure
LAST_WAIT_S = 5.0  # the longest once the run is over: little time is left
REFUSED_WAIT_S = 300.0  # after a refusal: a person has to act
DONE, REFUSED, UNUSABLE, ABANDONED, HELD = 0, 3, 4, 5, 6  # exit codes
ONCE = "once"  # the last word of a worker's command that is not to wait for another follower to end
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
NICE = 10  # the run goes first

Opener = Callable[[RunInfo], Sink]
Say = Callable[[str], None]


class Control:
    """What the supervisor says, through a pipe, and a wait that it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.over = False  # the run is, and nothing will be written any more

    def wait(self, seconds: float) -> None:
        """Until the seconds are over, or the run is. Ends the process when the supervisor is gone."""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return
        if not os.read(self._descriptor, 64):
            leave(ABANDONED)
        self.over = True


@dataclass(frozen=True, slots=True)
class Following:
    """One run followed for one tracker."""

    root: Path
    name: str
    kind: SinkKind
    open_sink: Opener
    say: Say

    @property
    def position_path(self) -> Path:
        return position_path(self.root, self.name)


def follow(following: Following, control: Control, *, draw: Callable[[], float] = random.random) -> int:
    """Sends rows until the run is over and all are sent: DONE. REFUSED: the run is over, and the service will
    not take the rest.

    Without end while the run goes on; afterwards the supervisor ends the process when time is up. Raises
    RunDirError for a position that cannot be read.
    """
    failures, said = 0, ""
    while True:
        before = open_position(following.position_path).number
        try:
            send_rows(following, control, troubled=bool(said))
            return DONE
        except RunDirError:
            raise
        except (
            Exception
        ) as error:  # whatever a service's library raises: it must neither end the follower nor lose rows
            failure = error
        control.wait(0)
        if isinstance(failure, TrackerError) and not isinstance(
            failure, SinkUnavailable
        ):  # refused, or settings of the environment that are wrong
            wait_s, problem = REFUSED_WAIT_S, f"refuses rows: {failure}"
            if control.over:
                following.say(problem)
                return REFUSED
        else:
            if (
                open_position(following.position_path).number > before
            ):  # some were taken: the service was there until now
                failures, said = 0, ""
            failures += 1
            asked_s = failure.retry_after_s if isinstance(failure, SinkUnavailable) else None
            wait_s = choose_wait(failures, asked_s=asked_s, over=control.over, draw=draw)
            problem = (
                f"does not take rows: {failure if isinstance(failure, SinkUnavailable) else repr(failure)}"
            )
        if problem != said:
            following.say(f"{problem}; tried again until it does")
        said = problem
        control.wait(wait_s)


def choose_wait(failures: int, *, asked_s: float | None, over: bool, draw: Callable[[], float]) -> float:
    """Seconds until the next try after so many failures in a row: doubling, with up to half of it taken off
    by chance, so that the followers of many runs do not come at once. Never less than the service asks for,
    unless the run is over.
    """
    longest = LAST_WAIT_S if over else LONGEST_WAIT_S
    wait_s = min(longest, FIRST_WAIT_S * 2.0 ** min(failures - 1, 30)) * (1 - 0.5 * draw())
    return wait_s if asked_s is None else min(max(wait_s, asked_s), longest if over else REFUSED_WAIT_S)


def send_rows(following: Following, control: Control, *, troubled: bool = False) -> None:
    """Opens the sink at the stored position and sends rows until the run is over and all are sent. Raises
    what the sink raises, OSError.

    `troubled`: the last try failed; says so when rows are taken again.
    """
    kind = following.kind
    position = replace(open_position(following.position_path), handed=0)
    with alarm_after(kind.deadline_s):
        sink = following.open_sink(describe_run(following.root, position))
    with closing(sink, kind.deadline_s):
        while True:
            was_over = control.over
            batch = read_batch(following.root, kind.files, position, limit=kind.batch_rows, say=following.say)
            if not batch.ends:
                if was_over:
                    break
                control.wait(LOOK_S)
                continue
            position = send_batch(following, sink, position, batch, control)
            if troubled:
                following.say("takes rows again")
            troubled = False
            control.wait(0)
    if kind.confirms_at_close:
        write_position(following.position_path, position)


def send_batch(
    following: Following, sink: Sink, position: Position, batch: Batch, control: Control
) -> Position:
    """The stored position after the sink has taken the batch, whole or, where it refuses rows of it, in
    halves without those that it refuses alone.

    A half that is taken counts at once: what comes again after a failure is the rest of the batch, in the
    same order and with the same numbers.
    """
    if not batch.rows:
        return store(following, advance(position, batch.ends, 0, None))
    position = replace(position, sending=batch.ends)
    if not following.kind.confirms_at_close:
        write_position(following.position_path, position)
    pieces = [(0, len(batch.rows))]  # (begin, end), the first one last
    while pieces:
        begin, end = pieces.pop()
        rows, mark = batch.rows[begin:end], None
        try:
            with alarm_after(following.kind.deadline_s):
                mark = sink.send(rows)
        except RowsRefused as error:
            control.wait(0)
            if len(rows) > 1:
                middle = (begin + end) // 2
                pieces += [(middle, end), (begin, middle)]
                continue
            following.say(f"refuses {describe_row(rows[0])} for good; it is left out: {error}")
            position = replace(position, left_out=LeftOut(position.left_out.rows + 1, describe_row(rows[0])))
        ends = batch.find_ends(begin, end) if pieces else batch.ends
        position = store(
            following,
            replace(advance(position, ends, len(rows), mark), sending=batch.ends if pieces else None),
        )
    return position


def store(following: Following, position: Position) -> Position:
    """The position, which is on disk now; of a sink that confirms at close only how many rows it holds is.
    Raises OSError.
    """
    if following.kind.confirms_at_close:
        confirmed = open_position(following.position_path)
        write_position(following.position_path, replace(confirmed, handed=position.number - confirmed.number))
    else:
        write_position(following.position_path, position)
    return position


def describe_row(tracked: TrackedRow) -> str:
    """Which row it is, for a person who looks for it in the files."""
    row = tracked.row
    name = f" {row['name']!r}" if "name" in row else ""
    return (
        f"row{name} of {tracked.file}.jsonl (stage {row['stage']}, step {row['step']}, attempt"
        f" {row['attempt']})"
    )


@contextmanager
def closing(sink: Sink, deadline_s: float) -> Iterator[None]:
    """Closes the sink on the way out; an error of closing hides none that came before."""
    try:
        yield
    except BaseException:
        with alarm_after(deadline_s), contextlib.suppress(Exception):
            sink.close()
        raise
    with alarm_after(deadline_s):
        sink.close()


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """The system ends this process when the block takes longer, whatever it is in."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def describe_run(root: Path, position: Position) -> RunInfo:
    """What a sink is told of the run. A config that is missing or cannot be read is an empty one."""
    return RunInfo(
        position.id, root.resolve().name, root.resolve(), read_config(root), os.environ, position.mark
    )


def read_config(root: Path) -> Mapping[str, Any]:
    """The resolved settings, what looks like a secret left out."""
    try:
        return remove_secrets(tomllib.loads(RunDir(root).config.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


@contextmanager
def holding(path: Path, control: Control, say: Say, *, once: bool) -> Iterator[bool]:
    """One follower of a run for one tracker: waits for another to end, as one that still sends the last rows
    of the attempt before. False, with `once`, while there is another.
    """
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        said = False
        while not (held := try_lock(descriptor)) and not once:
            if not said:
                say("another process follows the run for this tracker; waiting for it to end")
            said = True
            control.wait(LOOK_S)
        yield held
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """False where another process has it. True on a file system without locks: nobody is kept off there."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def leave(code: int) -> NoReturn:
    """Ends the process at once: a library's threads and its handlers at exit could wait for a service that
    does not answer.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with(parent: int) -> None:
    """This process is killed when its parent dies. Where the system has no such thing, the end of stdin has
    to do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            leave(ABANDONED)


def main(
    argv: Sequence[str],
    *,
    kinds: Mapping[str, SinkKind] = SINKS,
    open_named: Callable[[str, RunInfo], Sink] = open_sink,
) -> int:
    """The worker of a tracker: ROOT NAME PARENT_PID [ONCE]. Its exit code."""
    root, name, parent, once = Path(argv[0]), argv[1], int(argv[2]), ONCE in argv[3:]
    die_with(parent)
    with contextlib.suppress(OSError):
        os.nice(NICE)

    def say(text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr, flush=True)

    control = Control(0)
    following = Following(root, name, kinds[name], lambda run: open_named(name, run), say)
    try:
        with holding(root / "trackers" / f"{name}.lock", control, say, once=once) as held:
            return follow(following, control) if held else HELD
    except (RunDirError, OSError) as error:
        say(f"cannot follow the run: {error}")
        return UNUSABLE


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
