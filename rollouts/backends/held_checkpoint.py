"""A checkpoint of which every rank holds its part in host memory, from the copy to the writing, beside
whatever the device threads do.

rank 0                                                        every other rank
capture() ─► HeldCheckpoint                                   capture ─► HeldPart, in a channel
  called with a path: write_held ────────────────────────────► write_held: its part, in a thread
    its own part, in a thread ◄── how many files, or what failed ──┘
    then it names the files of all
  drop(), where nothing was written: drop_held ──────────────► forgets its part
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import trio

from rollouts.backends.sharded_capture import HeldPart
from rollouts.distributed.commands import Command
from rollouts.distributed.process_group import describe_failure, hear_failure
from rollouts.models.parts import name_parts

if TYPE_CHECKING:
    from rollouts.backends.fsdp import CommandReceiver, CommandSender


class HeldCheckpoint:
    """What capture() leaves on rank 0: a function that writes it to a directory, once. `name`: of this
    capture alone. `backend`: its number.
    """

    def __init__(self, hub: CommandSender, name: str, held: HeldPart, *, backend: int = 0) -> None:
        self._hub = hub
        self._backend = backend
        self._name = name
        self._held: HeldPart | None = held  # until it is written or dropped

    async def __call__(self, path: Path) -> None:
        """Every rank writes its part to `path`, which all see; afterwards no rank holds it.

        Raises what any rank has met, after all have ended: OSError of a disk, StorageError, RunDirError, else
        BackendError.
        """
        held, self._held = self._held, None
        assert held is not None, f"{self._name} is written or dropped already"
        self._hub.send(
            Command("write_held", {"name": self._name, "path": str(path), "backend": self._backend})
        )
        counts, failure = {0: 0}, None
        try:
            counts[0] = await trio.to_thread.run_sync(held.write, path)
        except Exception as error:  # raised when nobody writes there any more: the directory is removed then
            failure = error
        del held  # memory that is free while the others write, and while the files are hashed
        answers = await self._hub.wait_answers(self._name)
        for rank, said in sorted(answers.items()):
            if said.isdecimal():
                counts[rank] = int(said)
            elif failure is None:
                failure = hear_failure(rank, said.encode())
        if failure is not None:
            raise failure
        await trio.to_thread.run_sync(name_parts, path, [counts[rank] for rank in sorted(counts)])

    def drop(self) -> None:
        """Frees every rank's part, if it was not written. Returns at once."""
        if self._held is not None:
            self._held = None
            self._hub.send(Command("drop_held", {"name": self._name, "backend": self._backend}))


async def write_held(
    link: CommandReceiver, held: trio.MemoryReceiveChannel[HeldPart], path: Path, name: str
) -> None:
    """Writes this rank's part of a checkpoint, once it is captured, while steps run; answers how many files
    hold weights, or what has failed.
    """
    try:
        said = str(await trio.to_thread.run_sync((await held.receive()).write, path))
    except Exception as error:  # rank 0 raises it
        said = describe_failure(error).decode()
    link.answer(name, said)
