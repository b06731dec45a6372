"""The optimizer and its learning rate."""

import torch

from rollouts.config.tables import OptimConfig
from rollouts.models.lora import Adapter, list_trained
from rollouts.schedules import interpolate_cosine, interpolate_linear


def create_adamw_optimizer(trained: torch.nn.Module | Adapter, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over every parameter that trains, of a model or an adapter, tied ones once. Weight decay
    only on matrices (embeddings included), not norms or biases.

    Works on CPU and CUDA. Two parameter groups, matrices first; a group is there even when empty, so that
    state dicts always fit. Raises ValueError if nothing trains or a beta is 1.
    """
    parameters = [one for one in list_trained(trained).values() if one.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter with requires_grad=True; there is nothing to optimize")
    groups = [
        {"params": [one for one in parameters if (one.ndim >= 2) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), eps=1e-8, fused=True)


def compute_lr(step: int, total_steps: int, config: OptimConfig) -> float:
    """The learning rate of optimizer step number `step`, counted from 0.

    Rises as lr·(step + 1)/warmup_steps; from its peak it stays, or falls as a line or half a cosine to
    0 at step total_steps − 1 and stays there. Without warm-up the peak is step 0. A warm-up
    longer than the run is never finished.
    """
    assert step >= 0, step
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    peak = max(config.warmup_steps, 1)  # counted from 1, as schedules do
    if config.schedule == "constant" or total_steps <= peak:
        return config.lr
    fall = interpolate_linear if config.schedule == "linear" else interpolate_cosine
    return fall(step + 1, first=config.lr, last=0.0, begin=peak, end=total_steps)
