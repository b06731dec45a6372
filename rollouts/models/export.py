"""From a torch module to a directory that others load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_hf_model(model: PreTrainedModel, path: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Writes a Hugging Face model directory: config, safetensors in the weights' own dtype, and the tokenizer with its chat template.

    What `load_hf_model` then reads with that dtype is equal bit for bit; tied weights are written once. Not atomic: write into a
    directory that nobody reads yet.
    """
    path.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(str(path))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(path))
