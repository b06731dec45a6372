"""Our policy losses and advantages, and TRL's GRPO in its loss types, on the same logits, rewards and
engine's log-probs.

The numbers are what TRL 1.16.0's GRPOTrainer computed in float64, from the completions to the loss; with
`.[test-trl]` it does so again, in its `_generate_and_score_completions`, of which only generation and reward
functions are replaced, and its `_compute_loss`. Settings are written as a user writes them: a GRPOConfig
there, a preset of ours as an [rl] table here.
"""

import contextlib
import json
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollouts.advantages import ADVANTAGES, AdvantageInputs
from rollouts.config.schema import RLTrainingConfig
from rollouts.loops.rl_batch import make_loss_spec
from rollouts.losses import LOSSES, LossInputs
from rollouts.types import metric_values
from tests.unit.test_against_trl import Model, stack, table

# Two prompts of one token, three completions each; the rewards are those of two functions, which are added.
PROMPTS = [0, 0, 0, 3, 3, 3]
COMPLETIONS = json.loads("[[1, 2, 3, 4], [6, 5, 1], [3], [2, 2, 6, 4, 1], [5, 0, 3], [4, 6]]")
REWARDS = json.loads("[[1.0, 0.2], [0.0, 0.4], [0.5, 0.0], [0.0, 1.0], [0.0, 0.7], [1.0, 0.1]]")
RL = """
steps = 1
data = { kind = "jsonl", path = "x.jsonl" }
rollout = { num_prompts = 2, samples_per_prompt = 3, max_new_tokens = 8 }
"""
GRPO = """{"use_cpu": true, "bf16": false, "report_to": [], "num_generations": 3, "num_iterations": 2,
    "max_completion_length": 8, "per_device_train_batch_size": 6}"""
POLICY, REFERENCE = table(1), table(2)
OLD = POLICY + 0.1 * table(3)
ENGINE = OLD + 0.04 * table(4)
DIRECTION = table(5)  # a recorded slope is the gradient's product with it

Case = dict[str, Any]
"""theirs: of GRPOConfig; rl: an [rl] table; equal: or different there, as a test below says; recorded: TRL's
loss and slope."""
CASES = json.loads(Path(__file__).with_name("trl_grpo.json").read_text())
EQUAL = [name for name, case in CASES.items() if case["equal"]]

METRICS = {
    "entropy": "entropy/mean",
    "clip_ratio/region_mean": "clip_ratio",
    "clip_ratio/low_mean": "clip_ratio/low",
    "clip_ratio/high_mean": "clip_ratio/high",
}


# --- ours ---------------------------------------------------------------------------------------------------


def score(weights):
    """Log-probs and entropies of the completions' tokens [B, T], 0 outside the mask, and the mask."""
    ids, mask = stack([[prompt, *row] for prompt, row in zip(PROMPTS, COMPLETIONS, strict=True)])
    log_probs, mask = weights[ids[:, :-1]].log_softmax(-1), mask[:, 1:]
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    own = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.where(mask, own, 0.0), torch.where(mask, entropies, 0.0), mask


def config_of(case):
    return RLTrainingConfig.model_validate(tomllib.loads(RL) | case["rl"])


def our_advantages(case):
    config, rewards = config_of(case), np.array(REWARDS)
    named = dict(zip("ab", rewards.T, strict=True))
    inputs = AdvantageInputs(rewards=rewards.sum(-1), group_indices=np.array(PROMPTS), named_rewards=named)
    return np.asarray(ADVANTAGES[config.advantage](inputs, **config.advantage_params)).tolist()


def our_loss(case, weights):
    """The mean and what it is the mean of."""
    log_probs, entropy, mask = score(weights)
    inputs = LossInputs(
        log_probs=log_probs,
        mask=mask,
        entropy=entropy,
        advantages=torch.tensor(our_advantages(case), dtype=torch.float64)[:, None].expand_as(log_probs),
        old_log_probs=score(OLD)[0],
        rollout_log_probs=score(ENGINE if case["theirs"].get("use_vllm") else OLD)[0],
        ref_log_probs=score(REFERENCE)[0],
    )
    spec = make_loss_spec(config_of(case))
    output = LOSSES[spec.name](inputs, unit=spec.unit, **spec.params)
    return output.sum / (spec.constant or output.count), output


@pytest.mark.parametrize("name", EQUAL)
def test_our_losses_are_the_numbers_that_trl_computed(name):
    weights = POLICY.clone().requires_grad_()
    loss, _ = our_loss(CASES[name], weights)
    (gradient,) = torch.autograd.grad(loss, weights)
    found = loss.item(), float((gradient * DIRECTION).sum())
    assert found == pytest.approx(CASES[name]["recorded"], rel=1e-9)


# --- TRL's --------------------------------------------------------------------------------------------------


class TrainedModel(Model):
    training = True


@pytest.fixture
def trl(monkeypatch):
    """TRL's GRPO; a table has no gradient checkpointing to switch off. TRL makes tensors of the default
    dtype.
    """
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", reason="pip install -e .[test-trl] compares with TRL itself")
    from trl.trainer import grpo_config, grpo_trainer

    monkeypatch.setattr(grpo_trainer, "disable_gradient_checkpointing", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(grpo_trainer, "gather_object", list)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield SimpleNamespace(trainer=grpo_trainer.GRPOTrainer, config=grpo_config.GRPOConfig)
    torch.set_default_dtype(default)


def make_trainer(trl, case, folder):
    """A trainer that its __init__ has not run on: that wants a model and its tokenizer. It takes most
    settings over under their own names.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a setting's name, by transformers
        args = trl.config(output_dir=str(folder), **json.loads(GRPO) | case["theirs"])
    fake = trl.trainer.__new__(trl.trainer)
    vars(fake).update(vars(args))
    vars(fake).update(
        args=args,
        model=TrainedModel(OLD),
        ref_model=TrainedModel(REFERENCE),
        accelerator=SimpleNamespace(
            device="cpu",
            num_processes=1,
            is_main_process=False,  # so that timings are logged nowhere
            process_index=0,
            sync_gradients=True,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
            pad_across_processes=lambda value, **_: value,
            autocast=contextlib.nullcontext,
        ),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[1],
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        current_gradient_accumulation_steps=args.gradient_accumulation_steps,
        reward_weights=torch.ones(2),
        reward_funcs=[None, None],
        reward_func_names=["a", "b"],
        aux_loss_enabled=False,
        environments=None,
        environment_factories=None,
        tools=None,
        _is_vlm=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        _generate=lambda prompts: generate(with_log_probs=bool(case["theirs"].get("use_vllm"))),
        _calculate_rewards=lambda *_: torch.tensor(REWARDS),
    )
    return fake


def generate(*, with_log_probs):
    rows = [row[: len(ids)] for row, ids in zip(score(ENGINE)[0].tolist(), COMPLETIONS, strict=True)]
    prompts, texts = [[prompt] for prompt in PROMPTS], [""] * len(PROMPTS)
    return prompts, COMPLETIONS, None, texts, rows if with_log_probs else None, {}, None, None


def trl_loss(trl, case, weights, folder):
    """Loss, advantages and metrics: summed over the micro-batches of an optimizer step, as the trainer does
    with their gradients.
    """
    trainer = make_trainer(trl, case, folder)
    batch = trainer._generate_and_score_completions([{"prompt": str(prompt)} for prompt in PROMPTS])
    size = trainer.args.per_device_train_batch_size
    parts = [
        {name: value[start : start + size] if value.dim() > 0 else value for name, value in batch.items()}
        for start in range(0, len(PROMPTS), size)
    ]
    total = torch.stack([trainer._compute_loss(TrainedModel(weights), part) for part in parts]).sum()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return total, batch["advantages"].tolist(), metrics


# --- with TRL -----------------------------------------------------------------------------------------------


def test_trl_itself_computes_the_recorded_numbers_and_our_advantages_gradients_and_metrics(trl, tmp_path):
    for name, case in CASES.items():
        theirs, ours = POLICY.clone().requires_grad_(), POLICY.clone().requires_grad_()
        loss, advantages, metrics = trl_loss(trl, case, theirs, tmp_path)
        (their_gradient,) = torch.autograd.grad(loss, theirs)
        slope = float((their_gradient * DIRECTION).sum())
        assert (loss.item(), slope) == pytest.approx(case["recorded"], rel=1e-9), f"{name}: as recorded"
        recorded = case.get("metrics", {})
        assert {key: metrics[key] for key in recorded} == pytest.approx(recorded, rel=1e-9), (
            f"{name}: as recorded"
        )
        if name not in EQUAL:
            continue
        assert advantages == pytest.approx(our_advantages(case), rel=1e-9), name
        our_mean, output = our_loss(case, ours)
        (our_gradient,) = torch.autograd.grad(our_mean, ours)
        torch.testing.assert_close(our_gradient, their_gradient, rtol=0, atol=1e-12, msg=name)
        if not name.endswith("/parts"):  # of the last part there
            check_metrics(case, metrics, metric_values(output.metrics), name)


def check_metrics(case, theirs, ours, name):
    both = {our_name: theirs[key] for key, our_name in METRICS.items() if key in theirs}
    if (
        "importance_sampling_level" in case["theirs"] or "delta" in case["theirs"]
    ):  # clipped: a share of rows there; counted after delta has cut the ratio
        both = {"entropy/mean": both["entropy/mean"]}
    assert {key: ours[key] for key in both} == pytest.approx(both, rel=1e-6), name  # they count in float32


DEFAULTS = json.loads("""{
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": null, "delta": null, "beta": 0.0,
    "use_bias_correction_kl": true, "scale_rewards": "group", "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vllm_importance_sampling_correction": true,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_min": null,
    "vllm_importance_sampling_clip_max": 3.0}""")


def test_the_records_have_the_defaults_of_trl(trl, tmp_path):
    args = make_trainer(trl, {"theirs": {}}, tmp_path).args
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
