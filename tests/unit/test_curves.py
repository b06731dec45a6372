"""The arithmetic of benchmarks/curves: quarters, standard errors, verdicts."""

import math
from pathlib import Path

import pytest

from benchmarks.curves.__main__ import make_command
from benchmarks.curves.bars import Bar, compute_mean_and_error, judge, load_jobs
from rollouts.config.load import load_config
from tests.support.text_tables import cases

ROOT = Path(__file__).resolve().parents[2]
JOBS = load_jobs(ROOT / "benchmarks" / "curves" / "jobs.toml")


def test_the_standard_error_of_a_mean_divides_by_n_minus_1():
    mean, error = compute_mean_and_error([1.0, 3.0, 5.0, 7.0])  # squares 9 + 1 + 1 + 9 = 20, s² = 20/3
    assert (mean, error) == (4.0, pytest.approx(math.sqrt(20 / 3 / 4), rel=1e-15))


# A rise is 3.54 standard errors. `near` and `beyond` look at the last third, whose mean is 2. Evaluations
# (eval/) are compared one by one, steps by quarters.
@cases("""
bar                                             | values                | met
kind = "rises", errors = 3.5                    | 0 2 0 0 0 0 5 7       | yes
kind = "rises", errors = 3.6                    | 0 2 0 0 0 0 5 7       | no
kind = "rises"                                  | 7 5 0 0 0 0 2 0       | no
kind = "near", target = 1.75, tolerance = 0.75  | 0 0 0 0 0 0 1.5 2 2.5 | yes
kind = "near", target = 1.25, tolerance = 0.5   | 0 0 0 0 0 0 1.5 2 2.5 | no
kind = "near", target = 2.75, tolerance = 0.5   | 0 0 0 0 0 0 1.5 2 2.5 | no
kind = "beyond", target = 1.5, tolerance = 0.25 | 0 0 0 0 0 0 1.5 2 2.5 | yes
kind = "beyond", target = 1.5, tolerance = 0.5  | 0 0 0 0 0 0 1.5 2 2.5 | no
kind = "ends", least = 3.0                      | 1 1 9 9 9 9 2 4       | yes
kind = "ends", least = 3.1                      | 1 1 9 9 9 9 2 4       | no
kind = "gains"                                  | 1 1 9 9 9 9 2 4       | yes
kind = "falls"                                  | 4 2 9 9 9 9 1 1       | yes
kind = "falls"                                  | 1 1 1 1 1 1 1 1       | no
kind = "falls", metric = "eval/m"               | 3 5 2                 | yes
kind = "gains", metric = "eval/m"               | 3 5 2                 | no
kind = "gains", by = 2.0, metric = "eval/m"     | 3 9 5                 | yes
kind = "gains", by = 2.1, metric = "eval/m"     | 3 9 5                 | no
kind = "below", target = 5.0, metric = "eval/m" | 3 5 2                 | yes
kind = "below", target = 4.0, metric = "eval/m" | 3 5 2                 | no
""")
def test_a_curve_meets_a_bar_or_not(bar: dict, values: list[float], met: bool):
    verdict = judge(Bar(**{"metric": "m", **bar}), values)
    assert verdict.met == met


def test_a_curve_is_like_others_if_each_quarter_lies_in_their_range_widened_by_two_errors():
    others = [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0], [0.5, 0.5, 1.5, 1.5, 2.5, 2.5, 3.5, 3.5]]
    bar, late = (Bar("reward/mean", "like", of="base", lag=lag) for lag in (0, 2))
    good = [0.2, 0.4, 1.1, 1.3, 2.4, 2.4, 3.0, 3.2]
    assert judge(bar, good, others).met
    low = [0.2, 0.4, 0.6, 0.8, *good[4:]]  # 0.7 ± 0.1 in the second quarter, whose least is 1.0
    assert not judge(bar, low, others).met
    assert judge(late, [9.0, 9.0, *good], others).met
    with pytest.raises(ValueError, match="a spread needs two"):
        judge(bar, low, others[:1])


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.name)
def test_every_job_has_a_config_that_is_valid(job, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = make_command(job, job.run_names()[0], None)
    load_config(command[2], command[5:])
    assert not job.start or JOBS[job.start].run_names() == [job.start], "what a job starts from has one run"
