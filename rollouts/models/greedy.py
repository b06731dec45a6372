"""A model's own greedy answer, with everything it thought at each token: what an engine's answer can be
compared with later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollouts.models.devices import find_device
from rollouts.models.sampling import without_cache
from rollouts.types import FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def complete_greedily(
    model: PreTrainedModel, prompt_ids: IntArray, count: int, *, autocast_dtype: torch.dtype | None = None
) -> FloatArray:
    """[count, V] float32 log-probs, in nats, at each of `count` greedy tokens after `prompt_ids`; row i is
    given the argmax of the rows before.

    One forward pass over the whole sequence for each, so it is meant for a few tokens.
    """
    device = find_device(model)
    assert count > 0, count
    ids = torch.tensor(prompt_ids, device=device)[None]
    rows: list[Tensor] = []
    extra: dict[str, Any] = without_cache(model)
    with torch.no_grad():
        for _ in range(count):
            with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
                logits = model(input_ids=ids, **extra).logits[0, -1]
            rows.append(logits.float().log_softmax(-1))
            ids = torch.cat([ids, rows[-1].argmax()[None, None]], dim=1)
    return torch.stack(rows).cpu().numpy()
