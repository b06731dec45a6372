"""Where a model computes: chosen for a run, made a thread's own, found from a model; what memory is free
there, and in which precision a CPU multiplies.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, cast

import torch

from rollouts.config.schema import RunConfig
from rollouts.errors import ConfigError
from rollouts.types import T

P = ParamSpec("P")
LEAST_GAIN = 1.3  # times as fast: CPUs with AMX reach 2 to 4, those that emulate bfloat16 less than 1


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


@contextmanager
def rounding_products(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Inside, a CPU rounds the factors of float32 products to bfloat16, if that is the `dtype`; None: it does
    not. It sums in float32, and all else stays float32. Nothing on a GPU, which autocasts.

    For the whole process: threads that compute take turns.
    """
    matmul = cast(Any, torch.backends.mkldnn).matmul
    before, wanted = matmul.fp32_precision, "bf16" if dtype is torch.bfloat16 else "ieee"
    # what rounds nothing is left as it is: there are several names for that
    changes = device.type == "cpu" and "bf16" in (before, wanted)
    if changes:
        matmul.fp32_precision = wanted
    try:
        yield
    finally:
        if changes:
            matmul.fp32_precision = before


def unrounded(attention: Callable[P, T]) -> Callable[P, T]:
    """`attention` outside of rounding_products, which would slow it down: its products are small."""

    @wraps(attention)
    def attend(*inputs: P.args, **options: P.kwargs) -> T:
        with rounding_products(None, torch.device("cpu")):
            return attention(*inputs, **options)

    return attend


@contextmanager
def autocast(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Inside, a forward pass multiplies in `dtype`, None being the model's own: see rounding_products."""
    casts = dtype is not None and device.type != "cpu"
    with rounding_products(dtype, device), torch.autocast(device.type, dtype=dtype, enabled=casts):
        yield


@cache
def measure_rounding() -> tuple[bool, float]:
    """Whether this CPU knows rounding_products, and how many times as fast they are. Once a process, so that
    its stages choose alike.
    """
    left, right, device = torch.randn(512, 1024), torch.randn(1024, 1024), torch.device("cpu")
    found = dict[torch.dtype | None, tuple[float, torch.Tensor]]()
    for dtype in (None, torch.bfloat16) * 4:  # the first prepare their programs
        with rounding_products(dtype, device):
            began = time.perf_counter()
            product = left @ right
            seconds = time.perf_counter() - began
        found[dtype] = min(seconds, found.get(dtype, (seconds,))[0]), product
    (plain, exact), (fast, rounded) = found.values()
    return not torch.equal(exact, rounded), plain / fast
