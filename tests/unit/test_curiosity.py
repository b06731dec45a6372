"""Parts of the reward that keep a state or ask the models of the run: curiosity, novelty and coherence by a
scoring model. Expected numbers are worked by hand; the models are scripted.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rollouts.config.schema import RunConfig
from rollouts.errors import BackendError, ConfigError, UserFunctionError
from rollouts.loops.algorithm import needs_reference
from rollouts.preflight.functions import check_options, join_parts
from rollouts.rewards.curiosity import curiosity, halve
from rollouts.rewards.library import LIBRARY, coherence, coherence_scored, novelty
from rollouts.types import Sample
from tests.support.text_tables import cases


def sample_of(tokens, response="", *, prompt_tokens=1, **fields):
    """A sample whose tokens after the prompt were sampled."""
    mask = np.arange(len(tokens)) >= prompt_tokens
    return Sample(
        id="s",
        prompt="q",
        response=response,
        tokens=np.asarray(tokens),
        loss_mask=mask,
        rollout_log_probs=np.zeros(len(tokens), np.float32),
        weight_versions=np.where(mask, 0, -1),
        **fields,
    )


# --- halves -------------------------------------------------------------------------------------------------


def test_both_halves_are_rows_of_the_tokens_that_the_engine_gave():
    sample = sample_of([9, 1, 2, 3, 4, 5])
    batch, alone = halve([sample]), halve([sample], alone=True)
    assert [row.tolist() for row in batch.tokens] == [[9, 1, 2, 3, 4, 5]] * 2
    assert [np.flatnonzero(mask).tolist() for mask in batch.loss_masks] == [[1, 2, 3], [4, 5]]
    assert [row.tolist() for row in alone.tokens] == [[9, 4, 5], [9, 1, 2, 3, 4, 5]]
    assert [np.flatnonzero(mask).tolist() for mask in alone.loss_masks] == [[1, 2], [4, 5]]


def test_what_tools_said_is_in_no_half_and_stays():
    sample = sample_of([9, 1, 7, 8, 2, 3])
    sample = replace(sample, loss_mask=np.asarray([0, 1, 0, 0, 1, 1], bool), weight_versions=np.full(6, -1))
    first, second = halve([sample]).loss_masks
    assert (np.flatnonzero(first).tolist(), np.flatnonzero(second).tolist()) == ([1, 4], [5])
    assert halve([sample], alone=True).tokens[0].tolist() == [9, 7, 8, 3]


@cases("count", [0, 1])
def test_of_no_token_and_of_one_the_halves_are_empty(count):
    assert [int(mask.sum()) for mask in halve([sample_of([9, 1][: count + 1])]).loss_masks] == [count, 0]


# --- curiosity ----------------------------------------------------------------------------------------------


class States:
    """A backend whose hidden states over the halves of the samples are `pairs` [G, 2, D]."""

    def __init__(self, pairs=()):
        self.pairs = np.asarray(pairs, np.float64)

    async def forward_with_entropy(self, batch, *, project):
        assert project
        found = self.pairs.reshape(len(batch), -1).T.astype(np.float32)[..., None]  # of one token each
        return [(), (), *found]


def make_curious(backend, **settings):
    """(state, what scores pairs of φ by it, what learns from them)."""
    state = {}
    fn = partial(curiosity, backend=backend, state=state, **settings)

    async def ask(pairs, **more):
        backend.pairs = np.asarray(pairs, np.float64)
        return await fn([sample_of(range(5))] * len(pairs), **more)

    return state, ask, partial(ask, learn=True)


ONE = [[1, 0], [0, 1]]  # φ1, φ2
PAYS = ("error", "progress")


async def test_the_reward_is_eta_times_half_the_squared_error_over_its_mean():
    state, ask, _ = make_curious(States(), eta=0.5)
    state["learnt"] = [0.0, [[0.6, 0.2], [0.0, 0.0]], 1.0, 1]  # f(1, 0) = (.6, .2); σ² = 1
    assert await ask([[[1, 0], [1, 0]]]) == pytest.approx([0.05])  # .5 · ½ · (.4² + .2²)
    state["learnt"][2:] = 0.5, 2  # σ² = ¼
    assert await ask([[[1, 0], [1, 0]], [[3, 0], [2, 0]]]) == pytest.approx([0.2] * 2)  # length 1


async def test_it_learns_a_step_a_sample_and_is_used_before():
    state, ask, learn = make_curious(States(), lr=0.1)
    for _ in range(2):
        assert await ask([ONE]) == pytest.approx([0.5])  # η · ½ / ½; nothing was learnt by asking
    assert await learn([ONE]) == pytest.approx([0.5])
    assert state["learnt"] == (0.0, [[0.0, 0.1], [0.0, 0.0]], 1.0, 2)
    assert await ask([ONE]) == pytest.approx([0.5 * 0.405 / 0.5])  # ½ · .9² over σ² = ½
    await learn([ONE, ONE])
    assert np.asarray(state["learnt"][1])[0, 1] == pytest.approx(0.271)  # 1 − .9³
    assert state["learnt"][2:] == pytest.approx((1 + 2 * 0.405, 4))  # errors are of before the batch


async def test_progress_is_how_much_smaller_the_last_batch_has_made_the_error():
    _, ask, learn = make_curious(States(), pay="progress", lr=0.1)
    assert await ask([ONE]) == [0]
    await learn([ONE])
    assert await ask([ONE]) == pytest.approx([0.5 * (0.5 - 0.405) / 0.5])
    assert await ask([[[1, 0], [0, -1]]]) == pytest.approx([0.5 * (0.5 - 0.605) / 0.5])  # for the worse


@cases("""
pay      | other   | paid
error    | 1 0     | 0.1
progress | 0 1     | 0.03
progress | 0 -1    | -0.03
""")
async def test_no_reward_is_above_the_cap(pay, other: list[float], paid: float):
    _, ask, learn = make_curious(States(), pay=pay, cap=abs(paid))
    await learn([ONE])
    assert await ask([[[1, 0], other]]) == pytest.approx([paid])


async def test_a_response_without_a_second_half_pays_nothing_however_little_it_was_foretold():
    _, ask, learn = make_curious(States())
    await learn([ONE])
    for pay in PAYS:
        assert await ask([[[1, 0], [0, 0]], [[0, 0], [0, 0]]], pay=pay) == pytest.approx([0, 0])


async def test_the_random_responder_is_paid_for_ever_by_the_error_and_not_by_progress():
    """Structured: one of three responses. Random: states that nothing foretells. Both visit 200 times."""

    def direction(*shape):
        drawn = rng.normal(size=(*shape, 16))
        return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)

    rng = np.random.default_rng(0)
    known, (_, ask, learn), visits = direction(3, 2), make_curious(States()), []
    for _ in range(200):
        structured, noise = known[rng.integers(3, size=8)], direction(8, 2)
        visits.append([[await ask(one, pay=pay) for one in (structured, noise)] for pay in PAYS])
        await learn([*structured, *noise])
    paid = dict(zip(PAYS, np.asarray(visits).swapaxes(0, 1), strict=True))  # [visits, 2, 8] each
    first, late = paid["error"][0].mean(1), paid["error"][-50:].mean((0, 2))
    assert late[0] < first[0] / 10  # what is known is dull
    assert late[1] > 10 * late[0]  # the naive form pays noise more, for ever
    structured, noise = paid["progress"].mean(2).sum(0)
    assert structured > max(0, noise)  # what can be learnt pays more than noise, over all visits
    assert abs(paid["progress"][-50:].mean((0, 2))).max() < late[1] / 100  # and in the end nothing does
    lucky = np.maximum(0, paid["progress"]).mean(2).sum(0)
    assert lucky[1] > lucky[0]  # paid for luck alone, noise would gain more


# --- novelty ------------------------------------------------------------------------------------------------


def answer(text, prompt_id="p"):
    return Sample(id="s", prompt="q", response=text, metadata={"prompt_id": prompt_id})


@cases("""
before | reward
0      | 1
3      | 0.5
99     | 0.1
""")
async def test_an_answer_is_worth_one_over_the_root_of_how_often_it_was_given(before: int, reward: float):
    state = {}
    await novelty([answer("so it is 7")] * before, state=state, learn=True)
    for _ in range(2):
        found = await novelty([answer("7"), answer("7.0")], state=state)
        assert found == pytest.approx([reward] * 2)  # others of its batch do not count
    assert await novelty([answer("8"), answer("7", "other")], state=state) == [1, 1]
    assert await novelty([answer("who knows")], state=state) == [0]  # no answer is no new one
    assert await novelty([answer("7")], state=state, cap=0.05) == [0.05]


async def test_answers_beyond_the_capacity_are_forgotten_from_the_oldest_on():
    state = {}
    for text in ("1", "2", "1", "3"):
        await novelty([answer(text)], state=state, learn=True, capacity=2)
    assert state == {"p 1": 2, "p 3": 1}


# --- coherence by a scoring model ---------------------------------------------------------------------------


class Scorer:
    """A reference by which log p of a token is −1 if it stands in the row before, else −3; `odd` in its place
    where that is given.
    """

    def __init__(self, odd=None):
        self.odd, self.batches = odd, []

    async def score(self, batch):
        self.batches.append(batch)
        return tuple(
            mask * [self.odd or (-1.0 if one in row[:at] else -3.0) for at, one in enumerate(row)]
            for row, mask in zip(batch.tokens, batch.loss_masks, strict=True)
        )


WORDS = {}


def say(text):
    return sample_of([0, *(WORDS.setdefault(word, len(WORDS) + 1) for word in text.split())], text)


CHAIN = "We have 12 apples .\nFrom 12 we take 5 .\nSo 7 stay"


async def test_lift_is_what_the_first_half_adds_to_the_log_probs_of_the_second():
    scorer = Scorer()
    sample = sample_of([0, 1, 2, 3, 4, 1, 2, 9, 9])
    [result] = await coherence_scored([sample], reference=scorer, cap=5.0)
    # after 1 2 3 4: −1 −1 −3 −1; alone: −3 −3 −3 −1
    assert result.parts == {"lift": 1.0} and result.reward == 1.0
    [capped] = await coherence_scored([sample], reference=scorer, cap=0.3)
    assert capped.reward == 0.3
    assert (await coherence_scored([sample], reference=scorer, min_tokens=5))[0].parts == {"lift": 0}
    results = await coherence_scored([sample, sample_of([0])], reference=scorer)
    assert [one.reward for one in results] == [1, 0]
    assert len(scorer.batches) == 4 and len(scorer.batches[-1]) == 4  # one batch a group, two rows a sample


async def test_what_the_first_half_makes_less_likely_costs_nothing():
    class Backwards(Scorer):
        async def score(self, batch):
            return tuple(-row for row in await super().score(batch))

    [result] = await coherence_scored([sample_of([0, 1, 2, 3, 4, 1, 2, 3, 4])], reference=Backwards())
    assert result.parts["lift"] == -2 and result.reward == 0


async def test_a_step_said_again_lifts_more_and_is_not_paid():
    honest, cheat = say(CHAIN), say("\n".join(["We have 12 apples ."] * 3))
    one, other = await coherence_scored([honest, cheat], reference=Scorer(), cap=5.0)
    assert other.parts["lift"] > one.parts["lift"] > 0  # the naive form pays the cheat more
    assert coherence(cheat).parts["repeated"] == 1
    assert one.reward == one.parts["lift"] and other.reward == 0


# --- as parts -----------------------------------------------------------------------------------------------


DATA = {"kind": "jsonl", "path": "a.jsonl"}


def parts_of(models, **parts):
    """The parts of the library by name, with their settings."""
    rewards = {name: {"group_reward": name, **settings} for name, settings in parts.items()}
    config = RunConfig.model_validate({"rl": {"steps": 1, "data": DATA, "rollout": {"rewards": rewards}}})
    made = {
        name: partial(LIBRARY["group_reward"][name], **part.params)
        for name, part in config.rollout.rewards.items()
    }
    return config, join_parts(config, made, lambda: 1, **models)


ALL = {
    "curiosity": {"params": {"eta": 0.25}, "normalise": "running"},
    "novelty": {"params": {"extract": "text"}},
    "coherence_scored": {},
}


def draw(rng, number):
    """(samples of two groups with answers, the φ of each)."""
    said = [say(f"{rng.integers(4)} a b {at}") for at in range(4)]
    samples = [replace(one, id=f"g{number}-s{at}", group_index=at // 2) for at, one in enumerate(said)]
    return samples, rng.normal(size=(4, 2, 3))


async def visit(parts, backend, rng, count):
    """The rewards of batches that train."""
    rewards = []
    for number in range(count):
        samples, pairs = draw(rng, number)
        scored = []
        for group in (slice(0, 2), slice(2, 4)):
            backend.pairs = pairs[group]
            results = await parts.score_group(samples[group])
            rewards += [result.reward for result in results]
            scored += [
                replace(one, rewards=result.parts)
                for one, result in zip(samples[group], results, strict=True)
            ]
        backend.pairs = pairs
        await parts.learn(scored)
    return rewards


async def test_what_was_learnt_goes_through_a_checkpoint_to_the_bit():
    backend = States()
    models = {"backend": backend, "reference": Scorer()}
    whole, broken, resumed = (parts_of(models, **ALL)[1] for _ in range(3))
    expected = await visit(whole, backend, np.random.default_rng(0), 6)
    rng = np.random.default_rng(0)
    first = await visit(broken, backend, rng, 3)
    held = broken.state_dict()
    saved = json.dumps(held)
    assert set(held) == {"curiosity", "curiosity.state", "novelty.state"}
    resumed.load_state_dict(json.loads(saved))
    assert first + await visit(resumed, backend, rng, 3) == expected
    assert json.dumps(resumed.state_dict()) == json.dumps(whole.state_dict())
    await visit(broken, backend, rng, 1)
    assert json.dumps(held) == saved  # what is being saved does not change


async def test_a_model_that_says_nothing_finite_fails_its_group_by_the_name_of_the_part():
    samples = [say(CHAIN)] * 2
    for odd in (np.nan, -np.inf):
        _, parts = parts_of({"reference": Scorer(odd)}, coherence_scored={})
        with np.errstate(invalid="ignore"), pytest.raises(UserFunctionError) as raised:
            await parts.score_group(samples)
        assert str(raised.value).startswith("rl.rollout.rewards.coherence_scored: group reward function")
    _, parts = parts_of({"backend": States(np.full((2, 2, 3), np.nan))}, curiosity={})
    with pytest.raises(UserFunctionError, match=r"rl\.rollout\.rewards\.curiosity: .*nan"):
        await parts.score_group(samples)


async def test_a_backend_that_fails_ends_the_run_and_no_sample():
    class Failed:
        async def forward_with_entropy(self, batch, **_):
            raise BackendError("an earlier step failed")

    _, parts = parts_of({"backend": Failed()}, curiosity={})
    with pytest.raises(BackendError):
        await parts.score_group([say(CHAIN)])


async def test_without_models_they_can_be_tried():
    _, parts = parts_of({}, **ALL)
    results = await parts.score_group([say(CHAIN), say(CHAIN)])
    assert [one.reward for one in results] == [1.0] * 2  # novelty alone needs none


async def test_an_async_reward_of_the_users_may_keep_a_state_too():
    async def longest(samples, *, state=None, learn=False, reference="a name"):
        seen = state.get("longest", 0)
        if learn:
            state["longest"] = max(seen, *(len(one.response) for one in samples))
        return [float(len(one.response) > seen) for one in samples]

    config, _ = parts_of({}, novelty={})
    parts = join_parts(config, {"novelty": longest}, lambda: 1, reference="a model")
    group = [answer("ab"), answer("abc")]
    assert [one.reward for one in await parts.score_group(group)] == [1, 1]
    await parts.learn([replace(one, rewards={"novelty": 1.0}) for one in group])
    assert [one.reward for one in await parts.score_group(group)] == [0, 0]
    assert parts.state_dict() == {"novelty.state": {"longest": 3}}


@cases("""
name             | params            | wrong
curiosity        | pay = "surprise"  | pay='surprise'; it must be one of error, progress
novelty          | extract = "last"  | extract='last'; it must be one of number
curiosity        | pay = "progress"  |
coherence_scored | cap = 2.0         |
""")
def test_their_options_are_checked_before_a_model_is_there(name, params: dict, wrong):
    with pytest.raises(ConfigError, match=f"key.params: {wrong}") if wrong else nullcontext():
        check_options("key", partial(LIBRARY["group_reward"][name], **params))


def test_the_reference_is_opened_for_a_part_that_asks_it():
    for name, needed in (("coherence_scored", True), ("curiosity", False)):
        config, _ = parts_of({}, **{name: {}})
        assert config.rl and needs_reference(config.rl) == needed


@cases("name: curiosity novelty coherence_scored")
def test_alone_they_are_refused_with_the_way_out(name):
    rollout = {"group_reward": name}
    with pytest.raises(
        ValueError, match=rf"'{name}' keeps a state .*make it one, in \[rl\.rollout\.rewards\."
    ):
        RunConfig.model_validate({"rl": {"steps": 1, "data": DATA, "rollout": rollout}})
