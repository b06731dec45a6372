"""Readers in other processes while a writer publishes, is killed at random, and rolls back: what they saw.

    python -m tests.online.swaps 10000        swaps; 8 readers

A writer publishes tiny models whose every weight is a number of its own, and now and then an older one again.
Readers load what is published, again and again. A model whose weights are not all that number is torn.
"""

import itertools
import json
import random
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import trio
from safetensors.numpy import load_file

from rollouts.checkpoints import follow
from rollouts.checkpoints.follow import list_publications, load_published, open_publisher
from tests.support.fork_server import open_fork_server

READERS = 8
SHARD = 1 << 17  # bytes: a snapshot is of several files
KEEP = 2  # so few that readers often find theirs removed
ROLL_BACK_EVERY = 25
LIFE_S = (0.1, 10.0)  # of a writer
PAUSE_S = 0.1  # of a reader, to leave the machine to the writer
TRIES = 1000  # of a reader: nothing is kept for it, and it may be slow
IMPORTS = ("rollouts.weight_sync.snapshots", "transformers.models.llama.modeling_llama")  # of writers


def main(argv):
    """A writer, in the folder argv[0]. Publishes until it is killed."""
    trio.run(write, Path(argv[0]))


async def write(folder):
    """A line for each publication, once it is there."""
    from rollouts.models.load import load_hf_model, resolve_model  # readers do without torch
    from rollouts.weight_sync.snapshots import HeldWeights, export_snapshot

    model = load_hf_model(resolve_model("tiny:llama"))
    weights = list(model.named_parameters())
    export = partial(export_snapshot, HeldWeights(model, [weights]), shard_bytes=SHARD)
    publisher = await open_publisher(folder, keep=KEEP, keep_s=0.0)
    for swap in itertools.count(1):
        held = list_publications(folder)
        if swap % ROLL_BACK_EVERY == 0 and len(held) > 1:
            done = await publisher.publish_again(held[-1].publication)
        else:
            number = secrets.randbelow(1 << 24)  # exact in float32; `random` draws the same in every fork
            for _, weight in weights:
                weight.data.fill_(number)
            done = await publisher.publish(export, number)
        print(done.publication, flush=True)


def load(path):
    """The smallest and the largest weight of each tensor of a snapshot."""
    arrays = [array for file in path.glob("*.safetensors") for array in load_file(file).values()]
    return {float(one) for array in arrays for one in (array.min(), array.max())}


def read(folder):
    """Loads until stdin ends; then a line of what it saw: [loads, tries, different publications, torn]."""
    loads, tries, seen, torn, last = 0, [], 0, [], 0
    check = follow.check_files
    follow.check_files = lambda *given: tries.append(1) or check(*given)
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        if not list_publications(folder):
            continue
        found, values = load_published(folder, load, tries=TRIES)
        loads += 1
        seen += found.publication > last
        if values != {float(found.weight_version)} or found.publication < last:
            torn.append([last, found.publication, found.weight_version, sorted(values)])
        last = found.publication
    print(json.dumps([loads, len(tries), seen, torn]))


def run(swaps, folder, *, seed=0, readers=READERS):
    """What came of so many publications. `folder` is new."""
    rng, written, lives, said = random.Random(seed), [0], 0, folder / "said"
    folder = folder / "published"
    command = [sys.executable, "-m", "tests.online.swaps", "read", str(folder)]
    start = partial(subprocess.Popen, command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with open_fork_server("tests.online.swaps:main", imports=IMPORTS) as server, ExitStack() as stack:
        reading = [stack.enter_context(start()) for _ in range(readers)]
        while len(written) <= swaps:
            lives += 1
            said.write_text("")
            ended = server.run([str(folder)], output=said, kill_after_s=rng.uniform(*LIFE_S))
            assert ended.returncode == -signal.SIGKILL, said.read_text()
            written += [int(line) for line in said.read_text().splitlines()]
            assert not any(one.poll() for one in reading)  # no reader failed
        loads, tries, seen, torn = zip(*(json.loads(one.communicate()[0]) for one in reading), strict=True)
    assert all(before < after for before, after in pairwise(written))
    newest = list_publications(folder)[0].publication
    assert newest >= written[-1], (newest, written[-1])
    trio.run(open_publisher, folder)  # clears what the last one left
    kept = {follow.POINTER, *(one.snapshot for one in list_publications(folder))}
    return {
        "publications": len(written) - 1,
        "kills": lives,
        "loads": sum(loads),
        "begun again": sum(tries) - sum(loads),
        "seen": list(seen),
        "torn": [row for rows in torn for row in rows],
        "left over": sorted({path.name for path in folder.iterdir()} - kept),
    }


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as place:
            began = time.monotonic()
            print(run(int(sys.argv[1]), Path(place)), f"{time.monotonic() - began:.0f} s")
