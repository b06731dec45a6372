"""A manager on a scripted engine, for the tests of what it does with groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rollouts.config.tables import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, ScriptedEngine, ScriptedReply
from rollouts.types import (
    FilterDecision,
    GenerateRequest,
    Sample,
    SampleGroup,
    SamplingParams,
)

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(FAKE_END,))
chat_generate: Any = make_chat_generate(FakeTokenizer())


def group_of(request: GenerateRequest) -> int:
    return int(request.request_id[1:9])


def member_of(sample_id: str) -> int:
    return int(sample_id[11:14])


async def index_reward(sample: Sample) -> float:
    """0, 1, 2, … within the group."""
    return float(member_of(sample.id))


@dataclasses.dataclass
class Run:
    """A manager with its parts."""

    manager: AsyncRolloutManager
    buffer: DataBuffer
    engine: ScriptedEngine
    version: list[int]

    async def batch_groups(self) -> list[int]:
        batch = await self.manager.generate_batch()
        assert batch.group_indices is not None
        return list(dict.fromkeys(batch.group_indices.tolist()))

    def upcoming(self, count: int) -> list[tuple[int, str]]:
        """The prompts that would be drawn next."""
        other = DataBuffer(ROWS, seed=0)
        other.load_state_dict(self.buffer.state_dict())
        return [prompt.key for prompt in other.get_prompts(count)]


ROWS = [{"prompt": f"question {index}", "answer": str(index)} for index in range(12)]
STREAM = [prompt.key for prompt in DataBuffer(ROWS, seed=0).get_prompts(36)]


def make_run(
    script: Callable[[GenerateRequest], ScriptedReply] = lambda request: ScriptedReply(text="ab"),
    *,
    num_prompts: int = 2,
    samples_per_prompt: int = 2,
    over_sampling: float = 1.0,
    engine: ScriptedEngine | None = None,
    generate: Any = chat_generate,
    reward: Any = index_reward,
    **options: Any,
) -> Run:
    of_config = {
        name: options.pop(name)
        for name in list(options)
        if name in RolloutConfig.model_fields and name not in ("filters", "group_reward")
    }
    config = RolloutConfig(
        num_prompts=num_prompts,
        samples_per_prompt=samples_per_prompt,
        over_sampling=over_sampling,
        **of_config,
    )
    buffer, version = DataBuffer(ROWS, seed=0), [0]
    engine = engine or ScriptedEngine(script)
    manager = AsyncRolloutManager(
        buffer,
        engine,
        generate=generate,
        config=config,
        reward=reward,
        seed=1,
        policy_version=lambda: version[0],
        **{"sampling": SAMPLING} | options,
    )
    return Run(manager, buffer, engine, version)


def books(run: Run) -> dict[str, float]:
    """Where every group is."""
    names = ("drawn", "trained", "held", "in_flight")
    return {
        name: count
        for name, count in run.manager.statistics().items()
        if name in names or name.startswith(("dropped/", "failed/"))
    }


def keep_groups(*kept: int):
    async def chosen(group: SampleGroup) -> FilterDecision:
        return FilterDecision(group.group_index in kept, "not_chosen")

    return chosen


def fail_on(error: Exception, *sample_ids: str):
    """A reward function that fails for some samples."""

    async def broken_reward(sample: Sample) -> float:
        if not sample_ids or sample.id in sample_ids:
            raise error
        return float(member_of(sample.id))

    return broken_reward
