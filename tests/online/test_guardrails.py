"""Signs of collapse, and what may be published."""

import json
import math

import numpy as np
import pytest

from rollouts.config.online import OnlineConfig
from rollouts.online.guardrails import FIRST, WINDOW, Guardrails
from rollouts.types import Sample


def batch(*groups, start=0):
    """A sample for each answer of each group."""
    return [
        Sample(
            id=f"g{index}-s{at}",
            prompt="q",
            response=answer,
            group_index=index,
            metadata={"prompt_id": f"p{index}"},
            tokens=np.asarray([1, 2]),
            loss_mask=np.asarray([False, True]),
            rollout_log_probs=np.zeros(2, np.float32),
            weight_versions=np.asarray([-1, 0]),
        )
        for index, answers in enumerate(groups, start)
        for at, answer in enumerate(answers)
    ]


def test_votes_have_an_entropy_a_share_of_different_answers_and_a_commonest_label():
    found = Guardrails(OnlineConfig()).observe(batch(["7", "7", "8", "none"], ["7", "7", "7", "7"]))
    # of the first group 2, 1, 1 of 4: 1.5 log 2; the second is unanimous; both labels are 7
    assert found["online/vote_entropy"] == pytest.approx(0.75 * math.log(2))
    assert found["online/distinct"] == (3 / 4 + 1 / 4) / 2
    assert found["online/label_share"] == 1.0
    assert not any(name.endswith("change") for name in found)  # there is nothing to compare with yet


def test_changes_are_from_the_first_batches():
    rails = Guardrails(OnlineConfig())
    for step in range(FIRST):
        rails.observe(batch(["1", "2"], ["3", "4"], start=2 * step))
    found = rails.observe(batch(["9", "9"], ["9", "9"], start=100))
    assert found["online/vote_entropy/change"] == pytest.approx(-math.log(2))
    assert found["online/distinct/change"] == -0.5


def drift(share):
    """The label share over 40 batches in which more and more prompts get the answer 7."""
    rails, found = Guardrails(OnlineConfig()), []
    for step in range(40):
        sevens = round(16 * share(step))
        groups = [["7"] * 4 if at < sevens else [str(100 * step + at)] * 4 for at in range(16)]
        found.append(rails.observe(batch(*groups, start=16 * step)))
    return found


def test_a_policy_that_answers_everything_alike_is_seen_and_one_that_only_agrees_is_not():
    collapsing = drift(lambda step: step / 40)
    seen = next(step for step, row in enumerate(collapsing) if row.get("online/label_share/change", 0) > 0.1)
    assert seen <= 12  # before a third of the answers are 7
    assert all(row.get("online/label_share/change", 0) <= 0.1 for row in drift(lambda step: 0.0))
    assert len(Guardrails(OnlineConfig()).labels) <= WINDOW


def test_small_falls_do_not_add_up():
    rails, published = Guardrails(OnlineConfig(max_fall=0.03)), []
    for step, accuracy in enumerate((0.50, 0.49, 0.48, 0.47, 0.46, 0.45)):
        if rails.judge(accuracy):
            published.append(accuracy)
            rails.note_published(accuracy, step)
    assert published == [0.50, 0.49, 0.48, 0.47]  # always compared with the best
    assert (rails.best, rails.accuracies["3"], rails.refused) == (0.50, 0.47, 2)
    rails.best = 0.27
    assert rails.judge(0.24)  # 0.27 - 0.03 is a little more as a number


def test_several_refused_in_a_row_stop_and_a_good_one_counts_anew():
    rails = Guardrails(OnlineConfig(max_refused=2))
    rails.note_published(0.5, 1)
    assert not rails.judge(0.1) and not rails.stops
    assert rails.judge(0.5) and rails.refused == 0
    assert not rails.judge(0.1) and not rails.judge(0.1) and rails.stops
    assert not Guardrails(OnlineConfig(max_refused=0), refused=9).stops


def test_its_state_is_json_and_goes_on():
    rails = Guardrails(OnlineConfig())
    rails.observe(batch(["1", "2"]))
    rails.note_published(0.25, 3)
    rails.refused = 1
    again = Guardrails(OnlineConfig())
    again.load_state_dict(json.loads(json.dumps(rails.state_dict())))
    held = rails.state_dict()
    assert again.state_dict() == held
    rails.observe(batch(["1", "2"]))
    assert again.state_dict() == held  # what is saved later is as it was
