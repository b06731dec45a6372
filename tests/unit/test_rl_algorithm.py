"""Which algorithm holds in which step, and the KL coefficient that a controller has come to."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from rollouts import errors
from rollouts.errors import CheckpointError, ConfigError
from rollouts.loops.algorithm import (
    LoopState,
    check_algorithms,
    choose_algorithm,
    count_updates,
    decode_loop_state,
    list_algorithms,
    make_kl_control,
    needs_reference,
    update_loop_state,
)
from rollouts.loops.rl_batch import add_advantages, choose_optim, measure_kl
from rollouts.preflight.checks import check_loss
from rollouts.preflight.functions import load_advantages
from tests.support.text_tables import cases, read_params
from tests.unit import test_loops
from tests.unit.test_rl_batch import batch_of, segmented


def rl_config(*changes, **settings):
    return test_loops.rl_config(steps=100, changes=[*changes], **settings)


def choose(config, *steps):
    return [choose_algorithm(config, step, LoopState(config.kl_coef)) for step in steps]


def coefs(config, *steps):
    return [algorithm.settings.kl_coef for algorithm in choose(config, *steps)]


# --- changes ------------------------------------------------------------------------------------------------


def test_without_changes_every_step_is_as_the_settings_say():
    config = rl_config(clip_high=0.28)
    for algorithm in choose(config, 1, 7, 100):
        assert (algorithm.change, algorithm.settings) == (0, config)
        assert algorithm.loss.params == {"clip_low": 0.2, "clip_high": 0.28}
    assert list_algorithms(config) == [config]
    assert not needs_reference(config) and count_updates(config) == 1


def test_what_a_change_does_not_name_stays_as_the_one_before_left_it():
    config = rl_config(
        {"from_step": 10, "clip_high": 0.3}, {"from_step": 20, "normalise_by": "sequences"}, clip_low=0.1
    )
    found = [(one.change, one.loss.unit, one.loss.params) for one in choose(config, 9, 10, 19, 20, 99)]
    before, after = {"clip_low": 0.1, "clip_high": 0.2}, {"clip_low": 0.1, "clip_high": 0.3}
    second, third = (1, "tokens", after), (2, "sequences", after)
    assert found == [(0, "tokens", before), second, second, third, third]


def test_another_loss_or_advantage_begins_with_its_default_parameters_and_the_same_one_keeps_its_own():
    settings = read_params("""loss_params = { dual_clip = 3.0 }, clip_high = 0.28, advantage = "grpo", \
advantage_params = { ddof = 0 }""")
    first = {"from_step": 5, "loss": "gspo", "advantage": "centred"}
    _, other, back = list_algorithms(rl_config(first, {"from_step": 9, "loss": "ppo_clip"}, **settings))
    assert (other.loss_params, other.clip_high, other.advantage_params) == ({}, 0.2, {})
    assert (back.loss_params, back.clip_high) == ({}, 0.2)
    _, same = list_algorithms(rl_config({"from_step": 5, "loss": "ppo_clip", "kl_in": "loss"}, **settings))
    assert (same.loss_params, same.clip_high) == ({"dual_clip": 3.0}, 0.28)


def test_another_loss_begins_with_its_own_unit_where_the_one_before_had_its_own():
    changes = {"from_step": 5, "loss": "gspo"}, {"from_step": 9, "loss": "cispo"}
    for units in ("tokens", "sequences", "tokens"), ("constant",) * 3:
        pieces = list_algorithms(rl_config(*changes, normalise_by=units[0]))
        assert tuple(piece.normalise_by for piece in pieces) == units


def test_the_kl_coefficient_ramps_in_a_straight_line_from_where_it_was():
    config = rl_config(
        {"from_step": 11, "kl_coef": 0.3, "kl_ramp_steps": 10}, {"from_step": 31, "kl_coef": 0.0}, kl_coef=0.1
    )
    assert coefs(config, 1, 10, 11, 12, 16, 21, 30, 31, 99) == pytest.approx(
        [0.1, 0.1, 0.1, 0.12, 0.2, 0.3, 0.3, 0.0, 0.0]
    )
    falling = rl_config({"from_step": 11, "kl_coef": 0.0, "kl_ramp_steps": 10}, kl_coef=0.1)
    assert coefs(config, 21) + coefs(falling, 21, 22) == [0.3, 0.0, 0.0]  # exactly


@cases(r"""
changes | message
[{"from_step":60,"loss":"gspo","clip_high":0.28}] | changes with from_step=60: clip_high=0.28 with loss='gspo'
[{"from_step":60,"kl_coef":1,"kl_in":"loss"}] | changes with from_step=60: kl_estimator='k1' with kl_in='loss'
[{"from_step": 9, "loss": "gspo"}, {"from_step": 9, "loss": "cispo"}] | from_step=9 comes after from_step=9
[{"from_step": 9, "loss": "gspo"}, {"from_step": 4, "loss": "cispo"}] | from_step=4 comes after from_step=9
[{"from_step": 9}]                | from_step=9 changes nothing
[{"from_step":9,"loss":"gspo","kl_ramp_steps":3}] | from_step=9 has kl_ramp_steps; it needs kl_coef beside it
[{"from_step": 1, "loss": "gspo"}] | from_step
[{"from_step": 9, "steps": 3}]     | steps
""")
def test_a_change_that_makes_no_sense_is_refused_at_the_start(changes: Any, message):
    with pytest.raises(ValueError, match=message):
        rl_config(*changes)


@cases(r"""
error       | change                                               | settings | message
ConfigError | {"loss": "gspo", "loss_params": {"clip_hi": 1}} | {} | loss 'gspo' has no parameter 'clip_hi'
ConfigError | {"loss": "gspo"} | {"loss_params": {"clip_hi": 1}} | ^loss 'ppo_clip' has no parameter 'clip_hi'
PlugInError | {"advantage": "groo"} | {} | rl\.advantage='groo' does not name a function
ConfigError | {"advantage": "mine.py:scaled", "advantage_params": {"to": 2.0}} | {} | .*has no parameter 'to'
""")
def test_the_loss_and_the_advantage_of_every_piece_are_checked_and_the_change_is_named(
    error, change: Any, settings: Any, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def scaled(inputs, *, by=1.0):\n    return inputs.rewards * by\n")
    mine = {"from_step": 60, "advantage": "mine.py:scaled", "advantage_params": {"by": 2.0}}
    assert sorted(load_advantages(rl_config(mine))) == ["grpo", "mine.py:scaled"]
    look = check_loss if "loss" in change else load_advantages
    message = message if message[0] == "^" else rf"rl\.changes with from_step=60: {message}"
    with pytest.raises(getattr(errors, error), match=message):
        look(rl_config({"from_step": 60, **change}, **settings))


# --- controllers --------------------------------------------------------------------------------------------


def test_a_controller_moves_the_coefficient_of_the_next_step():
    config = rl_config(kl_coef=0.1, kl_control="proportional(target=2, horizon=100)")
    state, control = LoopState(config.kl_coef), make_kl_control(config)
    batch = batch_of([0.0] * 50)
    seen = []
    for step, kl in enumerate([4.0, 1.9, math.nan], start=1):
        algorithm = choose_algorithm(config, step, state)
        seen.append(algorithm.settings.kl_coef)
        update_loop_state(state, algorithm, control, batch, {"kl/ref_per_sample": kl})
    # errors 4/2 − 1 cut to 0.2, and 1.9/2 − 1 = −0.05, each times 50/100
    assert seen == pytest.approx([0.1, 0.1 * 1.1, 0.1 * 1.1 * 0.975])
    assert state.kl_coef == pytest.approx(seen[-1])  # what was not measured moves nothing


@cases(r"""
control                                       | message
two_sided(target=1)                           | rl.kl_control='two_sided\(target=1\)': .*tolerance
two_sided(target=0, tolerance=0.1)            | the rule is target > 0
two_sided(target=1, tolerance=0.1, horizon=5) | horizon
""")
def test_a_controller_that_cannot_be_made_is_refused_before_the_run(control, message):
    config = rl_config(kl_coef=0.1, kl_control=control)
    with pytest.raises(ConfigError, match=message):
        check_algorithms(config, lambda settings: None)


def test_the_state_of_the_loop_is_kept_to_the_last_bit_and_a_broken_one_is_refused():
    state = LoopState(kl_coef=0.1 * 1.1 * 0.975)
    assert decode_loop_state(dataclasses.asdict(state)) == state
    for broken in ({}, {"kl_coef": "0.1"}, {"kl_coef": math.nan}, {"kl_coef": -1.0}, {"kl_coef": True}):
        with pytest.raises(CheckpointError, match="the loop's state has kl_coef="):
            decode_loop_state(broken)


def test_the_measured_kl_is_the_mean_over_trajectories_wherever_the_term_is():
    """3 and 5 nats."""
    with_reference = segmented(1.0, 2.0, 5.0)
    assert measure_kl(with_reference, np.asarray([0, 0, 1])) == {"kl/ref_per_sample": pytest.approx(4.0)}
    for kl_in, estimator in (("reward", "k1"), ("loss", "k3")):
        config = rl_config(advantage="raw", kl_coef=0.1, kl_in=kl_in, kl_estimator=estimator)
        _, metrics = add_advantages(with_reference, config)
        assert metrics["kl/ref_per_sample"] == pytest.approx(4.0)
    assert "kl/ref_per_sample" not in add_advantages(segmented(), rl_config(advantage="raw"))[1]
    assert measure_kl(segmented(*[math.inf] * 3), np.asarray([0, 0, 1])) == {}


# --- the learning rate of a step ----------------------------------------------------------------------------


# of the groups 1, 1, 1, 0 and 1, 0, 0, 0 the best less the mean is .25 and .75, their mean .5
@cases("""
rewards         | lowest | factor | lr   | …
1 1 1 0 1 0 0 0 | 0.1    | 1.0    | 0.5  |
1 1 1 1 1 1 1 0 | 0.2    | 1.0    | 0.2  | the lowest
1 1 1 0 1 0 0 0 | 0.1    | 0.1    | 0.05 | slowed, too
1 1 1 0 1 0 0 0 | 0.0    | 0.1    | 0.1  | slowed alone
9 0 0 0 9 0 0 0 | 0.1    | 1.0    | null | at most all
""")
def test_the_learning_rate_is_in_proportion_to_the_error(
    rewards: list[float], lowest: float, factor: float, lr: Any
):
    batch = batch_of(rewards, groups=[0] * 4 + [1] * 4)
    found = choose_optim(test_loops.rl_config(lr_by_error=lowest, optim={"lr": 1.0}), batch, factor)
    assert (found and found.lr) == (lr and pytest.approx(lr))


def test_the_step_after_an_undone_one_has_no_momentum():
    config = test_loops.rl_config(
        kl_coef=0.1, kl_ref_limit=0.2, kl_in="loss", kl_estimator="k3", optim={"lr": 1.0, "beta2": 0.5}
    )
    batch, state = batch_of([0.0, 1.0], groups=[0, 0]), LoopState(0.1)
    for undone in (0.0, 1.0, 0.0):
        measured = {"kl/ref_per_sample": 0.3, "optim/undone": undone}
        algorithm = choose_algorithm(config, 1, state)
        update_loop_state(state, algorithm, make_kl_control(config), batch, measured)
        found = choose_optim(config, batch, state.lr_factor, state.undone)
        assert (found and (found.lr, found.betas)) == ((1.0, (0.0, 0.5)) if undone else None)
        assert state.kl == 0.3


def test_a_coefficient_that_stays_at_its_bound_is_said_once(caplog):
    config = test_loops.rl_config(
        kl_coef=1.0, kl_control="two_sided(target=0.05, tolerance=0.01, factor=1.2, highest=1)"
    )
    state, control = LoopState(1.0), make_kl_control(config)
    batch = batch_of([0.0, 1.0], groups=[0, 0])
    seen = []
    for step in range(1, 31):
        algorithm = choose_algorithm(config, step, state)
        kl = 0.01 if step == 26 else 0.5
        seen.append(update_loop_state(state, algorithm, control, batch, {"kl/ref_per_sample": kl}))
    assert [row.get("kl/coef_at_bound", 0) for row in seen] == [*range(1, 26), 0, 1, 2, 3, 4]
    [message] = caplog.messages
    assert "has been 1, a bound of rl.kl_control, for 20 steps, and the KL is 0.5 nats" in message
