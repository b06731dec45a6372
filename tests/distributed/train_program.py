"""Ten steps on fixed rollouts for every case, for tests.distributed.test_fsdp_equivalence.

torchrun … -m tests.distributed.train_program CASES SHARD_SIZE OUT        weights: OUT.<case>.safetensors
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import trio
from safetensors.torch import save_file

from rollouts.config.tables import OptimConfig
from rollouts.models.load import resolve_model
from rollouts.types import LossSpec, RolloutBatch

OPTIM = OptimConfig(lr=1e-3, warmup_steps=3, schedule="linear", weight_decay=0.01, max_grad_norm=1.0)
HALF = 5  # steps before a save
SPECS = {
    "sft": LossSpec("sft"),
    "value": LossSpec("value", {"clip": 0.2}),
    "grpo": LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.01}),
    "entropy": LossSpec(
        "reinforce", {"entropy_coef": 0.1, "correction": "token_tis(cap=1.5)"}, unit="sequence_sums"
    ),
}


def find_model(name):
    """The directory of a model; "gpt2" is a random one that computes in its own precision throughout: most
    others have norms in float32.
    """
    return make_gpt2() if name == "gpt2" else resolve_model(name)


@cache
def make_gpt2():
    import transformers

    from rollouts.models.directories import build_directory_once, choose_model_cache
    from rollouts.models.tokenizers import make_byte_tokenizer

    def write(folder):
        sizes = {"vocab_size": 259, "n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(**sizes, initializer_range=0.1, bos_token_id=256, eos_token_id=257)
            ).save_pretrained(str(folder))
        make_byte_tokenizer().save_pretrained(str(folder))

    path = choose_model_cache(None) / "test-gpt2-1"
    build_directory_once(path, write)
    return path


class Case(NamedTuple):
    """What is trained, and how."""

    model: str
    dtype: Literal["float32", "float64"]
    loss: str
    steps: int = 10
    options: dict[str, Any] = {}  # of the sharded backend alone; never changed
    saves: str = ""  # the directory of a checkpoint after step HALF
    loads: str = ""  # that of one from which it goes on


def backend_options(case):
    """Settings of both backends: a budget that makes several micro-batches of some batches, and one of
    others.
    """
    return {"optim": OPTIM, "total_steps": case.steps, "micro_batch_tokens": 160, "share_prefix": True}


def make_rollouts(step):
    """Groups of uneven size over prompts of uneven length, answers of 1 to 60 tokens; some groups have no
    advantage.
    """
    rng = np.random.default_rng(step)
    rows = []
    for group in range(int(rng.integers(1, 5))):
        prompt = rng.integers(0, 250, 3 + 7 * group)
        for _ in range(int(rng.integers(1, 5))):
            answer = rng.integers(0, 250, int(rng.integers(1, 61)))
            row = np.concatenate([prompt, answer])
            mask = (np.arange(len(row)) >= len(prompt)) & (rng.random(len(row)) < 0.9)
            mask[-1] = True
            values = *rng.normal(-5.6, 0.3, (2, len(row))), 0.0 if group == 1 else rng.normal()
            rows.append((row, mask, *(np.where(mask, one, 0.0).astype(np.float32) for one in values)))
    tokens, masks, log_probs, ref, advantages = zip(*rows, strict=True)
    return RolloutBatch(
        tokens=tokens,
        loss_masks=masks,
        rollout_log_probs=log_probs,
        ref_log_probs=ref,
        advantages=advantages,
        returns=tuple(row / 4 for row in advantages),
        old_values=tuple(row + 6 for row in log_probs),
        temperature=0.9,
    )


async def train(backend, case):
    """What every step said, the sum of the first rollouts' log-probs afterwards, and the weights."""
    losses, norms, metrics = [], [], {}
    if case.loads:
        await backend.load(Path(case.loads))
    for step in range(HALF if case.loads else 0, case.steps):
        forward, optim = backend.forward_backward(make_rollouts(step), SPECS[case.loss]), backend.optim_step()
        result = await forward
        losses.append(result.loss)
        norms.append((await optim).grad_norm)
        metrics = {name: metric.value for name, metric in result.metrics.items()}
        if case.saves and step == HALF - 1:
            await backend.save(Path(case.saves))
    rows = await backend.forward(make_rollouts(0))
    found = {"losses": losses, "norms": norms, "metrics": metrics, "rows": [float(row.sum()) for row in rows]}
    return found, await backend.get_weights()


async def drive(channel, ranks):
    from rollouts.backends.fsdp import open_fsdp_backend

    found = []
    for number, fields in enumerate(json.loads(sys.argv[1])):
        case = Case(*fields)
        # in a thread: to make one takes seconds, in which this rank must be heard
        path = await trio.to_thread.run_sync(find_model, case.model)
        options = {**backend_options(case), "autocast": "off", "threads": 1, **case.options}
        async with open_fsdp_backend(
            path, channel=channel, ranks=ranks, dtype=case.dtype, **options
        ) as backend:
            said, weights = await train(backend, case)
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            f"{sys.argv[-1]}.{number}.safetensors",
        )
        found.append(said)
    return found


if __name__ == "__main__":
    from tests.distributed.job import main

    torch.set_num_threads(1)
    assert Path(sys.argv[-1]).parent.is_dir()
    main(drive, shard_size=int(sys.argv[2]))
