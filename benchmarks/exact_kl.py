"""What the exact KL to the reference costs a step of RL beside the sampled one, k3. CPU.

    python -m benchmarks.exact_kl [--rounds 4] [--threads 2] [--quick]

SmolLM2-135M in float32, policy and frozen reference in one process; the batch of benchmarks.train_step: 4
groups of 8 answers of 40 tokens on average, prompts of 64, random tokens. Three sides take turns A B C C B A,
each a whole training part of a step on the same weights:

    plain   forward_backward of ppo_clip without a KL term, optim_step
    k3      the reference's log-probs, forward_backward with kl_estimator = "k3", optim_step
    exact   forward_backward with kl_estimator = "exact", which runs the reference itself, optim_step

Ratios are of the CPU time of all threads, which other load on the machine disturbs less than the clock: the
median of turns that stood side by side.

    share_of_training   (exact − k3) / k3: what the exact KL adds beyond a reference that is asked anyway
    share_of_step       the same of a whole step, of which training is half, as in the demo with its shared
                        engine (TRAINING_SHARE); target <= 0.15
    reference_share     (k3 − plain) / k3: what asking the reference costs
    exact_over_plain    all that the KL costs in the trainer
    kl_difference       of kl/exact and the mean of the full softmax in float64 over the rows of one group, in
                        relation to it; checked before anything is timed

--quick: one round. The last line is JSON; exit status 1 if a target is missed.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import trio

from benchmarks.e2e.step_batch import CLIP, LR, MAX_GRAD_NORM, SAMPLES, make_step_batch, to_rollout_batch
from benchmarks.harness import Turn, compute_ratio, finish, make_parser
from rollouts.backends.open import open_pytorch_backend
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.loops.rl_batch import select_rows
from rollouts.models.load import resolve_model
from rollouts.reference.score import FrozenReference, open_frozen_reference
from rollouts.types import LossSpec, RolloutBatch, metric_values

MODEL = "bundled:smollm2-135m-instruct"
TRAINING_SHARE = 0.5
MOVED = 0.02  # of the policy's weights, relative: as far from the reference as after some training
TARGETS = {"share_of_step": "<= 0.15", "kl_difference": "<= 1e-4"}
CLIPPED = {"clip_low": CLIP, "clip_high": CLIP}
SPECS = {
    "plain": LossSpec("ppo_clip", CLIPPED),
    "k3": LossSpec("ppo_clip", {**CLIPPED, "kl_coef": 0.05, "kl_estimator": "k3"}),
    "exact": LossSpec("ppo_clip", {**CLIPPED, "kl_coef": 0.05, "kl_estimator": "exact"}),
}


async def train(
    backend: PyTorchTrainingBackend, reference: FrozenReference, batch: RolloutBatch, side: str
) -> Turn:
    """One training part of a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    if side == "k3":
        batch = replace(batch, ref_log_probs=await reference.score(batch))
    trained, stepped = backend.forward_backward(batch, SPECS[side]), backend.optim_step()
    result = await trained
    assert result.loss is not None and (await stepped).skipped is None
    return Turn(time.perf_counter() - wall, time.process_time() - cpu)


@torch.no_grad()
def move_weights(model: Any) -> None:
    """Noise on every matrix, of MOVED times its spread."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight += MOVED * weight.std() * torch.randn(weight.shape, generator=generator)


@torch.no_grad()
def compute_slowly(policy: Any, reference: Any, batch: RolloutBatch) -> float:
    """The mean over trained tokens of KL(reference || policy), all logits at once, softmax in float64."""
    found: list[torch.Tensor] = []
    for tokens, mask in zip(batch.tokens, batch.loss_masks, strict=True):
        ids = torch.from_numpy(tokens)[None]
        own, ref = (
            model(input_ids=ids).logits[0, :-1].double().log_softmax(-1) for model in (policy, reference)
        )
        found.append((ref.exp() * (ref - own)).sum(-1)[torch.from_numpy(mask[1:])])
    return float(torch.cat(found).mean())


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    path, turns = resolve_model(MODEL), {side: list[Turn]() for side in SPECS}
    async with (
        open_pytorch_backend(
            path,
            optim=OptimConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM),
            total_steps=10**6,
            autocast="off",
            threads=arguments.threads,
            skip_zero_advantage=False,
        ) as backend,
        open_frozen_reference(path, device_thread=backend.device_thread) as reference,
    ):
        submit = backend.device_thread.submit
        await submit(partial(move_weights, backend.model))
        await backend.compare_with(reference)
        batch = to_rollout_batch(make_step_batch(vocab_size=backend.vocab_size))
        batch = replace(batch, rollout_log_probs=await backend.forward(batch))
        group = select_rows(batch, np.arange(SAMPLES))
        kl = metric_values((await backend.compute_loss(group, SPECS["exact"])).metrics)["kl/exact"]
        slow = await submit(partial(compute_slowly, backend.model, reference.model, group))
        difference = abs(kl - slow) / slow
        print(
            f"KL of one group {kl:.6f} nats a token, {difference:.1e} from all logits in float64", flush=True
        )
        for side in SPECS:  # warms up, makes AdamW's moments
            await train(backend, reference, batch, side)
        for number in range(arguments.rounds):
            for side in (*SPECS, *reversed(SPECS)):
                turns[side].append(await train(backend, reference, batch, side))
            seconds = {side: statistics.median(turn.cpu_s for turn in turns[side]) for side in SPECS}
            print(
                f"round {number}: CPU { ({side: round(one, 2) for side, one in seconds.items()}) }",
                flush=True,
            )
    cpu = {side: [turn.cpu_s for turn in found] for side, found in turns.items()}
    to_k3, to_plain = compute_ratio(cpu["k3"], cpu["exact"]), compute_ratio(cpu["plain"], cpu["exact"])
    print(f"exact / k3: {to_k3}, exact / plain: {to_plain}")
    return {
        "share_of_step": round(TRAINING_SHARE * (to_k3.median - 1), 4),
        "share_of_training": round(to_k3.median - 1, 4),
        "reference_share": round(1 - compute_ratio(cpu["k3"], cpu["plain"]).median, 4),
        "exact_over_plain": round(to_plain.median, 3),
        "kl_difference": float(f"{difference:.2g}"),
        **{f"{side}_s": round(statistics.median(turn.wall_s for turn in turns[side]), 3) for side in SPECS},
        **{f"{side}_cpu_s": round(statistics.median(found), 3) for side, found in cpu.items()},
        "trained_tokens": float(batch.response_lengths.sum()),
    }


def main() -> int:
    parser = make_parser(__doc__, quick="one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="of A B C C B A")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    metrics = trio.run(measure, arguments)
    return finish("exact_kl", peer="the sampled KL, k3", metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
