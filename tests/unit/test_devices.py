"""Where a run computes: what the setting comes to on a machine, that all ranks come to the same, and that the
backend is opened there.
"""

from __future__ import annotations

import json
import re
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed
import trio

from integration_training import opening, train
from rollouts.backends.open import choose_autocast_dtype
from rollouts.config.schema import RunConfig
from rollouts.config.tables import EngineConfig, ModelConfig
from rollouts.errors import ConfigError, ModelError
from rollouts.models.devices import DeviceMemory, choose_device, describe_device, look_at_device, use_device
from rollouts.preflight.estimate import Lengths, ModelSize, estimate_memory
from rollouts.preflight.findings import Finding
from rollouts.ranks.launch import Launch
from rollouts.ranks.meet import connect
from rollouts.weight_sync.open import choose_wire

RUN = """
model = { name = "tiny:byte", threads = 1 }
sft = { steps = 1, data = { kind = "jsonl", path = "rows.jsonl" } }
"""
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def have_gpus(patch: pytest.MonkeyPatch, count: int, *, free: tuple[int, ...] = ()) -> None:
    """As if torch found so many GPUs, with so much free memory each."""
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 << 30))


# --- the choice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "deterministic", "gpus", "chosen"),
    [
        ("auto", False, 0, "cpu"),
        ("auto", False, 2, "cuda"),
        ("auto", True, 2, "cpu"),
        ("cpu", False, 2, "cpu"),
        ("cuda", False, 2, "cuda"),
    ],
)
def test_a_gpu_is_taken_where_there_is_one_but_not_in_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, deterministic: bool, gpus: int, chosen: str
):
    have_gpus(monkeypatch, gpus)
    assert choose_device(wanted, deterministic=deterministic, local_ranks=2) == chosen


def test_a_gpu_that_torch_does_not_find_is_refused_with_the_reason_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
):
    have_gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ConfigError,
        match=r"model\.device='cuda', but torch \S+ is a build for CPUs; .*set model\.device='auto' or 'cpu'",
    ):
        choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        ConfigError,
        match=r"model\.device='cuda', but torch \S+ finds no GPU \(nvidia-smi, CUDA_VISIBLE_DEVICES\)",
    ):
        choose_device("cuda")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_more_ranks_on_a_machine_than_gpus_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, wanted: Any
):
    have_gpus(monkeypatch, 2)
    with pytest.raises(
        ConfigError,
        match=(
            r"distributed\.ranks=3 with model\.device=.*torch finds 2; use at most 2, .*set"
            r" model\.device='cpu'"
        ),
    ):
        choose_device(wanted, local_ranks=3)


def test_equal_bits_on_a_gpu_are_not_promised():
    with pytest.raises(
        ValueError,
        match=r"model\.device='cuda' with deterministic=true; equal bits are shown on CPUs only",
    ):
        RunConfig(deterministic=True, model=ModelConfig(device="cuda"))
    RunConfig(deterministic=True, model=ModelConfig(device="cpu"))


def test_auto_computes_in_bfloat16_only_on_a_gpu_that_multiplies_it(monkeypatch: pytest.MonkeyPatch):
    """One that emulates it is slower than in float32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert choose_autocast_dtype("auto", "cuda:1") is None
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert choose_autocast_dtype("auto", "cuda:1") == torch.bfloat16


def test_a_thread_takes_the_gpu_that_is_named_by_number(monkeypatch: pytest.MonkeyPatch):
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    for device in ("cpu", "cuda", "cuda:1"):
        use_device(device)
    assert taken == [torch.device("cuda:1")]
    assert (describe_device("cpu"), describe_device("cuda:1")) == ("cpu", "cuda:1 (name of cuda:1)")


@pytest.mark.parametrize(
    ("device", "args", "wire"),
    [
        ("cpu", [], "gloo"),
        ("cuda", [], "nccl"),
        ("cuda:0", ["--device", "cpu"], "gloo"),
        ("cuda", ["--device=cuda"], "nccl"),
    ],
)
def test_weights_go_over_nccl_from_a_gpu_to_gpus_only(device: str, args: list[str], wire: str):
    assert choose_wire(EngineConfig(kind="sglang", transport="memory", args=args), device) == wire


# --- ranks --------------------------------------------------------------------------------------------------


def choose_and_fail() -> str:
    raise ConfigError("model.device='cuda', but torch finds no GPU")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            [lambda: "cuda", lambda: "cpu"],
            r"model\.device is 'cpu' on rank 1 on \S+ and 'cuda' on rank 0 .*set model\.device='cpu'",
        ),
        ([lambda: "cpu", choose_and_fail], r"rank 1 on \S+: model\.device='cuda', but torch finds no GPU"),
    ],
)
async def test_ranks_that_cannot_compute_alike_refuse_with_the_same_words_before_there_is_a_process_group(
    choices: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    said: list[str] = []

    def meet(rank: int) -> None:
        launch = Launch(rank, 2, rank, 2, "127.0.0.1", 0)
        with pytest.raises(ConfigError) as caught:
            connect(launch, 0, choices[rank])
        said.append(str(caught.value))

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for rank in range(2):
                nursery.start_soon(trio.to_thread.run_sync, meet, rank)
    assert said[0] == said[1]
    assert re.match(message, said[0])
    assert not torch.distributed.is_initialized()


# --- before a run -------------------------------------------------------------------------------------------


def test_the_fullest_gpu_of_the_ranks_counts(monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 3, free=(5 << 30, 3 << 30, 1 << 30))
    assert look_at_device("auto", local_ranks=2) == DeviceMemory("cuda", 3 << 30)
    assert look_at_device("cpu").kind == "cpu"


def test_a_gpu_that_does_not_answer_is_a_config_error(monkeypatch: pytest.MonkeyPatch):
    def fail(index: int) -> None:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    have_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(
        ConfigError,
        match=(
            r"model\.device='auto': a GPU cannot be used \(CUDA error: out of memory\); .*model\.device='cpu'"
        ),
    ):
        look_at_device("auto")


def estimate(settings: dict[str, Any], *, free: int) -> list[Finding]:
    """Of SFT with a model of 4 MiB of weights."""
    sft = {"steps": 1, "data": {"kind": "jsonl", "path": "x"}}
    config = RunConfig.model_validate({"sft": sft, "output": {"dir": "/tmp"}, "distributed": settings})
    size = ModelSize(parameters=2**20, layers=2, hidden=32, inner=64, query=32, key_value=16)
    *found, _ = estimate_memory(
        config, ["sft"], Lengths(prompt=6, conversation=16), size, device=DeviceMemory("cuda", free)
    )
    return found


def test_a_gpu_holds_its_rank_s_part_and_is_compared_with_its_own_memory():
    (found,) = estimate({"ranks": 4, "shard_size": 2}, free=9 << 20)
    # of 16 MiB half, and 16 conversations of 16 tokens at 5.5 KiB
    assert found.subject == "sft: memory of a GPU"
    assert found.message.startswith(
        "about 9.38 MiB when every sample has its full length, an estimate: 2 MiB weights 4 x 1.049M / 2"
        " ranks, "
    )
    assert (found.level, "; 9 MiB are free: lower" in found.message) == ("warning", True)
    assert estimate({"ranks": 4}, free=9 << 20)[0].level == "ok"


def test_what_is_offloaded_counts_against_the_machine_once_for_every_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.preflight.estimate.read_free_memory", lambda: 30 << 20)
    gpu, host = estimate({"ranks": 4, "shard_size": 2, "cpu_offload": True}, free=9 << 20)
    assert gpu.message.startswith("about 1.38 MiB")
    assert gpu.level == "ok"
    assert (host.subject, host.level) == ("sft: host memory", "warning")
    assert host.message.startswith(
        "about 32 MiB when every sample has its full length, an estimate: 8 MiB 2 x weights 4 x 1.049M, "
    )


# --- train.py -----------------------------------------------------------------------------------------------


def test_the_program_asks_for_what_the_config_says_and_for_all_ranks_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[Any] = []
    monkeypatch.setattr(
        "rollouts.models.devices.choose_device",
        lambda wanted, **options: asked.append((wanted, options)) or "cpu",
    )
    launch = Launch(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="localhost", restart=0
    )
    train.choose_run_device(RunConfig(deterministic=True, model=ModelConfig(device="cpu")), launch)
    assert asked == [("cpu", {"deterministic": True, "local_ranks": 4})]


def test_ranks_train_on_the_device_on_which_they_have_met(monkeypatch: pytest.MonkeyPatch):
    opened: dict[str, Any] = {}
    monkeypatch.setattr(
        "rollouts.backends.fsdp.open_fsdp_backend", lambda path, **options: opened.update(options)
    )
    config = RunConfig.model_validate(
        {"sft": {"steps": 1, "data": {"kind": "jsonl", "path": "x"}}, "distributed": {"cpu_offload": True}}
    )
    ranks = SimpleNamespace(channel=None, ranks=SimpleNamespace(device=torch.device("cuda:0")))
    opening.open_backend(
        cast(Any, SimpleNamespace(config=config, ranks=ranks, tokenizer=None, device="cuda:0")), "sft", Path()
    )
    assert opened["ranks"] is ranks.ranks
    assert opened["cpu_offload"] is True
    assert "device" not in opened


def test_the_chosen_device_reaches_the_backend_of_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def refuse(path: Path, *, device: str, **options: Any) -> None:
        raise ModelError(f"it was to be on {device}")

    have_gpus(monkeypatch, 1)
    monkeypatch.setenv("ROLLOUTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rollouts.backends.open.open_pytorch_backend", refuse)
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW), encoding="utf-8")
    main = partial(run_program, tmp_path / "run.toml")
    assert main("--output.dir", str(tmp_path / "run")) == 2
    assert "ModelError: it was to be on cuda\n" in capfd.readouterr().err
    have_gpus(monkeypatch, 0)
    assert main("--model.device", "cuda", "--output.dir", str(tmp_path / "other")) == 2
    assert "ConfigError: model.device='cuda', but torch" in capfd.readouterr().err
    assert not (tmp_path / "other").exists(), "a corrected command would be refused"


def run_program(config: Path, *arguments: str) -> int:
    return train.main(["--config", str(config), "--mode", "sft", *arguments])
