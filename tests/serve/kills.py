"""Kills a server with SIGKILL at random instants, starts it again, and says what its client lost by it.

    an undisturbed life ─► its losses, weights, samples, checkpoints
    the same life ─ SIGKILL ─ start ─ SIGKILL ─ start … ─► the same; and every answer is still there

    python -m tests.serve.kills 100 1        kills and a seed

A life trains, pipelined, saves both kinds, samples, loads in place in the middle of a gradient, and begins a
second model from a checkpoint. Between kills a server may have served for a while, or not begun to.
"""

import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import trio

from rollouts.checkpoints.load import check_checkpoint
from rollouts.serve.store import open_store
from tests.serve.clients import decode_sampled, decode_trained, draw_batches
from tests.serve.servers import open_client, open_forks, open_process

BATCHES = draw_batches(8, seed=4)
PAUSE_S = (0.05, 2.0)  # from a start to the next kill


class Life(NamedTuple):
    """What a client saw."""

    seen: dict[str, Any]  # numbers that do not depend on names
    answers: dict[str, Any]  # of every request, by its id


async def live(client):
    """A client's whole life, in which nothing is awaited before it must be."""
    seen, answers = dict[str, Any](), dict[str, Any]()

    async def collect(name):
        answers[name] = await client.result(name)
        return answers[name]

    async def train(model, batches):
        sent = [(await model.send(data), await model.optim()) for data in batches]
        losses = [decode_trained(await collect(one)).loss for one, _ in sent]
        seen["norms"] = seen.get("norms", []) + [
            (await collect(step))["metrics"]["grad_norm"] for _, step in sent
        ]
        return losses

    model = await client.create()
    seen["first"] = await train(model, BATCHES[:3])
    saves = [
        await model.submit("save_weights", path="a"),
        await model.submit("save_weights_for_sampler", path="a"),
        await model.submit("save_weights_for_sampler", sampling_session_seq_id=0),
    ]
    half = await model.send(BATCHES[3])  # a gradient that the load below drops
    path, named, live_sampler = [await collect(one) for one in saves]
    await collect(await model.submit("load_weights", path=path["path"], optimizer=True))
    seen["second"] = [decode_trained(await collect(half)).loss, *await train(model, BATCHES[4:6])]
    samplers = [live_sampler["sampling_session_id"], await client.make_sampler(model_path=named["path"])]
    drawn = [await client.sample(one, [1, 2, 3], 2, max_tokens=6, seed=3, stop=[]) for one in samplers]
    seen["samples"] = [decode_sampled(await collect(one)).tokens for one in drawn]
    other = await client.load(path["path"])
    seen["other"] = await train(other, BATCHES[5:7])
    await collect(await model.submit("save_weights", path="a", overwrite=True))
    seen["probes"] = [await one.probe() for one in (model, other)]
    return Life(seen, answers)


async def check_after(client, life, wanted):
    """What differs from an undisturbed life, or is not there any more. The server is up."""
    found = [
        f"{name}: {life.seen[name]} instead of {value}"
        for name, value in wanted.seen.items()
        if life.seen[name] != value
    ]
    for name, answer in life.answers.items():
        if await client.result(name) != answer:
            found.append(f"request {name} has another answer now")
    listed = (await client.get("checkpoints"))["checkpoints"]
    if sorted(one["checkpoint_id"] for one in listed) != ["sampler_weights/a", "weights/a"]:
        found.append(f"checkpoints: {listed}")
    return found


def check_disk(server):
    """What is not whole, or nobody's, in the directory of a server that has ended."""
    found, state = list[str](), server.folder / "state"
    with open_store(state / "service.sqlite") as store:
        rows = store.all("SELECT * FROM checkpoints")
        models = store.all("SELECT id, snapshot FROM models")
        samplers = store.all("SELECT folder FROM samplers WHERE model IS NOT NULL")
    for row in rows:
        if row["kind"] == "training":
            check_checkpoint(Path(row["folder"]), hashes=True)
    snapshots = [row for row in models if row["snapshot"] >= 0]
    kept = {
        "checkpoints/*/*": {row["folder"] for row in rows},
        "models/*/*": {f"{state}/models/{row['id']}/step_{row['snapshot']}" for row in snapshots},
        "samplers/*": {row["folder"] for row in samplers},
    }
    for pattern, wanted in kept.items():
        there = {*map(str, state.glob(pattern))}
        if there != wanted:
            found.append(f"{pattern}: {sorted(there)} on disk, {sorted(wanted)} known")
    return found


async def kill_often(server, times):
    """Until cancelled, at each of the instants, which is a time since the last start."""
    for seconds in times:
        await trio.sleep(seconds)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.kill_and_start)


async def run_kills(forks, folder, kills, seed):
    """What went wrong with so many kills at least, at most five in a life."""
    rng = random.Random(seed)
    with open_process(forks, folder / "plain", snapshot_s=0) as server:
        async with open_client(server.url) as client:
            wanted = await live(client)
            wrong = await check_after(client, wanted, wanted)
        server.end(signal.SIGTERM)
    wrong += check_disk(server)
    done = 0
    while done < kills:
        snapshot_s = rng.choice([0.0, 0.3, 30.0])
        times = [rng.uniform(*PAUSE_S) for _ in range(min(rng.randint(1, 4), kills - done))]
        with open_process(forks, folder / f"life{done}", snapshot_s=snapshot_s) as server:
            async with open_client(server.url) as client:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(kill_often, server, times)
                    with trio.fail_after(300):
                        life = await live(client)
                    nursery.cancel_scope.cancel()
                server.kill_and_start()
                found = await check_after(client, life, wanted)
            server.end(signal.SIGTERM)
        found += check_disk(server)
        wrong += [f"life{done}, {times}, snapshot_s {snapshot_s}: {one}" for one in found]
        done += len(times) + 1
        print(f"{done} kills: {found or 'nothing lost'}", flush=True)
    return wrong


def main():
    """Prints how each life went, and what was wrong."""
    with tempfile.TemporaryDirectory() as folder, open_forks() as forks:
        print(trio.run(run_kills, forks, Path(folder), *map(int, sys.argv[1:])))


if __name__ == "__main__":
    main()
