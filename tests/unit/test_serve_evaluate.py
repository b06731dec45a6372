"""What a service says of a run's weights is what transformers and peft say of the files that it saves."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rollouts.client.service import open_service_client
from rollouts.client.training import TrainingClient
from rollouts.config.model import LoraConfig
from rollouts.evaluation.diversity import compute_distinct_n, compute_self_bleu
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.testing.torch_contracts import BATCH, SFT, STEP, train
from tests.serve.clients import KEY, Client
from tests.serve.servers import open_server
from tests.support.plain_backend import save_scalar, score_row
from tests.support.text_tables import read_cells

# peft 0.21 asks for what transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
MODEL, OTHER = "tiny:llama", "tiny:qwen3"
PROMPTS = [[5, 6, 7], [8, 9], "3+4?", [{"role": "user", "content": "Say hello."}]]


class Trained(NamedTuple):
    """A run that has trained a step, at its service."""

    client: Client
    training: TrainingClient
    folder: Path

    async def collect(self, path, /, **body):
        """What a request came to."""
        queued = await self.client.post(path, body)
        return await self.client.post("retrieve_future", {"request_id": queued["request_id"]})

    async def evaluate(self, **body):
        return await self.collect(f"/runs/{self.training.run_id}/evaluate", **body)

    async def load_saved(self):
        """The run's model, by peft, of what it has saved to sample from."""
        run, seq = self.training.run_id, self.training.next_seq
        saved = await self.collect("save_weights_for_sampler", model_id=run, seq_id=seq, path="saved")
        assert "path" in saved
        (folder,) = self.folder.glob("state/checkpoints/*/step_*")
        from peft import PeftModel

        return PeftModel.from_pretrained(load_hf_model(resolve_model(MODEL)), str(folder)).eval()


@asynccontextmanager
async def open_trained(folder, **serving):
    async with (
        open_server(folder, model=MODEL, **serving) as client,
        open_service_client(client.url, KEY) as ours,
    ):
        training = await ours.create_training_client(lora=LoraConfig(rank=4), seed=1)
        await train(training)
        yield Trained(client, training, folder)


def score_plainly(model, rows, temperature=1.0):
    """Log-probs and entropies of the tokens that train, by the model's own logits."""
    with torch.no_grad():
        found = [score_row(model, row["tokens"], temperature) for row in rows]
    pairs = [*zip(found, [np.asarray(row["loss_mask"]) for row in rows], strict=True)]
    log_probs, entropies = (np.concatenate([one[k].numpy()[mask] for one, mask in pairs]) for k in (0, 1))
    return log_probs.astype(np.float64), entropies.astype(np.float64)


async def test_the_metrics_of_samples_are_those_of_plain_logits(tmp_path):
    async with open_trained(tmp_path, references={"other": OTHER}) as run:
        asked = {"prompts": PROMPTS, "samples_per_prompt": 2, "max_new_tokens": 5}
        asked |= {"temperature": 0.8, "reference": "other", "seed": 7, "samples": True}
        found = await run.evaluate(**asked)
        again = await run.evaluate(**asked)
        other = await run.evaluate(**{**asked, "seed": 8})
        base = await run.evaluate(**{**asked, "reference": "base", "samples": False})
        model = await run.load_saved()
        left = [*tmp_path.glob("state/samplers/*")]
    rows, metrics = found["samples"], found["metrics"]
    taken = [[row["tokens"] for row in one["samples"]] for one in (found, again, other, base)]
    assert taken[0] == taken[1] != taken[2] and not taken[3] and not left
    log_probs, entropies = score_plainly(model, rows, 0.8)
    sampled = np.concatenate([np.asarray(row["rollout_log_probs"])[row["loss_mask"]] for row in rows])
    np.testing.assert_allclose(sampled, log_probs, atol=1e-4)
    assert found["num_samples"] == 8 and found["num_tokens"] == len(log_probs)
    responses = [np.asarray(row["tokens"])[row["loss_mask"]].tolist() for row in rows]
    wanted = {
        "perplexity": np.exp(-log_probs.mean()),
        "entropy": entropies.mean(),
        "kl": (log_probs - score_plainly(load_hf_model(resolve_model(OTHER)), rows, 0.8)[0]).mean(),
        "distinct_1": compute_distinct_n(responses, 1),
        "distinct_2": compute_distinct_n(responses, 2),
        "self_bleu": compute_self_bleu(responses),
        "response_length/mean": fmean(map(len, responses)),
        "truncated/frac": fmean(row["status"] == "truncated" for row in rows),
        "prompts": 4,
        "failed": 0,
    }
    assert metrics == pytest.approx(wanted, rel=1e-4)
    plain = score_plainly(load_hf_model(resolve_model(MODEL)), rows, 0.8)[0]
    assert base["metrics"]["kl"] == pytest.approx((log_probs - plain).mean(), abs=1e-4)
    assert abs(base["metrics"]["kl"]) > 1e-3


async def test_given_responses_are_scored_and_rewarded(tmp_path):
    judge = save_scalar("llama", tmp_path / "judge")
    tokenizer = load_tokenizer(resolve_model(MODEL))
    async with open_trained(tmp_path / "run", references={"judge": str(judge)}) as run:
        asked = {"prompts": ["3+4?"] * 3, "responses": ["7", "8", [20, 21]], "samples": True}
        asked["answers"] = [7, 7, ["7", "seven"]]
        found = await run.evaluate(**asked, reward="numeric_match")
        judged = await run.evaluate(**asked, reward="judge")
        model = await run.load_saved()
    rows = found["samples"]
    said = [np.asarray(row["tokens"])[row["loss_mask"]].tolist() for row in rows]
    assert said == [*(tokenizer.encode(one, add_special_tokens=False) for one in "78"), [20, 21]]
    assert [row["reward"] for row in rows] == [1, 0, 0]
    metrics = found["metrics"]
    assert (metrics["reward/mean"], metrics["avg@1"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert metrics["reward/std"] == pytest.approx(pstdev([1, 0, 0]))
    assert metrics["perplexity"] == pytest.approx(np.exp(-score_plainly(model, rows)[0].mean()), rel=1e-4)
    scalar = load_hf_model(judge, head="scalar")
    with torch.no_grad():
        scores = [float(scalar(input_ids=torch.tensor([row["tokens"]])).logits[0, 0]) for row in rows]
    assert [row["reward"] for row in judged["samples"]] == pytest.approx(scores, abs=1e-4)
    assert judged["metrics"]["reward/mean"] == pytest.approx(fmean(scores), abs=1e-4)


async def test_what_cannot_be_evaluated_is_refused_and_training_goes_on(tmp_path):
    async with open_trained(tmp_path) as run:
        good = {"prompts": [[5, 6, 7]], "max_new_tokens": 2}
        run.training.forward_backward(BATCH, SFT)
        for change, says in read_cells("""
            {"prompts": [[]]} | prompts[0] has no token
            {"prompts": [[5, 1000000]]} | prompts[0] has the token id 1000000
            {"prompts": [[{"role": "user"}]]} | DataError
            {"responses": ["a", "b"]} | there are 1 prompts and 2 responses
            {"responses": [""]} | responses[0] has no token
            {"max_new_tokens": 5000} | the context holds 2048
            {"reward": "numeric_match"} | compares with answers
            {"reward": "numeric_match", "answers": ["none"]} | 1 of 1 held-out samples failed
            {"reward": "base"} | reward='base' is no reward model, and none of exact_match
            {"reward": "os:system"} | there is no reference 'os:system'
            {"reference": "nothing"} | there is no reference 'nothing'
        """):
            found = await run.evaluate(**(good | json.loads(change)))
            assert says in found["error"] and found["category"] == "user", found
        ours = run.training.run_id
        for name, body, status in (
            (ours, {"prompts": []}, 422), (ours, {"prompts": "x"}, 422), (ours, {}, 422), ("none", good, 404),
        ):  # fmt: skip
            assert (await run.client.ask("POST", f"/runs/{name}/evaluate", json=body)).status_code == status
        assert (await run.training.optim_step(STEP)).skipped is None
        assert (await run.evaluate(**good))["num_samples"] == 1
