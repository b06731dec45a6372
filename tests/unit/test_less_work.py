"""Less work, the same gradient: packing, shared prefixes, the fused head and skipping against one plain
forward for each row.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from rollouts.models.forward_plan import plan_forward
from rollouts.models.log_probs import ForwardPlan
from rollouts.types import LossSpec, RolloutBatch
from tests.support.plain_backend import compute_plain_loss, load_tiny, open_backend, take_gradients
from tests.support.text_tables import cases
from tests.unit.test_local_engine import make_model

TOLERANCE = 1e-4  # ‖a − b‖ / ‖b‖ of each parameter's gradient
WINDOW = 24  # tokens, shorter than the rows
SPECS = {
    "clip": LossSpec("ppo_clip"),
    "kl": LossSpec("ppo_clip", params={"kl_coef": 0.1}),
    "entropy": LossSpec("ppo_clip", params={"entropy_coef": 0.05}),
}
SWITCHES = ("packing", "sharing", "fused_head", "skipping")


def load(kind: str) -> Any:
    if kind != "windowed":
        return load_tiny(kind)
    sizes = {"vocab_size": 259, "max_position_embeddings": 512, "initializer_range": 0.02}
    return make_model("Mistral", sliding_window=WINDOW, **sizes)


def make_batch() -> RolloutBatch:
    """Two groups of unlike prompts, the third row of each with a beginning of its answer in common with the
    first, and one group without an advantage.
    """
    rng = np.random.default_rng(0)
    tokens, masks, advantages = [], [], []
    for prompt, answers, scale in ((150, (40, 9, 35), 1.0), (7, (12, 5, 30), 1.0), (20, (6, 8), 0.0)):
        start = rng.integers(0, 250, prompt)
        first = rng.integers(0, 250, answers[0])
        for number, length in enumerate(answers):
            answer = rng.integers(0, 250, length) if number else first
            if number == 2:
                answer[:4] = first[:4]
            tokens.append(np.concatenate([start, answer]))
            masks.append(np.arange(prompt + length) >= prompt)
            advantages.append(np.where(masks[-1], scale * rng.standard_normal(), 0.0).astype(np.float32))

    def draw() -> tuple[Any, ...]:
        return tuple(
            np.where(mask, -5.5 + 0.3 * rng.standard_normal(len(mask)), 0.0).astype(np.float32)
            for mask in masks
        )

    return RolloutBatch(
        tokens=tuple(tokens),
        loss_masks=tuple(masks),
        advantages=tuple(advantages),
        old_log_probs=draw(),
        ref_log_probs=draw(),
        temperature=1.2,
    )


def choose_plan(model, on: Collection[str]) -> ForwardPlan:
    """The model's own, or without what is not switched on: then rows are computed alone, or their logits at
    every position.
    """
    plan = plan_forward(model)
    if not {"packing", "sharing"} & {*on}:
        plan = plan._replace(layout="single")
    return plan if "fused_head" in on else plan._replace(head="whole")


async def check_gradients(kind: str, loss: str, *on: str):
    """With these switches they are those of each row by itself."""
    model, plain, batch, spec = load(kind), load(kind), make_batch(), SPECS[loss]
    compute_plain_loss(plain, batch, spec)
    options = {"share_prefix": "sharing" in on, "skip_zero_advantage": "skipping" in on}
    async with open_backend(model, plan=choose_plan(model, on), **options) as backend:
        await backend.forward_backward(batch, spec)
        statistics = backend.statistics()
    wanted = "packed" if {"packing", "sharing"} & {*on} else "single"
    assert statistics[f"batches_as_{wanted}"] == 1
    assert statistics["skipped_rows"] == (2 if "skipping" in on and loss == "clip" else 0)
    found = take_gradients(model)
    for name, gradient in take_gradients(plain).items():
        assert float((found[name] - gradient).norm()) <= TOLERANCE * float(gradient.norm()), name


@pytest.mark.parametrize("loss", SPECS)
@cases("kind: llama qwen3 windowed")
async def test_all_switches_together_give_the_plain_gradient(kind, loss):
    await check_gradients(kind, loss, *SWITCHES)


@pytest.mark.parametrize("switch", [*SWITCHES, None])
@cases("kind: llama qwen3 windowed")
async def test_each_switch_alone_gives_the_plain_gradient(kind, switch: str | None):
    await check_gradients(kind, "clip", *([switch] if switch else []))
