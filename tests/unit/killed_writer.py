"""A process that writes every file of a record as fast as it can, until it is killed."""

import itertools
import os
import signal

import numpy as np
import trio

from rollouts.metrics import jsonl
from rollouts.metrics.spans import Span
from rollouts.metrics.writer import open_jsonl_logger
from rollouts.run_dir import RunDir
from rollouts.types import Sample
from tests.support.made_updates import make_update


async def write(run_dir, said, attempt, first_step):
    texts = ["x" * (300_000 if index == 0 else 500) for index in range(4)]  # one that takes a while to write
    samples = tuple(
        Sample(id=f"s{index}", prompt="p", response=text, tokens=np.arange(3), loss_mask=np.array([0, 1, 1]))
        for index, text in enumerate(texts)
    )
    metrics = {f"area/metric_{index}": float(index) for index in range(60)}
    async with open_jsonl_logger(
        run_dir, attempt=attempt, samples_per_step=4, token_arrays_bytes=1 << 30
    ) as logger:
        os.write(said, b"open\n")
        for step in itertools.count(first_step):
            await logger.log_samples("rl", step, step - 1, samples)
            await logger.log_evaluation("rl", step, step, "heldout", {"eval/heldout/avg@1": 0.5})
            spans = [Span("train", "trainer", 1.0, 2.0), Span("generate", "stub", 0.0, 1.0, "s0", 3)]
            await logger.log_step("rl", step, step - 1, metrics, updates=[make_update()], spans=spans)
            os.write(said, b"%d\n" % step)


def arm(nth, said):
    """Patches os.write, or os.open, to die; but what is `said` is written whole."""
    count, write_, open_ = itertools.count(1), os.write, os.open

    def write_half(file, data):
        if file == said or next(count) != nth:
            return write_(file, data)
        written = write_(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return written

    def open_and_die(path, flags, *arguments):
        file = open_(path, flags, *arguments)
        if flags & os.O_EXCL and str(path).endswith(".jsonl") and next(count) == -nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return file

    if nth > 0:
        os.write = write_half
    elif nth < 0:
        os.open = open_and_die  # pyright: ignore[reportAttributeAccessIssue]


def run_writer(folder, output, nth, attempt, first_step, part_bytes):
    """Writes to `output` each step that is logged.

    nth: 0 waits for a kill from outside; n above 0 dies inside the n-th write, having written half of it, as
    a kill can leave one; below 0 when the -n-th new part was opened.
    """
    arm(nth, output.fileno())
    jsonl.PART_BYTES = part_bytes
    trio.run(write, RunDir(folder), output.fileno(), attempt, first_step)
