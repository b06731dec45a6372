"""The process that follows a run for its trackers. The run starts it, and again when it dies.

files ──► read_batch ──► sink.send, in a thread, under a deadline ──► position stored ──► …
a failure       ──► the sink is opened anew at the stored position, after a wait that doubles
rows refused    ──► sent in halves, down to the row at fault, which is named, counted and left out
a sink that hangs ──► the process ends and is started again: nothing else ends a blocked call
stdin ends      ──► the run is over: what is left is sent

The position, in RUN/trackers/NAME.json, is how far a tracker has followed a run.
"""

import fcntl
import heapq
import logging
import math
import os
import random
import sys
import tomllib
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import trio

from rollouts.config.secrets import find_secrets, hide_secrets, remove_secrets
from rollouts.errors import RowsRefused, RunDirError, SinkRefused, TrackerError
from rollouts.metrics.jsonl import NonNegative, Place, read_lines
from rollouts.protocols import Say
from rollouts.run_dir import RunDir, replace_file
from rollouts.trackers.sinks import ALERTS, SINKS, Batch, Mark, RunInfo, SinkKind, TrackedRow, open_sink
from rollouts.types import Function

# --- the position -------------------------------------------------------------------------------------------


class LeftOut(msgspec.Struct, frozen=True):
    """Rows that the tracker's service refused for good."""

    rows: int = 0
    last: str = ""  # which row was the last of them


class Position(msgspec.Struct):
    """How far one tracker has followed one run."""

    id: str  # 32 hex digits; the run's identity in the tracker
    files: dict[str, Place] = {}  # where the next row begins, per file: everything before it was taken
    number: NonNegative = 0  # rows taken so far, or left out
    mark: dict[str, Any] | None = None  # what the sink said of them
    left_out: LeftOut = LeftOut()
    schema: Literal[1] = 1

    def describe_left_out(self) -> str:
        """What the tracker will never have, empty where that is nothing."""
        rows, values = self.left_out.rows, (self.mark or {}).get("left_out")
        said = (
            f"{rows} refused for good and left out, the last: {self.left_out.last}" if rows else "",
            f"{values} values left out by the service" if values else "",
        )
        return "; ".join(filter(None, said))


def position_path(root: Path, name: str) -> Path:
    """Where a tracker's position is."""
    return root / "trackers" / f"{name}.json"


def read_position(path: Path) -> Position:
    """The stored position, a new one where there is none. Raises RunDirError for a file that says something
    else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Position)
    except FileNotFoundError:
        return Position(uuid.uuid4().hex)
    except ValueError as error:
        raise RunDirError(
            f"{path} does not say how far the tracker is ({error}); remove it to send the whole run again,"
            " as a new one"
        ) from error


def write_position(path: Path, position: Position) -> None:
    """The whole position is on disk under this name when this returns. Raises StorageError."""
    replace_file(path, [msgspec.json.format(msgspec.json.encode(position), indent=1), b"\n"])


# --- the rows after a position ------------------------------------------------------------------------------


class Head(msgspec.Struct):
    """What every row has."""

    stage: str
    step: int
    attempt: int
    time_unix: float


def read_batch(
    root: Path, files: Sequence[str], position: Position, *, limit: int, say: Say
) -> tuple[Batch, dict[str, Place]]:
    """Up to `limit` whole rows after the position, of all files together by their time; and where each file's
    next row begins after them and the lines that are no rows.

    Within a file rows keep their order. A line that is no row is passed over and said; one without its
    newline is waited for. Raises OSError.
    """

    def parse_lines(file: str) -> Iterator[tuple[float, str, Any, Place]]:
        """(time, file, row, where the next line begins) of each whole line; row None: it is none."""
        for line, end in read_lines(root / f"{file}.jsonl", position.files.get(file, Place())):
            try:
                row = msgspec.json.decode(line)
                yield msgspec.convert(row, Head).time_unix, file, row, end
            except (ValueError, RecursionError):
                say(f"{file}.jsonl: no row ends at byte {end.offset} ({line[:40]!r}…): passed over")
                yield -math.inf, file, None, end

    rows, ends = [], {}
    for _, file, row, end in heapq.merge(*map(parse_lines, files), key=itemgetter(0)):
        if row is not None:
            if len(rows) == limit:
                break
            rows.append(TrackedRow(file, row, position.number + len(rows), end))
        ends[file] = end
    return rows, ends


# --- the follower -------------------------------------------------------------------------------------------


LOOK_S = 0.5  # between two looks at the files
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0  # after a failure
LAST_WAIT_S, LAST_TRIES = 5.0, 40  # the longest once the run is over, and how often
REFUSED_WAIT_S = 300.0  # after a refusal: a person has to act
NICE = 10  # the run goes first

Outcome = Literal["sent", "behind", "held"]  # all rows; not all; none, as another process follows the run


async def follow(root: Path, name: str, say: Say, over: trio.Event) -> Outcome:
    """Sends rows to one tracker until nothing is written any more (`over`) and all are sent, or the service
    refuses or stays away after that. Raises RunDirError for a position that cannot be read.
    """
    kind, path, last_tries = SINKS[name], position_path(root, name), LAST_TRIES
    failures, trouble = 0, ""  # since rows were taken last, and what was said of them

    def store(position: Position) -> None:
        nonlocal failures, trouble
        write_position(path, position)
        if trouble:
            say("takes rows again")
        failures, trouble = 0, ""

    async def call(function: Function, *args: object) -> Any:
        """The result of a call that may block. One that blocks for too long ends the process."""
        with trio.move_on_after(kind.deadline_s):
            return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
        say(f"hung for {kind.deadline_s:g} s and was ended")
        os._exit(1)

    while True:
        try:
            position = read_position(path)
            write_position(path, position)  # a kill never gives a run two identities
            sink = await call(open_sink, name, describe_run(root, position)._replace(say=say))
            try:
                await send_until_over(root, kind, position, over, say, partial(call, sink.send), store)
            finally:
                await call(sink.close)
            store(position)
            return "sent"
        except RunDirError:
            raise
        except Exception as error:  # whatever a library raises must neither end this nor lose rows
            refused = isinstance(error, SinkRefused)
            problem = (
                f"{'refuses' if refused else 'does not take'} rows:"
                f" {error if isinstance(error, TrackerError) else repr(error)}"
            )
        wait_s, is_over = REFUSED_WAIT_S if refused else choose_wait(failures), over.is_set()
        last_tries -= is_over
        if is_over and (refused or last_tries < 0):
            say(problem)
            return "behind"
        if problem != trouble:
            say(f"{problem}; tried again until it does")
        failures, trouble = failures + 1, problem
        if is_over:
            await trio.sleep(min(wait_s, LAST_WAIT_S))
        with trio.move_on_after(wait_s):
            await over.wait()


async def send_until_over(
    root: Path,
    kind: SinkKind,
    position: Position,
    over: trio.Event,
    say: Say,
    send: Callable[[Batch], Awaitable[Mark | None]],
    store: Callable[[Position], None],
) -> None:
    """Sends the rows after the position, and moves and stores it, until the run is over and all are sent.
    Raises what `send` raises, OSError.
    """

    async def send_rows(rows: Batch) -> None:
        """Moves the position behind the rows when the sink has taken them, whole or, where it refuses some,
        in halves without those that it refuses alone. A half that is taken counts at once.
        """
        try:
            position.mark = await send(rows) or position.mark
        except RowsRefused as error:
            if len(rows) > 1:
                middle = len(rows) // 2
                for half in (rows[:middle], rows[middle:]):
                    await send_rows(half)
                return
            row = rows[0].row
            named = f" {row['name']!r}" if "name" in row else ""
            which = (
                f"row{named} of {rows[0].file}.jsonl (stage {row['stage']}, step {row['step']}, attempt"
                f" {row['attempt']})"
            )
            say(f"refuses {which} for good; it is left out: {error}")
            position.left_out = LeftOut(position.left_out.rows + 1, which)
        position.files |= {row.file: row.end for row in rows}
        position.number += len(rows)
        if not kind.confirms_at_close:
            store(position)

    was_over = False
    while not was_over:
        was_over = over.is_set()  # before the files are read
        rows, ends = read_batch(root, kind.files, position, limit=kind.batch_rows, say=say)
        if rows:
            await send_rows(rows)
        if ends:
            position.files |= ends
            if not kind.confirms_at_close:
                store(position)
            was_over = False
        elif not was_over:
            with trio.move_on_after(LOOK_S):
                await over.wait()


def choose_wait(failures: int) -> float:
    """Seconds until the next try after so many failures and one more: doubling, up to half of it taken off by
    chance, so that the followers of many runs do not come at once.
    """
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures, 30)) * random.uniform(0.5, 1.0)


def describe_run(root: Path, position: Position) -> RunInfo:
    """What a sink is told of the run. A config that is missing or cannot be read is an empty one."""
    config = {}
    with suppress(OSError, ValueError):
        config = remove_secrets("", tomllib.loads(RunDir(root).config.read_text("utf-8")))
    whole = root.resolve()
    return RunInfo(position.id, whole.name, whole, config, os.environ, position.mark or {})


async def follow_all(
    root: Path,
    names: Sequence[str],
    *,
    wait_over: Callable[[], Awaitable[object]],
    say: Callable[[str, str], None],
    once: bool = False,
) -> dict[str, Outcome]:
    """What became of each tracker. Sends until `wait_over` has returned and all is sent, refused or given up.

    A tracker has one follower of a run at a time; another is waited for, unless `once`. `say` gets texts
    without the secrets of the environment; what libraries log may have them, and goes nowhere.
    """
    outcomes: dict[str, Outcome] = dict.fromkeys(names, "behind")
    over, secrets, folder = trio.Event(), find_secrets(os.environ), root / "trackers"
    logging.disable()
    folder.mkdir(exist_ok=True)

    async def follow_one(name: str) -> None:
        def tell(text: str) -> None:
            hidden = hide_secrets(f"{name}: {text}", secrets)  # and what would steer a terminal
            say(name, "".join(letter if letter.isprintable() else " " for letter in hidden))

        try:
            with (folder / f"{name}.lock").open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if once:
                        outcomes[name] = "held"
                        return
                    tell("another process follows the run for this tracker; waiting for it to end")
                    await trio.to_thread.run_sync(fcntl.flock, lock, fcntl.LOCK_EX, abandon_on_cancel=True)
                except OSError:  # a file system without locks keeps nobody off
                    pass
                outcomes[name] = await follow(root, name, tell, over)
        except Exception as error:  # nobody reads a traceback here
            tell(f"cannot follow the run: {type(error).__name__}: {error}")

    async def tell_over() -> None:
        await wait_over()
        over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_over)
        async with trio.open_nursery() as followers:
            for name in names:
                followers.start_soon(follow_one, name)
        nursery.cancel_scope.cancel()
    return outcomes


# --- the process --------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> NoReturn:
    """The follower that a run starts: ROOT NAME…; what it says of a tracker is in RUN/trackers/NAME.log."""
    root, *names = argv
    with suppress(OSError):
        os.nice(NICE)

    def say(name: str, text: str) -> None:
        with suppress(OSError), Path(root, "trackers", f"{name}.log").open("a") as file:
            file.write(f"{text}\n")
        if name == ALERTS:  # the run's own log has them too
            with suppress(OSError):
                os.write(0, f"{text}\n".encode())

    async def wait_stdin_ended() -> None:
        with suppress(PermissionError):  # /dev/null: no trainer holds the other end
            await trio.lowlevel.wait_readable(0)  # nothing is ever written there

    trio.run(partial(follow_all, Path(root), names, wait_over=wait_stdin_ended, say=say))
    os._exit(0)  # at once: a library's threads and handlers could wait for a service for ever


if __name__ == "__main__":
    main(sys.argv[1:])
