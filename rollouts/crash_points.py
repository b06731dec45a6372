"""Named places in the code where a test can make the process die, raise or hang. Free where nothing is armed:
one look-up.

    ROLLOUTS_CRASH_AT=checkpoint.before_rename        SIGKILL to this process, as the system's own would come
    ROLLOUTS_RAISE_AT=train.before_optim_step:3       raises CrashPointReached the third time
    ROLLOUTS_HANG_AT=rollout.dispatch:1:1             the thread that gets there never goes on, on rank 1 only
    ROLLOUTS_LIST_POINTS=FILE                         appends each point reached to FILE, one a line

A value is name[:nth][:rank]: nth counts from 1, and without a rank every rank is meant. A program calls
arm_crash_points once, at its start; until then nothing can be reached, so a process that never asks (a reward
worker, a server) is never affected. `tests.support.kill_harness` uses them.
"""

import difflib
import itertools
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping

from rollouts.errors import ConfigError, CrashPointReached

VARIABLES = ("ROLLOUTS_CRASH_AT", "ROLLOUTS_RAISE_AT", "ROLLOUTS_HANG_AT")
LIST_VARIABLE = "ROLLOUTS_LIST_POINTS"

# by name, what holds there; the word before the dot is the point's class
POINTS = dict(
    re.findall(
        r"(\S+) +(.+)",
        """\
start.armed                   The command line is read; nothing is checked, loaded or written.
start.checked                 Every check before a model loads has passed; nothing is written.
start.directory_made          The run directory has its config.toml, and no row yet.
start.opened                  Reward workers and metrics files are open; no stage has begun.
files.partial                 A file that is replaced whole is written under its temporary name.
stage.opened                  A stage's backend and engine are open; nothing is restored or trained.
stage.complete                A stage has its last checkpoint, and the next has not begun.
resume.found                  The newest complete checkpoint is chosen; damaged later ones have their names.
resume.verified               Every file of the checkpoint is as it was written; nothing else is restored.
resume.restored               Weights and optimizer are restored; the loop's own state is not.
resume.state_loaded           DataBuffer and rollout manager have their state; the first step has not begun.
rollout.drawn                 Prompts are drawn and entered in the ledger; none of their requests was made.
rollout.dispatch              A sample is about to go to its generate function, and so to an engine.
rollout.turn                  A trajectory is about to ask for a turn, and what it has so far is noted.
rollout.generated             A sample has its answer and no reward.
rollout.before_reward         A reward function is about to be called.
rollout.after_reward          A reward function has answered.
rollout.group_finished        Every sample of a group is done; it is about to be kept, dropped or failed.
rollout.batch_ready           A batch is delivered: its groups count as trained, and no step has seen them.
train.before_agreement        A rank of several has a micro-batch's log-probs, and has not told its loss.
train.after_forward_backward  The gradient of a batch is there; the weights are the old ones.
train.before_optim_step       The optimizer is about to change the weights.
train.after_optim_step        The optimizer has changed the weights; their version is the old one.
train.version_set             The new weights have their version.
sync.begin                    The engines are about to be brought to the trainer's weights.
sync.before_load              An engine is paused and has its old weights.
sync.after_load               An engine has its new weights and is still paused.
sync.committed                An engine has proven its new weights.
sync.published                The new version is published.
metrics.before_row            The row of a step is about to be written.
metrics.after_row             The row of a step is written.
metrics.before_samples        Sample rows are about to be written.
metrics.after_samples         Sample rows are written.
metrics.before_evaluation     The row of an evaluation is about to be written; its samples are.
metrics.after_evaluation      The row of an evaluation is written.
checkpoint.begin              A checkpoint is due; nothing of it is on disk.
checkpoint.directory_made     The temporary directory of a checkpoint is there, empty.
checkpoint.after_model        Model and optimizer files are written, not synced.
checkpoint.after_state        The loop's own state is written, not synced.
checkpoint.before_manifest    Every file is hashed and synced; there is no manifest.
checkpoint.after_manifest     The manifest is written, not synced.
checkpoint.before_rename      The temporary directory is complete and synced, under its temporary name.
checkpoint.after_rename       The checkpoint has its name; its parent directory is not synced.
checkpoint.complete           The checkpoint is durable.
checkpoint.retention_hidden   A checkpoint that goes is renamed out of sight; its files are all there.
checkpoint.retention_done     Every checkpoint that goes is gone.
end.before_summary            Training is over; there is no summary.
end.summary_written           The summary is there; the report is not printed.
""",
    )
)

# by name of the point: the variable that names it, the time from 1 at which it happens, and a count of times
# reached; next() of it is atomic, so threads do not miscount
_armed: dict[str, tuple[str, int, Iterator[int]]] = {}
_listing: list[int] = []  # descriptor of the file that lists what is reached, if any


def reach(name: str) -> None:
    """Does at the point `name` what was armed for it, and usually nothing. Raises CrashPointReached where
    that was asked for.
    """
    assert name in POINTS, f"{name!r} is no crash point; write it into POINTS with a sentence"
    if _listing:
        os.write(_listing[0], f"{name}\n".encode())
    if name not in _armed:
        return
    variable, nth, count = _armed[name]
    if next(count) != nth:
        return
    if variable == "ROLLOUTS_RAISE_AT":
        raise CrashPointReached(
            f"{name} was reached for the {nth}. time, and {variable} names it: {POINTS[name]}"
        )
    if variable == "ROLLOUTS_CRASH_AT":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # for ever; a crash gets here too, in the moment before the signal arrives


def arm_crash_points(environ: Mapping[str, str], *, rank: int = 0) -> None:
    """Arms what the variables of `environ` name for this rank, and disarms everything else.

    Raises ConfigError naming variable and value if there is no such point, the same is given two actions, or
    the list cannot be written.
    """
    _armed.clear()
    names = set()
    for variable in VARIABLES:
        text = environ.get(variable)
        if not text:
            continue
        match = re.fullmatch(r"([^:]*)(?::([1-9]\d*)(?::(\d+))?)?", text, re.ASCII)
        name = text.partition(":")[0]
        if name not in POINTS:
            near = difflib.get_close_matches(name, POINTS, n=1, cutoff=0.0)
            raise ConfigError(
                f"{variable}={text!r} names no crash point; did you mean {near[0]!r}? All are in"
                " rollouts/crash_points.py"
            )
        if match is None:
            raise ConfigError(
                f"{variable}={text!r} must be name[:nth][:rank], nth from 1 and rank from 0; try {name}:1"
            )
        if name in names:
            raise ConfigError(f"{variable}={text!r}: another variable names {name}; one action per point")
        names.add(name)
        if match[3] in (None, str(rank)):
            _armed[name] = variable, int(match[2] or 1), itertools.count(1)
    while _listing:
        os.close(_listing.pop())
    if path := environ.get(LIST_VARIABLE):
        try:
            _listing.append(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError as error:
            raise ConfigError(
                f"{LIST_VARIABLE}={path!r} cannot be written ({error.strerror}); name a file in a directory"
                " that is there"
            ) from error
