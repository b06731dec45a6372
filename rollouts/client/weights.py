"""Weights as a file of safetensors. Torch is loaded here, once weights are asked for."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts.codec import WEIGHTS


def read_weights(folder: Path) -> dict[str, Tensor]:
    """By Hugging Face name. Blocks."""
    return load_file(folder / WEIGHTS)


def write_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Copies of them, which share no memory. Blocks."""
    copies = {name: one.detach().to("cpu", copy=True).contiguous() for name, one in weights.items()}
    save_file(copies, folder / WEIGHTS)
