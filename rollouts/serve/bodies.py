"""The JSON that clients send: fields that are not here are ignored, as newer SDKs have more."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from rollouts.errors import ServiceRefused

T = TypeVar("T")
Text = Annotated[str, Meta(max_length=4096)]
Seq = Annotated[int, Meta(ge=0, lt=2**62)]
Metadata = Annotated[dict[Text, Text], Meta(max_length=64)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Lifetime = Annotated[int, Meta(gt=0, lt=10**10)] | None  # in seconds; None: for ever


def read_body(body: bytes, kind: type[T]) -> T:
    """The body as a record. Raises ServiceRefused naming the field that is missing or wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ServiceRefused(f"the body: {error}", 422) from error


class InSession(Struct):
    """A heartbeat."""

    session_id: Text


class LoraConfig(Struct):
    """Of an adapter; rank 0: the whole model trains."""

    rank: Annotated[int, Meta(ge=0, le=4096)]
    seed: Annotated[int, Meta(ge=-(2**62), lt=2**62)] | None = None
    train_mlp: bool = True
    train_attn: bool = True
    targets: list[Text] | None = None  # of our clients, as the next two: ends of names of what is adapted
    alpha: Annotated[float, Meta(gt=0)] | None = None
    dropout: Share = 0.0


class Optimizer(Struct, frozen=True):
    """Only AdamW."""

    type: Text = "adamw"
    settings: dict[str, Any] = {}  # of our clients: an OptimConfig, for steps that bring no settings
    total_steps: Positive = 1  # where its schedule ends


class CreateModel(Struct):
    """A new model to train."""

    session_id: Text
    model_seq_id: Seq
    base_model: Text
    lora_config: LoraConfig | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer = Optimizer()


class LoadWeights(Struct):
    """A new model from a checkpoint (session_id, model_seq_id), or other weights for one that is there."""

    path: Text
    optimizer: bool = False
    session_id: Text | None = None
    model_seq_id: Seq = 0
    model_id: Text = ""
    seq_id: Seq = 0
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer = Optimizer()


class OfModel(Struct):
    """What every request of a model has."""

    model_id: Text
    seq_id: Seq = 0


class AdamParams(Struct, frozen=True):
    """Of one step. Decay is decoupled; grad_clip_norm 0: no clipping."""

    learning_rate: NotNegative = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Annotated[float, Meta(ge=1e-38)] = 1e-12  # float32 makes 0 of a smaller one
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class OptimStep(OfModel):
    """One step of the optimizer."""

    adam_params: AdamParams = AdamParams()
    optimizer_params: Optimizer | None = None


class SaveWeights(OfModel):
    """A checkpoint of either kind."""

    path: Text | None = None
    ttl_seconds: Lifetime = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    sampling_session_seq_id: Seq = 0
    kind: Literal["snapshot", "inflight"] = "snapshot"


class CreateSampler(Struct):
    """A sampling client, of the base model or of a checkpoint."""

    session_id: Text
    sampling_session_seq_id: Seq
    base_model: Text | None = None
    model_path: Text | None = None


class Chunk(Struct):
    """A part of a prompt."""

    type: Text = "encoded_text"
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None


class Prompt(Struct):
    """Its chunks follow one another."""

    chunks: list[Chunk]


class Sampling(Struct):
    """How sequences are drawn."""

    max_tokens: Positive | None = None
    temperature: NotNegative = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    seed: int | None = None
    stop: str | list[int | str] | None = None  # None: what ends a turn of the model; empty: nothing does


class Tensor(Struct):
    """Numbers in JSON."""

    data: list[int]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


Few = Annotated[int, Meta(ge=0, le=1024)]


class Sample(Struct):
    """asample."""

    prompt: Prompt
    sampling_params: Sampling
    sampling_session_id: Text = ""
    seq_id: Seq = 0
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Few = 0
    topk_sample_logprobs: Few = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Few = 0
    prompt_logprobs_last_n: Positive | None = None


class OfRequest(Struct):
    """One request."""

    request_id: Text


class OfPath(Struct):
    """A checkpoint."""

    tinker_path: Text


class TimeToLive(Struct):
    """Of a checkpoint."""

    ttl_seconds: Lifetime = None
