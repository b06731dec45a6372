"""Which rank this process is, as the launcher says in the environment; whether the run may use the ranks that
it was started with, and how a program that was started alone becomes several.

    python train.py --distributed.ranks 4 ──► torchrun --nproc-per-node=4 train.py … ──► 4 ranks
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollouts.config.schema import RunConfig
from rollouts.errors import ConfigError
from rollouts.types import Texts

LOOPBACK = "127.0.0.1"
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Launch(NamedTuple):
    """This process's place among the processes of the run."""

    rank: int  # 0 drives
    world_size: int  # processes of the run, on all machines
    local_rank: int  # among those of this machine: the index of its device
    local_world_size: int  # processes of the run on this machine
    master_addr: str  # name or address of the machine of rank 0
    restart: int  # how often the launcher has started the run again after a failure
    run_id: str = ""  # of torchrun's rendezvous, the same on all machines; "" without torchrun
    agent: str = ""  # identifies the torchrun process that started this one; "" without its directory of logs

    @property
    def on_one_node(self) -> bool:
        """Whether all processes of the run are on this machine."""
        return self.local_world_size == self.world_size


def read_launch(environ: Texts) -> Launch:
    """The place that torchrun, or whoever sets the same variables, gave to this process; that of a lone
    process if nothing is set.

    Raises ConfigError naming the variable that is missing, no number or out of range.
    """
    alone = not any(environ.get(name) for name in PLACE) or environ.get("WORLD_SIZE") == "1"
    one, zero = ("1", "0") if alone else ("", "")
    world_size = _read_number(environ, "WORLD_SIZE", one, least=1)
    rank = _read_number(environ, "RANK", zero, below=world_size)
    local_world_size = _read_number(environ, "LOCAL_WORLD_SIZE", one, least=1, below=world_size + 1)
    local_rank = _read_number(environ, "LOCAL_RANK", zero, below=local_world_size)
    master_addr = environ.get("MASTER_ADDR", "").strip() or (LOOPBACK if alone else "")
    if not master_addr:
        raise ConfigError(f"MASTER_ADDR is not set, but WORLD_SIZE={world_size}; start with torchrun")
    restart = _read_number(environ, "TORCHELASTIC_RESTART_COUNT", "0")
    run_id = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    # a directory that each torchrun process makes for itself, with one for each of its attempts
    logs = environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")[0]
    agent = f"{socket.gethostname()}:{logs}" if logs else ""
    return Launch(rank, world_size, local_rank, local_world_size, master_addr, restart, run_id, agent)


def _read_number(
    environ: Mapping[str, str], name: str, default: str, *, least: int = 0, below: int = 10**9
) -> int:
    text = environ.get(name, "").strip() or default
    if text.isascii() and text.isdigit() and least <= int(text[:20]) < below:
        return int(text)
    way_out = f"start with torchrun, or under srun export {', '.join(PLACE)} and MASTER_ADDR"
    raise ConfigError(f"{name}={text!r} must be a number from {least} to {below - 1}; {way_out}")


def launch_ranks(config: RunConfig, argv: Sequence[str], *, dry_run: bool = False) -> Launch:
    """This process's place among the ranks. One that is alone and is to be several (choose_relaunch) goes on
    as the torchrun that starts them. Raises ConfigError as read_launch and check_ranks.
    """
    relaunch = None if dry_run else choose_relaunch(config, os.environ, argv)
    if relaunch is not None:
        # what torchrun would set, with a warning; torch's own threads are model.threads
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(relaunch[0], relaunch)
    launch = read_launch(os.environ)
    check_ranks(config, launch, dry_run=dry_run)
    return launch


def torchrun_command(ranks: int, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` (a script, or -m and a module, and its arguments) as `ranks` processes of
    this machine.

    When one of them fails, torchrun ends the others (SIGTERM, SIGKILL 30 s later) and does not start again.
    """
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *argv]


def choose_relaunch(config: RunConfig, environ: Texts, argv: Sequence[str]) -> list[str] | None:
    """The command of torchrun that starts distributed.ranks processes of `argv` (a program and its
    arguments); None where none is needed.

    A process that a launcher has started (WORLD_SIZE is set) is one of the ranks already.
    """
    if config.distributed.ranks == 1 or environ.get("WORLD_SIZE"):
        return None
    return torchrun_command(config.distributed.ranks, argv)


def check_ranks(config: RunConfig, launch: Launch, *, dry_run: bool = False) -> None:
    """Raises ConfigError where the config asks for other ranks than the launcher has started, or for groups
    into which they do not divide.

    `dry_run`: a process that stays alone answers for as many ranks as the config asks for.
    """
    asked, shard_size = config.distributed.ranks, config.distributed.shard_size
    if dry_run and launch.world_size == 1:
        launch = launch._replace(world_size=asked, local_world_size=asked)
    if asked not in (1, launch.local_world_size):
        raise ConfigError(
            f"distributed.ranks={asked}, but the launcher has started {launch.local_world_size} on this"
            " machine; leave distributed.ranks out under a launcher, or start it with"
            f" --nproc-per-node={asked}"
        )
    if launch.world_size == 1 and config.distributed.cpu_offload:
        raise ConfigError(
            "distributed.cpu_offload=true, but one process trains alone; set distributed.ranks, or leave it"
            " out"
        )
    if shard_size and launch.world_size % shard_size:
        fitting = [str(size) for size in range(1, launch.world_size + 1) if launch.world_size % size == 0]
        raise ConfigError(
            f"distributed.shard_size={shard_size} does not divide the {launch.world_size} ranks into equal"
            f" groups; use {' or '.join(fitting)}, or 0 for one group of all"
        )


def identify_process(pid: int) -> str:
    """Host, boot, number and start time of a running process, which no other process shares. "" where there
    is none, or the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        fields = stat.rpartition(")")[2].split()  # the process's name, before them, may hold anything
        return "" if fields[0] in "ZX" else f"{socket.gethostname()}/{boot}/{pid}/{fields[19]}"
    except (OSError, IndexError):
        return ""


def has_ended(identity: str) -> bool:
    """Whether the process that identify_process described was on this machine and runs no more."""
    if not identity:
        return False
    host, pid, _ = identity.rsplit("/", 2)
    return host == identify_process(os.getpid()).rsplit("/", 2)[0] and identify_process(int(pid)) != identity
