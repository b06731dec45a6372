"""Which rank this process is, read from what the launcher put into the environment, and the command that
starts several of them.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollouts.errors import ConfigError

ALONE = "127.0.0.1"  # the address of the only node
LARGEST = 10**9  # no launcher counts further: more digits are a mistake
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
WAY_OUT = {  # of a variable that is missing
    "LOCAL_RANK": "start with torchrun, or under srun export LOCAL_RANK=$SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "start with torchrun, or under srun export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place among those of the run."""

    rank: int  # 0 drives
    world_size: int  # processes of the run, on all nodes
    local_rank: int  # among those of this node: the index of its device
    local_world_size: int  # processes of the run on this node
    master_addr: str  # name or address of the node of rank 0, where the process group meets
    # times that the launcher has started the run again after a failure; 0: the first time, or again for
    # another reason
    restart: int
    # of torchrun's rendezvous, the same on all machines: the user's, or a random one; "" without torchrun
    run_id: str = ""
    # which process of torchrun has started this one, unlike any other ever; "" where that cannot be known
    agent: str = ""

    @property
    def on_one_node(self) -> bool:
        """Whether all processes of the run are on this machine."""
        return self.local_world_size == self.world_size


def read_launch(environ: Mapping[str, str]) -> Launch:
    """The place that torchrun, or whoever sets the same variables, gave to this process; that of a lone
    process if nothing is set.

    Raises ConfigError naming the variable that is missing, no number or at odds with another one.
    """
    if not any(environ.get(name) for name in PLACE):
        return Launch(0, 1, 0, 1, ALONE, _read_restart(environ), *_read_launcher(environ))
    world_size = _read_number(environ, "WORLD_SIZE", least=1)
    alone = world_size == 1
    rule = f"WORLD_SIZE={world_size}"
    rank = _read_number(environ, "RANK", most=world_size - 1, rule=rule)
    local_world_size = _read_number(
        environ, "LOCAL_WORLD_SIZE", least=1, most=world_size, rule=rule, missing=1 if alone else None
    )
    rule = f"LOCAL_WORLD_SIZE={local_world_size}"
    local_rank = _read_number(
        environ, "LOCAL_RANK", most=local_world_size - 1, rule=rule, missing=0 if alone else None
    )
    master_addr = environ.get("MASTER_ADDR", "").strip() or (ALONE if alone else "")
    if not master_addr:
        raise ConfigError(
            f"MASTER_ADDR is not set, but WORLD_SIZE={world_size}; start with torchrun, or export the address"
            " of the node of rank 0"
        )
    return Launch(
        rank,
        world_size,
        local_rank,
        local_world_size,
        master_addr,
        _read_restart(environ),
        *_read_launcher(environ),
    )


def torchrun_command(ranks: int, argv: Sequence[str], *, max_restarts: int) -> list[str]:
    """The command that runs `argv` (a script, or -m and a module, and its arguments) as `ranks` processes of
    this machine.

    When one of them fails, torchrun ends the others (SIGTERM, SIGKILL 30 s later) and starts all again, at
    most `max_restarts` times. torchrun sets OMP_NUM_THREADS=1 where it is not set and ranks > 1. Raises
    ConfigError for counts that make no sense.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}; there must be at least 1")
    if max_restarts < 0:
        raise ConfigError(
            f"max_restarts={max_restarts}; it cannot be negative, 0 means that a failure is final"
        )
    assert argv, "torchrun needs something to run"
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *argv]


def identify_process(pid: int, *, proc: Path = Path("/proc")) -> str:
    """Machine, start of its system, number and start of a process: together unlike any other's. "" where the
    system does not tell.
    """
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        started = _read_stat(pid, proc)[19]
    except (OSError, IndexError):
        return ""
    return f"{socket.gethostname()}/{boot}/{pid}/{started}"


def find_agent(run_id: str, parent: int, *, proc: Path = Path("/proc")) -> str:
    """identify_process of torchrun: the first that torchrun has not told the run id, from `parent` upwards,
    for it may have been told to start a script or a profiler that starts this program. "" where the system
    does not tell.
    """
    try:
        while _read_run_id(proc / str(parent) / "environ") == run_id:
            parent = int(_read_stat(parent, proc)[1])
    except (OSError, IndexError, ValueError):
        return ""
    return identify_process(parent, proc=proc)


def _read_run_id(environ: Path) -> str:
    found = [
        pair.partition(b"=")[2]
        for pair in environ.read_bytes().split(b"\0")
        if pair.startswith(b"TORCHELASTIC_RUN_ID=")
    ]
    return os.fsdecode(found[0]).strip() if found else ""


def _read_stat(pid: int, proc: Path) -> list[str]:
    """Fields of /proc/PID/stat from the state of the process on; its name, before them, may hold anything."""
    return (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _read_launcher(environ: Mapping[str, str]) -> tuple[str, str]:
    """(run id, agent)."""
    run_id = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    return run_id, find_agent(run_id, os.getppid()) if run_id else ""


def _read_restart(environ: Mapping[str, str]) -> int:
    return _read_number(environ, "TORCHELASTIC_RESTART_COUNT", missing=0)


def _read_number(
    environ: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    most: int = LARGEST,
    rule: str = "",
    missing: int | None = None,
) -> int:
    """The number in a variable, from `least` to `most` because of `rule`; `missing` if it is not set, and
    None says that it must be.
    """
    text = environ.get(name, "").strip()
    if not text:
        if missing is not None:
            return missing
        present = " and ".join(f"{other}={environ[other]!r}" for other in PLACE if environ.get(other))
        raise ConfigError(
            f"{name} is not set, but {present};"
            f" {WAY_OUT.get(name, 'start with torchrun, or unset all of them for a lone process')}"
        )
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{name}={text!r} is not a whole number; start with torchrun, or correct what sets it"
        )
    number = int(text[:20])  # a longer one is too large whatever follows
    if not least <= number <= most:
        because = f" ({rule})" if rule else ""
        raise ConfigError(
            f"{name}={number} must be from {least} to {most}{because}; start with torchrun, or correct what"
            " sets it"
        )
    return number
