# %% [markdown]
# # GRPO in a page
#
# Group-relative policy optimisation on a tiny random model, from plain functions: no event loop, no engine, no config. A CPU takes well
# under a minute. Then the same loop with another generator, reward, advantage and loss, one line each.

# %%
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from rollouts.advantages import broadcast_advantages, compute_group_advantages
from rollouts.config.schema import OptimConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.filters import check_reward_nonzero_std
from rollouts.generation.rollouts import append_completion, generate_rollout_batches, make_sync_chat_generate
from rollouts.losses import LOSSES, LossFn
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.padded import make_loss_inputs
from rollouts.models.sampling import sample_completions
from rollouts.types import GenerateRequest, Sample, SamplingParams

torch.manual_seed(0)

# %% [markdown]
# ## The task
#
# A prompt asks for digits. The reward is the share of the response's tokens that are digits. The model is random and its tokens are bytes, so
# it starts at about 10 of 259.

# %%
PROMPTS = [{"prompt": f"Write {count} digits."} for count in range(2, 10)]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0)


def reward_digits(sample: Sample) -> float:
    return sum(character in "0123456789" for character in sample.response) / sample.response_length


# %% [markdown]
# ## The loop
#
# Every stage is an argument. A batch has 4 prompts with 8 samples each, ragged numpy arrays; `make_loss_inputs` is one forward pass to padded
# tensors with gradient; a loss answers with a sum and what it sums over.


# %%
def train(
    steps: int,
    *,
    generator: Callable[..., Callable[[list[Sample]], list[Sample]]],
    reward: Callable[[Sample], float],
    advantage: Callable[..., NDArray[np.float32]],
    loss: LossFn,
    lr: float = 3e-3,
) -> list[float]:
    """The mean reward of every step's batch, from the same random weights and the same order of prompts each time."""
    directory = resolve_model("tiny:byte")
    model, tokenizer = load_hf_model(directory), load_tokenizer(directory)
    optimizer = create_adamw_optimizer(model, OptimConfig(lr=lr))
    batches = generate_rollout_batches(
        DataBuffer(PROMPTS, seed=0),
        generator(model, tokenizer),
        num_prompts=4,
        samples_per_prompt=8,
        reward_fn=reward,
        filter_fn=check_reward_nonzero_std,  # equal rewards teach nothing: draw another prompt
        temperature=SAMPLING.temperature,
        max_attempts=50,
    )
    rewards: list[float] = []
    for _ in range(steps):
        batch = next(batches)
        advantages = advantage(batch.rewards, batch.group_indices)
        batch = replace(batch, advantages=broadcast_advantages(advantages, batch.loss_masks))
        total, count, _ = loss(make_loss_inputs(model, batch))
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert batch.rewards is not None
        rewards.append(float(batch.rewards.mean()))
    return rewards


def report(name: str, rewards: list[float]) -> None:
    fifths = np.array_split(rewards, 5)
    print(f"{name:32s} mean reward by fifth of the run: {'  '.join(f'{part.mean():.2f}' for part in fifths)}")


# %% [markdown]
# ## GRPO
#
# The generator answers in the chat template; advantages are (r − mean) / std within a group; the loss is PPO's clipped ratio against the log-probs
# at which the tokens were sampled.


# %%
def chat(model, tokenizer):
    return make_sync_chat_generate(partial(sample_completions, model, seed=0), tokenizer, SAMPLING)


GRPO = {"generator": chat, "reward": reward_digits, "advantage": partial(compute_group_advantages, kind="grpo"), "loss": LOSSES["ppo_clip"]}
grpo = train(40, **GRPO)
report("GRPO", grpo)

# %% [markdown]
# ## Swapping a stage is passing another function
#
# **Advantage and loss**: RLOO's leave-one-out baseline with plain REINFORCE.

# %%
rloo = train(40, **(GRPO | {"advantage": partial(compute_group_advantages, kind="rloo"), "loss": LOSSES["reinforce"]}))
report("RLOO + REINFORCE", rloo)


# %% [markdown]
# **Reward**: anything that looks at a sample. A mapping's named parts are added up.


# %%
def reward_vowels(sample: Sample) -> dict[str, float]:
    count = max(sample.response_length, 1)
    return {name: sum(character in letters for character in sample.response) / count for name, letters in (("front", "ei"), ("back", "aou"))}


vowels = train(40, **(GRPO | {"reward": reward_vowels}))
report("GRPO for vowels", vowels)


# %% [markdown]
# **Generator**: a function from pending samples to finished ones. This one leaves the chat template out and tokenizes the bare prompt.


# %%
def bare(model, tokenizer):
    def generate(samples: list[Sample]) -> list[Sample]:
        requests = [
            GenerateRequest(request_id=sample.id, prompt_ids=np.asarray(tokenizer.encode(sample.prompt)), sampling=SAMPLING) for sample in samples
        ]
        completions = sample_completions(model, requests, seed=0)
        return [append_completion(*row, tokenizer) for row in zip(samples, (request.prompt_ids for request in requests), completions, strict=True)]

    return generate


bare_prompt = train(40, **(GRPO | {"generator": bare}))
report("GRPO without the chat template", bare_prompt)


# %% [markdown]
# **Loss**: any function of `LossInputs` that answers with a sum, a count and metrics. This one takes part of the entropy off.


# %%
def own_loss(inputs):
    from rollouts.losses import LossOutput

    kept = torch.where(inputs.mask, -inputs.advantages * inputs.log_probs, 0.0)
    return LossOutput(kept.sum(), float(inputs.mask.sum()), {})


own = train(40, **(GRPO | {"loss": own_loss}))
report("GRPO with a loss of one's own", own)

# %% [markdown]
# ## Did it learn?

# %%
for name, rewards in (("grpo", grpo), ("rloo", rloo), ("vowels", vowels), ("bare prompt", bare_prompt), ("own loss", own)):
    first, last = float(np.mean(rewards[:4])), float(np.mean(rewards[-4:]))
    print(name, round(first,3), round(last,3))
