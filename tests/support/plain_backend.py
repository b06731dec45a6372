"""A small model, a backend of one process for it, and its gradients held against those of a plain forward."""

from contextlib import asynccontextmanager

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.losses import LossInputs, resolve_loss
from rollouts.models.export import save_hf_model
from rollouts.models.layers import get_scalar_weight, set_padding_token
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.optim import create_adamw_optimizer
from rollouts.types import LOSS_FIELDS

OPTIM = OptimConfig(lr=1e-2)


def load_tiny(kind):
    """tiny:`kind`, a model of the caller's own."""
    return load_hf_model(resolve_model(f"tiny:{kind}"))


def save_scalar(kind, folder):
    """tiny:`kind` with a random scalar head."""
    causal = resolve_model(f"tiny:{kind}")
    model, tokenizer = load_hf_model(causal, head="scalar"), load_tokenizer(causal)
    set_padding_token(model, tokenizer)
    with torch.no_grad():
        get_scalar_weight(model).normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    save_hf_model(model, folder, tokenizer)
    return folder


def score_row(model, tokens, temperature=1.0, targets=None):
    """Log-prob of each token, or of the target in its place, and entropy before it, [T], 0 for the first: by
    the model's own logits.
    """
    ids = torch.as_tensor(tokens)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    every = (logits / temperature).log_softmax(-1)
    wanted = ids if targets is None else torch.as_tensor(targets)
    found = every.gather(-1, wanted[1:, None])[:, 0], -(every.exp() * every).sum(-1)
    return pad(found[0], (1, 0)), pad(found[1], (1, 0))


def score_completion(model, request, completion):
    """The model's own log-probs of the completion at the request's temperature."""
    ids = np.concatenate([request.prompt_ids, completion.token_ids])
    with torch.no_grad():
        scored, _ = score_row(model, ids, request.sampling.temperature or 1.0)
    return scored[len(request.prompt_ids) :].numpy()


def stack(rows):
    """[B, T] padded with 0."""
    return pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)


def score_plainly(model, batch):
    """Log-probs and entropies [B, T] of a batch whose rows are scored each by itself, 0 outside the mask."""
    pairs = zip(batch.tokens, batch.targets or batch.tokens, strict=True)
    scored = zip(*(score_row(model, row, batch.temperature, wanted) for row, wanted in pairs), strict=True)
    log_probs, entropy = (torch.where(stack(batch.loss_masks), stack(rows), 0.0) for rows in scored)
    return log_probs, entropy


def compute_plain_loss(model, batch, spec):
    """(the loss, its denominator) of a batch whose rows are scored each by itself; leaves the gradients."""
    fields = {
        name: stack(rows) for name in LOSS_FIELDS.values() if (rows := getattr(batch, name)) is not None
    }
    log_probs, entropy = score_plainly(model, batch)
    extras = {name: stack(rows) for name, rows in batch.extras.items()}
    mask = stack(batch.loss_masks)
    inputs = LossInputs(log_probs=log_probs, mask=mask, entropy=entropy, extras=extras, **fields)
    output = resolve_loss(spec.name)(inputs, unit=spec.unit, **spec.params)
    loss = output.sum / output.count
    loss.backward()
    return float(loss.detach()), float(output.count)


@asynccontextmanager
async def open_backend(model, *, optim=OPTIM, total_steps=10, **options):
    async with open_device_thread(name="trainer", torch_threads=1) as device_thread:
        optimizer = create_adamw_optimizer(model, optim)
        options |= {"optim": optim, "total_steps": total_steps}
        yield PyTorchTrainingBackend(model, optimizer, device_thread, **options)


def open_engine_of(backend, mode="shared", **options):
    """The embedded engine on the model of a backend."""
    return open_local_engine(
        backend.model, device_thread=backend.device_thread, mode=mode,
        trainer_version=lambda: backend.weight_version, **options,
    )  # fmt: skip


def take_gradients(model):
    """Zeros where no row reached a parameter."""
    every = model.named_parameters()
    return {name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in every}


def compute_difference(found, wanted):
    """Norm of the difference over the norm of `wanted`, all tensors together."""
    assert found.keys() == wanted.keys()
    pairs = ((found[name].double(), one.double()) for name, one in wanted.items())
    squares = [((one - other).square().sum(), other.square().sum()) for one, other in pairs]
    apart, size = torch.tensor(squares).sum(0).sqrt().tolist()
    return apart / (size or 1.0)


def assert_gradients_close(found, wanted, tolerance=1e-5):
    """To `tolerance` of the norm of all gradients."""
    assert compute_difference(found, wanted) <= tolerance
