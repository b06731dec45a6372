"""What `inspect` and the report say of guards: how their bands were kept, what was published, and which
samples moved the weights most.
"""

import pytest

from rollouts.inspect.guardrails import load_guardrails
from rollouts.inspect.record import load_facts, open_record
from rollouts.inspect.report.page import gather_run
from tests.support.text_tables import cases
from tests.unit.run_rows import read_command, write_rows, write_run

CONFIG = """[rl]
kl_control = "two_sided(target=0.05, tolerance=0.01, factor=1.2, lowest=0.25, highest=1)"
kl_ref_limit = 0.1
kl_limit = 0.0
grad_norm_limit = 100.0
[rl.optim]
max_grad_norm = 1.0
[online]
signs = [
    { metric = "online/length/change", rule = "below(limit=-0.2)", action = "stop" },
    { metric = "reward/mean", rule = "falls(by=0.5, steps=20)", action = "slow" },
]
"""
# of four steps
METRICS = """
kl/ref_per_sample    | 0.02 0.04 0.05 0.25
kl/coef              | 0.25 0.5  0.5  0.75
kl/coef_at_bound     | 1    -    -    -
kl/ref_after         | 0.01 0.02 0.1  0.3
optim/grad_norm      | 0.5  1    2    3
optim/grad_norm/max  | 0.5  1    2    200
optim/clipped        | 0    0    1    0
optim/undone         | 0    0    0    1
optim/updates        | 2    2    2    2
optim/skipped_steps  | 0    0    0    1
online/length/change | -    -    -0.1 -0.3
reward/mean          | 0.5  0.5  0.5  1
"""
UPDATE = (
    "2027-01-15T08:00:00Z  attempt 1   rl            step      1  update   0  version      1  loss +1.0e-02\n"
)
WORDS = """2027-01-15T08:00:01Z  rl step 0: publication 1: the average of 0 steps, accuracy 0.500
2027-01-15T08:00:02Z  rl step 2: publication 2: the average of 2 steps, accuracy 0.480
2027-01-15T08:00:03Z  rl step 2: publication 3: the average of 2 steps, accuracy 0.480
2027-01-15T08:00:04Z  rl step 4: refused: the average of 4 steps; accuracy 0.100 is more than 0.03 below 0.500
2027-01-15T08:00:05Z  rl step 4: publication 4: rollback to v1, the best
2027-01-15T08:00:06Z  rl step 4: learning stops: 1 candidates in a row were refused
"""


def gather_facts(root):
    """What a report holds of a run, without its samples."""
    with open_record(root, points=True) as record:
        return gather_run(record, share=1.0)[0]


def make_rows():
    """The rows of metrics that METRICS are."""
    rows = [{"step": step} for step in range(1, 5)]
    for line in METRICS.strip().splitlines():
        name, _, values = line.partition("|")
        for row, value in zip(rows, values.split(), strict=True):
            row |= {} if value == "-" else {name.strip(): float(value)}
    return rows


@pytest.fixture
def guarded(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", *make_rows())
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "updates.log").write_text(UPDATE + WORDS + "2027-01-15T08:00:07Z  rl st")
    return tmp_path


def write_contributions(root):
    """Ten samples of step 1, a row of an attempt whose step was trained again, and one that moved nothing."""
    row = {"update": 0, "advantage": 1.5, "reward": 1.0, "kl": 0.25, "rewards": {"vote": 1.0, "vote.of": 2}}
    many = ({**row, "id": f"s{number}", "share": number / 100} for number in range(1, 11))
    write_rows(
        root / "contributions.jsonl",
        {**row, "step": 2, "id": "old", "share": 0.9},
        *many,
        {**row, "step": 2, "attempt": 2, "id": "new", "share": 0.5},
        {"step": 3, "id": "undone", "share": 0.0},
    )
    write_rows(root / "metrics.1.jsonl", {**make_rows()[1], "attempt": 2})


# of `guarded`, worked by hand from METRICS. Of the KL 0.04 and 0.05 are within 0.05 ± 0.01, and its mean is
# (0.02 + 0.04 + 0.05 + 0.25) / 4; a bound is inside, as 0.1 of ≤ 0.1
BANDS = """
kl/ref_per_sample | 0.05 ± 0.01 | 50.0 % | 1 below, 1 above | 0.02 | 0.09 | 0.25 | 0.25
kl/coef | 0.25 to 1 | 100.0 % | 1 at a bound | 0.25 | 0.5 | 0.75 | 0.75
kl/ref_after | ≤ 0.1 | 75.0 % | 1 undone | 0.01 | 0.1075 | 0.3 | 0.3
optim/grad_norm | ≤ 1 | 50.0 % | 1 clipped | 0.5 | 1.625 | 3 | 3
optim/grad_norm/max | ≤ 100 | 75.0 % | 1 undone | 0.5 | 50.88 | 200 | 200
online/length/change | ≥ -0.2 | 50.0 % | 1 (stop) | -0.3 | -0.2 | -0.1 | -0.3
reward/mean | falls(by=0.5, steps=20) | – | slow | 0.5 | 0.625 | 1 | 1
"""
SHOWN = ("guard", "band", ">inside", "outside", ">lowest", ">mean", ">highest", ">last")


def test_a_band_says_how_many_steps_were_inside_and_what_was_undone_or_clipped(guarded):
    facts = gather_facts(guarded)
    lines = [" | ".join(row.get(name, "–") for name in SHOWN) for row in facts["guardrails"]]
    assert lines == BANDS.strip().splitlines()
    # two updates in each of four steps, one of them undone; of two publications of step 2 the later counts
    title = "guardrails, 87.5 % of 8 updates succeeded, 2 published, 1 refused"
    assert {row["title"] for row in facts["guardrails"]} == {title}
    assert facts["guardrails"][0]["|course"] == "▁▁▂█"
    assert facts["guardrails"][5]["|course"] == "  █▁"
    bounds = [(row["name"], row.get("low"), row.get("high")) for row in facts["guards"]]
    assert bounds[2] == ("kl/ref_after", None, 0.1)


def test_what_was_said_in_words_is_told_from_updates_and_a_torn_line(guarded):
    events = gather_facts(guarded)["events"]
    kinds = ",".join(event["kind"] for event in events)
    assert kinds == "published,published,published,refused,rolled back,stopped"
    assert events[-1] == {
        "stage": "rl",
        "step": 4,
        "time": "2027-01-15T08:00:06Z",
        "kind": "stopped",
        "words": "learning stops: 1 candidates in a row were refused",
    }


def test_inspect_prints_guards_the_newest_ten_of_what_happened_and_samples(guarded, capsys):
    write_contributions(guarded)
    (guarded / "updates.log").write_text(WORDS * 2)
    text = " ".join(read_command(capsys, "inspect", guarded, "--last", "1").split())
    wanted = """
guardrails, 87.5 % of 8 updates succeeded, 2 published, 1 refused
kl/ref_per_sample 0.05 ± 0.01 50.0 % 1 below, 1 above
what happened, the newest 10 of 12
2027-01-15T08:00:03Z rl 2 publication 3: the average of 2 steps, accuracy 0.480
samples that mattered most, by their share of an update's gradient
│ rl │ 2 │ new │ 50.0 % │ 1.5 │ 1 │ 0.25 │ vote 1 │
│ rl │ 1 │ s10 │ 10.0 % │
│ rl │ 1 │ s4 │ 4.0 % │"""
    for line in wanted.strip().splitlines():
        assert line in text, line
    for absent in ("│ old │", "│ s3 │", "│ undone │", "vote.of"):
        assert absent not in text, absent


def test_a_run_that_only_clips_has_no_guardrails_and_its_contributions_are_not_read(tmp_path, capsys):
    root = write_run(tmp_path / "run", optim__grad_norm=2.0, optim__clipped=1.0)
    settings = 'kl_control = "fixed"\nkl_ref_limit = 0.0\n[rl.optim]\nmax_grad_norm = 1.0\n'
    (root / "config.toml").write_text(f"[rl]\n{settings}")
    write_contributions(root)
    text = read_command(capsys, "inspect", root)
    assert "guardrails" not in text and "mattered" not in text and "what happened" not in text


@cases("""
control                                        | bands
fixed                                          | none
proportional(target=6, horizon=1000)           | kl/ref_per_sample 6 None None, kl/coef None None None
two_sided(target=6, tolerance = 1)             | kl/ref_per_sample 6 ± 1 5.0 7.0, kl/coef ≥ 0 0.0 None
two_sided(target=6, tolerance=1, highest=inf)  | kl/ref_per_sample 6 ± 1 5.0 7.0, kl/coef ≥ 0 0.0 None
""")
def test_the_band_is_that_of_the_controller(control, bands, tmp_path):
    (tmp_path / "config.toml").write_text(f'[rl]\nkl_control = "{control}"\n')
    with open_record(tmp_path, points=True) as record:
        load_facts(record)
        load_guardrails(record, "")
        found = [
            f"{row['name']} {row.get('band')} {row.get('low')} {row.get('high')}"
            for row in record.rows("FROM guards")
        ]
    assert ", ".join(found) == ("" if bands == "none" else bands)
