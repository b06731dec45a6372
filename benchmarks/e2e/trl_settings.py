"""GRPOTrainer's settings where they must be the same as ours."""

from typing import Any


def make_common_settings(
    *, lr: float, max_grad_norm: float, clip: float, samples: int, rows: int
) -> dict[str, Any]:
    """Arguments of GRPOConfig: float32 on the CPU, a constant rate, no KL, one update per batch of `rows`,
    the loss's mean over all its tokens.
    """
    return {
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "tf32": None,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": max_grad_norm,
        "beta": 0.0,
        "epsilon": clip,
        "num_iterations": 1,
        "num_generations": samples,
        "generation_batch_size": rows,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 0,
        "report_to": "none",
        "logging_steps": 10**6,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_completions": False,
        "dataloader_num_workers": 0,
    }
