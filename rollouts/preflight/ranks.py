"""Whether a run may use the ranks that it was started with, and how a program that was started alone becomes
several.

python train.py --distributed.ranks 4 ──► torchrun --nproc-per-node=4 train.py … ──► 4 ranks
"""

from collections.abc import Mapping, Sequence

from rollouts.config.schema import RunConfig
from rollouts.errors import ConfigError
from rollouts.ranks.launch import Launch, torchrun_command


def choose_relaunch(config: RunConfig, environ: Mapping[str, str], argv: Sequence[str]) -> list[str] | None:
    """The command of torchrun that starts distributed.ranks processes of `argv` (a program and its
    arguments); None where none is needed.

    A process that a launcher has started (WORLD_SIZE is set) is one of the ranks already.
    """
    if config.distributed.ranks == 1 or environ.get("WORLD_SIZE"):
        return None
    return torchrun_command(config.distributed.ranks, argv, max_restarts=0)


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
