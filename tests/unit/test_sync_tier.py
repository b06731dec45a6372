"""The synchronous tier: batches from plain functions."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollouts.data.data_buffer import DataBuffer, PromptRow
from rollouts.errors import (
    ConfigError,
    NotEnoughSamples,
    PlugInError,
    UserFunctionError,
)
from rollouts.generation.rollouts import (
    append_completion,
    apply_sample_transforms,
    convert_to_batch,
    extract_sample_fields,
    generate_rollout_batches,
    make_samples,
)
from rollouts.models.tokenizers import END_ID, make_byte_tokenizer
from rollouts.types import (
    Completion,
    FilterDecision,
    Sample,
    SampleGroup,
    Status,
)

ROWS = [{"prompt": text, "answer": index} for index, text in enumerate("abcde")]


def make_buffer() -> DataBuffer:
    return DataBuffer(ROWS, seed=0, shuffle=False)


def answer(sample: Sample) -> Sample:
    """Prompt token 7, then as many response tokens as the sample's number in its group, plus one: s000 has 1,
    s001 has 2.
    """
    count = int(sample.id[-3:]) + 1
    return replace(
        sample,
        response="x" * count,
        tokens=np.asarray([7] + [8] * count),
        loss_mask=np.asarray([0] + [1] * count),
        rollout_log_probs=np.asarray([0.0] + [-0.5] * count),
        weight_versions=np.asarray([-1] + [3] * count),
        status=Status.COMPLETED,
    )


def answer_all(samples: list[Sample]) -> list[Sample]:
    return [answer(sample) for sample in samples]


def reward_length(sample: Sample) -> float:
    return float(len(sample.response))


batches_of_two = functools.partial(generate_rollout_batches, num_prompts=2, samples_per_prompt=2)


def prompts_after(buffer: DataBuffer, count: int = 12) -> list[tuple[int, str]]:
    return [prompt.key for prompt in buffer.get_prompts(count)]


# --- batches ------------------------------------------------------------------------------------------------


def test_the_tier_loads_neither_trio_nor_torch():
    code = (
        "import sys, rollouts.generation.rollouts, rollouts.data.data_buffer, rollouts.advantages;"
        " print({'trio', 'torch'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_pending_samples_carry_the_row_and_launch_order():
    prompt = PromptRow("row-1", 2, {"prompt": "b", "answer": 1})
    first, second = make_samples(12, prompt, 2)
    assert (first.id, second.id) == ("g00000012-s000", "g00000012-s001")
    assert first.metadata == {"prompt_id": "row-1", "epoch": 2, "answer": 1}
    assert (first.group_index, first.status, first.prompt) == (12, Status.PENDING, "b")


def test_what_a_function_changes_in_one_sample_is_not_seen_by_its_siblings_or_the_next_epoch():
    row = {"prompt": "b", "x": {"y": [1, {"z": 2}]}}
    first, second = make_samples(0, PromptRow("row-1", 0, row), 2)
    first.metadata["x"]["y"][1]["z"] = 3
    first.metadata["x"]["y"].append(4)
    assert (
        second.metadata["x"]
        == row["x"]
        == make_samples(1, PromptRow("row-1", 1, row), 1)[0].metadata["x"]
        == {"y": [1, {"z": 2}]}
    )


def test_a_row_with_fields_of_our_names_does_not_change_which_prompt_it_is():
    row = {"prompt": "b", "prompt_id": "mine", "epoch": 7}
    assert make_samples(0, PromptRow("row-1", 2, row), 1)[0].metadata == {"prompt_id": "row-1", "epoch": 2}


def test_a_batch_has_a_row_per_sample_in_the_order_drawn():
    batch = next(batches_of_two(make_buffer(), answer_all, reward_fn=reward_length, temperature=0.7))
    assert [row.tolist() for row in batch.tokens] == [[7, 8], [7, 8, 8], [7, 8], [7, 8, 8]]
    assert batch.rewards is not None and batch.rewards.tolist() == [1, 2, 1, 2]
    assert batch.group_indices is not None and batch.group_indices.tolist() == [0, 0, 1, 1]
    assert [record["answer"] for record in batch.metadata] == [0, 0, 1, 1]
    assert batch.temperature == 0.7
    assert batch.response_lengths.tolist() == [1, 2, 1, 2]


def test_answers_may_come_in_any_order_and_lose_their_group_index():
    def reverse(samples: list[Sample]) -> list[Sample]:
        return [replace(answer(sample), group_index=None) for sample in reversed(samples)]

    batch = next(batches_of_two(make_buffer(), reverse, reward_fn=reward_length))
    assert [sample.id for sample in batch.samples] == [
        "g00000000-s000",
        "g00000000-s001",
        "g00000001-s000",
        "g00000001-s001",
    ]
    assert [sample.group_index for sample in batch.samples] == [0, 0, 1, 1]


def test_dropped_groups_are_drawn_again_until_the_batch_is_full():
    buffer, asked = make_buffer(), []

    def generate(samples: list[Sample]) -> list[Sample]:
        asked.append([sample.group_index for sample in samples[::2]])
        return answer_all(samples)

    def even(group: SampleGroup) -> bool:
        return group.group_index % 2 == 0

    batch = next(batches_of_two(buffer, generate, reward_fn=reward_length, filter_fn=even))
    assert asked == [[0, 1], [2]]  # two are missing, then one
    assert batch.group_indices is not None and batch.group_indices.tolist() == [0, 0, 2, 2]
    assert buffer.statistics()["drawn"] == 3


def test_failed_samples_leave_their_group_before_they_are_scored():
    scored = []

    def generate(samples: list[Sample]) -> list[Sample]:
        return [
            replace(answer(sample), status=Status.FAILED) if sample.id == "g00000000-s001" else answer(sample)
            for sample in samples
        ]

    def reward(sample: Sample) -> float:
        scored.append(sample.id)
        return 1.0

    batches = generate_rollout_batches(
        make_buffer(), generate, num_prompts=1, samples_per_prompt=3, reward_fn=reward
    )
    assert [sample.id for sample in next(batches).samples] == ["g00000000-s000", "g00000000-s002"]
    assert scored == ["g00000000-s000", "g00000000-s002"]


def test_the_generate_function_may_set_the_rewards_itself():
    def generate(samples: list[Sample]) -> list[Sample]:
        return [replace(answer(sample), reward=0.25) for sample in samples]

    batch = next(batches_of_two(make_buffer(), generate))
    assert batch.rewards is not None and batch.rewards.tolist() == [0.25] * 4
    with pytest.raises(ConfigError, match="sample g00000000-s000 has no reward: pass reward_fn"):
        next(batches_of_two(make_buffer(), answer_all))


def test_transforms_run_between_the_reward_and_the_filter():
    seen = []

    def penalise(samples: list[Sample]) -> list[Sample]:
        return [replace(sample, reward=(sample.reward or 0.0) - 10) for sample in samples]

    def look(group: SampleGroup) -> FilterDecision:
        seen.append(group.rewards.tolist())
        return FilterDecision(keep=True)

    batch = next(
        batches_of_two(
            make_buffer(), answer_all, reward_fn=reward_length, transforms=[penalise], filter_fn=look
        )
    )
    assert seen == [[-9, -8], [-9, -8]]
    assert batch.rewards is not None and batch.rewards.tolist() == [-9, -8, -9, -8]


# --- nothing is lost ----------------------------------------------------------------------------------------


def test_too_few_groups_are_an_error_once_the_attempts_are_spent():
    buffer = make_buffer()
    batches = batches_of_two(
        buffer,
        answer_all,
        reward_fn=reward_length,
        filter_fn=lambda group: group.group_index == 3,
        max_attempts=4,
    )
    with pytest.raises(
        NotEnoughSamples,
        match=(
            r"1 of num_prompts=2 groups were kept of 8 drawn \(<lambda> 7\), and max_attempts=4 allows no"
            r" more"
        ),
    ):
        next(batches)
    assert prompts_after(buffer) == prompts_after(
        make_buffer()
    )  # all 8, over two epochs, are back in their order


@pytest.mark.parametrize("error", [ValueError("no verdict"), KeyboardInterrupt()])
def test_prompts_of_a_batch_that_did_not_come_about_are_drawn_again(error: BaseException):
    buffer, fresh = make_buffer(), make_buffer()

    def reward(sample: Sample) -> float:
        if sample.id == "g00000004-s000":  # in the third round of the second batch
            raise error
        return 1.0

    def drop_group_2(group: SampleGroup) -> bool:
        return group.group_index != 2

    batches = batches_of_two(buffer, answer_all, reward_fn=reward, filter_fn=drop_group_2)
    next(batches)
    with pytest.raises((UserFunctionError, KeyboardInterrupt)):
        next(batches)
    fresh.get_prompts(2)  # those of the batch that was delivered
    assert prompts_after(buffer) == prompts_after(fresh)
    with pytest.raises(StopIteration):
        next(batches)


# --- functions that break their rules -----------------------------------------------------------------------


def raise_zero_division(argument: Any) -> Any:
    return 1 / 0


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            raise_zero_division,
            (
                "function raise_zero_division on samples g00000000-s000 to g00000001-s001 raised"
                " ZeroDivisionError: division by zero"
            ),
        ),
        (lambda samples: answer_all(samples)[1:], "returned no sample g00000000-s000"),
        (
            lambda samples: [*answer_all(samples), answer(replace(samples[0], id="new-000"))],
            "returned a sample new-000",
        ),
        (lambda samples: [answer(samples[0])] * 4, "returned sample g00000000-s000 twice"),
        (
            lambda samples: samples,
            "returned sample g00000000-s000 as pending; set completed, truncated or failed",
        ),
        (
            lambda samples: [replace(answer(s), status=Status.ABORTED) for s in samples],
            "returned sample g00000000-s000 as aborted",
        ),
        (lambda samples: [sample.response for sample in samples], "must return a list of Samples"),
        (lambda samples: None, "returned None; it must return a list of Samples"),
    ],
)
def test_a_generate_function_that_breaks_its_rule_is_named(broken: Callable[..., Any], message: str):
    with pytest.raises(UserFunctionError, match=message):
        next(batches_of_two(make_buffer(), broken, reward_fn=reward_length))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            raise_zero_division,
            "reward function raise_zero_division on sample g00000000-s000 raised ZeroDivisionError",
        ),
        (
            lambda sample: float("nan"),
            "on sample g00000000-s000 returned nan as its reward; it must be a finite number",
        ),
        (lambda sample: None, "returned None as its reward"),
        (lambda sample: {}, "returned a mapping without parts"),
    ],
)
def test_a_reward_that_is_none_is_never_a_zero(broken: Callable[..., Any], message: str):
    with pytest.raises(UserFunctionError, match=message):
        next(batches_of_two(make_buffer(), answer_all, reward_fn=broken))


async def async_function(argument: Any) -> Any:
    return argument


@pytest.mark.parametrize("name", ["generate_fn", "reward_fn", "filter_fn", "transforms"])
def test_async_functions_are_refused_before_anything_is_drawn(name: str):
    arguments: dict[str, Any] = {"generate_fn": answer_all, "reward_fn": reward_length}
    wrapped = functools.partial(async_function)
    arguments[name] = [wrapped] if name == "transforms" else wrapped
    with pytest.raises(PlugInError, match="async_function is async; these calls run plain functions"):
        generate_rollout_batches(make_buffer(), num_prompts=1, samples_per_prompt=1, **arguments)


# --- transforms ---------------------------------------------------------------------------------------------


def make_finished(count: int = 2) -> list[Sample]:
    return [
        replace(answer(sample), reward=float(index))
        for index, sample in enumerate(make_samples(5, make_buffer().get_prompts(1)[0], count))
    ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            raise_zero_division,
            (
                "transform raise_zero_division on 2 samples, the first of them g00000005-s000 raised"
                " ZeroDivisionError"
            ),
        ),
        (lambda samples: None, "returned None; it must return a list of Samples"),
        (lambda samples: samples * 2, "returned sample g00000005-s000 twice"),
        (
            lambda samples: [replace(samples[0], group_index=6)],
            "returned sample g00000005-s000 with group_index=6; it was given no such group",
        ),
        (lambda samples: [replace(samples[0], status=Status.PENDING)], "as pending"),
    ],
)
def test_a_transform_that_breaks_its_rule_is_named(broken: Callable[..., Any], message: str):
    with pytest.raises(UserFunctionError, match=message):
        apply_sample_transforms(make_finished(), [broken])


# --- samples as arrays --------------------------------------------------------------------------------------


def test_the_fields_of_samples_are_ragged_columns():
    fields = extract_sample_fields(make_finished())
    assert [row.tolist() for row in fields.tokens] == [[7, 8], [7, 8, 8]]
    assert [row.tolist() for row in fields.loss_masks] == [[False, True], [False, True, True]]
    assert [row.tolist() for row in fields.rollout_log_probs] == [[0, -0.5], [0, -0.5, -0.5]]
    assert [row.tolist() for row in fields.weight_versions] == [[-1, 3], [-1, 3, 3]]
    assert (
        fields.rewards is not None
        and fields.rewards.tolist() == [0, 1]
        and fields.rewards.dtype == np.float32
    )
    assert fields.group_indices is not None and fields.group_indices.tolist() == [5, 5]


def test_a_batch_without_rewards_is_for_supervised_training():
    batch = convert_to_batch([replace(sample, reward=None, group_index=None) for sample in make_finished()])
    assert batch.rewards is None and batch.group_indices is None and len(batch) == 2


def test_half_scored_and_failed_samples_do_not_become_a_batch():
    first, second = make_finished()
    with pytest.raises(
        ValueError, match="sample g00000005-s001 has no reward and other samples of the batch do"
    ):
        convert_to_batch([first, replace(second, reward=None)])
    with pytest.raises(ValueError, match="sample g00000005-s001 is failed"):
        convert_to_batch([first, replace(second, status=Status.FAILED)])
    with pytest.raises(ValueError, match="sample g00000005-s000 is pending"):
        convert_to_batch([replace(first, status=Status.PENDING)])


def test_a_completion_trains_and_its_prompt_does_not():
    pending = make_samples(0, make_buffer().get_prompts(1)[0], 1)[0]
    completion = Completion(
        request_id=pending.id,
        token_ids=np.asarray([104, 105, END_ID]),
        log_probs=np.asarray([-1, -2, -3], np.float32),
        weight_versions=np.asarray([4, 4, 4]),
        finish_reason="stop",
    )
    sample = append_completion(pending, np.asarray([97, 98]), completion, make_byte_tokenizer())
    assert (sample.response, sample.status) == ("hi", Status.COMPLETED)
    assert sample.tokens.tolist() == [97, 98, 104, 105, END_ID]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    assert sample.rollout_log_probs.tolist() == [0, 0, -1, -2, -3]
    assert sample.weight_versions.tolist() == [-1, -1, 4, 4, 4]
