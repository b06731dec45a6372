"""Our policy losses and advantages, and TRL's GRPO in its loss types, on the same logits, rewards and
engine's log-probs.

The numbers are what TRL 1.16.0's GRPOTrainer computed in float64, from the completions to the loss; with
`.[test-trl]` it does so again, in its `_generate_and_score_completions`, of which only generation and reward
functions are replaced, and its `_compute_loss`. Settings are written as a user writes them: a GRPOConfig
there, a preset of ours as an [rl] table here.
"""

from __future__ import annotations

import contextlib
import json
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollouts.advantages import ADVANTAGES, AdvantageInputs
from rollouts.config.schema import RLTrainingConfig
from rollouts.loops.rl_batch import make_loss_spec
from rollouts.losses import LOSSES, LossInputs, LossOutput
from rollouts.losses.corrections import sequence_tis, token_tis
from rollouts.losses.reductions import compute_log_ratio
from rollouts.types import metric_values
from tests.unit.test_against_trl import table

# Two prompts of one token, three completions each; the rewards are those of two functions, which are added.
PROMPTS = [0, 0, 0, 3, 3, 3]
COMPLETIONS = [[1, 2, 3, 4], [6, 5, 1], [3], [2, 2, 6, 4, 1], [5, 0, 3], [4, 6]]
REWARDS = [[1.0, 0.2], [0.0, 0.4], [0.5, 0.0], [0.0, 1.0], [0.0, 0.7], [1.0, 0.1]]
MAX_COMPLETION_LENGTH = 8
POLICY, REFERENCE = table(1), table(2)
OLD = POLICY + 0.1 * table(3)
ENGINE = OLD + 0.04 * table(4)
DIRECTION = table(5)  # a recorded slope is the gradient's product with it

Case = dict[str, Any]
"""theirs: of GRPOConfig; rl: an [rl] table; equal: or different there, as a test below says; recorded: TRL's
loss and slope."""
CASES: dict[str, Case] = json.loads(Path(__file__).with_name("trl_grpo.json").read_text("utf-8"))
EQUAL = [name for name, case in CASES.items() if case["equal"]]

METRICS = {
    "entropy": "entropy/mean",
    "clip_ratio/region_mean": "clip_ratio",
    "clip_ratio/low_mean": "clip_ratio/low",
    "clip_ratio/high_mean": "clip_ratio/high",
}


# --- ours ---------------------------------------------------------------------------------------------------


def weigh_as_vespo(inputs: LossInputs) -> Tensor:
    """w^k·exp(λ·(1 − w)), w the product of the row's ratios to the engine: with `reinforce` TRL's "vespo"."""
    log_ratio = compute_log_ratio(inputs.need_old(), inputs.need("rollout_log_probs")).sum(-1, keepdim=True)
    rest = 1 - log_ratio.exp()
    positive = inputs.need("advantages") >= 0
    return torch.where(positive, (2 * log_ratio + 3 * rest).exp(), (3 * log_ratio + 2 * rest).exp())


def clamp_token_weights(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """TRL's "token_truncate" with a clip_min."""
    return token_tis(inputs, cap=high).clamp(min=low)


def drop_rows_above(inputs: LossInputs, *, cap: float) -> Tensor:
    """TRL's "sequence_mask"."""
    weights = sequence_tis(inputs, cap=1e8)
    return torch.where(weights > cap, 0.0, weights)


def score(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies of the completions' tokens [B, T], 0 outside the mask, and the mask."""
    width = max(map(len, COMPLETIONS))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in COMPLETIONS])
    mask = torch.tensor([[position < len(row) for position in range(width)] for row in COMPLETIONS])
    before = torch.cat([torch.tensor(PROMPTS)[:, None], ids[:, :-1]], dim=1)
    log_probs = weights[before].log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    own = log_probs.gather(-1, ids[..., None]).squeeze(-1)
    return torch.where(mask, own, 0.0), torch.where(mask, entropies, 0.0), mask


def config_of(case: Case) -> RLTrainingConfig:
    rollout = {"num_prompts": 2, "samples_per_prompt": 3, "max_new_tokens": MAX_COMPLETION_LENGTH}
    data = {"kind": "jsonl", "path": "x.jsonl"}
    return RLTrainingConfig.model_validate({"data": data, "steps": 1, "rollout": rollout} | case["rl"])


def our_advantages(case: Case) -> list[float]:
    config, rewards = config_of(case), np.array(REWARDS)
    named = dict(zip("ab", rewards.T, strict=True))
    inputs = AdvantageInputs(rewards=rewards.sum(-1), group_indices=np.array(PROMPTS), named_rewards=named)
    params: dict[str, Any] = dict(config.advantage_params)
    return np.asarray(ADVANTAGES[config.advantage](inputs, **params)).tolist()


def our_inputs(case: Case, weights: Tensor = POLICY) -> LossInputs:
    log_probs, entropy, mask = score(weights)
    return LossInputs(
        log_probs=log_probs,
        mask=mask,
        entropy=entropy,
        advantages=torch.tensor(our_advantages(case), dtype=torch.float64)[:, None].expand_as(log_probs),
        old_log_probs=score(OLD)[0],
        rollout_log_probs=score(ENGINE if case["theirs"].get("use_vllm") else OLD)[0],
        ref_log_probs=score(REFERENCE)[0],
    )


def our_output(case: Case, inputs: LossInputs) -> tuple[Tensor, LossOutput]:
    """The mean and what it is the mean of."""
    spec = make_loss_spec(config_of(case))
    output = LOSSES[spec.name](inputs, unit=spec.unit, **spec.params)
    return output.sum / (spec.constant or output.count), output


def our_loss(case: Case, weights: Tensor = POLICY) -> tuple[Tensor, LossOutput]:
    return our_output(case, our_inputs(case, weights))


@pytest.mark.parametrize("name", EQUAL)
def test_our_losses_are_the_numbers_that_trl_computed(name: str):
    weights = POLICY.clone().requires_grad_()
    loss, _ = our_loss(CASES[name], weights)
    (gradient,) = torch.autograd.grad(loss, weights)
    found = float(loss.detach()), float((gradient * DIRECTION).sum())
    assert found == pytest.approx(CASES[name]["recorded"], rel=1e-9)


# --- what differs -------------------------------------------------------------------------------------------


def their_number(name: str) -> float:
    """TRL's, which is not ours."""
    number = CASES[name]["recorded"][0]
    assert float(our_loss(CASES[name])[0]) != pytest.approx(number, rel=1e-3)
    return number


def keep(inputs: LossInputs, kept: Tensor) -> LossInputs:
    return replace(inputs, mask=inputs.mask & kept)


def k3_and_ratio() -> tuple[Tensor, Tensor, Tensor]:
    """k3 to the reference and the ratio to OLD, [B, T], and the mask."""
    (policy, _, mask), (old, *_), (reference, *_) = score(POLICY), score(OLD), score(REFERENCE)
    return torch.exp(reference - policy) - (reference - policy) - 1, torch.exp(policy - old), mask


def test_bnpo_is_there_a_mean_of_the_means_of_micro_batches_and_here_of_the_batch():
    inputs, rows = our_inputs(CASES["bnpo"]), torch.arange(6)[:, None]
    parts = [float(our_output(CASES["bnpo"], keep(inputs, part))[0]) for part in (rows < 3, rows >= 3)]
    assert sum(parts) / 2 == pytest.approx(their_number("bnpo/parts"), rel=1e-9)


def test_a_row_without_a_trained_token_counts_there_in_a_mean_over_rows():
    case = CASES["grpo/truncated"]
    ends = torch.tensor([ids[-1] == 1 for ids in COMPLETIONS])  # 1 ends a completion
    loss, output = our_output(case, keep(our_inputs(case), ends[:, None]))
    assert output.count == 2
    assert float(loss) * 2 / 6 == pytest.approx(their_number("grpo/truncated"), rel=1e-9)


def test_the_weight_for_the_engine_does_not_multiply_the_kl_term_there():
    k3, ratio, mask = k3_and_ratio()
    row_weights = torch.exp((score(OLD)[0] - score(ENGINE)[0]).sum(-1, keepdim=True))
    more = 0.3 * ((1 - row_weights) * ratio * k3)[mask].mean()
    ours = our_loss(CASES["dapo/vllm/beta"])[0]
    assert float(ours + more) == pytest.approx(their_number("dapo/vllm/beta"), rel=1e-9)


def test_the_off_policy_mask_leaves_the_kl_term_alone_there():
    k3, ratio, mask = k3_and_ratio()
    kl = ((ratio * k3 * mask).sum(-1) / mask.sum(-1)).mean()
    without, _ = our_loss(CASES["grpo/vllm/off_policy_mask"])
    assert float(without + 0.3 * kl) == pytest.approx(
        their_number("grpo/vllm/off_policy_mask/beta"), rel=1e-9
    )


def test_the_kl_term_of_a_loss_by_sequence_is_multiplied_by_the_ratio_of_the_row_there():
    k3, ratio, mask = k3_and_ratio()
    lengths = mask.sum(-1, keepdim=True)
    row_ratio = torch.exp((ratio.log() * mask).sum(-1, keepdim=True) / lengths)
    more = 0.3 * (((row_ratio - ratio) * k3 * mask) / lengths).sum(-1).mean()
    ours = our_loss(CASES["gspo/beta"])[0]
    assert float(ours + more) == pytest.approx(their_number("gspo/beta"), rel=1e-9)


def test_the_tokens_of_highest_entropy_are_those_of_the_batch_there_and_of_each_row_here():
    case = CASES["dapo"]
    inputs = our_inputs(case)
    assert inputs.entropy is not None
    threshold = np.quantile(inputs.entropy[inputs.mask].numpy().astype(np.float32), 0.6)
    _, output = our_output(case, keep(inputs, inputs.entropy.float() >= float(threshold)))
    assert float(output.sum) / int(inputs.mask.sum()) == pytest.approx(
        their_number("dapo/quantile"), rel=1e-9
    )


def test_the_entropy_bonus_is_there_always_a_mean_over_tokens_and_here_in_the_unit_of_the_loss():
    _, entropy, mask = score(POLICY)
    loss, _ = our_loss(CASES["grpo"])
    assert float(loss - 0.2 * entropy[mask].mean()) == pytest.approx(
        their_number("grpo/entropy_coef"), rel=1e-9
    )
    lengths = mask.sum(-1)
    ours, _ = our_loss(CASES["grpo/entropy_coef"])
    assert float(ours) == pytest.approx(float(loss - 0.2 * (entropy.sum(-1) / lengths).mean()), rel=1e-9)


def test_the_std_of_the_whole_batch_only_scales_the_loss():
    std = float(np.array(REWARDS).sum(-1).std(ddof=1))
    ours, _ = our_loss(CASES["dapo/scale_batch"])
    assert float(ours) / (std + 1e-4) == pytest.approx(their_number("dapo/scale_batch"), rel=1e-9)


def test_a_row_above_the_cap_of_its_weight_is_dropped_there_and_counts_with_the_cap_here():
    case = CASES["dapo/vllm/sequence_mask"]
    case = case | {"rl": case["rl"] | {"loss_params": {"correction": "sequence_tis(cap=1.1)"}}}
    inputs = our_inputs(case)
    above = (score(OLD)[0] - score(ENGINE)[0]).sum(-1, keepdim=True).exp() > 1.1
    (_, output), (_, capped) = our_output(case, inputs), our_output(case, keep(inputs, above))
    assert above.sum() == 1
    assert abs(float(capped.sum)) > 0.1
    assert float(output.sum - capped.sum) / output.count == pytest.approx(
        CASES["dapo/vllm/sequence_mask"]["recorded"][0], rel=1e-9
    )


def test_clip_ratios_are_shares_of_tokens_with_a_gain_in_cispo_there_and_of_rows_by_sequence():
    _, ratio, mask = k3_and_ratio()
    gains = torch.tensor(our_advantages(CASES["cispo/bound"]))[:, None] > 0
    assert (
        float((ratio > 1.1)[mask].double().mean())
        == metric_values(our_loss(CASES["cispo/bound"])[1].metrics)["clip_ratio/high"]
    )
    assert float(((ratio > 1.1) & gains)[mask].double().mean()) == pytest.approx(
        CASES["cispo/bound"]["metrics"]["cispo_clip_ratio"], rel=1e-6
    )
    row_ratio = torch.exp((ratio.log() * mask).sum(-1) / mask.sum(-1))
    clipped = torch.where(gains.squeeze(-1), row_ratio > 1.06, row_ratio < 0.95)
    ours = metric_values(our_loss(CASES["gspo/epsilons"])[1].metrics)["clip_ratio"]
    assert ours == pytest.approx(float((clipped * mask.sum(-1)).sum() / mask.sum()), rel=1e-6)
    assert float(clipped.double().mean()) == pytest.approx(
        CASES["gspo/epsilons"]["metrics"]["clip_ratio/region_mean"], rel=1e-6
    )


# --- TRL's --------------------------------------------------------------------------------------------------


class Model:
    """What TRL asks of a model, from a table of logits."""

    training = True

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: object) -> Any:
        log_probs = self.weights[input_ids[:, :-1]].log_softmax(-1)
        found = log_probs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        kept = labels[:, 1:] != -100
        return types.SimpleNamespace(
            log_probs=torch.where(kept, found, 0.0), entropy=torch.where(kept, entropy, 0.0)
        )


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
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
    yield types.SimpleNamespace(trainer=grpo_trainer.GRPOTrainer, config=grpo_config.GRPOConfig)
    torch.set_default_dtype(default)


def make_trainer(trl: Any, case: Case, folder: Path) -> Any:
    """A trainer that its __init__ has not run on: that wants a model and its tokenizer. It takes most
    settings over under their own names.
    """
    fixed = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "num_generations": 3,
        "num_iterations": 2,
    }
    fixed |= {"max_completion_length": MAX_COMPLETION_LENGTH, "per_device_train_batch_size": 6}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a setting's name, by transformers
        args = trl.config(**fixed | case["theirs"])
    fake = trl.trainer.__new__(trl.trainer)
    vars(fake).update(vars(args))
    vars(fake).update(
        args=args,
        model=Model(OLD),
        ref_model=Model(REFERENCE),
        accelerator=types.SimpleNamespace(
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
        _tokenizer=types.SimpleNamespace(pad_token_id=0),
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


def generate(*, with_log_probs: bool) -> tuple[object, ...]:
    rows = [row[: len(ids)] for row, ids in zip(score(ENGINE)[0].tolist(), COMPLETIONS, strict=True)]
    return (
        [[prompt] for prompt in PROMPTS],
        COMPLETIONS,
        None,
        ["" for _ in PROMPTS],
        rows if with_log_probs else None,
        {},
        None,
        None,
    )


def trl_loss(
    trl: Any, case: Case, weights: Tensor, folder: Path
) -> tuple[Tensor, list[float], dict[str, float]]:
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
    total = torch.stack([trainer._compute_loss(Model(weights), part) for part in parts]).sum()
    return (
        total,
        batch["advantages"].tolist(),
        {name: values[-1] for name, values in trainer._metrics["train"].items()},
    )


# --- with TRL -----------------------------------------------------------------------------------------------


def test_trl_itself_computes_the_recorded_numbers_and_our_advantages_gradients_and_metrics(
    trl: Any, tmp_path: Path
):
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


def check_metrics(case: Case, theirs: dict[str, float], ours: dict[str, float], name: str) -> None:
    both = {our_name: theirs[key] for key, our_name in METRICS.items() if key in theirs}
    if (
        "importance_sampling_level" in case["theirs"] or "delta" in case["theirs"]
    ):  # clipped: a share of rows there; counted after delta has cut the ratio
        both = {"entropy/mean": both["entropy/mean"]}
    assert {key: ours[key] for key in both} == pytest.approx(both, rel=1e-6), name  # they count in float32


def test_the_records_have_the_defaults_of_trl(trl: Any, tmp_path: Path):
    args = make_trainer(trl, {"theirs": {}}, tmp_path).args
    defaults = (
        args.loss_type,
        args.epsilon,
        args.epsilon_high,
        args.delta,
        args.beta,
        args.use_bias_correction_kl,
        args.scale_rewards,
    )
    assert defaults == ("dapo", 0.2, None, None, 0.0, True, "group")
    assert (args.importance_sampling_level, args.sapo_temperature_pos, args.sapo_temperature_neg) == (
        "token",
        1.0,
        1.05,
    )
    assert (args.vllm_importance_sampling_correction, args.vllm_importance_sampling_mode) == (
        True,
        "sequence_mask",
    )
    assert (args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max) == (None, 3.0)
