"""RL whose reference and reward model a training service has is the run that has them itself."""

import shlex

import pytest
import trio

from rollouts.metrics.jsonl import read_rows
from rollouts.models.load import resolve_model
from tests.e2e.conftest import TINY
from tests.serve.clients import KEY
from tests.serve.servers import open_server
from tests.support.compare_runs import comparable
from tests.support.plain_backend import save_scalar

SETTINGS = shlex.split("""--mode rl --deterministic false --model.autocast off --rl.steps 3 --rl.kl_coef 0.1
    --rl.eval_every 0 --rl.rollout.filters [] --rl.rollout.temperature 0.9""")


async def test_the_metrics_are_those_of_models_in_the_trainers_process(train, tmp_path, monkeypatch):
    start, judge = resolve_model("tiny:byte"), save_scalar("byte", tmp_path / "judge")
    references = {"start": str(start), "judge": str(judge)}
    argv = ["--config", str(TINY), *SETTINGS]
    local, served = tmp_path / "local", tmp_path / "served"

    def run(out, judge, *more, code=0):
        arguments = [*argv, "--rl.rollout.reward_model", judge, *more]
        return train.fork(arguments, out, code=code, environ={"ROLLOUTS_API_KEY": KEY})

    async with open_server(tmp_path / "service", references=references) as client:
        there = f"{client.url}/references"
        where = ("--reference.where", f"{there}/start")
        await trio.to_thread.run_sync(run, local, str(judge))
        await trio.to_thread.run_sync(run, served, f"{there}/judge", *where)
        done = await trio.to_thread.run_sync(
            lambda: run(tmp_path / "none", f"{there}/start", "--reference.where", f"{there}/judge", code=2)
        )
    rows, others = ([comparable(row) for row in read_rows(out / "metrics.jsonl")] for out in (served, local))
    assert len(rows) == 3 and rows[-1]["kl/ref"] and rows[-1]["reward/part/reward_model/mean"]
    # which rows share a batch is a matter of time: after the first step rounding decides some tokens
    assert {**rows[0], "stage": 0} == pytest.approx({**others[0], "stage": 0}, rel=1e-3, abs=1e-4)
    for row, other in zip(rows, others, strict=True):
        for name in ("kl/ref", "reward/part/reward_model/mean"):
            assert row[name] == pytest.approx(other[name], rel=0.5)
    assert "has a head of 'scalar'; it takes one of 'tokens'" in done.stderr
