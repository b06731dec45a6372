"""GPU use and memory through NVML: of a package pynvml that plays a driver."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from rollouts.metrics import gpus
from rollouts.metrics.gpus import open_gpu_watch, read_gpus
from tests.support.text_tables import read_cells


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the driver says: percent and bytes by the number, or the UUID, by which NVML knows a GPU."""
    said = SimpleNamespace(
        percent={0: 10, "GPU-b": 80}, used={0: 1 << 30, "GPU-b": 3 << 30, "MIG-c": 1 << 29}
    )
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex={0: 0}.__getitem__,
        nvmlDeviceGetHandleByUUID={"GPU-b": "GPU-b", "MIG-c": "MIG-c"}.__getitem__,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=said.used[gpu]),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=said.percent[gpu]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return said


SEEN = """
GPU-b,0 | 0/memory_gib=3 0/utilization=0.8 1/memory_gib=1 1/utilization=0.1
7,MIG-c | 1/memory_gib=0.5
        |
"""


@pytest.mark.parametrize(("visible", "expected"), read_cells(SEEN))
def test_gpus_are_numbered_as_cuda_visible_devices_lists_them(
    driver: Any, monkeypatch: pytest.MonkeyPatch, visible: str, expected: str
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pairs = (pair.split("=") for pair in expected.split())
    assert read_gpus() == {f"perf/gpu/{name}": float(value) for name, value in pairs}


def test_without_the_package_nothing_is_said(driver: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_gpus() == {"perf/gpu/0/memory_gib": 1.0, "perf/gpu/0/utilization": 0.1}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what makes an import fail
    assert read_gpus() == {}


async def test_a_row_has_the_mean_use_and_the_most_memory_since_the_row_before(
    monkeypatch: pytest.MonkeyPatch,
):
    looks = iter([(0.2, 1.0), (0.6, 2.0), (0.4, 0.5), (1.0, 7.0)])
    looked = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def look() -> dict[str, float]:  # in its thread; the fourth hangs for ever, which holds no run back
        share, gib = next(looks)
        if share == 1.0:
            token.run_sync_soon(looked.set)
            trio.from_thread.run(trio.sleep_forever)
        return {"perf/gpu/0/utilization": share, "perf/gpu/0/memory_gib": gib}

    monkeypatch.setattr(gpus, "read_gpus", look)
    async with open_gpu_watch(0) as take:
        await looked.wait()
        assert take() == pytest.approx({"perf/gpu/0/utilization": 0.4, "perf/gpu/0/memory_gib": 2.0})
        assert take() == {}
