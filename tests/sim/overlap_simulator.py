"""A whole RL run in virtual time, in which generating, training and updating the engine take given times: how
much of them goes on at once.

    engine    `slots` requests at a time, a token each every token_s; lengths are lognormal; an update freezes
              it for pause_s
    trainer   train_s for a step; hold_s for the copy of its weights
    update  hold_s (the trainer waits) ─► export_s (nobody waits)
        ─► pause_s (the engine is frozen, what is in flight goes on from new weights)

The loop, the manager and its rules are the real ones. Limits: a batch cannot be generated in less than its
tokens · token_s / slots, nor trained in less than train_s + hold_s.
"""

import math
from dataclasses import dataclass

import numpy as np
import trio
import trio.testing

from rollouts.config.schema import RLTrainingConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.loops.rl import run_rl_training
from rollouts.testing.fakes import FakeBackend, ScriptedEngine, fake_uniform
from rollouts.types import (
    Completion,
    SamplingParams,
)
from tests.sim.fakes import NoLog
from tests.support.fake_tokenizer import FakeTokenizer

TOKEN_S = 0.02
SLOTS = 128
NUM_PROMPTS, SAMPLES_PER_PROMPT = 16, 8
OVER_SAMPLING = (
    1.1  # so that a slot that becomes free has a request at once, though groups are launched whole
)
MEAN_TOKENS, SIGMA = 400, 0.8  # of a response's length
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSetting:
    """One run. Times are virtual seconds."""

    max_staleness: int
    train_s: float
    hold_s: float
    export_s: float
    pause_s: float
    steps: int
    # steps at the beginning that do not count: the first batches are shorter, for their longest answers are
    # on the way
    warm_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReport:
    """What came of one run, after the warm-up and before the last step."""

    step_s: float  # mean
    generate_limit_s: float  # mean tokens of a delivered batch · token_s / slots
    train_limit_s: float  # train_s + hold_s
    lag_max: int
    stale: float  # groups dropped as too old
    mixed: int  # samples with tokens of several versions
    longest_s: float  # of any response, undisturbed


class SlotEngine(ScriptedEngine):
    """Decodes `slots` requests at once; the others wait in order of arrival. Frozen requests keep their
    slots.
    """

    def __init__(self):
        super().__init__(context_length=10**9)
        self.longest_tokens = 0
        self._free = trio.CapacityLimiter(SLOTS)
        self._moving = trio.Event()  # set while it decodes
        self._moving.set()
        self._disturbed = trio.Event()  # set and replaced when everything stops decoding
        self._aborts = 0

    def choose_length(self, sample_id):
        """Tokens of the whole response: lognormal, by sample."""
        normal = np.random.default_rng([SEED, *sample_id.encode()]).standard_normal()
        return max(1, round(MEAN_TOKENS * math.exp(SIGMA * normal - SIGMA**2 / 2)))

    async def generate(self, request):
        sample_id, *done = request.request_id.split("@")
        length = self.choose_length(sample_id)
        self.longest_tokens = max(self.longest_tokens, length)
        versions = []
        left, aborts = length - sum(map(int, done)), self._aborts
        while len(versions) < left and self._aborts == aborts:
            async with self._free:
                await self._decode(versions, left, aborts)
        count = len(versions)
        return Completion(
            request_id=request.request_id,
            token_ids=np.zeros(count, np.int64),
            log_probs=np.zeros(count, np.float32),
            weight_versions=np.asarray(versions, np.int64),
            finish_reason="stop" if count == left else "abort",
        )

    async def _decode(self, versions, left, aborts):
        while len(versions) < left and self._aborts == aborts:
            await self._moving.wait()
            began, version, most = trio.current_time(), self._version, left - len(versions)
            with trio.move_on_after(most * TOKEN_S) as scope:
                await self._disturbed.wait()
            decoded = int((trio.current_time() - began) / TOKEN_S + 1e-6)
            versions += [version] * (most if scope.cancelled_caught else min(decoded, most))

    def _disturb(self):
        disturbed, self._disturbed = self._disturbed, trio.Event()
        disturbed.set()

    async def pause(self, mode):
        assert mode == "keep", mode
        self._moving = trio.Event()
        self._disturb()
        await trio.lowlevel.checkpoint()

    async def resume(self):
        self._moving.set()
        await trio.lowlevel.checkpoint()

    async def abort_all(self):
        self._aborts += 1
        self._disturb()
        await trio.lowlevel.checkpoint()


class SlowBackend(FakeBackend):
    """A FakeBackend of which only forward_backward takes time."""

    def __init__(self, train_s):
        super().__init__(0.0, 0.0, {})
        self._train_s = train_s

    def forward_backward(self, batch, loss):
        future = super().forward_backward(batch, loss)
        self._free_at += self._train_s
        future.done_at = self._free_at
        return future


class _StepLog(NoLog):
    """When each step was done, and what was in it."""

    def __init__(self):
        self.times: list[float] = []
        self.tokens: list[float] = []
        self.mixed = 0

    async def log_step(self, *row, **more):
        self.times.append(trio.current_time())
        await trio.lowlevel.checkpoint()

    async def log_samples(self, stage, step, policy_version, samples):
        sampled = [sample.weight_versions[sample.loss_mask].tolist() for sample in samples]
        self.tokens += [float(sum(map(len, sampled)))] if sampled else []
        self.mixed += sum(len(set(versions)) > 1 for versions in sampled)
        await trio.lowlevel.checkpoint()


class _SilentTokenizer(FakeTokenizer):
    def decode(self, token_ids, *, skip_special_tokens=True):
        return ""


def run_overlap(setting):
    """Runs a setting. Deterministic but for the order in which trio runs what is due at one moment."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    log, engine, statistics, lags = trio.run(_run, setting, clock=clock)
    first, last = setting.warm_up, setting.steps - 1  # the last step waits for its own update
    return OverlapReport(
        step_s=(log.times[last - 1] - log.times[first - 1]) / (last - first),
        generate_limit_s=float(np.mean(log.tokens[first:])) * TOKEN_S / SLOTS,
        train_limit_s=setting.train_s + setting.hold_s,
        lag_max=int(max(lags)),
        stale=statistics.get("dropped/stale", 0.0),
        mixed=log.mixed,
        longest_s=engine.longest_tokens * TOKEN_S,
    )


async def _run(setting):
    config = RLTrainingConfig.model_validate(
        {
            "data": {"kind": "jsonl", "path": "unused.jsonl"},
            "steps": setting.steps,
            "max_staleness": setting.max_staleness,
            "rollout": {
                "num_prompts": NUM_PROMPTS,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "over_sampling": OVER_SAMPLING if setting.max_staleness else 1.0,
                "reward_timeout_s": 1e6,
            },
        }
    )
    backend, engine, log = SlowBackend(setting.train_s), SlotEngine(), _StepLog()
    buffer = DataBuffer([{"prompt": f"p{row}"} for row in range(997)], seed=SEED)

    async def reward(sample):
        await trio.lowlevel.checkpoint()
        return fake_uniform(SEED, "reward", sample.id)

    async def sync_weights(
        backend,
        engines,
        version,
        *,
        released=None,
    ):
        await trio.sleep(setting.hold_s)
        if released is not None:
            released.set()
        await trio.sleep(setting.export_s)
        await engine.pause("keep")
        await trio.sleep(setting.pause_s)
        engine.set_version(version)
        await engine.resume()
        return {}

    manager = AsyncRolloutManager(
        buffer,
        engine,
        generate=make_chat_generate(_SilentTokenizer()),
        config=config.rollout,
        reward=reward,
        sampling=SamplingParams(max_new_tokens=10**8),
        seed=SEED,
        policy_version=lambda: backend.weight_version,
        max_staleness=setting.max_staleness,
    )
    history = await run_rl_training(
        backend, buffer, manager, [engine], config, log, sync_weights=sync_weights
    )
    return log, engine, manager.statistics(), [row["off_policy/max"] for row in history]
