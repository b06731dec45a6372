"""Our losses and TRL's on the same logits. The numbers below are what TRL 1.16.0 computed in float64; with
`.[test-trl]` it does so again.

The models are tables: the logits after a token are a row of a matrix [V, V], one matrix for the policy and
one for the reference. All sequences begin with one prompt token, so that what follows is the response for
both.
"""

import contextlib
import json
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers.loss.loss_utils import ForCausalLMLoss

from rollouts.data.samples import mismatch_completions
from rollouts.losses import sft_loss
from rollouts.losses.distillation import gkd_loss
from rollouts.losses.inputs import LossInputs
from rollouts.losses.preference_losses import (
    TRL_LOSS_TYPES,
    compute_kto_reference_point,
    compute_pair_log_probs,
    compute_preference_loss,
    kto_loss,
)
from rollouts.losses.reward_model_losses import bradley_terry_loss
from rollouts.types import metric_values
from tests.support.text_tables import cases, read_cells, read_params

LossAndMetrics = tuple[Tensor, dict[str, float]]
V = 7
# the prompt is the first token; the last are where TRL's likelihood is over all tokens
CHOSEN, REJECTED, SAME_LENGTH = json.loads("""[
[[0, 1, 2, 3, 4], [0, 6, 5, 1], [0, 3]],
[[0, 2, 2], [0, 4, 1, 3, 6], [0, 5, 6, 2]],
[[0, 1, 2, 3], [0, 6, 5, 1], [0, 3, 3, 4]]]""")
LABELS = [True, False, True]

# TRL's name, ours, our parameters, and the mean loss by TRL 1.16.0
CASES = {
    name: (ours, read_params(params), float(value))
    for name, ours, params, value in read_cells("""
dpo/sigmoid   | dpo          | beta = 0.3 | 0.40540798642273357
dpo/robust    | robust_dpo   | beta = 0.3, label_smoothing = 0.1 | 0.2592930208708553
dpo/ipo       | averaged_ipo | beta = 0.3 | 3.733386528802754
dpo/hinge     | hinge        | beta = 0.3 | 0.4914510574426021
dpo/sigmoid_norm | length_normalised_dpo | beta = 0.3 | 0.6063164349181331
dpo/exo_pair  | exo          | beta = 0.3, label_smoothing = 0.1 | 0.2668243091930942
dpo/nca_pair  | nca          | beta = 0.3 | 2.0673314801923426
dpo/sppo_hard | sppo_hard    | beta = 0.3 | 90.48884677125778
dpo/apo_zero  | apo_zero     | beta = 0.3 | 0.8513735808112259
dpo/apo_down  | apo_down     | beta = 0.3 | 0.8833417882148197
cpo/sigmoid   | cpo          | beta = 0.3, label_smoothing = 0.1, nll_weight = 0.5 | 1.5348913951876657
cpo/simpo     | simpo        | beta = 2.0, gamma = 0.5 | 0.28479452026402285
orpo          | orpo         | beta = 0.3 | 2.269903100699173
kto/kto       | kto          | use_reference_point = true | 0.3496785699701294
kto/apo_zero_unpaired | kto  | use_reference_point = false | 0.23534649268349048
reward        | reward       | centring = 0.01 | 0.8779706341203086
reward/margin | reward       | margins = [0.5, 0.0, 1.0] | 1.0499284943534668
gkd/0.0       | gkd          | beta = 0.0 | 2.767521043794823
gkd/0.3       | gkd          | beta = 0.3 | 0.3419870313530627
gkd/1.0       | gkd          | beta = 1.0 | 2.4375161297948766
""")
}
OTHER_NAMES = {
    "nll_loss": "loss/nll",
    "log_odds_chosen": "log_odds/mean",
    "kl": "kto/reference_point",
    "accuracy": "rewards/accuracies",
}


def table(seed):
    """[V, V] logits from a formula, so that no generator's stream matters."""
    return 2.5 * torch.sin(torch.arange(V * V, dtype=torch.float64).reshape(V, V) * (0.7 + 0.1 * seed) + seed)


POLICY, REFERENCE = table(1), table(2)


def stack(rows):
    """Ids [B, T] right-padded with 0, and which are tokens of a response."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[0 < position < len(row) for position in range(width)] for row in rows])


def score(weights, ids, mask):
    """[B, T] log-prob of each token after the one before it, 0 outside the mask."""
    found = weights[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.where(mask, pad(found, (1, 0)), 0.0)


# --- ours ---------------------------------------------------------------------------------------------------


def our_loss(name, weights):
    """By its name in CASES, as a function of the policy's table."""
    ours, params, _ = CASES[name]
    ids, mask = stack(CHOSEN)
    if ours == "kto":
        return our_kto(weights, **params)
    if ours == "reward":
        return bradley_terry_loss(*weights[:2, :3], **{key: torch.tensor(one) for key, one in params.items()})
    if ours == "gkd":
        before = ids[:, :-1]
        return gkd_loss(weights[before], REFERENCE[before], mask[:, 1:], temperature=0.8, **params)
    chosen = SAME_LENGTH if ours in ("cpo", "simpo", "orpo") else CHOSEN
    ids, mask = stack([row for pair in zip(chosen, REJECTED, strict=True) for row in pair])
    log_probs, ref_log_probs = score(weights, ids, mask), score(REFERENCE, ids, mask)
    inputs = LossInputs(log_probs=log_probs, mask=mask, ref_log_probs=ref_log_probs)
    return compute_preference_loss(compute_pair_log_probs(inputs), ours, **params)


def our_kto(weights, *, use_reference_point):
    def sums(rows):
        ids, mask = stack(rows)
        return score(weights, ids, mask).sum(-1), score(REFERENCE, ids, mask).sum(-1)

    point = compute_kto_reference_point(*sums(kl_rows())) if use_reference_point else 0.0
    labels, weighed = torch.tensor(LABELS), {"desirable_weight": 1.5, "undesirable_weight": 0.75}
    return kto_loss(*sums(CHOSEN), labels, reference_point=point, beta=0.3, **weighed)


def kl_rows():
    """Each prompt with another prompt's completion."""
    return [
        [CHOSEN[row][0], *CHOSEN[other][1:]]
        for row, other in enumerate(mismatch_completions(["a", "b", "c"]))
    ]


# --- TRL's --------------------------------------------------------------------------------------------------


class Model:
    """What TRL asks of a model, from a table of logits."""

    training = False

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, input_ids, labels=None, **_):
        logits = self.weights[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        kept, every = labels[:, 1:] != -100, self.weights[input_ids[:, :-1]].log_softmax(-1)
        log_probs = torch.where(kept, every.gather(-1, input_ids[:, 1:, None]).squeeze(-1), 0.0)
        entropy, flat = torch.where(kept, -(every.exp() * every).sum(-1), 0.0), torch.zeros_like(log_probs)
        return SimpleNamespace(
            log_probs=log_probs, entropy=entropy, mean_logits=flat, is_top1=flat.bool(), log_sum_sq_probs=flat
        )


def trainer(**fields):
    """The attributes that TRL's loss methods read of their trainer."""
    gathered = SimpleNamespace(
        device="cpu", gather_for_metrics=lambda value: value, gather=lambda value: value
    )
    given = {
        "model": Model(POLICY),
        "ref_model": Model(REFERENCE),
        "accelerator": gathered,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None),
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "_total_train_tokens": 0,
    }
    return SimpleNamespace(**given | fields)


@pytest.fixture
def trl(monkeypatch):
    """TRL's trainers; gradient checkpointing has nothing to be switched off on a table."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", reason="pip install -e .[test-trl] compares with TRL itself")
    from trl.experimental.cpo import cpo_trainer
    from trl.experimental.gkd import gkd_trainer
    from trl.experimental.orpo import orpo_trainer
    from trl.trainer import dpo_trainer, kto_trainer, reward_trainer

    for module in (dpo_trainer, kto_trainer):
        monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: contextlib.nullcontext())
    return SimpleNamespace(
        dpo=dpo_trainer.DPOTrainer,
        kto=kto_trainer.KTOTrainer,
        reward=reward_trainer.RewardTrainer,
        cpo=cpo_trainer.CPOTrainer,
        orpo=orpo_trainer.ORPOTrainer,
        gkd=gkd_trainer.GKDTrainer,
    )


def trl_dpo(trl, weights, loss_type):
    ids, mask = stack([*CHOSEN, *REJECTED])
    fake = trainer(
        ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], beta=0.3,
        label_smoothing=0.1, use_weighting=False,
    )  # fmt: skip
    batch = {"input_ids": ids, "attention_mask": mask.long(), "completion_mask": mask.long()}
    return trl.dpo._compute_loss(fake, Model(weights), batch, False), last_metrics(fake)


def last_metrics(fake):
    return {name: values[-1] for name, values in fake._metrics["eval"].items() if values}


def trl_kto(trl, weights, loss_type):
    (ids, mask), (kl_ids, kl_mask) = stack(CHOSEN), stack(kl_rows())
    batch = {"label": torch.tensor(LABELS)}
    for prefix, tokens, kept in (("", ids, mask.long()), ("KL_", kl_ids, kl_mask.long())):
        batch |= dict.fromkeys((f"{prefix}attention_mask", f"{prefix}completion_mask"), kept)
        batch[f"{prefix}input_ids"] = tokens
    weighed = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
    fake = trainer(loss_type=loss_type, calculate_KL=loss_type == "kto", beta=0.3, **weighed)
    fake._compute_kl_logps = partial(trl.kto._compute_kl_logps, fake)
    return trl.kto._compute_loss(fake, Model(weights), batch, False), last_metrics(fake)


def trl_without_reference(kind, weights, **fields):
    """ORPO and CPO."""
    batch = {}
    for side, rows in (("chosen", SAME_LENGTH), ("rejected", REJECTED)):
        ids, mask = stack(rows)
        inside = mask | (torch.arange(ids.shape[1]) == 0)
        batch |= {
            f"{side}_input_ids": ids,
            f"{side}_attention_mask": inside.long(),
            f"{side}_labels": ids.masked_fill(~mask, -100),
        }
    fake = trainer(
        is_encoder_decoder=False, padding_value=0, pad_token_id=0, label_pad_token_id=-100, **fields
    )
    fake.concatenated_inputs, fake.get_batch_logps = kind.concatenated_inputs, kind.get_batch_logps
    fake.concatenated_forward = partial(kind.concatenated_forward, fake)
    for name in ("odds_ratio_loss", "cpo_loss"):
        if hasattr(kind, name):
            setattr(fake, name, partial(getattr(kind, name), fake))
    loss, metrics = kind.get_batch_loss_metrics(fake, Model(weights), batch, "train")
    return loss, {name: float(value) for name, value in metrics.items()}


def trl_reward(trl, weights, **inputs):
    fake = trainer(args=SimpleNamespace(center_rewards_coefficient=None if inputs else 0.01))
    answer = SimpleNamespace(logits=weights[:2, :3].reshape(6, 1))
    loss = trl.reward.compute_loss(fake, lambda **_: answer, {"attention_mask": torch.ones(6, 1)} | inputs)
    return loss, last_metrics(fake)


CPO = read_params("alpha = 0.0, label_smoothing = 0.1, cpo_alpha = 0.5, beta = 0.3")
SIMPO = read_params("alpha = 0.0, label_smoothing = 0.0, cpo_alpha = 0.0, beta = 2.0, simpo_gamma = 0.5")


def trl_loss(trl, name, weights):
    kind, _, rest = name.partition("/")
    if kind in ("dpo", "kto"):
        return (trl_dpo if kind == "dpo" else trl_kto)(trl, weights, rest)
    if kind == "cpo":
        return trl_without_reference(trl.cpo, weights, loss_type=rest, **(SIMPO if rest == "simpo" else CPO))
    if kind == "orpo":
        return trl_without_reference(trl.orpo, weights, beta=0.3)
    if kind == "reward":
        return trl_reward(trl, weights, **({"margin": torch.tensor([0.5, 0.0, 1.0])} if rest else {}))
    ids, mask = stack(CHOSEN)
    before, labels = ids[:, :-1], ids.masked_fill(~mask, -100)[:, 1:]
    options = {"labels": labels, "beta": float(rest), "temperature": 0.8}
    return trl.gkd.generalized_jsd_loss(weights[before], REFERENCE[before], **options), {}


# --- compared -----------------------------------------------------------------------------------------------


@cases("name", CASES)
def test_our_losses_are_the_numbers_that_trl_computed(name):
    output = our_loss(name, POLICY)
    assert float(output.sum) / output.count == pytest.approx(CASES[name][2], abs=1e-5)


def test_every_type_of_dpo_that_trl_names_is_compared():
    found = {name.removeprefix("dpo/"): case[0] for name, case in CASES.items() if name.startswith("dpo/")}
    assert found | {"simpo": "simpo"} == TRL_LOSS_TYPES


def test_the_supervised_loss_is_that_of_transformers_which_trl_uses():
    ids, mask = stack(CHOSEN)
    ours, theirs = POLICY.clone().requires_grad_(), POLICY.clone().requires_grad_()
    output = sft_loss(LossInputs(log_probs=score(ours, ids, mask), mask=mask))
    wanted = ForCausalLMLoss(
        theirs[ids].float(), ids.masked_fill(~mask, -100), V
    )  # it widens to float32, and narrows to it
    mean = output.sum / output.count
    assert mean.item() == pytest.approx(wanted.item(), abs=1e-5)
    (our_gradient,), (their_gradient,) = torch.autograd.grad(mean, ours), torch.autograd.grad(wanted, theirs)
    assert_close(our_gradient, their_gradient, rtol=0, atol=1e-6)


def test_trl_itself_has_our_losses_gradients_and_metrics(trl):
    for name, (_, _, recorded) in CASES.items():
        theirs, ours = POLICY.clone().requires_grad_(), POLICY.clone().requires_grad_()
        loss, metrics = trl_loss(trl, name, theirs)
        assert loss.item() == pytest.approx(recorded, abs=1e-9), f"{name}: as recorded"
        output = our_loss(name, ours)
        mean = output.sum / output.count
        assert mean.item() == pytest.approx(loss.item(), abs=1e-5), name
        gradients = torch.autograd.grad(mean, ours) + torch.autograd.grad(loss, theirs)
        assert_close(*gradients, rtol=0, atol=1e-8, msg=name)
        values = metric_values(output.metrics)
        renamed = {OTHER_NAMES.get(key, key): value for key, value in metrics.items()}
        both = {key: value for key, value in renamed.items() if key in values}
        assert {key: values[key] for key in both} == pytest.approx(both, abs=1e-5), name
        assert len(both) >= (0 if name.startswith("gkd") else 1), name
