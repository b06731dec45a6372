"""Where a model computes: chosen for a run, made a thread's own, found from a model; and what memory is free
there.
"""

from typing import Literal

import torch

from rollouts.config.schema import RunConfig
from rollouts.errors import ConfigError


def choose_device(config: RunConfig, *, local_ranks: int) -> Literal["cpu", "cuda"]:
    """Where a run computes. model.device = "auto": a GPU where torch has one, but the CPU in deterministic
    mode.

    local_ranks: processes of the run on this machine; each takes a GPU of its own. Nothing is put on a
    device. Raises ConfigError where "cuda" is wanted and torch has none, and where there are fewer GPUs than
    local_ranks.
    """
    wanted = config.model.device
    if wanted == "cpu" or (wanted == "auto" and (config.deterministic or not torch.cuda.is_available())):
        return "cpu"
    if not torch.cuda.is_available():
        why = (
            "is a build for CPUs"
            if torch.version.cuda is None and torch.version.hip is None
            else "finds no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        )
        raise ConfigError(
            f"model.device='cuda', but torch {torch.__version__} {why}; mend that, or set model.device='auto'"
            " or 'cpu'"
        )
    count = torch.cuda.device_count()
    if local_ranks > count:
        raise ConfigError(
            f"distributed.ranks={local_ranks} with model.device={wanted!r}: each of the {local_ranks}"
            f" processes on this machine needs a GPU of its own, and torch finds {count}; use at most"
            f" {count}, let every process see all GPUs (CUDA_VISIBLE_DEVICES), or set model.device='cpu'"
        )
    return "cuda"


def read_free_gpu_memory(config: RunConfig, *, local_ranks: int) -> int | None:
    """Bytes free on the fullest GPU of choose_device's choice; None on the CPU. Raises ConfigError as it
    does, and for a GPU that does not answer.
    """
    if choose_device(config, local_ranks=local_ranks) == "cpu":
        return None
    try:
        return min(torch.cuda.mem_get_info(index)[0] for index in range(local_ranks))
    except RuntimeError as error:
        raise ConfigError(
            f"model.device={config.model.device!r}: a GPU cannot be used ({error}); see what else runs there,"
            " or set model.device='cpu'"
        ) from error


def use_device(device: torch.device) -> None:
    """Makes a GPU that `device` names by number the current one of this thread: compiled programs, NCCL and
    events take that.
    """
    if device.type == "cuda" and device.index is not None:  # pragma: gpu
        torch.cuda.set_device(device)


def describe_device(device: str) -> str:
    """For people: "cpu", or "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if torch.device(device).type == "cuda" else device
    )


def find_device(model: torch.nn.Module) -> torch.device:
    """Where a model computes: where its parameters are, unless FSDP offloads them, which wait in host
    memory.
    """
    parameter = next(model.parameters())
    mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
    if mesh is not None and mesh.device_type != parameter.device.type:
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())  # pragma: gpu
    return parameter.device
