"""The settings of a run: frozen pydantic models. Few settings; a new one is a decision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rollouts.config.changes import list_tables
from rollouts.config.fields import (
    FunctionText,
    NaturalFloat,
    NaturalInt,
    Off,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    as_list,
)
from rollouts.config.tables import (
    DistributedConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    ReferenceConfig,
    RolloutConfig,
    Sources,
)

SFT_LR = 1e-4  # ten times OptimConfig's, which suits RL


class SFTTrainingConfig(Section):
    """Supervised fine-tuning."""

    data: Sources
    steps: PositiveInt
    """training steps of the stage"""
    batch_size: PositiveInt = 16
    """conversations per step"""
    max_length: PositiveInt = 1024
    """tokens of one conversation"""
    train_on: Literal["all", "last"] = "all"
    """which assistant turns train"""
    thinking: Literal["keep", "drop"] = "keep"
    """whether the thinking part of assistant turns trains or is left out"""
    optim: OptimConfig = OptimConfig(lr=SFT_LR)
    micro_batch_tokens: PositiveInt = 8192
    """padded tokens of one forward pass"""
    eval_every: NaturalInt = 0
    """steps; 0: only before and after"""

    @model_validator(mode="before")
    @classmethod
    def _keep_own_lr(cls, settings: Any) -> Any:
        # an [sft.optim] table that sets something else would otherwise fall back to OptimConfig's lr, ten
        # times smaller
        if isinstance(settings, dict) and isinstance(settings.get("optim"), dict):
            return {**settings, "optim": {"lr": SFT_LR, **settings["optim"]}}
        return settings


CLIPPED_BY_SETTINGS = ("ppo_clip", "clip_cov")  # losses whose clip is rl.clip_low and rl.clip_high


class AlgorithmChange(Section):
    """Settings of [rl] from a step on; the others stay as they were before it. Another loss or advantage
    begins with its defaults.
    """

    from_step: Annotated[int, Field(ge=2)]
    """the first step that has them"""
    advantage: FunctionText | None = None
    """as in [rl], with advantage_params"""
    advantage_params: Annotated[dict[str, float | int | bool | str] | None, Off] = None
    """passed to the advantage by keyword, all of them"""
    loss: str | None = None
    """as in [rl], with loss_params, clip_low and clip_high"""
    loss_params: Annotated[dict[str, float | int | bool | str] | None, Off] = None
    """passed to the loss by keyword, all of them"""
    normalise_by: Annotated[Literal["tokens", "sequences", "sequence_sums", "constant"] | None, Off] = None
    """as in [rl]"""
    clip_low: Annotated[PositiveFloat | None, Off] = None
    """as in [rl]"""
    clip_high: Annotated[PositiveFloat | None, Off] = None
    """as in [rl]"""
    kl_coef: Annotated[NaturalFloat | None, Off] = None
    """with a kl_control that is not fixed: where it goes on from"""
    kl_ramp_steps: Annotated[PositiveInt | None, Off] = None
    """over so many steps kl_coef moves here in a straight line; None: at once"""
    kl_in: Annotated[Literal["reward", "loss"] | None, Off] = None
    """as in [rl]"""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"] | None, Off] = None
    """as in [rl]"""
    recompute_old: Annotated[bool | None, Off] = None
    """as in [rl]"""
    importance_cap: Annotated[PositiveFloat | None, Off] = None
    """as in [rl]"""


Changes = Annotated[list[AlgorithmChange], BeforeValidator(as_list)]


class CriticConfig(Section):
    """A critic: a model with one value per token, trained beside the policy. It makes RL PPO, with advantage
    "gae".
    """

    model: str = ""
    """empty: the model that RL starts from, with a head of 0; "stage": this run's reward model; a directory
    or a hub name
    """
    clip: NaturalFloat = 0.2
    """updates of a step that move a value further than this gain nothing by it, in the reward's unit; 0: no
    clip
    """
    optim: OptimConfig = OptimConfig()


class RLTrainingConfig(Section):
    """Reinforcement learning."""

    data: Sources
    curriculum: FunctionText = ""
    """module:function or file.py:function from (step, statistics) to the weights of the sources"""
    steps: PositiveInt
    """training steps of the stage"""
    rollout: RolloutConfig
    critic: CriticConfig | None = None
    """with it the advantage is "gae", unless another that gives returns is named"""
    advantage: FunctionText = "grpo"
    """a key of rollouts.advantages.ADVANTAGES, module:function or file.py:function"""
    advantage_params: dict[str, float | int | bool | str] = {}
    """passed to the advantage by keyword"""
    loss: str = "ppo_clip"
    """a key of rollouts.losses.LOSSES, or module:function"""
    loss_params: dict[str, float | int | bool | str] = {}
    """passed to the loss by keyword"""
    normalise_by: Literal["tokens", "sequences", "sequence_sums", "constant"] = "tokens"
    """constant: prompts * samples_per_prompt * max_new_tokens"""
    clip_low: PositiveFloat = 0.2
    """the ratio is clipped below 1 - clip_low; of ppo_clip and clip_cov"""
    clip_high: PositiveFloat = 0.2
    """the ratio is clipped above 1 + clip_high; of ppo_clip and clip_cov"""
    kl_coef: NaturalFloat = 0.0
    """0, here and in changes: no reference model is loaded"""
    kl_in: Literal["reward", "loss"] = "reward"
    """where the KL term goes"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k2 and k3 only with kl_in = "loss"."""
    kl_control: Literal["fixed", "proportional", "two_sided"] = "fixed"
    """how kl_coef follows the measured KL, from step to step"""
    kl_control_params: dict[str, float | int] = {}
    """proportional: target, horizon, limit; two_sided: target, tolerance, factor, lowest, highest"""
    kl_stop: NaturalFloat = 0.0
    """no more updates on a batch once approx_kl/mean is above, in nats per token; 0: never"""
    recompute_old: bool = False
    """old log-probs from a forward pass instead of the engine's, with truncated importance weights"""
    importance_cap: PositiveFloat = 2.0
    """C of min(exp(old - mu), C); used with recompute_old"""
    updates_per_batch: PositiveInt = 1
    """times that each batch is trained on: optimizer steps, or passes of `minibatches` of them"""
    minibatches: PositiveInt = 1
    """parts that each pass divides the groups of a batch into anew, one optimizer step each"""
    sync_every: PositiveInt = 1
    """steps between weight updates of the engines"""
    max_staleness: NaturalInt = 0
    """steps a trained token may lag behind the trainer"""
    optim: OptimConfig = OptimConfig()
    micro_batch_tokens: PositiveInt = 8192
    """padded tokens of one forward pass"""
    eval_every: NaturalInt = 0
    """steps; 0: only before and after"""
    changes: Changes = []
    """of the algorithm, each from its step on"""

    @model_validator(mode="after")
    def _consistent(self) -> RLTrainingConfig:
        if self.max_staleness < self.sync_every - 1:
            raise ValueError(
                f"max_staleness={self.max_staleness} is below sync_every - 1 = {self.sync_every - 1}: samples"
                f" would always be too old; set max_staleness = {self.sync_every - 1} or more, or sync_every"
                f" = {self.max_staleness + 1}"
            )
        for name in (
            "clip_low",
            "clip_high",
        ):  # the default written out is let through: a resolved config has every setting
            value = getattr(self, name)
            if self.loss not in CLIPPED_BY_SETTINGS and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value} with loss={self.loss!r}; it is read by"
                    f" {' and '.join(CLIPPED_BY_SETTINGS)} only: leave it out, and give other losses what"
                    " they take in loss_params"
                )
        if self.kl_in == "reward" and self.kl_coef > 0 and self.advantage == "gdpo":
            raise ValueError(
                "advantage='gdpo' with kl_in='reward'; it reads the named rewards, which have no KL term: use"
                " kl_in='loss'"
            )
        if self.kl_in == "reward" and self.kl_coef > 0 and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} with kl_in='reward'; KL in the reward is k1; use"
                " kl_in='loss' for k2 and k3"
            )
        if (
            self.kl_in == "loss"
            and self.kl_coef > 0
            and self.kl_estimator == "k1"
            and self.loss_params.get("kl_importance") is not True
        ):
            raise ValueError(
                "kl_estimator='k1' with kl_in='loss'; as a loss k1 has an expected gradient of 0; use 'k2'"
                " (reverse KL) or 'k3', or set kl_importance = true in loss_params"
            )
        self._check_cap()
        self._check_critic()
        self._check_updates()
        self._check_changes()
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_gae(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("critic") is not None:
            return {"advantage": "gae", **settings}
        return settings

    def _check_critic(self) -> None:
        if self.critic is None and self.advantage == "gae":
            raise ValueError(
                "advantage='gae' without a critic, whose values it needs; add [rl.critic], or choose another"
                " advantage"
            )
        if self.critic is not None and self.advantage != "gae" and ":" not in self.advantage:
            raise ValueError(
                f"advantage={self.advantage!r} with [rl.critic]; it has no use for a critic: leave one of"
                " them out, or set 'gae'"
            )

    def _check_updates(self) -> None:
        if self.minibatches > self.rollout.num_prompts:
            raise ValueError(
                f"minibatches={self.minibatches} with rollout.num_prompts={self.rollout.num_prompts}; a group"
                " stays together, so there are at most as many parts as prompts: set minibatches to"
                f" {self.rollout.num_prompts} or less"
            )
        if self.kl_stop and self.updates_per_batch * self.minibatches == 1:
            raise ValueError(
                f"kl_stop={self.kl_stop} with one update a batch, after which nothing is left out; set"
                " updates_per_batch or minibatches"
            )
        if self.kl_control == "fixed" and self.kl_control_params:
            raise ValueError(
                f"kl_control_params={self.kl_control_params} with kl_control='fixed', which takes none; set"
                " kl_control too"
            )
        if self.kl_control != "fixed" and not self.kl_coef:
            raise ValueError(
                f"kl_coef=0 with kl_control={self.kl_control!r}, which multiplies it and would leave it at 0;"
                " begin above 0"
            )

    def _check_changes(self) -> None:
        """Each piece is checked as a whole [rl]."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        last = 0
        for change, table in zip(self.changes, list_tables(self, self.changes)[1:], strict=True):
            where = f"changes with from_step={change.from_step}"
            if change.from_step <= last:
                raise ValueError(
                    f"{where} comes after from_step={last}; write the changes in the order of their steps,"
                    " one a step"
                )
            if all(value is None for name, value in change if name != "from_step"):
                raise ValueError(f"{where} changes nothing; name a setting, or leave it out")
            if change.kl_ramp_steps and (change.kl_coef is None or self.kl_control != "fixed"):
                raise ValueError(
                    f"{where} has kl_ramp_steps; it needs kl_coef beside it and kl_control='fixed', not"
                    f" {self.kl_control!r}"
                )
            last = change.from_step
            try:
                type(self).model_validate({**fields, **table, "changes": []})
            except ValidationError as error:
                causes = [
                    str(detail.get("ctx", {}).get("error", detail["msg"]))
                    for detail in error.errors(include_url=False)
                ]
                raise ValueError(f"{where}: {'; '.join(causes)}") from None

    def _check_cap(self) -> None:
        """The default written out is let through: a resolved config has every setting."""
        given = (
            self.importance_cap != type(self).model_fields["importance_cap"].default
            or "importance_cap" in self.loss_params
        )
        if given and self.loss_params.get("correction"):
            raise ValueError(
                f"importance_cap={self.loss_params.get('importance_cap', self.importance_cap)} with"
                f" correction={self.loss_params['correction']!r}; a correction takes the place of the capped"
                " weight: leave importance_cap out, or write the cap into it, as token_tis(cap=3)"
            )


PREFERENCE_LR = 1e-6  # a tenth of OptimConfig's
REFERENCE_FREE = ("simpo", "cpo", "orpo")  # preference losses that compare with no reference model


class PreferenceTrainingConfig(Section):
    """Training on preferences without a reward model: DPO and its family on pairs of responses, KTO on
    responses marked good or bad.
    """

    data: Sources
    steps: PositiveInt
    """training steps of the stage"""
    batch_size: PositiveInt = 16
    """pairs per step; of loss = "kto" responses per step"""
    max_length: PositiveInt = 1024
    """tokens of a prompt and one response; a longer response is cut"""
    loss: str = "dpo"
    """a key of rollouts.losses.preference_losses.PREFERENCE_LOSSES, "kto", or module:function"""
    loss_params: dict[str, float | int | bool | str] = {}
    """passed to the loss by keyword, for example beta; "kto" sets weights left out by counts"""
    reference: Literal["precomputed", "live", "none"] = "precomputed"
    """scores all rows once, or every batch; "none" for simpo, cpo and orpo"""
    held_out: NaturalInt = 0
    """pairs (of "kto" responses) off the end of the data that are evaluated and do not train"""
    optim: OptimConfig = OptimConfig(lr=PREFERENCE_LR)
    micro_batch_tokens: PositiveInt = 8192
    """padded tokens of one forward pass"""
    eval_every: NaturalInt = 0
    """steps; 0: only before and after"""

    @model_validator(mode="before")
    @classmethod
    def _keep_own_lr(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and isinstance(settings.get("optim"), dict):
            return {**settings, "optim": {"lr": PREFERENCE_LR, **settings["optim"]}}
        return settings

    @model_validator(mode="after")
    def _consistent(self) -> PreferenceTrainingConfig:
        if self.loss in REFERENCE_FREE and self.reference != "none":
            raise ValueError(
                f"reference={self.reference!r} with loss={self.loss!r}, which compares with no reference"
                " model; set reference = 'none'"
            )
        if self.loss not in REFERENCE_FREE and ":" not in self.loss and self.reference == "none":
            raise ValueError(
                f"reference='none' with loss={self.loss!r}, which compares with a reference model; set"
                f" reference = 'precomputed' or 'live', or use one of {', '.join(REFERENCE_FREE)}"
            )
        return self


class RewardModelTrainingConfig(Section):
    """Training of a reward model on pairs of responses: one score per response, the higher the better."""

    data: Sources
    steps: PositiveInt
    """training steps of the stage"""
    batch_size: PositiveInt = 16
    """pairs per step"""
    max_length: PositiveInt = 1024
    """tokens of a prompt and one response; a longer response is cut"""
    held_out: NaturalInt = 0
    """pairs off the end of the data that are evaluated and do not train"""
    optim: OptimConfig = OptimConfig()
    micro_batch_tokens: PositiveInt = 8192
    """padded tokens of one forward pass"""
    eval_every: NaturalInt = 0
    """steps; 0: only before and after"""


class RunConfig(Section):
    """Everything a run is made of. `--mode` says which of the stages run."""

    name: str = "run"
    """of the run directory, when output.dir is empty"""
    seed: Seed = 0
    """of data order, sampling and random weights"""
    deterministic: bool = False
    """float32, fixed threads, fixed order: two runs give the same bits"""
    model: ModelConfig = ModelConfig()
    output: OutputConfig = OutputConfig()
    distributed: DistributedConfig = DistributedConfig()
    engine: EngineConfig = EngineConfig()
    sft: SFTTrainingConfig | None = None
    rl: RLTrainingConfig | None = None
    preference: PreferenceTrainingConfig | None = None
    reward_model: RewardModelTrainingConfig | None = None
    reference: ReferenceConfig = ReferenceConfig()
    eval: EvalConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.deterministic and self.model.device == "cuda":
            raise ValueError(
                "model.device='cuda' with deterministic=true; equal bits are shown on CPUs only; set"
                " model.device='cpu', or deterministic=false"
            )
        if self.deterministic and self.model.compile:
            raise ValueError(
                "model.compile=true with deterministic=true; compiled sums round in another order; leave one"
                " of the two out"
            )
        if self.deterministic and self.model.autocast == "bfloat16":
            raise ValueError(
                "model.autocast='bfloat16' with deterministic=true; deterministic mode computes in float32;"
                " set model.autocast='off'"
            )
        if self.rl is not None:
            for name, every in (
                ("rl.eval_every", self.rl.eval_every),
                ("output.checkpoint_every", self.output.checkpoint_every),
            ):
                if every % self.rl.sync_every:
                    raise ValueError(
                        f"{name}={every} with rl.sync_every={self.rl.sync_every}; between updates the engines"
                        f" have older weights than the trainer: use a multiple of {self.rl.sync_every}"
                    )
        if self.deterministic and self.engine.kind != "local":
            raise ValueError(
                f"deterministic=true with engine.kind={self.engine.kind!r}; a server does not repeat its"
                " bits; use kind='local'"
            )
        shares = self.engine.kind == "local" and self.engine.mode == "shared"
        if self.rl is not None and shares and (self.rl.sync_every != 1 or self.rl.max_staleness != 0):
            raise ValueError(
                f"engine.mode='shared' with rl.sync_every={self.rl.sync_every},"
                f" rl.max_staleness={self.rl.max_staleness}; a shared engine always has the newest weights:"
                " it needs sync_every=1 and max_staleness=0; set engine.mode='copied', or engine.kind to a"
                " server's"
            )
        self._check_reference()
        return self

    def _check_reference(self) -> None:
        if (
            self.reference.update != "none"
            and self.preference is not None
            and self.preference.reference == "precomputed"
        ):
            raise ValueError(
                f"reference.update={self.reference.update!r} with preference.reference='precomputed'; scores"
                " of a reference that moves cannot be computed once: set preference.reference='live'"
            )
        if self.reference.update != "none" and self.rl is not None and self.rl.kl_control == "fixed":
            coefs = [
                self.rl.kl_coef,
                *(change.kl_coef for change in self.rl.changes if change.kl_coef is not None),
            ]
            if min(coefs) == 0 < max(coefs):
                raise ValueError(
                    f"reference.update={self.reference.update!r} with rl.kl_coef={coefs} over the run; in"
                    " steps with 0 nobody asks the reference, and it would stand still: use a small number"
                    " in place of 0"
                )
        if self.deterministic and self.reference.where.startswith("http"):
            raise ValueError(
                f"deterministic=true with reference.where={self.reference.where!r}; a server does not repeat"
                " its bits; use 'trainer'"
            )
