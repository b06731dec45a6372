"""Models with one number as their head: as they are loaded, run, trained and saved by the backend of one
process.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoModelForSequenceClassification

from rollouts.data.scores import make_score_batch, read_scores
from rollouts.errors import ConfigError, DataError, ModelError
from rollouts.models.forward_plan import plan_forward
from rollouts.models.layers import get_scalar_weight, has_scalar_head, set_padding_token
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.padded import pad_rows
from rollouts.testing import torch_contracts as contract
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import LossSpec
from tests.support import plain_backend
from tests.support.made_updates import floats
from tests.support.plain_backend import assert_gradients_close, save_scalar, take_gradients
from tests.support.text_tables import cases
from tests.unit.test_architectures import FORMS
from tests.unit.test_models import edit_json
from tests.unit.test_pytorch_backend import CONTRACT, check_promise

torch.set_num_threads(1)
KINDS = ("llama", "qwen3", "gemma", "moe")


@pytest.fixture(scope="module")
def causal():
    """Directories of random causal models, by kind."""
    return {kind: resolve_model(f"tiny:{kind}") for kind in ("byte", *KINDS)}


@pytest.fixture(scope="module")
def scalar(causal, tmp_path_factory):
    """Directories of the same models with a random scalar head."""
    folder = tmp_path_factory.mktemp("scalar")
    return {kind: save_scalar(kind, folder / kind) for kind in causal}


def open_backend(path, **options):
    return plain_backend.open_backend(load_hf_model(path, head="scalar"), **options)


def make_critic_batch():
    """make_batch with random returns and old values."""
    batch, rng = make_batch(), np.random.default_rng(100)
    returns, old = (floats(*(rng.normal(size=len(row)) for row in batch.tokens)) for _ in range(2))
    return dataclasses.replace(batch, returns=returns, old_values=old)


# --- loading ------------------------------------------------------------------------------------------------


@cases("kind", ["byte", *KINDS])
def test_a_causal_model_gets_a_head_of_zero_and_keeps_its_decoder(kind, causal):
    model, original = load_hf_model(causal[kind], head="scalar"), load_hf_model(causal[kind])
    theirs = dict(original.named_parameters()) | {"score.weight": torch.zeros(1, 64)}
    theirs.pop("lm_head.weight", None)
    assert has_scalar_head(model) and not has_scalar_head(original)
    assert (model.training, model.config.num_labels) == (False, 1)
    contract.assert_weights_equal(dict(model.named_parameters()), theirs)


@cases("kind", KINDS)
def test_a_saved_scalar_model_is_itself_again_here_and_in_transformers(kind, scalar, tmp_path):
    ours = load_hf_model(scalar[kind], head="scalar")
    theirs = AutoModelForSequenceClassification.from_pretrained(str(scalar[kind]))
    assert theirs.config.pad_token_id == 256 and get_scalar_weight(ours).any()
    contract.assert_weights_equal(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    named = Path(shutil.copytree(scalar[kind], tmp_path / "named"))
    edit_json(named / "config.json", id2label={"0": "helpful"}, label2id={"helpful": 0})
    assert load_hf_model(named, head="scalar").config.id2label == {0: "helpful"}


def test_a_scalar_model_is_resolved_as_one_and_refused_as_a_causal_one(scalar, causal):
    assert resolve_model(str(scalar["llama"]), head="scalar") == scalar["llama"]
    assert resolve_model(str(causal["llama"]), head="scalar") == causal["llama"]
    with pytest.raises(ModelError, match="was not trained to predict the next token"):
        resolve_model(str(scalar["llama"]))


# --- scores and values --------------------------------------------------------------------------------------


def test_what_is_no_score_is_refused():
    batch = make_score_batch([np.array([5])])
    with pytest.raises(DataError, match=r"sequences\[1\] has no token"):
        make_score_batch([np.array([5]), np.array([], np.int64)])
    with pytest.raises(DataError, match=r"loss_masks\[0\] trains 2 tokens.*make_score_batch"):
        read_scores([np.zeros(2, np.float32)], dataclasses.replace(batch, loss_masks=(np.ones(2, bool),)))


@cases("kind", KINDS)
async def test_scores_of_a_trained_and_saved_model_are_those_of_transformers(kind, scalar, tmp_path):
    rng = np.random.default_rng(3)
    start = rng.integers(0, 256, 6)
    sequences = [np.append(start, rng.integers(0, 256, length)) for length in (1, 4, 20, 4)]
    sequences.append(rng.integers(0, 256, 3))
    batch = make_score_batch(sequences)
    async with open_backend(scalar[kind], tokenizer=load_tokenizer(scalar[kind])) as backend:
        await contract.train(backend, make_critic_batch(), LossSpec("value"))
        await backend.save(tmp_path / "saved")
        found = read_scores(await backend.forward(batch), batch)
    theirs = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "saved")).eval()
    padded, mask = pad_rows(sequences), pad_rows([np.ones_like(row) for row in sequences])
    padded[mask == 0] = theirs.config.pad_token_id
    with torch.no_grad():
        wanted = theirs(input_ids=padded, attention_mask=mask).logits[:, 0].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.ptp(found) > 0.05  # else all scores are alike: nothing was compared


# --- gradients ----------------------------------------------------------------------------------------------


@cases("kind", KINDS)
async def test_every_split_has_the_gradient_of_a_plain_forward_of_each_row(kind, scalar):
    """Of ½·max((v − R)², (clip(v) − R)²), to a part of its norm."""
    batch = make_critic_batch()
    model = load_hf_model(scalar[kind], head="scalar")
    mask = np.concatenate(batch.loss_masks)
    rows = (model.base_model(input_ids=torch.from_numpy(ids)[None]) for ids in batch.tokens)
    # of every row by itself: at t the head on the decoder's state at t − 1; 0 at t = 0
    values = torch.cat([pad(model.score(row.last_hidden_state)[0, :-1, 0], (1, 0)) for row in rows])[mask]
    fields = batch.returns, batch.old_values
    returns, old = (torch.from_numpy(np.concatenate(rows)[mask]) for rows in fields)
    clipped = values.clamp(old - 0.3, old + 0.3)
    wanted = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
    wanted.backward()
    for options in FORMS:
        async with open_backend(scalar[kind], **options) as backend:
            result = await backend.forward_backward(batch, LossSpec("value", {"clip": 0.3}))
            found = take_gradients(backend.model)
        assert result.loss == pytest.approx(float(wanted.detach()), rel=1e-5), options
        assert_gradients_close(found, take_gradients(model))
        assert not [name for name in result.metrics if name.startswith("entropy")]


# --- how the model is run -----------------------------------------------------------------------------------


@cases("kind: llama qwen3 moe gemma")
def test_a_scalar_model_runs_as_its_causal_model_does(kind, causal):
    """A head of exactly 0 proves nothing by itself: the layouts are those that hold for the hidden states."""
    plan = plan_forward(load_hf_model(causal[kind], head="scalar"))
    assert plan == plan_forward(load_hf_model(causal[kind]))._replace(head="scalar", logit_scale=1.0)
    assert plan.choose_layout(100) == ("rows" if kind == "gemma" else "packed")


def test_a_model_that_sees_others_or_the_future_is_found_out_though_its_head_is_zero(causal):
    def spoil(change):
        model = load_hf_model(causal["llama"], head="scalar")

        def hook(module, inputs, output):
            output.last_hidden_state = change(output.last_hidden_state)

        model.get_decoder().register_forward_hook(hook)
        return model

    assert plan_forward(spoil(lambda states: states * len(states))).choose_layout(100) == "single"
    with pytest.raises(ModelError, match="is not causal"):
        plan_forward(spoil(lambda states: states + states.mean(1, keepdim=True)))
    model = spoil(lambda states: states)
    model.score.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    with pytest.raises(ModelError, match="puts its head on something else than its decoder's hidden states"):
        plan_forward(model)


# --- the backend of one process -----------------------------------------------------------------------------


@cases("promise", CONTRACT.values(), ids=CONTRACT)
async def test_a_scalar_backend_keeps_the_contract(promise, scalar, tmp_path):
    await check_promise(promise, lambda: open_backend(scalar["byte"]), tmp_path)


async def test_a_loss_that_needs_entropy_says_that_there_is_none(scalar):
    async with open_backend(scalar["byte"]) as backend:
        spec = LossSpec("ppo_clip", {"entropy_coef": 0.1})
        error = await contract.raised_by(backend.forward_backward(make_batch(), spec), ConfigError)
    assert "entropy" in str(error)


def test_the_padding_token_is_the_tokenizers_unless_it_ends_answers(causal, tmp_path):
    copied = Path(shutil.copytree(causal["byte"], tmp_path / "copied"))
    edit_json(copied / "config.json", pad_token_id=None)
    model, tokenizer = load_hf_model(copied, head="scalar"), load_tokenizer(copied)
    tokenizer.pad_token = tokenizer.eos_token
    for given, wanted in ((None, None), (tokenizer, None), (load_tokenizer(causal["byte"]), 256)):
        set_padding_token(model, given)
        assert model.config.pad_token_id == wanted
