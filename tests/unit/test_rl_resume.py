"""Runs of RL on a model under a KL limit and a KL controller. tests/e2e/test_rl_changes.py stops and resumes
one.
"""

import tomllib
from unittest.mock import AsyncMock

import pytest

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.schema import RLTrainingConfig
from rollouts.config.tables import OptimConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import ConfigError
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.loops.algorithm import count_updates
from rollouts.loops.rl import run_rl_training
from rollouts.models.load import resolve_model
from rollouts.reference.score import open_frozen_reference
from rollouts.testing.fakes import open_fake_backend
from rollouts.testing.torch_contracts import assert_weights_equal
from rollouts.types import SamplingParams
from tests.support.plain_backend import open_engine_of
from tests.support.text_tables import cases
from tests.unit.manager_runs import chat_generate
from tests.unit.test_loops import MemoryLogger

CONFIG = RLTrainingConfig.model_validate(
    tomllib.loads("""
steps = 6
kl_coef = 0.1
kl_control = "proportional(target=0.05, horizon=50)"
updates_per_batch = 2
minibatches = 2
data = [{ kind = "jsonl", path = "unused.jsonl" }]
rollout = { num_prompts = 3, samples_per_prompt = 3, max_new_tokens = 6 }
optim = { lr = 1e-2, schedule = "cosine" }
changes = [{ from_step = 4, loss = "gspo", normalise_by = "sequences", advantage = "centred" }]
""")
)


async def reward_low_bytes(sample):
    return float((sample.tokens[sample.loss_mask] < 128).mean())


async def train(backend, engine, config, **options):
    """The rows of the steps."""
    buffer = DataBuffer([{"prompt": f"prompt {number}"} for number in range(7)], seed=5)
    manager = AsyncRolloutManager(
        buffer, engine, generate=chat_generate, config=config.rollout, reward=reward_low_bytes, seed=5,
        sampling=SamplingParams(max_new_tokens=6, stop_token_ids=(257,)),
        policy_version=lambda: backend.weight_version,
    )  # fmt: skip
    return await run_rl_training(
        backend, buffer, manager, [engine], config, MemoryLogger(), seed=5, **options
    )


async def run(model, config):
    """The rows of the steps, and the weights after them."""
    options = {"threads": 1, "autocast": "off", "total_steps": config.steps * count_updates(config)}
    async with (
        open_pytorch_backend(model, optim=config.optim, deterministic=True, **options) as backend,
        open_frozen_reference(model, device_thread=backend.device_thread) as reference,
        open_engine_of(backend, deterministic=True) as engine,
    ):
        sync = AsyncMock(return_value={})
        rows = await train(backend, engine, config, reference=reference, sync_weights=sync)
        return rows, await backend.get_weights()


@cases("""
lr   | limit | trained_lr
10.0 | 0.1   | 0.0
0.01 | 9.0   | 0.01
""")
async def test_updates_beyond_the_kl_limit_change_no_weight_and_the_run_goes_on(
    lr: float, limit: float, trained_lr: float
):
    """A rate of 10 wrecks the model at once: all is undone, and the weights end as with a rate of 0. What no
    update exceeds changes no bit.
    """
    model, found = resolve_model("tiny:byte", seed=1), []
    for rate, kl_limit in ((lr, limit), (trained_lr, 0.0)):
        changes = {"steps": 3, "kl_limit": kl_limit, "optim": OptimConfig.model_construct(lr=rate)}
        found.append(await run(model, CONFIG.model_copy(update=changes)))
    (rows, weights), (_, expected) = found
    assert_weights_equal(weights, expected)
    undone = lr > 1
    found = [(row["optim/undone"], row["optim/updates"], row["kl/update"] > limit) for row in rows]
    assert found == [(undone, 4 - 3 * undone, undone)] * 3


async def test_a_resumed_run_under_a_controller_must_be_given_its_coefficient():
    said = r"rl\.kl_control='proportional.*' after 3 steps needs the coefficient it had come to; pass state="
    options = {"sync_weights": None, "completed_steps": 3}
    async with open_fake_backend() as backend:
        with pytest.raises(ConfigError, match=said):
            await run_rl_training(backend, None, None, [], CONFIG, MemoryLogger(), **options)
