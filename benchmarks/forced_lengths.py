"""Generation of responses whose lengths are given, by the embedded engine and by transformers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import trio
from torch import Tensor

from rollouts.engines.local import LocalEngine
from rollouts.types import Completion, GenerateRequest, IntArray, SamplingParams


async def run_engine(
    engine: LocalEngine, prompts: Sequence[IntArray], lengths: Sequence[int], name: str
) -> list[Completion]:
    """A completion of each prompt, of the given length, in that order."""
    completions: dict[int, Completion] = {}

    async def generate_one(index: int) -> None:
        sampling = SamplingParams(max_new_tokens=int(lengths[index]))
        completions[index] = await engine.generate(
            GenerateRequest(request_id=f"{name}-{index}", prompt_ids=prompts[index], sampling=sampling)
        )

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(generate_one, index)
    return [completions[index] for index in range(len(prompts))]


def run_generate(model: Any, ids: Tensor, length: int) -> Tensor:
    """What `model.generate` makes of prompts [B, T] of one length: all rows go on for `length` tokens, [B, T
    + length].
    """
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            min_new_tokens=length,
            eos_token_id=None,
            pad_token_id=0,
        )


def copy_in(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model with weights in `dtype`; its rotary frequencies stay in float32."""
    own = copy.deepcopy(model).eval().requires_grad_(False)
    for weight in own.parameters():
        weight.data = weight.data.to(dtype)
    return own
