"""Weights of a frozen model in 8 or 4 bits, and what that does to a KL estimate: measured, not assumed.

    16bit  every matrix as bfloat16: of a model that adapters train
    8bit   every matrix: blocks of 64 along a row, signed, a float32 scale each: 8.5 bits a weight
    4bit   matrices between the embeddings: blocks of 32, unsigned, a float32 scale and a zero point each:
           5.25 bits a weight; embedding and head as in 8bit, for they decide the logits

Codes are computed by torchao; the model keeps them instead of the matrix, which is made again, in float32,
each time that a layer runs. So a forward pass computes in float32, needs one layer's matrix at a time beside
the codes, and runs on a CPU and on a GPU alike. Vectors (norms, biases), short rows (convolutions, states of
a state space model) and routers of mixtures stay as they are.
"""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, DataError, ModelError
from rollouts.models.directories import list_tensors
from rollouts.models.limits import find_context_limit
from rollouts.models.sampling import sample_completions
from rollouts.types import Fields, FloatRows, GenerateRequest, Numbers, RolloutBatch, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bits = Literal[16, 8, 4]
BLOCK = {8: 64, 4: 32}  # weights of a row that share a scale
# by bits: torchao's name for signed codes around 0 or for codes with a zero point; type, lowest, highest code
CODES = {
    8: ("SYMMETRIC", torch.int8, -127, 127),
    4: ("ASYMMETRIC", torch.uint8, 0, 15),
}
LEAST_BLOCK = 8  # below it the scales cost more than the codes save
PACKED = "_packed_"  # before a weight's name: the module that holds its codes
BUFFER_BYTES = 64 * 1024  # allowed for what a model makes itself: rotary frequencies, mostly
PROBE_ROWS, PROBE_TOKENS = 8, 32
ENDS = ("embed", "wte", "lm_head", "output.weight")  # parts of the names of embeddings and heads
ROUTERS = (".gate.weight", ".router.weight")


# --- codes --------------------------------------------------------------------------------------------------


class PackedWeight(nn.Module):
    """One weight [..., columns] as integer codes. Its buffers move with the model that it is part of."""

    codes: Tensor  # [..., blocks, block] int8, or half as many uint8, the first of two in the low half
    scale: Tensor | None  # [..., blocks, 1] float32; None: the codes are the bits of bfloat16, [..., columns]
    zero: Tensor | None  # [..., blocks, 1] uint8, of 4 bits

    def __init__(self, weight: Tensor, bits: Bits) -> None:
        """Raises ConfigError if torchao is not installed; ModelError for a weight that is not finite."""
        super().__init__()
        shape, packed = weight.shape, Fields.fromkeys(("codes", "scale", "zero"))
        if bits == 16:
            # as integers, so that the model's dtype stays that of what it computes in
            packed["codes"] = weight.detach().bfloat16().view(torch.int16)
        else:
            torchao, (mapping, *kind) = load_torchao(), CODES[bits]
            size = (1, choose_block(shape[-1], bits))
            rows = weight.detach().float().reshape(-1, size[1])
            if not torch.isfinite(rows).all():
                raise ModelError(
                    "a weight of the reference model is not finite; copy the model directory again"
                )
            scale, zero = torchao.choose_qparams_affine(
                rows,
                torchao.MappingType[mapping],
                size,
                *kind,
                eps=torch.finfo(torch.float32).tiny,  # a block of zeros has a scale all the same
                scale_dtype=torch.float32,
            )
            codes = torchao.quantize_affine(rows, size, scale, zero, *kind)
            packed |= {"codes": codes, "scale": scale}
            if bits == 4:
                packed |= {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "zero": zero.to(torch.uint8)}
            shape = (*shape[:-1], shape[-1] // size[1], -1)
        # parameters, which FSDP divides among ranks as it does the weight
        for name, values in packed.items():
            made = None if values is None else nn.Parameter(values.reshape(shape), requires_grad=False)
            self.register_parameter(name, made)

    def unpack(self, rows: Any = slice(None)) -> Tensor:
        """The weight, or these rows of it, float32: (code − zero) · scale."""
        codes = self.codes[rows]
        if self.scale is None:
            return codes.view(torch.bfloat16).float()
        if self.zero is None:
            wide = codes.float()
        else:
            wide = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float().sub_(self.zero[rows])
        return wide.mul_(self.scale[rows]).flatten(-2)


def load_torchao() -> Any:
    """The module torchao.quantization. Raises ConfigError if it is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # importing torchao warns of kernels that are not used here
    try:
        import torchao.quantization  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"weights in 8bit or 4bit need torchao ({error}); install rollouts-rl[reference-quant], or"
            " choose the dtype bfloat16 or float32"
        ) from error
    finally:
        logging.disable(before)
    return torchao.quantization


def choose_block(columns: int, bits: Bits) -> int:
    """Weights of a row that share a scale: 64 or 32, or the largest of their divisors that divides the row,
    or the whole row.
    """
    block = math.gcd(columns, BLOCK[bits])
    return block if block >= LEAST_BLOCK else columns


# --- models -------------------------------------------------------------------------------------------------


def quantize_model(model: "PreTrainedModel", bits: Bits) -> None:
    """Replaces the model's matrices by codes, in place; it has no gradients afterwards and cannot be saved. A
    tied weight stays tied. Codes replace the matrices of linear layers and embeddings, and the stacked ones
    of a mixture's experts.

    Raises ConfigError if torchao is not installed, ModelError for weights that are not finite.
    """
    model.requires_grad_(False)
    ends = {
        getattr(end, "weight", None) for end in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    done = {}
    for module in list(model.modules()):
        for name, weight in list(module._parameters.items()):
            if weight is None:
                continue
            is_matrix = weight.ndim == 2 and isinstance(module, nn.Linear | nn.Embedding)
            if weight not in done and (is_matrix or weight.ndim >= 3) and weight.shape[-1] >= BLOCK[4]:
                rough = bits == 4 and (weight in ends or weight.shape[-1] % 2)
                done[weight] = PackedWeight(weight, 8 if rough else bits)
                # of both modules that have it; its memory goes now, not at the end
                weight.data = weight.data.new_empty(0)
            if weight in done:
                _replace(module, name, done[weight])


class _MultiplyPacked(torch.autograd.Function):
    """A linear layer that keeps its codes for the gradient, not the weight made of them."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, module: Any, bias: Tensor | None) -> Tensor:
        ctx.module = module
        return nn.functional.linear(states, module.weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] @ ctx.module.weight.to(grads[0].dtype), None, None


def _replace(module: nn.Module, name: str, packed: PackedWeight) -> None:
    """`module.name` makes the weight anew whenever it is read."""
    del module._parameters[name]
    module.add_module(PACKED + name, packed)
    changes: Fields = {name: property(lambda self: getattr(self, PACKED + name).unpack())}
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        changes["forward"] = lambda self, states: _MultiplyPacked.apply(states, self, self.bias)
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        changes["forward"] = lambda self, ids: getattr(self, PACKED + name).unpack(ids)
    changed: Any = type(type(module).__name__, (type(module),), changes)
    module.__class__ = changed


def count_bytes_by_headers(path: Path, dtype: str) -> int:
    """Bytes that the weights of the model in a directory will take at most, by the headers of its safetensors
    files alone. `dtype`: a FrozenDtype.

    In 8bit and 4bit a mixture's router is counted as exact and an embedding or head, told by its name, as 8
    bits. Raises ModelError.
    """
    sizes = (math.prod(shape) * _count_bits(name, shape, dtype) / 8 for name, _, shape in list_tensors(path))
    return BUFFER_BYTES + sum(map(math.ceil, sizes))


def _count_bits(name: str, shape: tuple[int, ...], dtype: str) -> float:
    """Bits a weight, its share of scales and zero points included."""
    if dtype == "bfloat16":
        return 16
    if dtype == "float32" or len(shape) < 2 or shape[-1] < BLOCK[4] or name.endswith(ROUTERS):
        return 32
    if dtype == "8bit" or shape[-1] % 2 or any(part in name for part in ENDS):
        return 8 + 32 / choose_block(shape[-1], 8)
    return 4 + 40 / choose_block(shape[-1], 4)


# --- the error ----------------------------------------------------------------------------------------------


def compare_log_probs(approximate: FloatRows, exact: FloatRows, batch: RolloutBatch) -> Numbers:
    """How far log-probs are from the exact ones on the trained tokens of a batch, in nats.

    reference/log_prob_error/mean and /max: of |exact − approximate|, per token. reference/kl_bias: mean(exact
    − approximate), which is what the k1 estimate mean(policy − reference) of KL(policy || reference) is too
    large by. On tokens that the exact model sampled it estimates KL(exact || approximate). Raises DataError
    for a batch that trains no token.
    """
    mask = np.concatenate(batch.loss_masks)
    if not mask.any():
        raise DataError("loss_masks of the probe batch of a quantised reference train no token; set some")
    one, other = (np.concatenate(values)[mask].astype(np.float64) for values in (exact, approximate))
    errors = one - other
    return {
        "reference/kl_bias": float(errors.mean()),
        "reference/log_prob_error/mean": float(np.abs(errors).mean()),
        "reference/log_prob_error/max": float(np.abs(errors).max()),
    }


def sample_probe(model: "PreTrainedModel") -> RolloutBatch:
    """Rows of tokens that the model itself samples at temperature 1 after its start token: what a policy near
    it would say. Deterministic for one model and machine.
    """
    start = model.config.get_text_config().bos_token_id
    prompt = np.asarray([start if isinstance(start, int) else 0])
    limit = find_context_limit(model.config) or PROBE_TOKENS + 1
    sampling = SamplingParams(max_new_tokens=min(PROBE_TOKENS, limit - 1))
    requests = [
        GenerateRequest(request_id=f"probe-{row}", prompt_ids=prompt, sampling=sampling)
        for row in range(PROBE_ROWS)
    ]
    rows = [np.append(prompt, each.token_ids) for each in sample_completions(model, requests)]
    return RolloutBatch(tokens=tuple(rows), loss_masks=tuple(np.arange(len(row)) > 0 for row in rows))
