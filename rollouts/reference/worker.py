"""The program of a reference model in a process of its own: loads it, scores what it is sent, ends when the
socket does.

    python -m rollouts.reference.worker SOCKET

Started by rollouts.reference.process under a guard, which kills it when the trainer is gone. It scores one
batch at a time on its one thread.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import numpy as np
import torch

from rollouts.distributed.commands import Command, decode_command
from rollouts.errors import RolloutsError
from rollouts.reference.messages import LENGTH, decode_batch, encode_frame
from rollouts.reference.open import LoadedReference, load_reference
from rollouts.reference.score import score_batch
from rollouts.types import RolloutBatch


def main() -> None:
    """Serves the socket named by the one argument."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(sys.argv[1])
        serve(channel)


def serve(channel: socket.socket) -> None:
    """Answers the load command, then score commands, until the other side closes. Ends after a load that
    failed.
    """
    first = read_command(channel)
    if first is None:
        return
    said: list[str] = []
    micro_batch_tokens = int(first.fields["micro_batch_tokens"])
    try:
        loaded = _load(first, said)
    except RolloutsError as error:
        send(channel, Command("failed", {"id": 0, "error": type(error).__name__, "message": str(error)}))
        return
    send(channel, Command("loaded", {"metrics": dict(loaded.metrics), "said": said}))
    while (command := read_command(channel)) is not None:
        send(channel, _score(loaded, command, micro_batch_tokens))


def _load(command: Command, said: list[str]) -> LoadedReference:
    fields = command.fields
    if fields["torch_threads"] is not None:
        torch.set_num_threads(int(fields["torch_threads"]))
    probe = decode_batch(command.arrays) if command.arrays else None
    options = {
        "dtype": fields["dtype"],
        "device": fields["device"],
        "micro_batch_tokens": int(fields["micro_batch_tokens"]),
    }
    return load_reference(Path(fields["path"]), probe=probe, say=said.append, **options)


def _score(loaded: LoadedReference, command: Command, micro_batch_tokens: int) -> Command:
    batch: RolloutBatch = decode_batch(command.arrays)
    number = {"id": command.fields["id"]}
    try:
        rows = score_batch(loaded.model, batch, plan=loaded.plan, micro_batch_tokens=micro_batch_tokens)
    except (
        RolloutsError,
        ValueError,
        IndexError,
    ) as error:  # a mask that no model can serve, a token that it has no embedding for
        return Command("failed", {**number, "error": type(error).__name__, "message": str(error)})
    return Command(
        "scored", number, {"log_probs": np.concatenate([np.zeros(0, np.float32), *rows]).astype(np.float32)}
    )


def send(channel: socket.socket, command: Command) -> None:
    """Sends one frame."""
    for piece in encode_frame(command):
        channel.sendall(piece)


def read_command(channel: socket.socket) -> Command | None:
    """The next command; None when the other side has closed."""
    head = _read_exactly(channel, LENGTH.size)
    body = head and _read_exactly(channel, LENGTH.unpack(head)[0])
    return decode_command(memoryview(body)) if body else None


def _read_exactly(channel: socket.socket, count: int) -> bytearray | None:
    received = bytearray(count)
    view = memoryview(received)
    while view:
        got = channel.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return received


if __name__ == "__main__":
    main()
