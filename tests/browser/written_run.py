"""A run directory written row by row, for tests of reports: fast, always the same, with everything in it that
a page could trip over.
"""

import itertools
import json

from tests.unit.run_rows import write_rows

NASTY = (
    "</script><script>document.title = 'broken'</script> <!-- \u2028 & {{script}} \\u003c 'quoted' \"too\""
)
CONFIG = """name = "written"
[rl]
steps = {steps}
[rl.optim]
lr = {lr}
[engine]
kind = "local"
urls = ["http://user:pass@127.0.0.1:1"]
password = "hunter2"
[[rl.changes]]
at = 3
[[rl.changes]]
at = 9
"""


SUMMARY = """{"mode": "sft+rl", "device": "cpu", "seed": 0, "accuracy": {"base": 0.02},
    "versions": {"torch": "2"}}"""
UPDATE = (
    "2027-01-15T08:00:{step:02d}Z  attempt 1   rl            step {step:>6d}  update   0  version {step:>6d}"
    "  loss +1.000000e-02  kl          -  beta         -  grad_norm 1.000e+00 clipped  lr 1.000e-03"
    "  samples     4  zero_advantage     1  tokens       20"
)


def head(stage, step, attempt=1):
    """What every row has; steps are ten seconds apart."""
    place = {"stage": stage, "step": step, "policy_version": step - 1, "attempt": attempt}
    return {"schema": 1, "time_unix": 1_800_000_000.0 + 10 * step} | place


def make_metrics(steps):
    """`sft` and `rl` steps; the reward rises by a hundredth a step, one sample fails in every fifth."""
    rows = [head("sft", step) | {"loss/total": 3.0 - step / 10, "time/step": 0.5} for step in range(1, 6)]
    same = json.loads("""{"response_length/mean": 5.0, "off_policy/mean": 0.5, "time/step": 2.0,
        "time/generate": 1.25, "time/train": 0.5}""")
    for step in range(1, steps + 1):
        own = {"reward/mean": step / 100, "loss/total": 1 / step, "off_policy/max": float(step % 3)}
        failed = {"fail/reward": 1.0, "groups/dropped/stale": 2.0} if step % 5 == 0 else {}
        rows.append(head("rl", step) | same | own | failed)
    return rows


def make_sample(step, number, *, failed):
    """A sample with reward (number % 4) / 4, or one that has failed."""
    answer = str(step + number)
    question = {"role": "user", "content": f"What is {step} + {number}? {NASTY}"}
    metadata = {"answer": answer, "note": NASTY}
    outcome = {"status": "completed", "reward": number % 4 / 4}
    if failed:
        text = {"message": f"no answer after {step} s", "traceback": NASTY}
        metadata["failure"] = {"class": "reward", "function": "tasks:judge"} | text
        outcome = {"status": "failed"}
    return head("rl", step) | outcome | {
        "id": f"s{step}-{number}",
        "group_index": step * 10 + number // 2,
        "prompt": [{"role": "system", "content": "Be brief."}, question],
        "response": f"It is {answer}. <b>{'word ' * number}</b>",
        "tokens": 12 + number,
        "response_length": 4 + number,
        "rewards": {"exact": 0.0, "form": 1.0},
        "weight_version_min": max(0, step - 1 - number % 3),
        "weight_version_max": step - 1,
        "metadata": metadata,
    }  # fmt: skip


def write_run(root, *, steps=20, per_step=4, lr=1e-3):
    """The run directory `root`, of a finished run; the last sample of every fifth step has failed."""
    write_rows(root / "metrics.jsonl", *make_metrics(steps))
    (root / "config.toml").write_text(CONFIG.format(steps=steps, lr=lr))
    every = range(1, steps + 1)
    places = itertools.product(every, range(per_step))
    samples = (make_sample(*at, failed=at[0] % 5 == 0 and at[1] == per_step - 1) for at in places)
    write_rows(root / "samples.jsonl", *samples)
    scored = {"name": "heldout", "eval/heldout/failed": 0.0}
    evaluated = (head("rl", step) | scored | {"eval/heldout/avg@1": step / 50} for step in (1, steps))
    write_rows(root / "evaluations.jsonl", *evaluated)
    (root / "summary.json").write_text(SUMMARY)
    skipped = {7: "  skipped: the loss is not finite"}
    lines = [UPDATE.format(step=step) + skipped.get(step, "") + "\n" for step in every]
    (root / "updates.log").write_text("".join(lines))
    return root
