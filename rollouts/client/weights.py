"""Weights as a file of safetensors. Torch is loaded here, once weights are asked for."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from rollouts.codec import WEIGHTS


def read_weights(folder: Path) -> dict[str, Tensor]:
    """By Hugging Face name. Blocks."""
    return load_file(folder / WEIGHTS)
