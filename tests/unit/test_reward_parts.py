"""The reward as named parts: what each counts, which one drives the advantage, and what the library's own are
paid for. Expected numbers are worked by hand.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rollouts.config.rollout import RewardPartConfig
from rollouts.config.schema import RLTrainingConfig
from rollouts.errors import ConfigError, DataError, NotEnoughSamples, UserFunctionError
from rollouts.filters import check_consensus
from rollouts.rewards.library import coherence, consensus, final, tool_penalty
from rollouts.rewards.parts import RewardParts, find_weight, rank_in_group
from rollouts.types import TRAJECTORY, RewardResult, Sample, SampleGroup
from tests.support.text_tables import cases
from tests.unit.manager_runs import make_run, member_of


def make_parts(step=1, **parts):
    """Parts of (function, settings); "reward" names it where the settings do not say group_reward."""
    made = {}
    for name, (function, settings) in parts.items():
        key = {} if "group_reward" in settings else {"reward": "m:f"}
        made[name] = (RewardPartConfig(**key, **settings), function)
    return RewardParts(made, lambda: step, 10.0, {})


def of_group(*values):
    """A group reward of these numbers."""

    async def given(samples):
        return values

    return given


def scored(number, **parts):
    """Samples of one group with these parts, a value each."""
    names, rows = [*parts], zip(*parts.values(), strict=True)
    return [
        Sample(
            id=f"g{number:08d}-s{at:03d}",
            prompt="q",
            group_index=number,
            rewards=dict(zip(names, row, strict=True)),
        )
        for at, row in enumerate(rows)
    ]


GROUP = {"group_reward": "m:f"}


async def test_the_reward_is_the_weighted_sum_of_its_parts():
    async def length(sample):
        return RewardResult(len(sample.response), {"chars": 1.0}, "counted")

    parts = make_parts(length=(length, {"weight": 0.5}), vote=(of_group(1, 0), GROUP | {"weight": 2.0}))
    run = make_run(reward=parts.score, group_reward=parts.score_group)
    batch = await run.manager.generate_batch()
    assert batch.rewards.tolist() == [3.0, 1.0] * 2  # "ab": 0.5 · 2 + 2 · 1, 0.5 · 2 + 2 · 0
    assert batch.samples[0].rewards == {"length": 2.0, "length.chars": 1.0, "vote": 1.0}
    assert batch.samples[0].metadata["reward_note"] == "length: counted"
    assert run.metrics()["reward/part/vote/std"] == 0.5


async def test_a_part_that_fails_costs_its_sample_or_its_group():
    async def broken(given):
        if isinstance(given, Sample) and member_of(given.id):
            return 1.0
        raise ValueError("no")

    for settings, failed in (({}, 1), (GROUP, 2)):
        parts = make_parts(part=(broken, settings))
        limits = {"samples_per_prompt": 3, "num_prompts": 1, "max_failed_fraction": 1.0, "max_attempts": 1}
        run = make_run(reward=parts.score, group_reward=parts.score_group, **limits)
        if settings:
            with pytest.raises(NotEnoughSamples):
                await run.manager.generate_batch()
        else:
            assert len(await run.manager.generate_batch()) == 3 - failed
        assert {one.metadata["failure"]["class"] for one in run.manager.failed_samples()} == {"reward"}


@cases("""
values    | ranks
3 1 2     | 1 0 0.5
1 1 5 0   | 0.5 0.5 1 0
2 2       | 0.5 0.5
7         | 0.5
""")
def test_a_rank_is_the_share_of_the_others_that_are_below(values: list[float], ranks: list[float]):
    assert rank_in_group(np.asarray(values)) == pytest.approx(ranks)


async def test_a_running_scale_is_that_of_the_batches_before():
    parts = make_parts(a=(None, {"normalise": "running", "weight": 3.0}), b=(None, {}))
    first, second = (
        scored(number, **{"a": values, "a.added": values, "b": [1, 1]})
        for number, values in enumerate(([0, 4], [5, 1]))
    )

    def weigh(samples):
        return parts.weigh({"a": np.asarray([one.rewards["a"] for one in samples]), "b": np.zeros(2)})["a"]

    assert weigh(first).tolist() == [0, 12]  # nothing was seen yet: 3 · value
    await parts.learn(first)  # mean 2, deviation 2
    assert weigh(second).tolist() == [4.5, -1.5]  # 3 · (5 − 2)/2, 3 · (1 − 2)/2
    saved = parts.state_dict()
    await parts.learn(second)
    other = make_parts(a=(None, {"normalise": "running", "weight": 3.0}), b=(None, {}))
    other.load_state_dict(saved)
    await other.learn(second)
    assert other.state_dict() == parts.state_dict() and parts.state_dict()["a"]["mean"] == 2.5


@cases("value", [1.0, 0.1])
async def test_a_part_that_never_varied_is_not_blown_up(value):
    parts = make_parts(a=(None, {"normalise": "running"}))
    for count in (3, 7):
        await parts.learn(scored(0, a=[value] * count))
    assert parts.weigh({"a": np.asarray([value, value + 1])})["a"].tolist() == pytest.approx([0.0, 1.0])


@cases("""
schedule                                | step | weight
constant                                | 7    | 2
linear(first=0, begin=1, end=5)         | 1    | 0
linear(first=0, begin=1, end=5)         | 2    | 0.5
linear(first=0, begin=1, end=5)         | 9    | 2
cosine(first=4, begin=2, end=4)         | 3    | 3
""")
def test_a_weight_follows_its_schedule(schedule, step: int, weight: float):
    assert find_weight(RewardPartConfig(reward="f", schedule=schedule, weight=2.0), step) == weight


@cases("""
settings                                                       | wrong
                                                               | names no reward
reward = "f", group_reward = "g"                               | more than one
reward_model = "m", params = { a = 1 }                         | params with reward_model
reward = "f", schedule = "linear(first=0)"                     | schedule='linear
reward = "f", schedule = "linear(first=0, begin=3, end=3)"     | 1 <= begin < end
reward = "f", schedule = "step(at=3)"                          | write constant
reward = "f", schedule = "linear(first=0, begin=1.5, end=1.9)" | whole steps
reward = "f", schedule = "linear(first=0, begin=1, end=inf)"   | write constant
""")
def test_settings_that_make_no_sense_are_refused(settings: dict, wrong):
    with pytest.raises(ValueError, match=wrong):
        RewardPartConfig(**settings)


def test_gdpo_which_standardises_itself_takes_no_schedule():
    data = {"kind": "jsonl", "path": "a.jsonl"}
    part = {"reward": "a:b", "schedule": "cosine(first=0, begin=1, end=9)"}
    rl = {"steps": 1, "data": data, "advantage": "gdpo", "rollout": {"rewards": {"a": part}}}
    with pytest.raises(ValueError, match=r"gdpo' with rollout\.rewards that have a schedule or normalise"):
        RLTrainingConfig.model_validate(rl)


# --- what drives learning -----------------------------------------------------------------------------------


async def test_the_drives_are_the_shares_of_the_advantage():
    parts = make_parts(final=(None, {}), coherence=(None, {"weight": 0.5}))
    drives = await parts.learn(scored(0, final=[1, 0, 0, 1], coherence=[0.2, 0.4, 0, 0.2]))
    # A = .5, −.4, −.6, .5; A·A = 1.02; the final's own .5, −.5, −.5, .5 give 1.0
    assert drives == {
        "reward/part/final/drive": pytest.approx(1.0 / 1.02),
        "reward/part/coherence/drive": pytest.approx(0.02 / 1.02),
    }
    for same in (1.0, 0.1):  # whose sum rounds
        equal = scored(0, final=[same] * 3, coherence=[0.7] * 3)
        assert await parts.learn(equal) == {}, "nothing is compared"


async def test_the_drives_are_of_what_was_added_and_of_turns_too():
    parts = make_parts(a=(None, {"schedule": "linear(first=0, begin=1, end=9)"}), b=(None, {}))
    samples = scored(0, **{"a": [1, 0], "a.added": [0, 0], "b": [1, 0], "turns": [0, 1]})
    drives = await parts.learn(samples)
    assert drives == {"reward/part/a/weight": 0.0}, "b and turns cancel, and a added nothing yet"
    drives = await parts.learn(scored(0, **{"a": [1, 0], "a.added": [0, 0], "b": [2, 0], "turns": [0, 1]}))
    assert [drives[f"reward/part/{name}/drive"] for name in ("a", "b", "turns")] == [0, 2, -1]


async def test_parts_are_correlated_with_the_accuracy_of_an_evaluation():
    async def noise(sample):
        return float(len(sample.response))

    async def broken(sample):
        if sample.response == "bad":
            raise ValueError("no")
        return 1.0

    parts = make_parts(length=(noise, {}), same=(broken, {}))
    responses = [("a", 0.0), ("bbbb", 1.0), ("ccc", 1.0), ("dd", 0.0), ("bad", 1.0)]
    samples = [
        Sample(id=f"s{at}", prompt="q", response=text, reward=reward, group_index=at)
        for at, (text, reward) in enumerate(responses)
    ]
    expected = np.corrcoef([1, 4, 3, 2], [0, 1, 1, 0])[0, 1]
    assert await parts.correlate(samples) == {
        "parts_failed": 1.0,
        "part/length/correlation": pytest.approx(expected),
    }


# --- the library --------------------------------------------------------------------------------------------


def say(*responses, **metadata):
    return [
        Sample(id=f"s{at}", prompt="q", response=text, metadata=dict(metadata))
        for at, text in enumerate(responses)
    ]


VOTES = ("it is 7", "7", "8", "7.0", "who knows")


def test_each_sample_is_compared_with_the_label_not_the_label_with_itself():
    for results in (
        consensus(say(*VOTES)),
        final(say(*VOTES), against="consensus"),
        final(say(*VOTES, answer="7")),
    ):
        assert [result.reward for result in results] == [1, 1, 0, 1, 0]
    assert consensus(say(*VOTES))[0].parts["vote_ratio"] == 0.6, "of all, not of those who answered"


@cases("""
extract | match                 | responses                     | rewards
text    | exact_match           | Paris; paris; Paris; Rome     | 1 1 1 0
json    | exact_match           | {"a":1}; { "a": 1 }; {"a": 2} | 1 1 0
number  | exact_match           | so it is 7; it is 7; 8        | 1 1 0
choice  | multiple_choice_match | answer is B; (B); A           | 1 1 0
number  | fuzzy_match           | it is 10; 10; 11; none        | 1 1 0.5 0
""")
def test_what_was_read_is_compared_with_the_label(extract, match, responses, rewards: list[float]):
    results = final(say(*responses.split("; ")), against="consensus", extract=extract, match=match)
    assert [result.reward for result in results] == rewards


@cases("""
rules                           | rewards
ties = "none"                   | 0 0 0 0 0
ties = "first"                  | 1 1 0 0 0
ties = "share"                  | 0.5 0.5 0.5 0.5 0
ties = "share", min_ratio = 0.5 | 0 0 0 0 0
ties = "first", min_voters = 6  | 0 0 0 0 0
""")
def test_ties_and_voters_follow_the_rules(rules: dict, rewards: list[float]):
    results = consensus(say("7", "7", "8", "8", "9"), **rules)
    assert [result.reward for result in results] == rewards


@cases("""
extract | one            | other            | agree
number  | so 1/2         | it is 0.50       | yes
choice  | The answer is B | (B)             | yes
json    | {"a":1, "b":2} | {"b": 2, "a": 1} | yes
json    | {"a": 1}       | {"a": 1          | no
text    | Paris          | Pari             | no
text    | Paris          | PARIS            | yes
""")
def test_answers_that_mean_the_same_vote_together(extract, one, other, agree: bool):
    assert (sum(result.reward for result in consensus(say(one, other), extract=extract)) == 2) == agree


def test_an_empty_text_has_no_vote():
    results = consensus(say("", "", "x"), extract="text")
    assert [result.reward for result in results] == [0, 0, 1]


def test_a_label_is_read_by_the_filter_under_the_name_of_its_part():
    rewards = {"agree": 1.0, "agree.has_label": 1.0, "agree.vote_ratio": 0.4}
    group = SampleGroup(0, "row-0", (Sample(id="s", prompt="q", rewards=rewards),))
    assert check_consensus(group, min_ratio=0.5).reason == "no_consensus"


@cases("""
function  | options             | wrong
consensus | extract = "last"    | extract='last'; it must be one of number
final     | match = "same"      | match='same'; it must be one of exact_match
final     | against = "nobody"  | against='nobody'
final     | ties = "share"      | ties='share'
""")
def test_options_of_the_library_are_checked(function, options: dict, wrong):
    with pytest.raises(ConfigError, match=wrong):
        {"consensus": consensus, "final": final}[function](say("7"), **options)


CHAIN = "We have 12 apples.\nFrom 12 apples we take 5.\nSo 7 apples stay."


@cases("""
text                                              | reward
x = 12.\\ny = 12 + 1                               | 1
{CHAIN}                                           | 1
We have 12 apples.                                | 0
We have 12 apples.\\nWe have 12 apples.            | 0
We have 12 apples.\\nClouds drift.\\nOn 12 apples.  | 0.5
""")
def test_coherent_steps_follow_from_what_was_said_and_repeat_nothing(text, reward: float):
    text = text.replace("{CHAIN}", CHAIN).replace("\\n", "\n")
    assert coherence(Sample(id="s", prompt="q", response=text)).reward == reward


def test_a_step_said_again_is_paid_less_than_a_step_that_goes_on():
    honest = coherence(Sample(id="s", prompt="q", response=CHAIN))
    cheat = coherence(Sample(id="s", prompt="q", response="\n".join([CHAIN.split("\n")[0]] * 9)))
    assert cheat.reward == 0 < honest.reward and cheat.parts["repeated"] == 1


def play(*calls, end="done", **parts):
    """A trajectory with calls of (tool, arguments, outcome)."""
    turns = [{"calls": [{"name": name, "outcome": outcome}]} for name, _, outcome in calls]
    messages = [{"role": "user", "content": "q"}] + [
        {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        for name, arguments, _ in calls
    ]
    record = {"end": end, "turns": turns}
    metadata = {TRAJECTORY: record, "messages": messages}
    return Sample(id="s", prompt="q", rewards=parts, metadata=metadata)


def test_misuse_and_excess_of_tools_cost():
    sample = play(("ask", "{}", "unknown"), ("add", "1", "ok"), ("add", "1", "ok"), end="turns")
    [result] = tool_penalty([sample], max_calls=1)
    # an unknown tool, no answer; two calls beyond one, one repetition
    assert result.reward == pytest.approx(-0.5) and result.parts == {"misuse": 2, "excess": 3}
    [result] = tool_penalty([play(("add", "1", "ok"), ("add", "2", "timeout"))])
    assert result.reward == 0, "a tool that takes too long is not the model's doing"


def test_calling_nothing_is_not_paid_more_than_calling_right():
    honest = play(("add", "1", "ok"), ("add", "1", "ok"), final=0.0)
    silent, malformed = play(final=0.0), play(("add", "{", "arguments"), final=0.0)
    naive = [one.reward for one in tool_penalty([honest, silent])]
    assert naive[0] < naive[1], "what a penalty alone teaches"
    honest_paid, silent_paid, malformed_paid = (
        one.reward for one in tool_penalty([honest, silent, malformed], right="final")
    )
    assert honest_paid == silent_paid == 0 > malformed_paid


def test_samples_without_trajectories_are_refused():
    with pytest.raises(DataError, match="no tools or environment"):
        tool_penalty(say("7"))
    with pytest.raises(DataError, match="no part 'final'"):
        tool_penalty([play()], right="final")


def test_what_the_prompt_shows_is_no_call_of_the_model():
    sample = play(("add", "1", "ok"))
    shown = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    messages = [shown, shown, *sample.metadata["messages"][1:]]
    sample = replace(sample, prompt=(shown, shown), metadata={**sample.metadata, "messages": messages})
    assert tool_penalty([sample])[0].reward == 0


async def test_a_group_part_sees_the_parts_before_it():
    parts = make_parts(
        final=(of_group(1.0, 0.0), GROUP), tools=(partial(tool_penalty, max_calls=0, right="final"), GROUP)
    )
    samples = [replace(play(("add", "1", "ok")), id=f"g0-s{at}") for at in range(2)]
    results = await parts.score_group(samples)
    assert [result.reward for result in results] == [0.9, 0.0]


async def test_a_failure_names_the_part():
    async def broken(sample):
        raise ValueError("no")

    with pytest.raises(UserFunctionError, match=r"rl\.rollout\.rewards\.judge: reward function broken .* no"):
        await make_parts(judge=(broken, {})).score(Sample(id="s", prompt="q"))


async def test_values_that_overflow_fail_their_sample():
    async def huge(sample):
        return 3e38

    parts = make_parts(a=(huge, {}), b=(huge, {"weight": 10.0}))
    with pytest.raises(UserFunctionError, match="parts of sample s"):
        await parts.score(Sample(id="s", prompt="q"))
