"""What settings are made of, and the tables of a config that are no stages."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WrapSerializer,
    field_validator,
    model_serializer,
    model_validator,
)

from rollouts.errors import parse_call
from rollouts.messages import drop_none
from rollouts.types import Fields

# NUL or half a surrogate pair, as repr writes it, not the text of such an escape
NOT_PLAIN = re.compile(r"(?<!\\)(?:\\\\)*\\(?:x00|ud[89a-f])")
NONE = "none"  # TOML has no null: the word switches off a nullable setting that is not text


class Section(BaseModel):
    """A frozen table of settings that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> Fields:
        return drop_none(dump(self))

    @field_validator("*")
    @classmethod
    def _has_plain_text(cls, value: Any) -> Any:
        if NOT_PLAIN.search(repr(value)):
            raise ValueError("the text has a NUL character, or bytes that are not UTF-8; remove them")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for rule, broken in self._list_rules().items():
            if broken:
                raise ValueError(rule)
        return self

    def _list_rules(self) -> Fields:
        """What a combination of settings that cannot work is refused with: whether it is there."""
        return {}


# --- kinds of values ----------------------------------------------------------------------------------------


def _check_once(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice; leave one out")
    return names


Off = BeforeValidator(lambda value: None if value == NONE else value)
Once = AfterValidator(_check_once)
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Params = dict[str, float | int | bool | str]
FrozenDtype = Literal["float32", "bfloat16", "8bit", "4bit"]


def _absolute_path(path: str, info: ValidationInfo) -> str:
    """`path`, absolute if the context of the validation is the directory that it is relative to."""
    if path in ("", "-") or "://" in path or not info.context:
        return path
    try:
        if re.search("[^/]{256}|.{4096}", path):
            raise OSError("it is too long")
        return str((info.context / Path(path).expanduser()).resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of a user that there is not
        raise ValueError(f"it cannot be a path: {error}; name a file or directory that can be") from error


def _absolute_function(name: str, info: ValidationInfo) -> str:
    if name.endswith(".json"):  # a response template
        return _absolute_path(name, info)
    file, colon, function = name.rpartition(":")
    return f"{_absolute_path(file, info)}:{function}" if colon and file.endswith(".py") else name


def _absolute_name(name: str, info: ValidationInfo) -> str:
    """`name`, absolute if it is a path: it says so, or such a thing is there. org/name of a hub only looks
    like one.
    """
    if not info.context or (info.data or {}).get("kind", "hf") != "hf" or not name:
        return name
    is_path = name.startswith((".", "~", "/")) or (
        ":" not in name  # os.path.exists raises nothing, as Path.exists does for long names
        and (name.endswith(".gguf") or os.path.exists(info.context / name))  # noqa: PTH110
    )
    return _absolute_path(name, info) if is_path else name


PathText = Annotated[str, AfterValidator(_absolute_path)]
FunctionText = Annotated[str, AfterValidator(_absolute_function)]
NameText = Annotated[str, AfterValidator(_absolute_name)]
DirText = Annotated[str, AfterValidator(lambda path, info: path and _absolute_path(path, info) and path)]


Tables = (  # a list, of which a single table is read and written by itself
    BeforeValidator(lambda tables: [tables] if isinstance(tables, dict | Section) else tables),
    WrapSerializer(lambda tables, dump: dump(tables)[0] if len(tables) == 1 else dump(tables)),
)


# --- tables -------------------------------------------------------------------------------------------------

Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow", "otlp", "statsd", "prometheus"]


class OutputConfig(Section):
    """Where the run writes."""

    dir: DirText = ""
    """empty: runs/NAME"""
    checkpoint_every: NonNegativeInt = 0
    """steps; 0: only at the end of a stage and when stopped"""
    keep_checkpoints: NonNegativeInt = 0
    """newest complete checkpoints of a stage that stay, and the one that did best on [eval]; 0: all"""
    samples_per_step: NonNegativeInt = 16
    """trajectories in samples.jsonl per step and per evaluation, evenly spaced over what there is"""
    trackers: Annotated[list[Tracker], Once] = []
    """fed from the files by a process beside the run"""


ALERT_RULES = ("above limit", "below limit", "absent steps", "falls by steps", "not_finite")
SKIPPED_STEPS = "optim/skipped_steps"


class RuleConfig(Section):
    """A rule on a metric."""

    metric: str
    """its name, for example "reward/mean"."""
    rule: str
    """above(limit=1), below(limit=0.1), absent(steps=3), falls(by=0.5, steps=20), or not_finite, of
    optim/skipped_steps
    """

    def _list_rules(self) -> Fields:
        rule, numbers = parse_call(self.rule)
        return {
            f"rule={self.rule!r}; write above(limit=…), below(limit=…), absent(steps=…), falls(by=…,"
            " steps=…) or not_finite; steps are 1 or more": (
                " ".join([rule, *sorted(numbers)]) not in ALERT_RULES or numbers.get("steps", 1) < 1
            ),
            f"rule='not_finite' of {self.metric}, but rows hold finite numbers only; {SKIPPED_STEPS} and"
            f" critic/{SKIPPED_STEPS} count where a loss or gradient was not: use that metric": (
                rule == "not_finite" and not self.metric.endswith(SKIPPED_STEPS)
            ),
        }


class AlertConfig(RuleConfig):
    """A rule on a metric. That it begins to hold is said once, and once more that it is over."""

    stage: str = ""
    """whose rows are looked at; empty: each stage by itself"""
    run: list[str] = []
    """a command and its arguments, called without a shell; the alert's text is one more argument"""
    webhook: str = ""
    """the environment variable with the URL that {"text": …} is posted to"""

    def _list_rules(self) -> Fields:
        return super()._list_rules() | {
            # a URL may be a secret, so it is not shown
            "webhook is no name of an environment variable; put the URL in one and name it": (
                not re.fullmatch(r"\w*", self.webhook)
            ),
        }


SourceKind = Literal["jsonl", "parquet", "hf", "reasoning_gym", "python", "stream"]
NEEDS = {  # what a source of a kind cannot do without
    "jsonl": "path",
    "parquet": "path",
    "hf": "dataset",
    "reasoning_gym": "dataset size",  # it could go on for ever
    "python": "function size",
    "stream": "path",
}


class DataSourceConfig(Section):
    """A source of rows; several [[tables]] of the same name are a mixture. A row has a prompt (text or
    messages) or messages, and more.
    """

    kind: SourceKind
    """files of rows, a dataset of the hub, rows made by reasoning-gym or by a Python function; stream: with
    [online], JSON lines that are still being written
    """
    path: PathText = ""
    """jsonl and parquet: the file, relative to the config file; a pattern with * means several, in the order
    of their names; stream: a file that grows, a directory of *.jsonl files, or "-" for standard input
    """
    dataset: NameText = ""
    """hf: a name on the hub, org/name or org/name:subset, or a directory; reasoning_gym: the dataset's name,
    or "composite"
    """
    split: str = "train"
    """hf: the split"""
    function: FunctionText = ""
    """python: module:function or file.py:function, called with size=, seed= and params; gives rows"""
    params: Fields = {}
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
    weight: PositiveFloat = 1.0
    """share of the draws in a mixture, relative to the other sources"""

    def _list_rules(self) -> Fields:
        fields = type(self).model_fields
        return {
            f"{needed} is missing; a source of kind {self.kind!r} needs it"
            f" ({' '.join(str(fields[needed].description).split())})": not getattr(self, needed)
            for needed in NEEDS[self.kind].split()
        }


Sources = Annotated[list[DataSourceConfig], *Tables, Field(min_length=1)]


class OptimConfig(Section):
    """AdamW and its schedule; the decay of the mean of gradients is 0.9, epsilon 1e-8."""

    lr: PositiveFloat = 1e-05
    """learning rate after the warm-up"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up; linear and cosine end at 0"""
    warmup_steps: NonNegativeInt = 0
    """steps over which lr rises linearly from lr/warmup_steps"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """decay of the mean of squared gradients"""
    weight_decay: NonNegativeFloat = 0.0
    """decoupled from the gradient, as in AdamW"""
    max_grad_norm: Annotated[PositiveFloat | None, Off, PlainSerializer(lambda norm: norm or NONE)] = 1.0
    """None: no clipping"""


# how a reference follows the policy, with the numbers that it has unless others are given
USUAL = "none", "reset(every=1)", "ema(policy_weight=0.01, every=1)", "tr_dpo(policy_weight=0.6, every=1)"
UPDATES = dict(map(parse_call, USUAL))


class ReferenceConfig(Section):
    """The model that a KL term or a preference loss compares with: what the stage started from, frozen or
    following the policy.
    """

    dtype: FrozenDtype = "float32"
    """of a teacher too; 8bit and 4bit need the extra reference-quant; the KL's bias is logged"""
    where: Annotated[str, Field(pattern="^(trainer$|https?://)")] = "trainer"
    """trainer: beside it; or the http(s) address of a server that serves this very model: vLLM, SGLang, or a
    training service, …/references/NAME
    """
    update: str = "none"
    """none: frozen; "reset(every=1)": becomes the policy after so many steps; "ema(policy_weight=0.01,
    every=1)" and "tr_dpo(policy_weight=0.6, every=1)": a mixture with it, in which the policy has this share
    """

    def _list_rules(self) -> Fields:
        elsewhere = self.where != "trainer"
        return {
            f"update={self.update!r} with where={self.where!r} and dtype={self.dtype!r}; a reference that"
            " moves is in the trainer's process, in float32 or bfloat16": (
                self.rule() and (elsewhere or self.dtype in ("8bit", "4bit"))
            ),
            f"dtype={self.dtype!r} with where={self.where!r}; a server has its own: leave dtype out": (
                elsewhere and self.dtype != "float32"
            ),
        }

    def rule(self) -> tuple[float, int] | None:
        """(policy's share, steps from one update to the next); None: frozen. Raises ValueError."""
        name, given = parse_call(self.update)
        numbers = UPDATES.get(name, {}) | given
        share, every = numbers.get("policy_weight", 1.0), numbers.get("every", 1.0)
        known = name in UPDATES and numbers.keys() == UPDATES[name].keys()
        if not known or not 0 < share <= 1 or every < 1 or every % 1:
            raise ValueError(
                f"update={self.update!r}; write none, reset(every=1), ema(policy_weight=0.01, every=1) or"
                " tr_dpo(policy_weight=0.6, every=1), every in whole steps, policy_weight up to 1"
            )
        return (share, int(every)) if numbers else None


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
    urls: Annotated[list[Annotated[str, Field(pattern="^https?://")]], Once] = []
    """servers that run already, whose key is in the environment variable VLLM_API_KEY or SGLANG_API_KEY;
    empty: this run starts its own
    """
    count: PositiveInt = 1
    """servers to start"""
    python: str = ""
    """Python with vLLM or SGLang in it; empty: .venv-vllm/bin/python or .venv-sglang/bin/python"""
    args: list[str] = []
    """more arguments of a started server, for example ["--dtype", "float32", "--max-model-len", "1024"]; with
    urls what its --dtype was
    """
    transport: Literal["disk", "memory"] = "disk"
    """how weights reach the servers"""

    def _list_rules(self) -> Fields:
        started = {"python": self.python, "count": self.count > 1}
        rules: Fields = {
            f"{name} is set, but kind='local' starts no server; set kind to a server's": (
                value and self.kind == "local"
            )
            for name, value in {"urls": self.urls, "args": self.args, **started}.items()
        }
        rules |= {
            f"urls names servers that run already; {name} is for servers that this run starts: set"
            " one or the other": value and self.urls
            for name, value in started.items()
        }
        said = "an address of urls has a query, which the record would show; a key goes in"
        return rules | {f"{said} VLLM_API_KEY or SGLANG_API_KEY": {*"?#"} & {*"".join(self.urls)}}


class DistributedConfig(Section):
    """Several processes that train one model together: ranks, which share weights, gradients and optimizer
    among them.
    """

    ranks: PositiveInt = 1
    """processes on this machine; above 1 the program starts itself again under torchrun, unless a launcher
    has started it
    """
    shard_size: NonNegativeInt = 0
    """ranks that hold one copy of the weights between them; 0: all ranks; fewer: as many copies as there are
    groups
    """
    cpu_offload: bool = False
    """on GPUs: weights, gradients and optimizer state wait in host memory, where AdamW runs, and gradients
    are summed over the ranks after every micro-batch: less GPU memory, slower steps
    """
