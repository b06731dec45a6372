"""The arithmetic of benchmarks/curves: quarters, standard errors, verdicts; and what its task calls right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.curves.__main__ import make_command
from benchmarks.curves.bars import Bar, Job, compute_mean_and_error, judge, load_jobs
from benchmarks.curves.tasks import (
    exact_and_short,
    keep_mixed,
)
from rollouts.config.load import load_config
from rollouts.types import Sample, SampleGroup, Status

ROOT = Path(__file__).resolve().parents[2]
JOBS = load_jobs(ROOT / "benchmarks" / "curves" / "jobs.toml")


def test_the_standard_error_of_a_mean_divides_by_n_minus_1() -> None:
    mean, error = compute_mean_and_error(
        [1.0, 3.0, 5.0, 7.0]
    )  # squares 9 + 1 + 1 + 9 = 20, s² = 20/3, s²/4 = 5/3
    assert mean == 4.0
    assert error == pytest.approx(math.sqrt(5 / 3), rel=1e-15)


def test_a_rise_below_its_standard_errors_is_missed() -> None:
    values = [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 5.0, 7.0]  # 3.54 standard errors
    assert judge(Bar("m", "rises", errors=3.5), values).met
    assert not judge(Bar("m", "rises", errors=3.6), values).met
    assert not judge(Bar("m", "rises"), values[::-1]).met, "a fall is no rise"


def test_near_and_beyond_look_at_the_last_third() -> None:
    values = [0.0] * 6 + [1.5, 2.0, 2.5]  # mean of the last third: 2
    verdict = judge(Bar("m", "near", target=1.75, tolerance=0.75), values)
    assert (verdict.bar, verdict.first, verdict.last, verdict.met) == (
        "`m` within 0.75 of 1.75, last third (3 of 3 steps)",
        0.0,
        2.0,
        True,
    )
    assert judge(Bar("m", "beyond", target=1.5, tolerance=0.25), values).met
    assert not judge(Bar("m", "near", target=1.25, tolerance=0.5), values).met
    assert not judge(Bar("m", "near", target=2.75, tolerance=0.5), values).met, "below is as far as above"
    assert not judge(Bar("m", "beyond", target=1.5, tolerance=0.5), values).met


def test_a_curve_is_like_others_if_each_quarter_lies_in_their_range_widened_by_two_errors():
    others = [[0.0] * 2 + [1.0] * 2 + [2.0] * 2 + [3.0] * 2, [0.5] * 2 + [1.5] * 2 + [2.5] * 2 + [3.5] * 2]
    bar = Bar("reward/mean", "like", of="base")
    assert judge(bar, [0.2, 0.4, 1.1, 1.3, 2.4, 2.4, 3.0, 3.2], others).met
    low = [
        0.2,
        0.4,
        0.6,
        0.8,
        2.4,
        2.4,
        3.0,
        3.2,
    ]  # 0.7 ± 0.1 in the second quarter, whose least is 1.0: 0.9 is not enough
    assert not judge(bar, low, others).met
    assert judge(
        Bar("reward/mean", "like", of="base", lag=2),
        [9.0, 9.0, 0.2, 0.4, 1.1, 1.3, 2.4, 2.4, 3.0, 3.2],
        others,
    ).met
    with pytest.raises(ValueError, match="a spread needs two"):
        judge(bar, low, others[:1])


def test_a_change_compares_quarters_of_steps_and_single_evaluations() -> None:
    steps = [1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 2.0, 4.0]
    assert judge(Bar("m", "ends", least=3.0), steps).met
    assert not judge(Bar("m", "ends", least=3.1), steps).met
    assert judge(Bar("m", "gains"), steps).met
    assert judge(Bar("m", "falls"), steps[::-1]).met
    assert not judge(Bar("m", "falls"), [1.0] * 8).met
    assert judge(Bar("eval/m", "falls"), [3.0, 5.0, 2.0]).last == 2.0
    assert not judge(Bar("eval/m", "gains"), [3.0, 5.0, 2.0]).met


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.name)
def test_every_job_has_a_config_that_is_valid(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = make_command(job, job.run_names()[0], None)
    load_config(command[2], command[5:])
    assert not job.start or JOBS[job.start].run_names() == [job.start], "what a job starts from has one run"


# --- the task -----------------------------------------------------------------------------------------------


def make_answer(response: str, *, answer: str = "eph", tokens: int = 4) -> Sample:
    ids, mask, versions = np.arange(tokens + 1), np.arange(tokens + 1) > 0, np.asarray([-1] + [0] * tokens)
    return Sample(
        id="a",
        prompt="dog",
        response=response,
        tokens=ids,
        loss_mask=mask,
        weight_versions=versions,
        status=Status.COMPLETED,
        metadata={"answer": answer},
    )


def test_groups_are_kept_by_what_is_right_and_not_by_the_punishment() -> None:
    def judge_group(*texts: tuple[str, int]) -> bool:
        samples = []
        for index, (text, tokens) in enumerate(texts):
            sample = make_answer(text, tokens=tokens)
            result = exact_and_short(sample)
            samples.append(replace(sample, id=f"a{index}", reward=result.reward, rewards=result.parts))
        return keep_mixed(SampleGroup(group_index=0, prompt_id="dog", samples=tuple(samples))).keep

    assert judge_group(("eph", 4), ("no", 4))
    assert not judge_group(("eph", 4), ("eph", 8)), "the rewards differ, the answers do not"
