"""Where a model computes."""

from __future__ import annotations

from typing import Any

import torch


def find_device(model: torch.nn.Module) -> torch.device:
    """Where a model computes: where its parameters are, unless FSDP offloads them, which wait in host memory."""
    parameter = next(model.parameters())
    mesh: Any = getattr(parameter, "device_mesh", None)  # of a DTensor
    if mesh is not None and mesh.device_type != parameter.device.type:
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())  # pragma: gpu
    return parameter.device
