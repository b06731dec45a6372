"""Plans of faults: what may happen when, and plans that are drawn from an integer."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from tests.support.fault_plan import (
    BAD_REPLY_KINDS,
    FAULT_KINDS,
    BadReply,
    BadStatus,
    Crash,
    CutBody,
    Fault,
    FaultPlan,
    Hang,
    RequestFault,
    Slow,
    StaleWeights,
    UpdateFails,
    UpdateFault,
    WrongVersion,
    draw_fault_plan,
)


def test_a_fault_has_exactly_one_moment():
    with pytest.raises(ValueError, match="moments \\[\\]; give one of"):
        Fault("a", Crash())
    with pytest.raises(ValueError, match="at_request', 'at_s"):
        Fault("a", Crash(), at_request=1, at_s=2.0)


@pytest.mark.parametrize(
    ("what", "moment"),
    [
        (StaleWeights(), "at_request"),
        (CutBody(3), "at_update"),
        (BadReply("no_tokens"), "at_s"),
        (UpdateFails("load"), "at_s"),
        (Slow(2), "at_update"),
    ],
)
def test_a_fault_that_cannot_happen_then_is_refused(what, moment):
    with pytest.raises(ValueError, match=f"{moment}=1 .* cannot happen there"):
        Fault("a", what, **{moment: 1})


def test_moments_before_the_start_are_refused():
    with pytest.raises(ValueError, match="begin at 0"):
        Fault("a", Crash(), at_s=-1.0)


def test_an_engine_sees_its_own_faults_in_the_plans_order():
    first, other, second = (
        Fault("a", Crash(), at_s=9.0),
        Fault("b", Crash(), at_s=1.0),
        Fault("a", BadStatus(503), at_request=0),
    )
    plan = FaultPlan((first, other, second))
    assert plan.of_engine("a") == (first, second)
    assert plan.of_engine("c") == ()


def test_a_seed_fixes_the_plan_and_another_seed_gives_another():
    plans = [draw_fault_plan(seed, engines=["a", "b"]) for seed in range(20)]
    assert plans == [draw_fault_plan(seed, engines=["a", "b"]) for seed in range(20)]
    assert len(set(plans)) > 15


def test_drawn_plans_reach_every_kind_of_fault_and_of_reply():
    faults = [fault for seed in range(400) for fault in draw_fault_plan(seed, engines=["a"]).faults]
    assert {type(fault.what) for fault in faults} == {*get_args(RequestFault), *get_args(UpdateFault)}
    assert {fault.what.kind for fault in faults if isinstance(fault.what, BadReply)} == set(BAD_REPLY_KINDS)
    assert {fault.what.phase for fault in faults if isinstance(fault.what, UpdateFails)} == {
        "pause",
        "load",
        "set_version",
        "resume",
        "probe",
    }
    assert any(isinstance(fault.what, Hang) and fault.what.for_s == math.inf for fault in faults)


def test_drawn_faults_keep_their_bounds():
    faults = draw_fault_plan(
        3, engines=["a", "b", "c"], most=50, requests=5, updates=2, horizon_s=10.0
    ).faults
    assert {fault.at_request for fault in faults} == {None, 0, 1, 2, 3, 4}
    assert {fault.at_update for fault in faults} == {None, 0, 1}
    assert all(fault.at_s is None or 0 <= fault.at_s <= 10 for fault in faults)


def test_plans_of_some_kinds_hold_no_other():
    faults = [
        fault
        for seed in range(30)
        for fault in draw_fault_plan(seed, engines=["a"], kinds=["stale", "version"]).faults
    ]
    assert {type(fault.what) for fault in faults} == {StaleWeights, WrongVersion}
    assert set(FAULT_KINDS) == {
        "crash",
        "hang",
        "slow",
        "status",
        "cut",
        "reply",
        "update",
        "stale",
        "version",
    }


def test_plans_that_recover_leave_nothing_down_for_ever():
    faults = [
        fault.what
        for seed in range(300)
        for fault in draw_fault_plan(seed, engines=["a"], recovers=True).faults
    ]
    assert all(fault.restart_after_s is not None for fault in faults if isinstance(fault, Crash))
    assert all(
        fault.for_s < math.inf and not fault.only_this_request for fault in faults if isinstance(fault, Hang)
    )
    assert all(fault.how != "hang" for fault in faults if isinstance(fault, UpdateFails))
