# %% [markdown]
# # PPO with GAE
#
# A policy, a critic that values every token, and a frozen reference whose KL is paid for token by token:
# InstructGPT's PPO from plain functions, on a tiny random model. A CPU needs well under a minute.

# %%
import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rollouts.advantages import (
    compute_explained_variance,
    compute_gae,
    compute_token_rewards,
    whiten_advantages,
)
from rollouts.config.tables import OptimConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.generation.rollouts import generate_rollout_batches, make_sync_chat_generate
from rollouts.losses import LOSSES, LossOutput
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.padded import make_loss_inputs
from rollouts.models.sampling import sample_completions
from rollouts.reference.score import score_batch
from rollouts.types import RolloutBatch, Sample, SamplingParams

# %% [markdown]
# ## The task
#
# As in GRPO in a page: the share of the response's 8 tokens that are digits. PPO compares a response with
# what its critic expected of it, so one sample of a prompt is enough.

# %%
STEPS, GAMMA, LAM, KL_COEF, EPOCHS = 32, 1.0, 0.95, 0.01, 2
PROMPTS = [{"prompt": f"Write {count} digits."} for count in range(2, 10)]
DIRECTORY = resolve_model("tiny:byte")


def reward_digits(sample: Sample) -> float:
    return sum(character in "0123456789" for character in sample.response) / sample.response_length


# %% [markdown]
# ## Three models
#
# The critic is the same model with one number in place of its vocabulary, 0 everywhere at first.
# `score_batch` asks the reference for log-probs and the critic for values, without gradient;
# `make_loss_inputs` asks the policy and the critic with it.

# %%
policy = load_hf_model(DIRECTORY)
critic = load_hf_model(DIRECTORY, head="scalar")
reference = copy.deepcopy(policy).requires_grad_(False)
policy_optimizer = create_adamw_optimizer(policy, OptimConfig(lr=3e-3))
critic_optimizer = create_adamw_optimizer(critic, OptimConfig(lr=1e-2))


# %% [markdown]
# ## What a batch is missing
#
# Each token's reward is −β·(log π − log ref), and the last one's also the sample's. GAE spreads the surprise
# δ_t = r_t + γ·V_{t+1} − V_t over the tokens before it; the returns are what the critic is to say next time.


# %%
def add_advantages(batch: RolloutBatch) -> RolloutBatch:
    masks, values = batch.loss_masks, score_batch(critic, batch)
    assert batch.rewards is not None and batch.rollout_log_probs is not None
    token_rewards = compute_token_rewards(
        batch.rewards, batch.rollout_log_probs, score_batch(reference, batch), masks, KL_COEF
    )
    advantages, returns = compute_gae(token_rewards, values, masks, gamma=GAMMA, lam=LAM)
    return replace(batch, advantages=whiten_advantages(advantages, masks), returns=returns, old_values=values)


def update(model: Any, optimizer: torch.optim.Optimizer, loss: LossOutput) -> None:
    optimizer.zero_grad()
    (loss.sum / loss.count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# %% [markdown]
# ## The loop
#
# The ratio is against the log-probs at which the tokens were sampled, so it moves in the second epoch, and
# the clips of policy and critic hold both near where they were.

# %%
batches = generate_rollout_batches(
    DataBuffer(PROMPTS, seed=0),
    make_sync_chat_generate(
        partial(sample_completions, policy, seed=0),
        load_tokenizer(DIRECTORY),
        SamplingParams(max_new_tokens=8),
    ),
    num_prompts=16,
    samples_per_prompt=1,
    reward_fn=reward_digits,
)
rewards: list[float] = []
explained: list[float] = []
for _, drawn in zip(range(STEPS), batches, strict=False):
    batch = add_advantages(drawn)
    for _ in range(EPOCHS):
        update(policy, policy_optimizer, LOSSES["ppo_clip"](make_loss_inputs(policy, batch)))
        update(critic, critic_optimizer, LOSSES["value"](make_loss_inputs(critic, batch), clip=0.2))
    assert batch.old_values is not None and batch.returns is not None and batch.rewards is not None
    share = compute_explained_variance(batch.old_values, batch.returns, batch.loss_masks)
    rewards.append(float(batch.rewards.mean()))
    explained.append(0.0 if share is None else share)

# %% [markdown]
# ## Did they learn?
#
# Random bytes score 10/259 = 0.04. A critic that explains nothing of the returns' variance has 0.

# %%
first, last = float(np.mean(rewards[:4])), float(np.mean(rewards[-4:]))
print(f"policy: mean reward {first:.2f} -> {last:.2f}")
print(f"critic: explained variance {np.mean(explained[:4]):.2f} -> {max(explained):.2f} at its best")
assert first < 0.15, f"the first batches score {first:.2f}; a random model does not"
assert last > 0.5, f"the last batches score {last:.2f}, not above 0.5"
assert max(explained) > 0.2, f"the critic explains {max(explained):.2f} of the variance at its best"
