"""A reward model's step is the one that plain autograd takes on transformers' own classification model; its
measures are those of its scores.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from rollouts.config.schema import RewardModelTrainingConfig
from rollouts.data.mixture import make_mixture, select_samples
from rollouts.data.samples import measure_scores
from rollouts.errors import DataError, ModelError
from rollouts.loops.reward_model import run_reward_model_training
from rollouts.loops.steps import on_thread
from rollouts.losses.row_losses import (
    make_regression_loss,
    make_score_loss,
    measure_calibration,
    measure_regression,
)
from rollouts.models.load import load_hf_model
from tests.support import plain_backend
from tests.unit.test_loops import Diary, MemoryLogger
from tests.unit.test_preference_loops import DATA, OPTIM, assert_close, make_pairs, train_plainly, weights_of

torch.set_num_threads(1)
CENTRING = 0.05


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A small reward model with a random head."""
    return plain_backend.save_scalar("llama", tmp_path_factory.mktemp("scalar"))


def config_of(**changes):
    return RewardModelTrainingConfig.model_validate({"data": DATA, "steps": 3, "batch_size": 4, **changes})


def open_backend(path):
    return plain_backend.open_backend(load_hf_model(path, head="scalar"), optim=OPTIM)


async def train(backend, samples, config, logger, of_scores=None, **loop):
    loss = on_thread(backend.device_thread.submit, of_scores or make_score_loss(CENTRING))
    mixture = make_mixture(samples)
    return await run_reward_model_training(backend, mixture, config, logger, loss=loss, **loop)


def score(model, tokens):
    """What transformers says of the whole sequence."""
    return model(input_ids=torch.from_numpy(np.asarray(tokens))[None]).logits[0, 0]


async def train_both(path, samples, plain_loss, of_scores=None, **changes):
    """Weights after three steps, ours and those of plain autograd on the mean of this loss of a sample, whose
    losses are the same.
    """
    plain, mixture = AutoModelForSequenceClassification.from_pretrained(path).eval(), make_mixture(samples)

    def loss_of(model, step):
        return torch.stack([plain_loss(model, one) for one in select_samples(mixture, 4, step, 7)]).mean()

    losses = train_plainly(plain, loss_of, 3)
    async with open_backend(path) as backend:
        history = await train(backend, samples, config_of(**changes), MemoryLogger(), of_scores, seed=7)
        trained = weights_of(backend.model)
    np.testing.assert_allclose([row["loss/total"] for row in history], losses, rtol=2e-5)
    return trained, weights_of(plain)


async def test_three_steps_are_those_of_plain_autograd_with_margins_and_centring(model_path):
    def plain_loss(model, sample):
        good, bad = (score(model, row.token_ids) for row in sample.rows)
        return -logsigmoid(good - bad - sample.margin) + CENTRING * (good + bad) ** 2

    both = await train_both(model_path, make_pairs(6), plain_loss)  # their margins are 0, 1, 2, …
    assert_close(*both, 3e-5)
    before = load_hf_model(model_path, head="scalar").score.weight
    assert (both[0]["score.weight"] - before).abs().max() > 1e-3


async def test_steps_on_scores_are_those_of_plain_autograd(model_path):
    samples = [pair._replace(rows=pair.rows[:1]) for pair in make_pairs(6)]  # their scores are 0, 1, 2, …
    std = np.sqrt(35 / 12)
    assert measure_scores(samples) == pytest.approx((2.5, std))

    def plain_loss(model, sample):
        return (score(model, sample.rows[0].token_ids) - (sample.margin - 2.5) / std).square()

    loss = make_regression_loss(*measure_scores(samples))
    both = await train_both(model_path, samples, plain_loss, loss, loss="mse")
    # AdamW divides tiny gradients elsewhere, and makes their rounding large
    assert_close(*(weights["score.weight"] for weights in both), 3e-5)


def test_scores_that_do_not_differ_are_refused_and_held_out_ones_are_measured():
    with pytest.raises(DataError, match="the deviation of the scores is 0"):
        measure_scores(make_pairs(1))
    found = measure_regression(np.asarray([0.0, 2.0, 1.0]), targets=np.arange(3.0))
    assert found == pytest.approx({"mse": 2 / 3, "correlation": 0.5})
    assert measure_regression(np.zeros(2), targets=np.ones(2)) == {"mse": 1.0}
    with pytest.raises(ModelError, match="not finite"):
        measure_regression(np.full(1, np.nan), targets=np.zeros(1))


async def test_metrics_are_of_the_scores_and_steps_are_logged_and_saved(model_path):
    logger, diary, samples = MemoryLogger(), Diary(checkpoint_every=1), make_pairs(4)
    async with open_backend(model_path) as backend:
        with torch.no_grad():
            pairs = [[float(score(backend.model, row.token_ids)) for row in one.rows] for one in samples]
        history = await train(backend, samples, config_of(steps=2, eval_every=1), logger, hooks=diary.hooks)
    first, scores = history[0], np.asarray(pairs)
    gaps = scores[:, 0] - scores[:, 1]
    assert first["rewards/margins"] == pytest.approx(gaps.mean(), abs=1e-5)
    assert first["rewards/accuracies"] == (gaps > 0).mean()
    assert first["rewards/max"] == pytest.approx(scores.max(), abs=1e-5)
    assert [row[:2] for row in logger.steps] == [("reward_model", step) for step in (1, 2)]
    assert diary.entries == [("save", 1), ("evaluate", 1), ("save", 2)]


def test_calibration_by_hand():
    # gaps ln 3 and −ln 3: p = 3/4 and 1/4; both bets have confidence 3/4, one is right: accuracy 1/2, error
    # 1/4, Brier (1/16 + 9/16) / 2
    found = measure_calibration(np.log([3.0, 1.0, 1.0, 3.0]))
    nll = -np.log([0.75, 0.25]).mean()
    assert found == pytest.approx({"accuracy": 0.5, "ece": 0.25, "brier": 0.3125, "nll": nll})
    said = "the scores of the reward model cannot be measured: the scores of pair 0 differ by nan"
    with pytest.raises(ModelError, match=said):
        measure_calibration(np.asarray([np.nan, 0.0]))


def test_slopes_of_scores_by_hand():
    # s_c = 1.2, s_r = .4, m = .5, centring .01: logit .3, loss .554355 + .0256; slope of s_c −σ(−.3) +
    # .02·1.6 = −.393557
    found = make_score_loss(0.01)(np.asarray([1.2, 0.4]), margins=np.asarray([0.5]))
    assert found.loss == pytest.approx(0.554355 + 0.0256, abs=1e-6)
    np.testing.assert_allclose(found.advantages, [0.4255575 - 0.032, -0.4255575 - 0.032], atol=1e-6)
