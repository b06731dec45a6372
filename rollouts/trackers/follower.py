"""The process that follows a run for its trackers. The run starts it, and again when it dies.

files ──► read_batch ──► sink.send, in a thread, under a deadline ──► position stored ──► …
a failure       ──► the sink is opened anew at the stored position, after a wait that doubles
rows refused    ──► sent in halves, down to the row at fault, which is named, counted and left out
a sink that hangs ──► the process ends with HUNG and is started again: nothing else ends a blocked call
stdin ends      ──► the run is over: what is left is sent
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import stat
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import trio
from msgspec.structs import replace

from rollouts.config.secrets import find_secrets, hide_secrets, remove_secrets
from rollouts.errors import RowsRefused, RunDirError, SinkUnavailable, TrackerError
from rollouts.run_dir import RunDir
from rollouts.trackers.position import (
    LeftOut,
    Position,
    open_position,
    position_path,
    read_batch,
    write_position,
)
from rollouts.trackers.sinks import SINKS, RunInfo, Sink, SinkKind, TrackedRow, open_sink

LOOK_S = 0.5  # between two looks at the files
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0  # after a failure
LAST_WAIT_S = 5.0  # the longest once the run is over: little time is left
REFUSED_WAIT_S = 300.0  # after a refusal: a person has to act
OUTPUT_S = 1.0  # for the last words of a library's process
LOG_BYTES = 4 << 20  # of one log
HUNG = 5  # exit code
NICE = 10  # the run goes first

Say = Callable[[str], None]
Outcome = Literal["sent", "behind", "held"]  # all rows; not all; none, as another process follows the run
Result = TypeVar("Result")


class SinkHung(Exception):
    """A call into a tracker's library did not return in time."""


@dataclass(frozen=True, slots=True)
class Following:
    """One run followed for one tracker."""

    root: Path
    name: str
    kind: SinkKind
    open_sink: Callable[[RunInfo], Sink]
    say: Say
    over: trio.Event  # nothing is written any more
    patience_s: float = math.inf  # without a row taken, after the run is over

    @property
    def path(self) -> Path:
        """Where the position is stored."""
        return position_path(self.root, self.name)

    async def call(self, function: Callable[..., Result], *args: object) -> Result:
        """The result of a call that may block. Raises SinkHung."""
        with trio.move_on_after(self.kind.deadline_s):
            return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
        self.say(f"hung for {self.kind.deadline_s:g} s and was ended")
        raise SinkHung

    def store(self, position: Position) -> Position:
        """The position, on disk unless the sink confirms at close."""
        if not self.kind.confirms_at_close:
            write_position(self.path, position)
        return position


async def follow_all(
    root: Path,
    names: Sequence[str],
    *,
    over: trio.Event,
    say_for: Callable[[str], Say],
    once: bool = False,
    patience_s: float = math.inf,
    kinds: Mapping[str, SinkKind] = SINKS,
    open_named: Callable[[str, RunInfo], Sink] = open_sink,
) -> dict[str, Outcome]:
    """What became of each tracker. Sends until the run is over and all is sent, refused or given up.

    `once`: where another process follows the run for a tracker it is not waited for. Raises SinkHung in a
    group.
    """
    outcomes: dict[str, Outcome] = dict.fromkeys(names, "behind")

    async def follow_one(name: str) -> None:
        say = say_for(name)
        following = Following(
            root, name, kinds[name], lambda run: open_named(name, run), say, over, patience_s
        )
        try:
            (root / "trackers").mkdir(exist_ok=True)
            with (root / "trackers" / f"{name}.lock").open("a") as lock:
                held = await take_lock(lock.fileno(), say, once=once)
                outcomes[name] = await follow(following) if held else "held"
        except (RunDirError, OSError) as error:
            say(f"cannot follow the run: {error}")

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(follow_one, name)
    return outcomes


async def take_lock(descriptor: int, say: Say, *, once: bool) -> bool:
    """Whether this process alone follows the run for the tracker. Waits for another to end, unless `once`."""
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if once:
                return False
            if not said:
                say("another process follows the run for this tracker; waiting for it to end")
            said = True
            await trio.sleep(LOOK_S)
        except OSError:  # a file system without locks keeps nobody off
            return True
        else:
            return True


async def follow(following: Following) -> Outcome:
    """Sends rows until the run is over and all are sent, or the service refuses or stays away after that."""
    failures, said, taken_s = 0, "", trio.current_time()
    while True:
        before = open_position(following.path).number
        try:
            await send_until_over(following, troubled=bool(said))
            return "sent"
        except (RunDirError, SinkHung):
            raise
        except Exception as error:  # whatever a library raises must neither end the follower nor lose rows
            refused = isinstance(error, TrackerError) and not isinstance(error, SinkUnavailable)
            told = f"{error}" if isinstance(error, TrackerError) else repr(error)
            asked_s = error.retry_after_s if isinstance(error, SinkUnavailable) else None
        problem = f"{'refuses' if refused else 'does not take'} rows: {told}"
        if open_position(following.path).number > before:
            failures, said, taken_s = 0, "", trio.current_time()
        failures += 1
        is_over = following.over.is_set()
        if is_over and (refused or trio.current_time() - taken_s > following.patience_s):
            following.say(problem)
            return "behind"
        if problem != said:
            following.say(f"{problem}; tried again until it does")
        said = problem
        wait_s = REFUSED_WAIT_S if refused else choose_wait(failures, asked_s)
        with trio.move_on_after(min(wait_s, LAST_WAIT_S) if is_over else wait_s):
            await (trio.Event() if is_over else following.over).wait()


def choose_wait(failures: int, asked_s: float | None) -> float:
    """Seconds until the next try after so many failures in a row: doubling, up to half of it taken off by
    chance, so that the followers of many runs do not come at once. Never less than the service asks for.
    """
    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 1, 30)) * (1 - 0.5 * random.random())
    return min(max(wait_s, asked_s or 0.0), REFUSED_WAIT_S)


async def send_until_over(following: Following, *, troubled: bool) -> None:
    """Opens the sink at the stored position and sends rows until the run is over and all are sent. Raises
    what the sink raises, OSError, SinkHung. `troubled`: the last try failed.
    """
    position, kind = open_position(following.path), following.kind
    sink = await following.call(following.open_sink, describe_run(following.root, position))
    try:
        while True:
            was_over = following.over.is_set()
            batch = read_batch(following.root, kind.files, position, limit=kind.batch_rows, say=following.say)
            if batch.rows:
                position = await send(following, sink, position, batch.rows)
                if troubled:
                    following.say("takes rows again")
                troubled = False
            if batch.ends:
                position = following.store(replace(position, files={**position.files, **batch.ends}))
                continue
            if was_over:
                break
            with trio.move_on_after(LOOK_S):
                await following.over.wait()
    except SinkHung:
        raise
    except Exception:
        with contextlib.suppress(Exception):
            await following.call(sink.close)
        raise
    await following.call(sink.close)
    write_position(following.path, position)


async def send(following: Following, sink: Sink, position: Position, rows: Sequence[TrackedRow]) -> Position:
    """The stored position after the sink has taken the rows, whole or, where it refuses some, in halves
    without those that it refuses alone. A half that is taken counts at once.
    """
    mark, left_out = position.mark, position.left_out
    try:
        mark = dict(await following.call(sink.send, rows) or mark or {}) or None
    except RowsRefused as error:
        if len(rows) > 1:
            middle = len(rows) // 2
            position = await send(following, sink, position, rows[:middle])
            return await send(following, sink, position, rows[middle:])
        row = rows[0].row
        named = f" {row['name']!r}" if "name" in row else ""
        place = f"stage {row['stage']}, step {row['step']}, attempt {row['attempt']}"
        which = f"row{named} of {rows[0].file}.jsonl ({place})"
        following.say(f"refuses {which} for good; it is left out: {error}")
        left_out = LeftOut(left_out.rows + 1, which)
    files, number = {**position.files, **{row.file: row.end for row in rows}}, position.number + len(rows)
    return following.store(replace(position, files=files, number=number, mark=mark, left_out=left_out))


def describe_run(root: Path, position: Position) -> RunInfo:
    """What a sink is told of the run. A config that is missing or cannot be read is an empty one."""
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        config = remove_secrets("", tomllib.loads(RunDir(root).config.read_text(encoding="utf-8")))
    return RunInfo(position.id, root.resolve().name, root.resolve(), config, os.environ, position.mark)


# --- the process --------------------------------------------------------------------------------------------


@asynccontextmanager
async def hiding_output() -> AsyncIterator[None]:
    """What this process, its libraries and their processes print inside the block goes to stderr without the
    secrets of the environment.
    """
    secrets = find_secrets(os.environ)
    sys.stdout.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    readable, writable = os.pipe()
    ended = trio.Event()

    async def pass_on(stream: trio.lowlevel.FdStream) -> None:
        held = b""
        async for part in stream:
            *lines, held = (held + part).split(b"\n")
            for line in lines:
                write_log(saved[2], hide_secrets(line.decode(errors="replace"), secrets))
            held = held[:LOG_BYTES]
        ended.set()

    async with trio.lowlevel.FdStream(readable) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(pass_on, stream)
        for number in saved:
            os.dup2(writable, number)
        os.close(writable)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, before in saved.items():
                os.dup2(before, number)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + OUTPUT_S):
                await ended.wait()
            nursery.cancel_scope.cancel()
            for before in saved.values():
                os.close(before)


def write_log(file: int, line: str) -> None:
    """Appends a line, unless the file is as long as a log may be."""
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode) or state.st_size < LOG_BYTES:
        os.write(file, f"{line}\n".encode())


def main(
    argv: Sequence[str],
    *,
    kinds: Mapping[str, SinkKind] = SINKS,
    open_named: Callable[[str, RunInfo], Sink] = open_sink,
) -> NoReturn:
    """The follower that a run starts: ROOT NAME…; what it says of a tracker is in RUN/trackers/NAME.log."""
    root, names = Path(argv[0]), argv[1:]
    with contextlib.suppress(OSError):
        os.nice(NICE)
    secrets = find_secrets(os.environ)

    def say_for(name: str) -> Say:
        def say(text: str) -> None:
            with contextlib.suppress(OSError), (root / "trackers" / f"{name}.log").open("a") as file:
                write_log(file.fileno(), hide_secrets(f"{name}: {text}", secrets))

        return say

    async def run() -> None:
        over = trio.Event()

        async def wait_stdin_ended() -> None:
            with contextlib.suppress(PermissionError):  # /dev/null: no trainer holds the other end
                await trio.lowlevel.wait_readable(0)  # nothing is ever written there
            over.set()

        async with hiding_output(), trio.open_nursery() as nursery:
            nursery.start_soon(wait_stdin_ended)
            await follow_all(root, names, over=over, say_for=say_for, kinds=kinds, open_named=open_named)
            nursery.cancel_scope.cancel()

    code = 0
    try:
        trio.run(run)
    except* SinkHung:
        code = HUNG
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: a library's threads and handlers could wait for a service for ever


if __name__ == "__main__":
    main(sys.argv[1:])
