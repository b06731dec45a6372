"""The tables of a config that several stages share, and those of the run as a whole."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollouts.config.fields import (
    DatasetText,
    Decay,
    DirText,
    Fraction,
    FunctionText,
    ModelText,
    NaturalFloat,
    NaturalInt,
    Off,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    as_list,
)
from rollouts.config.spelling import nearest

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


Sources = Annotated[list[DataSourceConfig], BeforeValidator(as_list), Field(min_length=1)]


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
