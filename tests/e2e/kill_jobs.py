"""Runs of the tiny config, so short that they can be killed hundreds of times."""

import shlex

from tests import ROOT
from tests.support.kill_harness import Job

TINY = str(ROOT / "integration_training/configs/tiny.toml")
ROWS = ("reasoning_gym",)
SMALL = """
    --sft.data.size 40 --rl.data.size 20 --eval.data.size 4 --sft.batch_size 4 --rl.rollout.num_prompts 2
    --rl.rollout.samples_per_prompt 2 --rl.rollout.filters [] --rl.eval_every 2
"""


def make_job(name, mode, flags, **options):
    arguments = ("--config", TINY, "--mode", mode, *shlex.split(SMALL + flags))
    return Job(name, arguments, tuple(mode.split("+")), ROWS, **options)


RL_FLAGS = "--rl.steps 5 --output.checkpoint_every 2"
COPIED_FLAGS = f"{RL_FLAGS} --engine.mode copied"
STALE_FLAGS = f"{COPIED_FLAGS} --rl.max_staleness 1 --deterministic false"
SFT = make_job("sft", "sft", "--sft.steps 5 --output.checkpoint_every 1")
RL = make_job("rl", "rl", RL_FLAGS)
BOTH = make_job("sft+rl", "sft+rl", "--sft.steps 3 --rl.steps 4 --output.checkpoint_every 2")
COPIED = make_job("rl, copied weights", "rl", COPIED_FLAGS)
STALE = make_job("rl, held groups", "rl", STALE_FLAGS, exact=False)
SFT_RANKS = Job("sft, two ranks", SFT.arguments, ("sft",), ROWS, ranks=2)
# An entropy term needs every row, so every step has a micro-batch, at which it can be cut.
RL_RANKS = make_job("rl, two ranks", "rl", f"{RL_FLAGS} --rl.loss_params.entropy_coef 0.001", ranks=2)
GAME_FLAGS = """ --rl.rollout.reward '' --rl.rollout.environment integration_training.tasks.guess:Guess
    --rl.rollout.max_turns 3"""
GAME = make_job("rl, a game of several turns", "rl", RL_FLAGS + GAME_FLAGS)
STALE_GAME = make_job("rl, held games", "rl", STALE_FLAGS + GAME_FLAGS, exact=False)
ONLINE_FLAGS = """--sft.steps 3 --sft.data.size 40 --sft.batch_size 4 --rl.steps 7 --rl.data.size 40
    --eval.data.size 6 --rl.rollout.num_prompts 2 --rl.rollout.samples_per_prompt 3"""
ONLINE = Job(
    "online",
    ("--config", TINY.replace("tiny", "tiny_online"), "--mode", "sft+online", *shlex.split(ONLINE_FLAGS)),
    ("sft", "rl"),
    ROWS,
)
JOBS = (SFT, RL, BOTH, COPIED, STALE, SFT_RANKS, RL_RANKS, GAME, STALE_GAME, ONLINE)
