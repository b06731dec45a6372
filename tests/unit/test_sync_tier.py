"""The synchronous tier: batches from plain functions."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rollouts.data.data_buffer import DataBuffer, PromptRow
from rollouts.errors import ConfigError, NotEnoughSamples, PlugInError, UserFunctionError
from rollouts.generation.rollouts import (
    append_completion,
    convert_to_batch,
    generate_rollout_batches,
    make_samples,
)
from rollouts.models.tokenizers import END_ID, make_byte_tokenizer
from rollouts.types import Completion, FilterDecision, Status
from tests.support.text_tables import cases, read_cells

ROWS = [{"prompt": text, "answer": index} for index, text in enumerate("abcde")]


def make_buffer():
    return DataBuffer(ROWS, seed=0, shuffle=False)


def answer(sample):
    """Prompt token 7, then as many response tokens as the sample's number in its group, plus one: s000 has 1,
    s001 has 2.
    """
    count = int(sample.id[-3:]) + 1
    return replace(
        sample,
        response="x" * count,
        tokens=[7] + [8] * count,
        loss_mask=[0] + [1] * count,
        rollout_log_probs=[0.0] + [-0.5] * count,
        weight_versions=[-1] + [3] * count,
        status=Status.COMPLETED,
    )


def each(change=answer):
    """A function that changes every sample in this way."""
    return lambda samples: [change(sample) for sample in samples]


def reward_length(sample):
    return float(len(sample.response))


batches_of_two = partial(generate_rollout_batches, num_prompts=2, samples_per_prompt=2)


def next_batch(generate=None, reward=reward_length, **options):
    return next(batches_of_two(make_buffer(), generate or each(), reward_fn=reward, **options))


def prompts_after(buffer):
    return [prompt.key for prompt in buffer.get_prompts(12)]


# --- batches ------------------------------------------------------------------------------------------------


def test_pending_samples_carry_a_copy_of_their_row_in_launch_order():
    # names of ours in the row do not change which prompt it is
    row = json.loads('{"prompt": "b", "x": {"y": [1, {"z": 2}]}, "prompt_id": "mine", "epoch": 7}')
    first, second = make_samples(12, PromptRow("row-1", 2, row), 2)
    assert (first.id, second.id) == ("g00000012-s000", "g00000012-s001")
    assert (first.group_index, first.status, first.prompt) == (12, Status.PENDING, "b")
    first.metadata["x"]["y"][1]["z"] = 3
    first.metadata["x"]["y"].append(4)
    (later,) = make_samples(13, PromptRow("row-1", 2, row), 1)
    wanted = '{"prompt_id": "row-1", "epoch": 2, "x": {"y": [1, {"z": 2}]}}'
    assert second.metadata == later.metadata == json.loads(wanted)


def test_a_batch_has_a_row_per_sample_in_the_order_drawn():
    def reverse(samples):
        return [replace(answer(sample), group_index=None) for sample in reversed(samples)]

    for generate in (each(), reverse):  # answers may come in any order and lose their group index
        batch = next_batch(generate, temperature=0.7)
        for name, rows in read_cells("""
            tokens            | [[7, 8], [7, 8, 8]]
            loss_masks        | [[false, true], [false, true, true]]
            rollout_log_probs | [[0, -0.5], [0, -0.5, -0.5]]
            weight_versions   | [[-1, 3], [-1, 3, 3]]
        """):
            assert [row.tolist() for row in getattr(batch, name)] == json.loads(rows) * 2
        assert batch.rewards.tolist() == [1, 2, 1, 2] and batch.rewards.dtype == np.float32
        assert batch.group_indices.tolist() == [0, 0, 1, 1] == [one.group_index for one in batch.samples]
        assert [record["answer"] for record in batch.metadata] == [0, 0, 1, 1]
        assert (batch.temperature, batch.response_lengths.tolist()) == (0.7, [1, 2, 1, 2])


def test_dropped_groups_are_drawn_again_until_the_batch_is_full():
    asked = []

    def generate(samples):
        asked.append([sample.group_index for sample in samples[::2]])
        return each()(samples)

    batch = next_batch(generate, filter_fn=lambda group: group.group_index % 2 == 0)
    assert asked == [[0, 1], [2]]  # two are missing, then one
    assert batch.group_indices.tolist() == [0, 0, 2, 2]


def test_failed_samples_leave_their_group_before_they_are_scored():
    def fail_second(samples):
        first, second, third = each()(samples)
        return [first, replace(second, status=Status.FAILED), third]

    def reward(sample):
        assert sample.status is Status.COMPLETED
        return 1.0

    batch = next_batch(fail_second, reward, samples_per_prompt=3, num_prompts=1)
    assert [sample.id for sample in batch.samples] == ["g00000000-s000", "g00000000-s002"]


def test_the_generate_function_may_set_the_rewards_itself():
    batch = next_batch(each(lambda sample: replace(answer(sample), reward=0.25)), None)
    assert batch.rewards.tolist() == [0.25] * 4
    with pytest.raises(ConfigError, match="sample g00000000-s000 has no reward: pass reward_fn"):
        next_batch(each(), None)


def test_transforms_run_between_the_reward_and_the_filter():
    def look(group):
        assert group.rewards.tolist() == [-9, -8]
        return FilterDecision(keep=True)

    penalise = each(lambda sample: replace(sample, reward=sample.reward - 10))
    assert next_batch(transforms=[penalise], filter_fn=look).rewards.tolist() == [-9, -8, -9, -8]


# --- nothing is lost ----------------------------------------------------------------------------------------


def test_too_few_groups_are_an_error_once_the_attempts_are_spent():
    buffer = make_buffer()
    keep_one = {"filter_fn": lambda group: group.group_index == 3, "max_attempts": 4}
    counts = r"1 of num_prompts=2 groups were kept of 8 drawn \(<lambda> 7\), and max_attempts=4 allows no"
    with pytest.raises(NotEnoughSamples, match=counts):
        next(batches_of_two(buffer, each(), reward_fn=reward_length, **keep_one))
    assert prompts_after(buffer) == prompts_after(make_buffer())  # all 8, over two epochs, in their order


@cases("error", [ValueError("no verdict"), KeyboardInterrupt()])
def test_prompts_of_a_batch_that_did_not_come_about_are_drawn_again(error):
    buffer, fresh = make_buffer(), make_buffer()

    def reward(sample):
        if sample.id == "g00000004-s000":  # in the third round of the second batch
            raise error
        return 1.0

    drop_group_2 = {"filter_fn": lambda group: group.group_index != 2}
    batches = batches_of_two(buffer, each(), reward_fn=reward, **drop_group_2)
    next(batches)
    with pytest.raises((UserFunctionError, KeyboardInterrupt)):
        next(batches)
    fresh.get_prompts(2)  # those of the batch that was delivered
    assert prompts_after(buffer) == prompts_after(fresh)
    with pytest.raises(StopIteration):
        next(batches)


# --- functions that break their rules -----------------------------------------------------------------------


def divide(argument):
    return 1 / 0


def change(**fields):
    return each(lambda sample: replace(answer(sample), **fields))


@cases(
    "function, broken, message",
    [
        ("generate", divide, "divide on samples g00000000-s000 to g00000001-s001 raised ZeroDivision"),
        ("generate", lambda samples: each()(samples)[1:], "returned no sample g00000000-s000"),
        ("generate", lambda rows: each()([*rows, replace(rows[0], id="new-000")]), "a sample new-000"),
        ("generate", lambda samples: [answer(samples[0])] * 4, "returned sample g00000000-s000 twice"),
        ("generate", lambda samples: samples, "as pending; set completed, truncated or failed"),
        ("generate", change(status=Status.ABORTED), "returned sample g00000000-s000 as aborted"),
        ("generate", each(reward_length), "must return a list of Samples"),
        ("reward", divide, "reward function divide on sample g00000000-s000 raised ZeroDivisionError"),
        ("reward", lambda sample: None, "on sample g00000000-s000 returned None as its reward"),
        ("transforms", divide, "transform divide on 4 samples, the first of them g00000000-s000 raised Zero"),
        ("transforms", lambda samples: None, "returned None; it must return a list of Samples"),
        ("transforms", lambda samples: samples * 2, "returned sample g00000000-s000 twice"),
        ("transforms", change(group_index=6), "s000 with group_index=6; it was given no such group"),
    ],
)
def test_a_function_that_breaks_its_rule_is_named(function, broken, message):
    with pytest.raises(UserFunctionError, match=message):
        next_batch(**{function: [broken] if function == "transforms" else broken})


@cases("name: generate_fn reward_fn filter_fn transforms")
def test_async_functions_are_refused_before_anything_is_drawn(name):
    async def waits(argument): ...

    wrapped = partial(waits)
    arguments = {"generate_fn": each(), "reward_fn": reward_length}
    arguments[name] = [wrapped] if name == "transforms" else wrapped
    with pytest.raises(PlugInError, match="waits is async; these calls run plain functions"):
        batches_of_two(make_buffer(), **arguments)


# --- samples as arrays --------------------------------------------------------------------------------------


def test_half_scored_and_unfinished_samples_do_not_become_a_batch():
    first, second = next_batch().samples[:2]
    unscored = [replace(sample, reward=None, group_index=None) for sample in (first, second)]
    batch = convert_to_batch(unscored)  # for supervised training
    assert batch.rewards is None and batch.group_indices is None and len(batch) == 2
    for changes, says in (
        ({"reward": None}, "s001 has no reward and other samples of the batch do"),
        ({"status": Status.FAILED}, "sample g00000000-s001 is failed"),
        ({"status": Status.PENDING}, "sample g00000000-s001 is pending"),
    ):
        with pytest.raises(ValueError, match=says):
            convert_to_batch([first, replace(second, **changes)])


def test_a_completion_trains_and_its_prompt_does_not():
    pending = make_samples(0, make_buffer().get_prompts(1)[0], 1)[0]
    ids, log_probs, versions = np.asarray([[104, 105, END_ID], [-1, -2, -3], [4, 4, 4]])
    completion = Completion(
        request_id="a", token_ids=ids, log_probs=log_probs, weight_versions=versions, finish_reason="stop"
    )
    sample = append_completion(pending, np.asarray([97, 98]), completion, make_byte_tokenizer())
    assert (sample.response, sample.status) == ("hi", Status.COMPLETED)
    found = sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.weight_versions
    wanted = [97, 98, *ids], [0, 0, 1, 1, 1], [0, 0, *log_probs], [-1, -1, *versions]
    np.testing.assert_array_equal(found, wanted)
