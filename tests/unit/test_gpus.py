"""GPU use and memory through NVML, of a package pynvml that plays a driver."""

import sys
from types import SimpleNamespace

import pytest
import trio

from rollouts.metrics import gpus
from rollouts.metrics.gpus import open_gpu_watch, read_gpus
from tests.support.text_tables import cases


@cases("""
visible | expected
none | 0/memory_gib=1 0/utilization=0.1 1/memory_gib=3 1/utilization=0.8
1,0  | 0/memory_gib=3 0/utilization=0.8 1/memory_gib=1 1/utilization=0.1
     |
""")
def test_gpus_are_numbered_as_cuda_visible_devices_lists_them(monkeypatch, visible, expected):
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=(1, 3)[gpu] << 30),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=(10, 80)[gpu]),  # percent
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if visible == "none":
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    pairs = (pair.split("=") for pair in expected.split())
    assert read_gpus() == {f"perf/gpu/{name}": float(value) for name, value in pairs}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert read_gpus() == {}


async def test_a_row_has_the_means_since_the_row_before_and_a_driver_that_hangs_holds_no_run_back(
    monkeypatch,
):
    shares, looked = [0.2, 0.6, 0.4], trio.Event()

    def look():  # in a thread
        if not shares:
            trio.from_thread.run_sync(looked.set)
            trio.from_thread.run(trio.sleep_forever)
        return {"perf/gpu/0/utilization": shares.pop()}

    monkeypatch.setattr(gpus, "read_gpus", look)
    monkeypatch.setattr(gpus, "LOOK_S", 0)
    async with open_gpu_watch() as take:
        await looked.wait()
        assert take() == pytest.approx({"perf/gpu/0/utilization": 0.4})
        assert take() == {}
