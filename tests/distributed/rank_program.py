"""One of several ranks, started without a launcher: they connect, then each does what the argument says.

hang    waits inside a collective in which rank 0 does not take part; rank 0 generates for ever
answer  rank 0 sends a command, which the others answer
fail    rank 1 raises an error of its own while rank 0 is inside a collective
force   rank 0 ends by force
"""

import os
import sys

import torch.distributed as dist
import trio

from rollouts.device_thread import open_device_thread
from rollouts.errors import ModelError
from rollouts.ranks import channel as ranks_channel
from rollouts.ranks.launch import read_launch
from rollouts.ranks.meet import all_gather_floats, open_ranks

ranks_channel.SILENT_BEATS = int(os.environ.get("SILENT_BEATS", "20"))


async def hang(opened):
    async with open_device_thread(name="trainer") as thread:
        if opened.ranks.rank:
            thread.submit(dist.barrier)
        await trio.sleep_forever()


async def answer(opened):
    channel = opened.channel
    if opened.ranks.rank == 0:
        channel.send({"name": "double", "numbers": [1, 2]})
        print(dict(sorted((await channel.wait_answers("doubled")).items())), flush=True)
        return
    while (command := await channel.receive()) is not None:
        channel.answer("doubled", str([2 * number for number in command["numbers"]]))


async def fail(opened):
    async with open_device_thread(name="trainer") as thread:
        if opened.ranks.rank == 1:
            opened.channel.phase = "step 3"
            raise ModelError("no memory for 8 bytes")
        await thread.submit(lambda: all_gather_floats(opened.ranks, [1.0]))


async def force(opened):
    if opened.ranks.rank:
        await opened.channel.receive()
    opened.channel.end_others()
    os._exit(0)


async def main():
    async with open_ranks(read_launch(os.environ)) as opened:
        opened.channel.phase = f"step {opened.ranks.rank + 1}"
        await trio.sleep(2.5)  # the others know the phase
        print("ready", flush=True)
        await {"hang": hang, "answer": answer, "fail": fail, "force": force}[sys.argv[1]](opened)


if __name__ == "__main__":
    trio.run(main)
