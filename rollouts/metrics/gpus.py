"""What the GPUs of this machine do while a run goes on, as NVML says: see the extra nvml."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from statistics import fmean

import trio

from rollouts.types import Numbers

LOOK_S = 1.0  # between two looks


def read_gpus() -> Numbers:
    """Use and memory of each GPU that this process may see, in the order of CUDA_VISIBLE_DEVICES, by metric.
    Empty without the package, the driver or a GPU, or where that variable has no numbers. May block.
    """
    found = {}
    with suppress(Exception):  # NVML's own errors are classes of its package, which may not be there
        import pynvml as nvml  # pyright: ignore[reportMissingImports]

        nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = range(nvml.nvmlDeviceGetCount()) if visible is None else map(int, visible.split(","))
        for index, number in enumerate(numbers):
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            found[f"perf/gpu/{index}/memory_gib"] = nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
            found[f"perf/gpu/{index}/utilization"] = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    return found


@asynccontextmanager
async def open_gpu_watch() -> AsyncIterator[Callable[[], Numbers]]:
    """A function that gives the mean use and memory of each GPU since it was called last. Looks in a thread
    of its own, until there is nothing to be seen.
    """
    seen = {}

    async def watch() -> None:
        while found := await trio.to_thread.run_sync(read_gpus, abandon_on_cancel=True):
            for name, value in found.items():
                seen.setdefault(name, []).append(value)
            await trio.sleep(LOOK_S)

    def take() -> Numbers:
        taken = {name: fmean(values) for name, values in seen.items()}
        seen.clear()
        return taken

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield take
        nursery.cancel_scope.cancel()
