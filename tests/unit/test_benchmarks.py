"""benchmarks/: what counts as met, the page of results, what each benchmark of the set says of itself; the
GPU suite at a tiny size; the arithmetic of the curves.
"""

import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import train_step
from benchmarks.bench import CPU_SET, ON_REQUEST, parse_result, run_benchmark
from benchmarks.bench_page import format_page, read_about
from benchmarks.curves.__main__ import make_command
from benchmarks.curves.bars import Bar, compute_mean_and_error, judge, load_jobs
from benchmarks.e2e.runs import Setting, make_config, order_rows
from benchmarks.e2e.tasks import make_rows
from benchmarks.h200.place import QWEN_1_5B, Place, Shape
from benchmarks.h200.report import Part, run_part
from benchmarks.h200.targets import TARGETS
from benchmarks.harness import finish
from rollouts.config.load import load_config
from rollouts.data.data_buffer import DataBuffer
from rollouts.preflight.findings import Findings
from rollouts.preflight.rows import load_all_rows
from tests import ROOT
from tests.support.text_tables import cases

MODULES = ("h200", *CPU_SET, *(name for name in ON_REQUEST if not name.startswith("h200")))


RESULT = """
{"benchmark": "packing", "peer": "verl", "metrics": {"fill": 0.98765, "imbalance": 1.0, "verl_ratio": null},
 "targets": {"fill": ">= 0.985", "imbalance": "<= 0.9", "verl_ratio": ">= 20"},
 "met": {"fill": true, "imbalance": false, "verl_ratio": null},
 "machine": {"cpu": "EPYC", "cores": 2, "memory_gib": 23.5, "load": 0.25}, "versions": {"python": "3.11.7"},
 "command": ["python", "-m", "benchmarks.packing"], "date": "2026-11-22 18:00 UTC", "commit": "abc123",
 "exit_status": 1, "wall_s": 61.2, "unmeasured": {"verl_ratio": "verl is not installed"}}
"""


def test_a_benchmark_ends_with_one_line_of_json_and_a_target_is_met_at_its_bound(capsys):
    metrics = {"speedup": 1.99, "memory": 0.6, "missing": None}
    targets = {"speedup": ">= 2.0", "memory": "<= 0.6", "missing": "<= 1", "absent": "<= 1"}
    status = finish("example", peer="trl", metrics=metrics, targets=targets, unmeasured={"missing": "no GPU"})
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert status == 1 and parse_result(out + "\n") == found
    assert found["met"] == {"speedup": False, "memory": True, "missing": None, "absent": None}
    assert found["unmeasured"] == {"missing": "no GPU"} and "failures" not in found
    assert found.keys() >= {"benchmark", "peer", "metrics", "targets", "machine", "versions"}
    for broken in ("", "Traceback\nValueError: no", '{"metrics": {}}\nand then it broke', "[1, 2]", "3"):
        assert parse_result(broken) is None


def test_a_benchmark_that_breaks_leaves_a_log_and_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.bench.RUNS", tmp_path)
    assert run_benchmark("no_such_benchmark", []) is None
    assert "no_such_benchmark" in (tmp_path / "no_such_benchmark.log").read_text()


def test_the_page_has_every_target_with_its_verdict_and_what_did_not_run():
    results = {"packing": json.loads(RESULT)}
    text = format_page(results, cpu_set=("packing", "train_step"), others=("ranks", "h200"), notes={})
    wanted = """
| [packing](#packing) | fill | 0.9877 | >= 0.985 | yes | 2026-11-22 abc123 | verl |
| [packing](#packing) | imbalance | 1 | <= 0.9 | **no** | 2026-11-22 abc123 | verl |
| [packing](#packing) | verl_ratio |  | >= 20 | not measured | 2026-11-22 abc123 | verl |
- not measured (verl is not installed): verl_ratio
2026-11-22 18:00 UTC, 61 s; 2 cores of EPYC, 23.5 GiB, load 0.25; python 3.11.7; commit abc123
Not run yet: train_step, h200.
| g1_mfu | >= 0.45 |"""
    assert [line for line in wanted.strip().splitlines() if line not in text] == []


def run_module(name, *arguments):
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@cases("name", MODULES)
def test_a_benchmark_says_what_it_measures_and_has_a_short_form(name):
    about, command = read_about(name)
    assert len(about) > 30 and command
    assert ("--tiny" if name == "h200" else "--quick") in run_module(name, "--help")


@pytest.mark.slow
def test_every_part_of_the_gpu_suite_runs_at_a_tiny_size():
    out = run_module("h200", "--tiny")
    found = parse_result(out)
    assert found is not None and "failures" not in found
    assert set(TARGETS) <= set(found["metrics"])
    assert found["targets"] == {}  # numbers of a tiny run meet nothing
    missing = {name for name, value in found["metrics"].items() if value is None}
    assert missing == set(found["unmeasured"])
    assert missing.isdisjoint(
        ["g1_tokens_per_s", "g2_ms", "g3_tokens_per_s", "g4_ms", "g5_speed_up", "g6_step_s"]
    )
    parts = [json.loads(line) for line in out.splitlines() if line.startswith('{"part"')]
    assert {name: value for part in parts for name, value in part["metrics"].items()} == found["metrics"]


async def test_a_part_that_fails_is_reported_and_its_numbers_have_a_reason(capsys):

    async def fail(place, report):
        report.add("first", 1.0)
        raise RuntimeError("out of memory\nin a kernel")

    part = Part("broken", "a part", 10.0, ("first", "second"), fail)
    report, failure = await run_part(part, Place("cpu", tiny=True), {"first": ">= 2"}, left_s=60.0)
    assert failure == "RuntimeError: out of memory in a kernel"
    assert report.metrics == {"first": 1.0, "second": None}
    assert report.unmeasured == {"second": failure}
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["part"], last["failure"], last["metrics"]) == ("broken", failure, report.metrics)


def test_flops_of_a_step_are_those_of_its_matrices_and_its_causal_attention():

    shape = Shape(
        "hand", "qwen2", hidden=4, layers=2, feed_forward=8, vocab=10, heads=2, kv_heads=1, head_dim=3
    )
    assert shape.body_parameters == 2 * (
        4 * 3 * (2 + 2 + 1 + 1) + 3 * 4 * 8
    )  # q and o of 2 heads, k and v of 1; gate, up, down: 336
    assert shape.head_parameters == 40
    assert shape.train_flops([5, 2], 6) == 6 * 336 * 7 + 6 * 40 * 6 + 6 * 2 * 2 * 3 * (25 + 4)
    assert shape.kv_bytes(2) == 2 * 2 * 1 * 3 * 2
    assert QWEN_1_5B.body_parameters + QWEN_1_5B.head_parameters == pytest.approx(1.544e9, rel=1e-3)
    assert QWEN_1_5B.kv_bytes(2) == 28 * 1024


def test_the_peer_gets_rows_in_the_order_in_which_our_run_draws_them(tmp_path):
    setting = Setting("digits", "tiny:byte", steps=14, lr=1e-5, seed=1, threads=1, micro_batch_rows=64)
    path, config_path = tmp_path / "rows.jsonl", tmp_path / "run.toml"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows("digits", count=96, seed=1)))
    config_path.write_text(make_config(setting, path, tmp_path / "run"))
    config = load_config(config_path)
    rows = load_all_rows(config, ["rl"], Findings(raises=True))
    drawn = DataBuffer(rows.training["rl"], seed=config.seed).get_prompts(14 * 8)
    assert [row.row["prompt"] for row in drawn] == [row["prompt"] for row in order_rows(setting)]


def test_gradient_error_is_relative_and_after_clipping(tmp_path):
    ours, trl = tmp_path / "ours", tmp_path / "trl"
    save_file({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}, ours)  # norm 5
    save_file({"a": torch.tensor([0.6, 0.0]), "b": torch.tensor([0.8])}, trl)
    assert train_step.compare_gradients(ours, trl, 1.0) < 1e-6
    save_file({"a": torch.tensor([0.6, 0.1]), "b": torch.tensor([0.8])}, trl)
    assert train_step.compare_gradients(ours, trl, 1.0) == pytest.approx(0.1 / 1.01**0.5, rel=1e-5)


# --- curves: quarters, standard errors, verdicts ------------------------------------------------------------


JOBS = load_jobs(ROOT / "benchmarks/curves/jobs.toml")


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
    assert judge(Bar(**{"metric": "m", **bar}), values).met == met


def test_a_curve_is_like_others_if_each_quarter_lies_in_their_range_widened_by_two_errors():
    *others, good = json.loads("""[[0, 0, 1, 1, 2, 2, 3, 3], [0.5, 0.5, 1.5, 1.5, 2.5, 2.5, 3.5, 3.5],
        [0.2, 0.4, 1.1, 1.3, 2.4, 2.4, 3.0, 3.2]]""")
    bar, late = (Bar("reward/mean", "like", of="base", lag=lag) for lag in (0, 2))
    assert judge(bar, good, others).met
    low = [0.2, 0.4, 0.6, 0.8, *good[4:]]  # 0.7 ± 0.1 in the second quarter, whose least is 1.0
    assert not judge(bar, low, others).met
    assert judge(late, [9.0, 9.0, *good], others).met
    with pytest.raises(ValueError, match="a spread needs two"):
        judge(bar, low, others[:1])


@cases("job", JOBS.values(), ids=lambda job: job.name)
def test_every_job_has_a_config_that_is_valid(job, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = make_command(job, job.run_names()[0], None)
    load_config(command[2], command[5:])
    assert not job.start or JOBS[job.start].run_names() == [job.start]  # what a job starts from has one run
