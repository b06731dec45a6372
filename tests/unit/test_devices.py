"""Where a run computes: what the setting comes to on a machine, that all ranks come to the same, and that the
backend is opened there.
"""

import socket

import pytest
import torch
import torch.distributed
import trio

from rollouts.backends.open import choose_autocast_dtype
from rollouts.config.model import ModelConfig
from rollouts.config.schema import RunConfig
from rollouts.errors import ConfigError
from rollouts.models.devices import (
    choose_device,
    measure_rounding,
    read_free_gpu_memory,
    rounding_products,
    unrounded,
)
from rollouts.ranks.launch import Launch
from rollouts.ranks.meet import connect
from tests.support.text_tables import cases


def have_gpus(patch, count, *, free=()):
    """As if torch found so many GPUs, with so much free memory each."""
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 << 30))


# --- the choice ---------------------------------------------------------------------------------------------


# setting, whether deterministic, GPUs, CUDA of the build | what is chosen for three ranks, or the refusal
@cases(r"""
wanted | deterministic | gpus | cuda | outcome
auto | no  | 0 | 13.0 | cpu
auto | no  | 3 | 13.0 | cuda
auto | yes | 3 | 13.0 | cpu
cpu  | no  | 3 | 13.0 | cpu
cuda | no  | 3 | 13.0 | cuda
cuda | no  | 0 |      | torch \S+ is a build for CPUs; .*set model\.device='auto' or 'cpu'
cuda | no  | 0 | 13.0 | torch \S+ finds no GPU \(nvidia-smi, CUDA_VISIBLE_DEVICES\)
cuda | no  | 2 | 13.0 | ranks=3 with model\.device=.*finds 2; use at most 2, .*model\.device='cpu'
auto | no  | 2 | 13.0 | ranks=3 with model\.device=.*finds 2; use at most 2, .*model\.device='cpu'
""")
def test_a_gpu_is_taken_where_there_is_one_or_refused_with_the_reason_and_the_way_out(
    monkeypatch, wanted, deterministic: bool, gpus: int, cuda, outcome
):
    have_gpus(monkeypatch, gpus)
    monkeypatch.setattr(torch.version, "cuda", cuda or None)
    config = RunConfig(deterministic=deterministic, model=ModelConfig(device=wanted))
    if " " in outcome:
        with pytest.raises(ConfigError, match=outcome):
            choose_device(config, local_ranks=3)
    else:
        assert choose_device(config, local_ranks=3) == outcome


def test_equal_bits_on_a_gpu_are_not_promised():
    wanted = r"model\.device='cuda' with deterministic=true; equal bits are shown on CPUs only"
    with pytest.raises(ValueError, match=wanted):
        RunConfig(deterministic=True, model=ModelConfig(device="cuda"))
    RunConfig(deterministic=True, model=ModelConfig(device="cpu"))


def test_auto_computes_in_bfloat16_only_on_a_gpu_that_multiplies_it(monkeypatch):
    """One that emulates it is slower than in float32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert choose_autocast_dtype("auto", torch.device("cuda:1")) is None
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert choose_autocast_dtype("auto", torch.device("cuda:1")) == torch.bfloat16


@cases("""
autocast | known | gain | outcome
off      | yes   | 3.0  | None
auto     | yes   | 3.0  | bfloat16
auto     | yes   | 0.8  | None
auto     | no    | 1.0  | None
bfloat16 | yes   | 0.8  | bfloat16
bfloat16 | no    | 1.0  | model.autocast='bfloat16', but this CPU
""")
def test_auto_computes_in_bfloat16_on_a_cpu_that_is_found_to_be_faster_with_it(
    monkeypatch, autocast, known: bool, gain: float, outcome
):
    monkeypatch.setattr("rollouts.backends.open.measure_rounding", lambda: (known, gain))
    try:
        found = str(choose_autocast_dtype(autocast, torch.device("cpu"))).removeprefix("torch.")
    except ConfigError as error:
        found = str(error)[: len(outcome)]
    assert found == outcome


def test_products_are_of_factors_rounded_to_bfloat16_summed_in_float32_and_attention_is_not():
    cpu, rng = torch.device("cpu"), torch.Generator().manual_seed(0)
    left, right = torch.randn(512, 1024, generator=rng), torch.randn(1024, 1024, generator=rng)
    rows = torch.randn(1, 2, 32, 16, generator=rng)
    exact, rounded = left @ right, left.bfloat16().float() @ right.bfloat16().float()
    attend = unrounded(torch.nn.functional.scaled_dot_product_attention)
    attended = attend(rows, rows, rows)
    with rounding_products(torch.bfloat16, cpu):
        found, again = left @ right, attend(rows, rows, rows)
        with rounding_products(None, cpu):
            inner = left @ right
    known, gain = measure_rounding()
    torch.testing.assert_close(found, rounded if known else exact, rtol=1e-3, atol=1e-3)
    assert gain > 0
    assert torch.equal(again, attended)
    assert torch.equal(inner, exact)
    assert torch.equal(left @ right, exact)  # as it was


# --- ranks --------------------------------------------------------------------------------------------------


@cases(r"""
devices  | message
cuda cpu | model\.device is 'cpu' on rank 1 on \S+ and 'cuda' on rank 0 .*set model\.device='cpu'
cpu none | rank 1 on \S+: model\.device='cuda', but torch finds no GPU
""")
async def test_ranks_that_cannot_compute_alike_refuse_with_the_same_words_before_there_is_a_process_group(
    devices, message, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    said = []

    def meet(rank, device):
        def choose():
            if device == "none":
                raise ConfigError("model.device='cuda', but torch finds no GPU")
            return device

        with pytest.raises(ConfigError, match=f"^{message}") as caught:
            connect(Launch(rank, 2, rank, 2, "127.0.0.1", 0), 0, choose)
        said.append(str(caught.value))

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for each in enumerate(devices.split()):
                nursery.start_soon(trio.to_thread.run_sync, meet, *each)
    assert said[0] == said[1]
    assert not torch.distributed.is_initialized()


# --- before a run -------------------------------------------------------------------------------------------


def test_the_fullest_gpu_of_the_ranks_counts(monkeypatch):
    have_gpus(monkeypatch, 3, free=(5 << 30, 3 << 30, 1 << 30))
    assert read_free_gpu_memory(RunConfig(), local_ranks=2) == 3 << 30
    assert read_free_gpu_memory(RunConfig(model=ModelConfig(device="cpu")), local_ranks=2) is None
