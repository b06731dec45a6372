"""Less work, the same gradient: packing, shared prefixes, the fused head and skipping against one plain
forward for each row.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from rollouts.losses import LossInputs, resolve_loss
from rollouts.models.forward_plan import plan_forward
from rollouts.models.load import load_hf_model
from rollouts.models.log_probs import ForwardPlan
from rollouts.models.tiny import make_tiny
from rollouts.types import LossSpec, RolloutBatch
from tests.support.plain_backend import open_backend

TOLERANCE = 1e-4  # ‖a − b‖ / ‖b‖ of each parameter's gradient
WINDOW = 24  # tokens, shorter than the rows
SPECS = {
    "clip": LossSpec("ppo_clip"),
    "kl": LossSpec("ppo_clip", params={"kl_coef": 0.1}),
    "entropy": LossSpec("ppo_clip", params={"entropy_coef": 0.05}),
}
SWITCHES = ("packing", "sharing", "fused_head", "skipping")


def make_windowed() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    config = transformers.MistralConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        max_position_embeddings=512,
    )
    return transformers.MistralForCausalLM(config).eval()


def load(kind: str, cache: Path) -> Any:
    if kind == "windowed":
        return make_windowed()
    return load_hf_model(make_tiny(kind, 0, cache))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def make_batch(vocab_size: int = 250) -> RolloutBatch:
    """Two groups of unlike prompts, the third row of each with a beginning of its answer in common with the
    first, and one group without an advantage.
    """
    rng = np.random.default_rng(0)
    tokens, masks, advantages = [], [], []
    for prompt, answers, scale in ((150, (40, 9, 35), 1.0), (7, (12, 5, 30), 1.0), (20, (6, 8), 0.0)):
        start = rng.integers(0, vocab_size, prompt)
        first = rng.integers(0, vocab_size, answers[0])
        for number, length in enumerate(answers):
            answer = rng.integers(0, vocab_size, length)
            answer[: 4 if number == 2 else 0] = first[: 4 if number == 2 else 0]
            tokens.append(first if number == 0 else answer)
            tokens[-1] = np.concatenate([start, tokens[-1]])
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


def compute_plain_gradients(model: Any, batch: RolloutBatch, spec: LossSpec) -> dict[str, Tensor]:
    """Each row by itself through the model's own logits; the whole batch is one loss."""
    shape = len(batch), max(map(len, batch.tokens))
    log_probs, entropy = (
        [torch.zeros(shape[1]) for _ in batch.tokens],
        [torch.zeros(shape[1]) for _ in batch.tokens],
    )
    for row, tokens in enumerate(batch.tokens):
        ids = torch.from_numpy(tokens)
        every = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / batch.temperature).log_softmax(
            -1
        )
        pad = (1, shape[1] - len(ids))
        log_probs[row] = torch.nn.functional.pad(every.gather(-1, ids[1:, None])[:, 0], pad)
        entropy[row] = torch.nn.functional.pad(-(every.exp() * every).sum(-1), pad)
    mask = stack(batch.loss_masks, shape[1])
    inputs = LossInputs(
        log_probs=torch.where(mask, torch.stack(log_probs), 0.0),
        mask=mask,
        entropy=torch.where(mask, torch.stack(entropy), 0.0),
        advantages=stack(batch.advantages or (), shape[1]),
        old_log_probs=stack(batch.old_log_probs or (), shape[1]),
        ref_log_probs=stack(batch.ref_log_probs or (), shape[1]),
    )
    output = resolve_loss(spec.name)(inputs, unit=spec.unit, **spec.params)
    (output.sum / float(mask.sum())).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def stack(rows: Sequence[Any], width: int) -> Tensor:
    return torch.stack(
        [torch.nn.functional.pad(torch.from_numpy(row), (0, width - len(row))) for row in rows]
    )


def choose_plan(model: Any, on: frozenset[str]) -> ForwardPlan:
    """The model's own, or without what is not switched on: then rows are computed alone, or their logits at
    every position.
    """
    plan = plan_forward(model)
    if not {"packing", "sharing"} & on:
        plan = dataclasses.replace(plan, layout="single")
    return plan if "fused_head" in on else dataclasses.replace(plan, head="whole")


async def compute_our_gradients(
    model: Any, batch: RolloutBatch, spec: LossSpec, on: frozenset[str], *, skips: bool
) -> dict[str, Tensor]:
    options = {"share_prefix": "sharing" in on, "skip_zero_advantage": "skipping" in on}
    async with open_backend(model, plan=choose_plan(model, on), **options) as backend:
        await backend.forward_backward(batch, spec)
        statistics = backend.statistics()
    wanted = "packed" if {"packing", "sharing"} & on else "single"
    assert statistics[f"batches_as_{wanted}"] == 1
    assert statistics["skipped_rows"] == (2 if "skipping" in on and skips else 0)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= TOLERANCE * float(gradient.norm()), name


@pytest.mark.parametrize("loss", SPECS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "windowed"])
async def test_all_switches_together_give_the_plain_gradient(kind: str, loss: str, cache: Path):
    wanted = compute_plain_gradients(load(kind, cache), make_batch(), SPECS[loss])
    found = await compute_our_gradients(
        load(kind, cache), make_batch(), SPECS[loss], frozenset(SWITCHES), skips=loss == "clip"
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("switch", [*SWITCHES, None])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "windowed"])
async def test_each_switch_alone_gives_the_plain_gradient(kind: str, switch: str | None, cache: Path):
    wanted = compute_plain_gradients(load(kind, cache), make_batch(), SPECS["clip"])
    found = await compute_our_gradients(
        load(kind, cache), make_batch(), SPECS["clip"], frozenset({switch} if switch else ()), skips=True
    )
    assert_same(found, wanted)
