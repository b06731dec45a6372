"""What the programs of these tests share: each is run by torchrun, and writes what rank 0 found as JSON to
the path in its last argument.
"""

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import trio

from tests import ROOT

PROCESS_TIMEOUT_S = 240


def run_ranks(ranks, module, *arguments, out):
    """What rank 0 of `module`, run by torchrun with `ranks` processes, wrote to `out`."""
    start_ranks(ranks, module, *arguments, str(out))
    return json.loads(out.read_text())


def start_ranks(ranks, module, *arguments):
    """Returns when `module`, run by torchrun with `ranks` processes, has ended well."""
    from rollouts.ranks.launch import torchrun_command

    command = torchrun_command(ranks, ["-m", module, *arguments])
    environ = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )


async def drive_ranks(drive, *, shard_size=0):
    """On rank 0 what `drive(channel, ranks)` returns; the other ranks do what it asks, and return None."""
    from rollouts.backends.fsdp import serve_backends
    from rollouts.ranks.launch import read_launch
    from rollouts.ranks.meet import open_ranks

    async with open_ranks(read_launch(os.environ), shard_size=shard_size) as opened:
        if opened.ranks.rank == 0:
            return await drive(opened.channel, opened.ranks)
        return await serve_backends(opened.channel, opened.ranks)


def main(drive, *, shard_size=0):
    """Runs `drive` on rank 0, and writes what it returns."""
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor"
    )  # torch hides it while it compiles, where it is no error
    found = trio.run(partial(drive_ranks, drive, shard_size=shard_size))
    if found is not None:
        Path(sys.argv[-1]).write_text(json.dumps(found))
