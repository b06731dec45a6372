"""An evaluation counts every prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollouts.data.data_buffer import PromptRow
from rollouts.errors import NotEnoughSamples
from rollouts.evaluation.evaluate import EvaluationResult, evaluate
from rollouts.generation.generate import make_chat_generate
from rollouts.generation.rollouts import make_samples
from rollouts.testing.fakes import FakeTokenizer, ScriptedEngine, ScriptedReply
from rollouts.types import GenerateRequest, Sample, SamplingParams, Status

ROWS = [{"prompt": str(number), "answer": str(number)} for number in range(10)]


async def reward(sample: Sample) -> float:
    if sample.metadata["answer"] == "3":
        raise ValueError("no idea")
    return float(int(sample.metadata["answer"]) % 2 == 0)


async def run(rows, script=lambda request: ScriptedReply(), **changes):
    return await evaluate(
        rows,
        ScriptedEngine(script),
        generate=make_chat_generate(FakeTokenizer()),
        reward=reward,
        sampling=SamplingParams(max_new_tokens=8, temperature=0.0, stop_token_ids=(257,)),
        **changes,
    )


async def test_a_failed_sample_is_counted_and_is_not_part_of_the_mean(autojump_clock):
    result = await run(ROWS)
    assert len(result.samples) == 10
    assert [sample.metadata["answer"] for sample in result.samples] == [str(number) for number in range(10)]
    assert result.samples[3].status is Status.FAILED
    assert result.mean_reward == pytest.approx(5 / 9)
    metrics = result.metrics("sums")
    assert metrics["eval/sums/avg@1"] == pytest.approx(5 / 9)
    assert [metrics[f"eval/sums/{name}"] for name in ("prompts", "failed", "truncated/frac")] == [10, 1, 0]
    assert metrics["eval/sums/response_length/mean"] == 3  # "ok" and the stop token


async def test_every_prompt_is_asked_samples_per_prompt_times_with_seeds_of_its_own(autojump_clock):
    seeds: list[int | None] = []

    def script(request: GenerateRequest) -> ScriptedReply:
        seeds.append(request.sampling.seed)
        return ScriptedReply()

    assert len((await run(ROWS[:2], script, samples_per_prompt=3)).samples) == len(set(seeds)) == 6


def test_pass_at_k_is_over_the_prompts_with_k_scored_samples():
    """Rewards of three prompts, four samples each; None is a sample that failed."""

    def result(*rewards: float | None) -> dict[str, float]:
        rows = [PromptRow(prompt_id=str(index), epoch=0, row={"prompt": "?"}) for index in range(3)]
        pending = [sample for index, row in enumerate(rows) for sample in make_samples(index, row, 4)]
        samples = [replace(sample, reward=reward) for sample, reward in zip(pending, rewards, strict=True)]
        return EvaluationResult(tuple(samples), 4, 3).metrics("m")

    found = result(1.0, 0.0, 0.0, 0.0, 1.0, 1.0, None, 0.0, None, None, None, 0.0)
    assert found["eval/m/pass@2"] == pytest.approx((1 / 2 + 1) / 2)  # 1 − C(3,2)/C(4,2) and 1 − C(1,2)/C(3,2)
    assert found["eval/m/pass@4"] == 1.0
    assert found["eval/m/avg@4"] == pytest.approx(3 / 8)
    assert not any("pass@" in name for name in result(*[0.5] * 12)), (
        "nothing passes where rewards are not 0 and 1"
    )


async def test_too_many_failures_are_an_error_and_not_a_mean(autojump_clock):
    with pytest.raises(NotEnoughSamples, match="1 of 2 held-out samples failed"):
        await run(ROWS[3:5])
