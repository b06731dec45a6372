"""Layers run by torch.compile, and the proof on a few tokens that they compute what the model does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rollouts.data.packing import make_micro_batches
from rollouts.errors import ModelError
from rollouts.losses.logprobs import widen
from rollouts.models.directories import quiet_transformers
from rollouts.models.forward_plan import ForwardPlan, compute_micro_batch_states
from rollouts.models.layers import compile_layers, make_probing_directions
from rollouts.types import Function

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (9, 7)  # tokens of the probe's rows
# of the size of hidden states, along random directions
FLOAT_TOLERANCE = 1e-4  # for float32 and wider
HALF_TOLERANCE = 0.1  # bfloat16 keeps 8 bits, and rounds where a program writes its results


def compile_and_prove(
    model: "PreTrainedModel",
    plan: ForwardPlan,
    autocast_dtype: torch.dtype | None,
    *,
    backend: str | Function,
    run: Callable[[Callable[[], Tensor]], Tensor] = lambda work: work(),
) -> None:
    """Compiles the layers, in place, by a backend of torch.compile, and holds their hidden states of a few
    tokens against those from before.

    run: how `work` is called that runs the model. The programs that training needs are made here, as far as a
    few tokens need them: seconds on a CPU, minutes for a large model. Raises ModelError if the compiler
    fails, or its programs differ by more than rounding.
    """
    rng = np.random.default_rng(0)
    vocab_size = model.config.get_text_config().vocab_size
    layout = plan.choose_layout(max(LENGTHS))
    rows = [rng.integers(0, vocab_size, length) for length in LENGTHS[: 1 if layout == "single" else 2]]
    masks = [np.arange(len(row)) > 0 for row in rows]
    (micro_batch,) = make_micro_batches(
        rows, masks, micro_batch_tokens=sum(LENGTHS) + 2, share_prefix=True, padding_free=layout == "packed"
    )

    def compute_states() -> Tensor:
        found = compute_micro_batch_states(model, micro_batch, plan=plan, autocast_dtype=autocast_dtype)
        return found.detach()

    with quiet_transformers():
        expected = run(compute_states)
        compile_layers(model, backend=backend)
        try:
            found = run(compute_states)
        except Exception as error:  # whatever a compiler raises
            lines = (str(error).strip() or "no message").splitlines()
            raise ModelError(  # torch's own words, and the compiler's
                f"model.compile=true, but torch.compile fails on the layers of {type(model).__name__}"
                f" ({type(error).__name__}: {' '.join(lines[:2])}); it needs a C++ compiler (g++), and Triton"
                " on GPUs; or set model.compile=false"
            ) from error
    worst = float((widen(found - expected) @ widen(make_probing_directions(expected)).T).abs().max())
    allowed = HALF_TOLERANCE if (autocast_dtype or model.dtype).itemsize < 4 else FLOAT_TOLERANCE
    if not worst <= allowed:
        raise ModelError(
            f"model.compile=true, but the compiled layers of {type(model).__name__} differ from the model's"
            f" by {worst:.1e} of their hidden states' size on a probe; the limit is {allowed:g}; set"
            " model.compile=false"
        )
