"""Runs of the tiny config, so short that they can be killed hundreds of times."""

import shlex
from pathlib import Path

from tests.support.kill_harness import Job

TINY = str(Path(__file__).resolve().parents[2] / "integration_training" / "configs" / "tiny.toml")
SMALL = (
    *("--config", TINY),
    *shlex.split("--sft.data.size 40 --rl.data.size 20 --eval.data.size 4 --sft.batch_size 4"),
    *shlex.split("--rl.rollout.num_prompts 2 --rl.rollout.samples_per_prompt 2 --rl.rollout.filters []"),
    *shlex.split("--rl.eval_every 2"),
)
ROWS = ("reasoning_gym",)
SFT = Job(
    "sft", (*SMALL, "--mode", "sft", "--sft.steps", "5", "--output.checkpoint_every", "1"), ("sft",), ROWS
)
RL = Job("rl", (*SMALL, "--mode", "rl", "--rl.steps", "5", "--output.checkpoint_every", "2"), ("rl",), ROWS)
BOTH = Job(
    "sft+rl",
    (*SMALL, "--mode", "sft+rl", "--sft.steps", "3", "--rl.steps", "4", "--output.checkpoint_every", "2"),
    ("sft", "rl"),
    ROWS,
)
COPIED = Job("rl, copied weights", (*RL.arguments, "--engine.mode", "copied"), ("rl",), ROWS)
STALE = Job(
    "rl, held groups",
    (*COPIED.arguments, "--rl.max_staleness", "1", "--deterministic", "false"),
    ("rl",),
    ROWS,
    exact=False,
)
SFT_RANKS = Job("sft, two ranks", SFT.arguments, ("sft",), ROWS, ranks=2)
# An entropy term needs every row, so every step has a micro-batch, at which it can be cut.
RL_RANKS = Job(
    "rl, two ranks", (*RL.arguments, "--rl.loss_params.entropy_coef", "0.001"), ("rl",), ROWS, ranks=2
)
JOBS = (SFT, RL, BOTH, COPIED, STALE, SFT_RANKS, RL_RANKS)
