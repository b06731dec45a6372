"""What the GPUs of this machine do while a run goes on, as NVML says: see the extra nvml."""

import importlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from statistics import fmean
from typing import Any

import trio

LOOK_S = 1.0  # between two looks


def read_gpus() -> dict[str, float]:
    """Use and memory of each GPU that this process may see, numbered from 0 as CUDA_VISIBLE_DEVICES lists
    them, by metric. Empty without the package, the driver or a GPU; of a part of one (MIG) memory alone. May
    block. No CUDA context is made.
    """
    found: dict[str, float] = {}
    with suppress(Exception):  # NVML's own errors are classes of its package, which may not be there
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else visible.split(",")
        for index, name in enumerate(names):
            with suppress(Exception):
                by_number = name.strip().isdecimal()
                find = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
                gpu = find(int(name) if by_number else name.strip())
                found[f"perf/gpu/{index}/memory_gib"] = nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
                found[f"perf/gpu/{index}/utilization"] = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    return found


@asynccontextmanager
async def open_gpu_watch(look_s: float = LOOK_S) -> AsyncIterator[Callable[[], dict[str, float]]]:
    """A function that gives, since it was called last, the mean use and the most memory of each GPU. Looks in
    a thread of its own, until there is nothing to be seen.
    """
    seen: dict[str, list[float]] = {}

    async def watch() -> None:
        while found := await trio.to_thread.run_sync(read_gpus, abandon_on_cancel=True):
            for name, value in found.items():
                seen.setdefault(name, []).append(value)
            await trio.sleep(look_s)

    def take() -> dict[str, float]:
        taken = {name: (fmean if "utilization" in name else max)(values) for name, values in seen.items()}
        seen.clear()
        return taken

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield take
        nursery.cancel_scope.cancel()
