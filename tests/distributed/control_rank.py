"""One rank for test_control_processes: python -m tests.distributed.control_rank; its place is in the
environment.

The address of the control channel goes out on rank 0's stdout and comes in on the others' stdin. Then the
process does what a rank does in a collective: its body waits for a thread that waits for ever, which no
cancellation can end.
"""

from __future__ import annotations

import os
import sys
import threading

import trio

from rollouts.distributed.control import ControlHub, open_control
from rollouts.distributed.launch import read_launch


async def share(data: bytes | None) -> bytes:
    if data is None:
        return bytes.fromhex(await trio.to_thread.run_sync(sys.stdin.readline))
    print(data.hex(), flush=True)
    return data


async def main() -> None:
    launch = read_launch(os.environ)
    async with open_control(launch, share=share) as control:
        control.set_phase(f"step {launch.rank + 1}")
        if isinstance(control, ControlHub):
            await trio.sleep(0.5)  # for the phases of the others to have come
        print("ready", flush=True)
        await trio.to_thread.run_sync(threading.Event().wait)


if __name__ == "__main__":
    trio.run(main)
