"""The settings of a run: frozen pydantic models. Few settings; a new one is a decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rollouts.config.changes import list_tables
from rollouts.config.spelling import nearest


class Section(BaseModel):
    """A frozen table of settings that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _has_plain_text(cls, value: Any) -> Any:
        for text in _texts(value):
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("the text has a NUL character, or bytes that are not UTF-8; remove them")
        return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


NONE = "none"  # TOML has no null: the word switches off a nullable setting that is not text
Off = BeforeValidator(lambda value: None if value == NONE else value)
PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NaturalFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


# --- paths: absolute where the context of a validation is the directory that they are relative to -----------


def _resolve(path: str, base: Path) -> str:
    _check_path(path)
    try:
        return str((base / Path(path).expanduser()).resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of a user that there is not
        raise ValueError(f"it cannot be a path: {error}; name a file or directory that can be") from error


def _check_path(path: str) -> str:
    if len(path.encode()) > 4095 or max(len(part.encode()) for part in Path(path, ".").parts or ("",)) > 255:
        raise ValueError(f"it cannot be a path: {len(path)} characters are too many; choose a shorter one")
    return path


def _absolute_path(path: str, info: ValidationInfo) -> str:
    return _resolve(path, info.context) if path and info.context else path


def _absolute_function(name: str, info: ValidationInfo) -> str:
    file, colon, function = name.rpartition(":")
    return f"{_absolute_path(file, info)}:{function}" if colon and file.endswith(".py") else name


def _absolute_dataset(name: str, info: ValidationInfo) -> str:
    if info.data.get("kind") != "hf" or not name or not info.context:
        return name
    # org/name on the hub looks like a relative path: it is one only if such a thing is there, or it says so
    is_path = name.startswith((".", "~", "/")) or (":" not in name and _is_there(name, info, Path.exists))
    return _absolute_path(name, info) if is_path else name


def _absolute_model(name: str, info: ValidationInfo) -> str:
    if not name or not info.context:
        return name
    is_path = (
        name.startswith((".", "~", "/"))
        or (name.endswith(".gguf") and (":" not in name or _is_there(name, info, Path.is_file)))
        or (":" not in name and _is_there(name, info, Path.is_dir))
    )
    return _absolute_path(name, info) if is_path else name


def _is_there(name: str, info: ValidationInfo, test: Callable[[Path], bool]) -> bool:
    try:
        return test(Path(info.context or "") / _check_path(name))
    except OSError:  # a directory on the way that may not be read
        return False


PathText = Annotated[str, AfterValidator(_absolute_path)]
FunctionText = Annotated[str, AfterValidator(_absolute_function)]
DatasetText = Annotated[str, AfterValidator(_absolute_dataset)]
ModelText = Annotated[str, AfterValidator(_absolute_model)]
DirText = Annotated[str, AfterValidator(_check_path)]  # stays as it is


TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow", "otlp", "statsd", "prometheus")


class OutputConfig(Section):
    """Where the run writes."""

    dir: DirText = ""
    """empty: runs/NAME"""
    checkpoint_every: NaturalInt = 0
    """steps; 0: only at the end of a stage and when stopped"""
    keep_checkpoints: NaturalInt = 0
    """newest complete checkpoints of a stage that stay, and the one that did best on [eval]; 0: all"""
    samples_per_step: NaturalInt = 16
    """rows of samples.jsonl written per step and per evaluation, evenly spaced over what there is"""
    token_arrays_gib: NaturalFloat = 4.0
    """per-token arrays of the newest steps' trained samples are kept in tokens/, up to this; 0: none
    """
    trackers: list[str] = []
    """fed from the files by processes beside the run: tensorboard, trackio, wandb, mlflow, otlp, statsd,
    prometheus
    """

    @field_validator("trackers")
    @classmethod
    def _are_trackers(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in TRACKERS:
                near = nearest(name, TRACKERS)
                raise ValueError(
                    f'"{name}" is no tracker; {f"did you mean {near}? " if near else ""}known are'
                    f" {', '.join(TRACKERS)}"
                )
        if len(set(names)) < len(names):
            raise ValueError("a tracker is named twice; leave one out")
        return names


class ModelConfig(Section):
    """Which model trains and how its numbers are kept."""

    name: ModelText = "bundled:smollm2-135m-instruct"
    """bundled:…, tiny:byte (random), a directory, or a hub name"""
    chat_template: PathText = ""
    """a file to use instead of the tokenizer's own chat template"""
    template_params: dict[str, Any] = {}
    """passed to the chat template, for example enable_thinking = false"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    compile: bool = False
    """torch.compile of each layer: minutes at the start, faster steps afterwards; needs a C++ compiler
    """
    autocast: Literal["off", "bfloat16", "auto"] = "auto"
    """master weights are float32; auto: bfloat16 where the hardware multiplies it natively"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """of all that computes with torch; auto: a GPU where torch has one, but never if deterministic"""
    threads: NaturalInt = 0
    """torch threads of a process; 0: one per core it may use, divided by the ranks on this machine"""


SourceKind = Literal["jsonl", "parquet", "hf", "reasoning_gym", "python"]
NEEDS: dict[SourceKind, tuple[str, str]] = {  # what a source of a kind cannot do without, and what that is
    "jsonl": ("path", "a jsonl source names its file"),
    "parquet": ("path", "a parquet source names its file"),
    "hf": ("dataset", "an hf source names a dataset of the hub or a local directory"),
    "reasoning_gym": ("dataset", "a reasoning_gym source names its dataset, for example 'chain_sum'"),
    "python": ("function", "a python source names a function as module:function or file.py:function"),
}
NEEDS_SIZE = ("reasoning_gym", "python")  # they could go on for ever


class DataSourceConfig(Section):
    """A source of rows; several [[tables]] of the same name are a mixture. A row has a prompt (text or
    messages) or messages, and more.
    """

    kind: SourceKind
    """files of rows, a dataset of the hub, rows made by reasoning-gym or by a Python function"""
    path: PathText = ""
    """jsonl and parquet: the file, relative to the config file; a pattern with * means several, in the order
    of their names
    """
    dataset: DatasetText = ""
    """hf: a name on the hub, or a directory; reasoning_gym: the dataset's name, or "composite"."""
    subset: str = ""
    """hf: the dataset's configuration"""
    split: str = "train"
    """hf: the split"""
    streaming: bool = False
    """hf: read the first `size` rows in order without downloading the rest"""
    function: FunctionText = ""
    """python: module:function or file.py:function, called with size=, seed= and params; gives rows"""
    params: dict[str, Any] = {}
    """reasoning_gym: passed to create_dataset; python: passed to the function"""
    size: Annotated[PositiveInt | None, Off] = None
    """how many rows to take; None: all there are (reasoning_gym and python need a size)"""
    seed: Seed = 0
    """reasoning_gym and python: which rows are made"""
    columns: dict[str, str] = {}
    """our name = the data's name, for example prompt = "question"."""
    system_prompt: str | None = None
    """put before every prompt that has no system message; None: what the chat template does"""
    max_bad_fraction: Fraction = 0.01
    """malformed rows that may be skipped, as a share of the rows; above it the run does not start"""
    name: str = ""
    """of the source in a mixture, in metrics and in sample records; empty: source-0, source-1, …"""
    weight: PositiveFloat = 1.0
    """share of the draws in a mixture, relative to the other sources"""

    @model_validator(mode="after")
    def _complete(self) -> DataSourceConfig:
        needed, why = NEEDS[self.kind]
        if not getattr(self, needed):
            raise ValueError(f"{needed} is missing; {why}")
        if self.size is None and (self.kind in NEEDS_SIZE or self.streaming):
            raise ValueError(
                f"size is missing; a {'streaming' if self.streaming else self.kind} source says how many rows"
                " to take"
            )
        if self.streaming and self.kind != "hf":
            raise ValueError(f"streaming=true with kind={self.kind!r}; only hf sources stream")
        return self


def _as_list(sources: Any) -> Any:
    return [sources] if isinstance(sources, dict | Section) else sources


Sources = Annotated[list[DataSourceConfig], BeforeValidator(_as_list), Field(min_length=1)]


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: PositiveFloat = 1e-05
    """learning rate after the warm-up"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up"""
    warmup_steps: NaturalInt = 0
    """steps over which lr rises linearly from lr/warmup_steps"""
    min_lr_ratio: Fraction = 0.0
    """lr at the end of linear and cosine, as a share of lr"""
    beta1: Decay = 0.9
    """decay of the mean of gradients"""
    beta2: Decay = 0.999
    """decay of the mean of squared gradients"""
    weight_decay: NaturalFloat = 0.0
    """decoupled from the gradient, as in AdamW"""
    max_grad_norm: Annotated[PositiveFloat | None, Off] = 1.0
    """None: no clipping"""
    max_nonfinite_steps: PositiveInt = 3
    """stop after so many steps in a row whose loss or gradient is not finite"""


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


class RolloutConfig(Section):
    """How samples are made."""

    num_prompts: PositiveInt = 8
    """P: groups in a batch"""
    samples_per_prompt: PositiveInt = 8
    """G: samples of a group"""
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    """groups launched at once = ceil(num_prompts * over_sampling)"""
    max_new_tokens: PositiveInt = 256
    """tokens of one response, at most"""
    temperature: PositiveFloat = 1.0
    """of sampling; the trainer divides its logits by it too"""
    generate: FunctionText = ""
    """module:function or file.py:function; empty: one chat turn"""
    reward: FunctionText = ""
    """module:function or file.py:function, of one sample"""
    group_reward: FunctionText = ""
    """module:function or file.py:function, of all samples of a group; instead of reward"""
    reward_model: str = ""
    """added to reward, or instead of it: "stage" (this run's reward_model stage), a directory or a hub name
    """
    reward_weights: dict[str, float] = {}
    """weight of each named part of the reward; empty: the reward is what the function says"""
    reward_combine: FunctionText = ""
    """module:function or file.py:function from the named parts to the reward; instead of reward_weights
    """
    filters: list[FunctionText] = []
    """group filters, run in order; names of rollouts.filters, module:function or file.py:function"""
    max_attempts: PositiveInt = 20
    """a batch may draw at most num_prompts * max_attempts groups"""
    max_failed_fraction: Fraction = 0.2
    """of the samples of a batch; above it the run stops"""
    reward_timeout_s: PositiveFloat = 30.0
    """seconds one reward call may take; after it the sample has failed"""
    reward_memory_gib: PositiveFloat = 4.0
    """memory of one process that runs sync rewards; above it the sample has failed"""


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


Changes = Annotated[list[AlgorithmChange], BeforeValidator(_as_list)]


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


class ReferenceConfig(Section):
    """The model that a KL term or a preference loss compares with: what the stage started from, frozen or
    following the policy.
    """

    dtype: Literal["float32", "bfloat16", "8bit", "4bit"] = "float32"
    """8bit and 4bit need the extra reference-quant; the KL's bias is logged"""
    where: str = "trainer"
    """trainer: beside it; process: one of its own; or the http(s) address of a server that serves this very
    model
    """
    server: Literal["vllm", "sglang"] = "vllm"
    """what runs at that address"""
    api_key_env: str = ""
    """environment variable that holds its key"""
    update: Literal["none", "ema", "reset", "tr_dpo"] = "none"
    """none: frozen; reset: becomes the policy; tr_dpo: a mixture with it"""
    every: PositiveInt = 1
    """steps from one update to the next"""
    policy_weight: Annotated[float | None, Field(gt=0, le=1), Off] = None
    """share of the policy in the update, 1 - decay of ema or α of tr_dpo; unset: 0.01 of ema, 0.6 of tr_dpo
    """

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceConfig:
        elsewhere = self.where.startswith(("http://", "https://"))
        if self.where != "trainer" and not elsewhere:
            hint = "; the reference in a process of its own is gone" if self.where == "process" else ""
            raise ValueError(
                f"where={self.where!r} must be 'trainer' or the http(s) address of a server{hint}"
            )
        if self.update != "none" and (self.where != "trainer" or self.dtype not in ("float32", "bfloat16")):
            raise ValueError(
                f"update={self.update!r} with where={self.where!r} and dtype={self.dtype!r}; a reference that"
                " moves is in the trainer's process, in float32 or bfloat16"
            )
        if elsewhere and self.dtype != "float32":
            raise ValueError(
                f"dtype={self.dtype!r} with where={self.where!r}; a server's dtype is its own: leave"
                " dtype out"
            )
        return self


class EngineConfig(Section):
    """What generates for RL: this process, or servers of its own kind. SFT evaluates with the embedded engine
    in any case.
    """

    kind: Literal["local", "vllm", "sglang"] = "local"
    """local: in this process"""
    mode: Literal["shared", "copied"] = "shared"
    """of a local engine: shared: the trainer's own parameters (with several ranks, a copy on rank 0)
    """
    max_rows: PositiveInt = 128
    """of a local engine: sequences decoded at once"""
    urls: list[str] = []
    """servers that run already; empty: this run starts its own"""
    api_key_env: str = ""
    """environment variable that holds the key of the servers in urls"""
    count: PositiveInt = 1
    """servers to start"""
    python: str = ""
    """Python with vLLM or SGLang in it; empty: .venv-vllm/bin/python or .venv-sglang/bin/python"""
    args: list[str] = []
    """more arguments of a started server"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of a started server; auto: as in the model's config.json"""
    context_length: NaturalInt = 0
    """tokens of prompt and response in a started server; 0: as long as the model allows"""
    transport: Literal["disk", "memory"] = "disk"
    """how weights reach the servers"""
    max_concurrency: PositiveInt = 256
    """requests in flight per server, at most"""
    down_limit_s: PositiveFloat = 900.0
    """seconds without any server in service after which the run saves and stops"""

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.kind == "local":
            unused = [name for name in ("urls", "api_key_env", "python", "args") if getattr(self, name)]
            unused += ["count"] if self.count != 1 else []
            if unused:
                raise ValueError(
                    f"{unused[0]} is set, but kind='local' starts no server; set kind='vllm' or 'sglang'"
                )
        if self.urls and (self.args or self.python or self.count != 1):
            raise ValueError(
                "urls names servers that run already; count, python and args are for servers that this run"
                " starts: set one or the other"
            )
        if len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls={self.urls} names a server twice")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls has {url!r}; a URL begins with http:// or https://")
        return self


class EvalConfig(Section):
    """Evaluation on held-out prompts. Rows whose prompt occurs here are left out of every training stage."""

    data: Sources
    reward: FunctionText = ""
    """empty: rl.rollout.reward"""
    max_new_tokens: PositiveInt = 256
    """tokens of one response, at most"""
    temperature: NaturalFloat = 0.0
    """0: greedy"""
    samples_per_prompt: PositiveInt = 1
    """samples of each held-out prompt"""


class DistributedConfig(Section):
    """Several processes that train one model together: ranks, which share weights, gradients and optimizer
    among them.
    """

    ranks: PositiveInt = 1
    """processes on this machine; above 1 the program starts itself again under torchrun, unless a launcher
    has started it
    """
    shard_size: NaturalInt = 0
    """ranks that hold one copy of the weights between them; 0: all ranks; fewer: as many copies as there are
    groups
    """
    cpu_offload: bool = False
    """on GPUs: weights, gradients and optimizer state wait in host memory, where AdamW runs, and gradients
    are summed over the ranks after every micro-batch: less GPU memory, slower steps
    """


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
