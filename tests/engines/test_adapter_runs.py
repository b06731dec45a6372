"""Whole RL runs in which an adapter trains, on real float32 servers that they start and update each step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rollouts.metrics.token_shards import read_token_arrays
from rollouts.models.load import load_hf_model
from rollouts.run_dir import RunDir
from tests.support.compare_runs import read_stage
from tests.support.plain_backend import score_row

from .conftest import Kind, find_python, save_random_model
from .runs import TRAIN, read_rows, train, use_short

pytestmark = pytest.mark.engines
STEPS = 6
FLAGS = (
    f"--model.lora.rank 8 --model.lora.alpha 16 --rl.steps {STEPS} --rl.sync_every 1 --rl.optim.lr 1e-2"
    " --rl.rollout.samples_per_prompt 4 --rl.rollout.max_new_tokens 100 --eval.data.size 4"
    " --output.checkpoint_every 1 --output.keep_checkpoints 0"
)
WHOLE = '--engine.args ["--dtype","float32","--max-model-len","1024","--no-enable-lora"]'
CASES: dict[str, tuple[Kind, str]] = {
    "vllm": ("vllm", ""),
    "sglang": ("sglang", ""),
    "merged": ("vllm", WHOLE),
    "killed": ("vllm", "--rl.max_staleness 0"),  # each batch is of the weights that the server then has
}


def run(folder, kind, more, **options):
    """The run of a model whose answers are of many lengths, and what it wrote to stderr."""
    save_random_model(folder / "model", seed=1, std=0.2)
    generation = folder / "model/generation_config.json"
    ends = {"eos_token_id": [*range(0, 96, 8), 258]}
    generation.write_text(json.dumps(json.loads(generation.read_text()) | ends))
    flags = f"{use_short(folder, folder / 'model')} --engine.python {find_python(kind)} {FLAGS} {more}"
    errors = train(folder, f"demo_{kind}.toml", flags, **options)
    return RunDir(folder / "run"), errors


@pytest.mark.parametrize("case", CASES)
def test_each_token_is_of_the_adapter_whose_version_it_bears(case, tmp_path):
    """The server's log-probs are those of the checkpoint of that version, and not of the one before: also
    where a sample went on over an update, if one was under way, or the server was killed and has been given
    the adapter again.
    """
    program = Path(__file__).with_name("killed_train.py") if case == "killed" else TRAIN
    run_dir, errors = run(tmp_path, *CASES[case], program=program)
    rows = read_stage(run_dir.metrics)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    told = [row for row in rows if "weight_sync/bytes" in row]
    assert len(told) >= STEPS - 2 and max(row["weight_sync/probe_difference/max"] for row in told) < 1e-4
    assert ("engines serve no LoRA adapters" in errors) == (case == "merged")
    for row in told:  # the whole model is of 430 kB
        assert (row["weight_sync/bytes"] < 150_000) == (case != "merged")

    paths = [tmp_path / "model", *(run_dir.checkpoint("rl", step) for step in range(1, STEPS))]
    models = [load_hf_model(path).float() for path in paths]
    changes = {}
    for row in read_rows(run_dir.contributions):
        arrays = read_token_arrays(run_dir, row)
        tokens = arrays["tokens"].astype(np.int64)
        sampled = {*arrays["version"][arrays["mask"] == 1].tolist()}
        assert sampled <= {row["step"] - 1, row["step"] - 2}
        for version in sampled:
            its = (arrays["mask"] == 1) & (arrays["version"] == version)
            with torch.no_grad():
                both = (score_row(models[one], tokens)[0] for one in (version, max(0, version - 1)))
                own, old = (scored.numpy()[its] for scored in both)
            np.testing.assert_allclose(arrays["mu"][its], own, rtol=0, atol=2e-4)
            if version:
                changes[version] = max(changes.get(version, 0.0), float(np.abs(own - old).max()))
    assert len(changes) >= 3 and min(changes.values()) > 1e-3, changes
    if case == "killed":
        again = (run_dir.engine_logs / "vllm-0.log").read_text().partition(" start 2 of vllm-0")[2]
        assert "rollouts-v2-" in again


def test_a_server_that_says_200_and_keeps_the_adapter_before_stops_the_run(tmp_path):
    run_dir, errors = run(
        tmp_path, "vllm", "", exit_code=1, program=Path(__file__).with_name("sabotaged_train.py")
    )
    assert "WeightSyncError" in errors and "does not serve the weights that were sent" in errors
    assert "vllm-0: probe" in errors
    assert {row["weight_version_max"] for row in read_stage(run_dir.samples)} == {0}
