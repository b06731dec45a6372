"""Whether a run may write where its config says, and nobody else does.

Whether a launcher starts a run again, which then resumes by itself, or a user starts one, who must say
--resume.

    torchrun's agent on each machine ─► processes of the run     after a failure: its count is above 0
                                     └─► the same command once more  after a machine left or came: it is not

So run.lock keeps the agents of the run that used the directory last. An agent starts one command only: a
process that one of them has started is a restart. A machine that has taken another's place has an agent that
nobody knows; if rank 0 is on it, an agent of another rank must be known. The run id alone proves nothing: it
is the user's to choose, "none" by default, and the same for two runs that were meant to be two.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rollouts.config.load import check_same_run, load_recorded
from rollouts.config.schema import RunConfig
from rollouts.errors import RunDirError
from rollouts.ranks.launch import Launch
from rollouts.run_dir import RunDir, check_links, is_locked, read_holder
from rollouts.types import Fields

# all that a run leaves that was killed while it wrote its first file: nothing of it is lost
PARTIAL_CONFIG = ".tmp-config.toml"


LOCK_TRIES = 10_000  # each some microseconds
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what flock says on a file system that knows none

_held = {}  # descriptor of a lock → its file, as os.fstat says


def choose_run_dir(config: RunConfig) -> RunDir:
    """output.dir, or runs/NAME where it is empty."""
    return RunDir(Path(config.output.dir or f"runs/{config.name}"))


def check_run_dir(run_dir: RunDir, config: RunConfig, *, resume: bool, locked: bool = False) -> None:
    """Raises RunDirError if the directory is another run's, or a run is at work in it: not this one, if it is
    `locked` here. Only reads.
    """
    try:
        if run_dir.root.exists() and not run_dir.root.is_dir():
            raise RunDirError(f"output.dir={run_dir.root} is a file; name a directory")
    except OSError as error:
        raise RunDirError(
            f"output.dir cannot be: {error.strerror}; name another with --output.dir"
        ) from error
    check_links(run_dir)
    if not locked and is_locked(run_dir):
        raise RunDirError(describe_holder(run_dir))
    if not run_dir.root.is_dir() or all(
        path == run_dir.lock or path.name == PARTIAL_CONFIG for path in run_dir.root.iterdir()
    ):
        return
    if not resume:
        raise RunDirError(
            f"output.dir={run_dir.root} is not empty; go on with --resume, or name another directory with"
            " --output.dir DIR"
        )
    if not run_dir.config.exists():
        raise RunDirError(
            f"output.dir={run_dir.root} holds files but no config.toml: it is not a run; name another"
            " directory with --output.dir DIR"
        )
    check_same_run(load_recorded(run_dir.config), config)


# --- one run at a time --------------------------------------------------------------------------------------


def lock_run_dir(run_dir: RunDir) -> int:
    """Keeps other runs off the directory, made if missing, until this process ends or closes the descriptor
    that is returned.

    The system drops the lock with the process, however that ends; started programs and forked children do not
    hold it on. Where several ranks make one run, only the first locks. What the file says of the launch that
    used the directory last stays until write_holder says another: this one may yet be refused. On a file
    system that has no locks nobody is kept off, and a warning says so. Raises RunDirError naming who holds
    it, or OSError's reason.
    """
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise RunDirError(
            f"output.dir={run_dir.root} cannot be written ({error}); name another directory with"
            " --output.dir DIR"
        ) from error
    try:
        take_lock(descriptor)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise RunDirError(describe_holder(run_dir)) from error
            raise RunDirError(
                f"{run_dir.lock} cannot be locked ({error}); name a directory on another file system with"
                " --output.dir DIR"
            ) from error
        logging.getLogger("rollouts").warning(
            "warning: the file system of %s has no locks (%s): nothing keeps a second run off it; see that"
            " none is started there",
            run_dir.root,
            error,
        )
    write_holder(descriptor, read_holder(run_dir).get("launch"))
    _held[descriptor] = os.fstat(descriptor)
    return descriptor


def take_lock(descriptor: int) -> None:
    """Locks the file alone. Who only asks whether it is locked (is_locked) shares it for a moment, and is
    waited for.

    Raises BlockingIOError where another has it alone, OSError where it cannot be locked.
    """
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused where it is not shared
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.sched_yield()
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_holder(descriptor: int, launch: Fields | None) -> None:
    """Who holds the lock, and what started it (rollouts.preflight.run_directory), in the file of the lock."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "launch": launch,
    }
    with suppress(OSError):  # a full disk, say: the lock holds without it, and who is refused is told less
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)


def _drop_in_child() -> None:
    """A forked child that outlives the run would hold its lock on."""
    for descriptor, file in _held.items():
        with suppress(OSError):  # closed already
            # else whoever locked has closed it, and the number is another file's now
            if os.path.samestat(os.fstat(descriptor), file):
                os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def describe_holder(run_dir: RunDir) -> str:
    """Who holds the lock, as far as the file says."""
    holder = read_holder(run_dir)
    who = f"a process that {run_dir.lock} does not name"
    if {"pid", "host", "started"} <= holder.keys():
        who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    return (
        f"output.dir={run_dir.root} is in use by {who}; wait for it or stop it, or name another directory"
        " with --output.dir DIR"
    )


# --- restarts -----------------------------------------------------------------------------------------------


Restart = Literal["yes", "no", "if another rank says so"]
NO_IDS = ("", "none")  # what torchrun calls a run that was given no id


def read_agents(run_dir: RunDir) -> tuple[str, frozenset[str]]:
    """(run id, agents) of the run that used the directory last; ("", none) where the file does not say."""
    try:
        launch = read_holder(run_dir)["launch"]
        return str(launch["run_id"]), frozenset(map(str, launch["agents"]))
    except (KeyError, TypeError):
        return "", frozenset()


def find_restart(run_dir: RunDir, launch: Launch, *, asked: bool = False) -> Restart:
    """Whether the launcher starts again what used the directory last. Ask before the directory is locked.
    Only reads. `asked`: by --resume, after which no other rank need say anything.

    The launcher's own count tells only where agents are not known: a start that was refused is started again
    too.
    """
    run_id, agents = read_agents(run_dir)
    if not launch.agent or not agents:
        return "yes" if launch.restart > 0 else "no"
    if launch.agent in agents:
        return "yes"
    same = launch.restart > 0 or (launch.run_id == run_id and run_id not in NO_IDS)
    if not same or launch.on_one_node:
        return "no"
    return "yes" if asked else "if another rank says so"


def record_launch(
    run_dir: RunDir, launch: Launch, restart: Restart, agents: Collection[str] | None = None
) -> Fields:
    """What run.lock is to say of this launch: first when the directory is locked and checked, then with the
    `agents` of all ranks. Of a launch that is not proven to be a restart, and may be refused, it says nothing
    new before that. Agents of before stay, for some may come back.

    Raises RunDirError where another rank had to say that this is a restart, and none does.
    """
    _, before = read_agents(run_dir)
    doubtful = restart == "if another rank says so"
    if agents is None:
        before = frozenset() if restart == "no" else before
        agents = () if doubtful else (launch.agent,)
    elif doubtful and before.isdisjoint(agents):
        raise RunDirError(
            f"output.dir={run_dir.root} is not empty, and another launch has used it last; go on with"
            " --resume, or name another directory with --output.dir DIR"
        )
    return {"run_id": launch.run_id, "agents": sorted({*before, *agents} - {""})}
