"""Words that two floors share: frozen records of numpy arrays and plain values. No torch, no trio.

Axes: P prompts, G samples per prompt, B = P*G rows, T tokens of one row (prompt and response).
"""

# ruff: noqa: I001  (names that are exported again stand together)

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollouts.messages import (
    ChatMessage as ChatMessage,
    JSONObject,
    JSONValue as JSONValue,
    check_json as check_json,
    checked_messages,
)
from rollouts.metric_kinds import (
    EffectiveShare as EffectiveShare,
    ExplainedVariance as ExplainedVariance,
    Max as Max,
    Mean as Mean,
    Metric as Metric,
    Metrics as Metrics,
    Min as Min,
    Total as Total,
    merge_metrics as merge_metrics,
    metric_values as metric_values,
)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
FloatRows = tuple[FloatArray, ...]  # one array [T_i] per row
Fields = dict[str, Any]  # named values: of JSON, of a request, of a call
Numbers = Mapping[str, float]  # by name: of metrics, of parts of a reward, weights
Texts = Mapping[str, str]  # by name: columns, headers, variables of the environment
Function = Callable[..., Any]  # one that is checked where it is called
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(described: type[T]) -> type[T]:
    """A class of frozen records, made by keyword: a dataclass."""
    return dataclass(frozen=True, slots=True, kw_only=True)(described)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def live(described: type[T]) -> type[T]:
    """A class of live objects, which change in place and are equal to themselves alone: a dataclass."""
    return dataclass(eq=False)(described)


class Status(StrEnum):
    """What became of a sample."""

    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # ended by itself
    TRUNCATED = "truncated"  # cut at the token limit
    ABORTED = "aborted"  # stopped by us; may be continued
    FAILED = "failed"  # could not be generated or scored; metadata["failure"] says why


EMPTY: Any = ()  # a token-level field that is left out
ARRAY_KINDS = {"i": ("iu", "integers"), "f": ("fiu", "numbers"), "b": ("b", "0 and 1")}


def _frozen_array(name: str, value: ArrayLike, dtype: Any, length: int) -> NDArray[Any]:
    source, wanted = np.asarray(value), np.dtype(dtype)
    if source.ndim != 1:
        raise ValueError(f"Sample.{name} has {source.ndim} axes; it must be one-dimensional [T]")
    if len(source) != length:
        raise ValueError(
            f"Sample.{name} has {len(source)} values for {length} tokens; token-level fields have one value"
            " per token"
        )
    kinds, what = ARRAY_KINDS[wanted.kind]
    fits = source.dtype.kind in kinds or (wanted.kind == "b" and np.isin(source, (0, 1)).all())
    if len(source) and not fits:
        raise ValueError(f"Sample.{name} has dtype {source.dtype}; it must hold {what}")
    result = source.astype(wanted)
    if wanted.kind == "f" and not np.isfinite(result).all():
        raise ValueError(f"Sample.{name} holds a value that is not finite")
    result.flags.writeable = False
    return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One prompt and what became of it. Lists are accepted for arrays; construction checks lengths, types and
    metadata.

    Where a token was not sampled its mask is 0, its log-prob 0.0 and its version -1. Token-level fields left
    empty are filled so. A turn is a run of ones in the mask. What is left of `reward` without the turn
    rewards of the trajectory belongs to the last token of it that trains. Raises ValueError naming the field
    that is wrong.
    """

    id: str  # unique in the run; samples of a group share a prompt, not an id
    prompt: str | tuple[ChatMessage, ...]  # text, or chat messages
    response: str = ""  # decoded response tokens, special tokens left out
    tokens: IntArray = EMPTY  # [T] prompt and response ids
    loss_mask: BoolArray = EMPTY  # [T] 1 where the token trains
    rollout_log_probs: FloatArray = EMPTY  # [T] nats, of the distribution sampled from
    weight_versions: IntArray = EMPTY  # [T] version that produced the token
    turn_rewards: FloatArray = EMPTY  # [T] of a turn at its last sampled token alone; 0.0 elsewhere
    # of the whole trajectory: its turn rewards, of all segments, and a final reward; None until scored
    reward: float | None = None
    rewards: Numbers = field(default_factory=dict)  # named parts of the reward
    group_index: int | None = None  # which draw of a prompt this belongs to; None outside a manager
    status: Status = Status.PENDING
    metadata: JSONObject = field(default_factory=dict)  # JSON values only: the dataset row, notes, failures

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"Sample.id is {self.id!r}; it must be a string that is not empty")
        if not isinstance(self.prompt, str):
            put("prompt", tuple(checked_messages(self.prompt, "Sample.prompt")))
        if not isinstance(self.response, str):
            raise ValueError(f"Sample.response is a {type(self.response).__name__}; it must be text")
        count = np.size(self.tokens)
        for name, dtype, blank in (
            ("tokens", np.int64, 0),
            ("loss_mask", np.bool_, 0),
            ("rollout_log_probs", np.float32, 0.0),
            ("weight_versions", np.int64, -1),
            ("turn_rewards", np.float32, 0.0),
        ):
            value = getattr(self, name)
            # rewards that are all 0 say nothing, also where a function has replaced the other fields
            known = np.count_nonzero(value) if name == "turn_rewards" else np.size(value)
            if known:
                put(name, _frozen_array(name, value, dtype, count))
            else:  # one value, however long
                put(name, np.broadcast_to(dtype(blank), count))
        if count and self.tokens.min() < 0:
            raise ValueError(f"Sample.tokens holds {int(self.tokens.min())}; token ids are not negative")
        if self.reward is not None:
            put("reward", _finite("Sample.reward", self.reward))
        parts = self.rewards.items()
        put("rewards", {str(key): _finite(f"Sample.rewards[{key!r}]", value) for key, value in parts})
        put("status", Status(self.status))
        check_json("Sample.metadata", self.metadata)

    @property
    def response_length(self) -> int:
        """Number of tokens that train."""
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version of any token that trains; None if none does."""
        return int(self.weight_versions[self.loss_mask].min()) if self.loss_mask.any() else None


SEGMENT_ID = re.compile(
    r"(.+)\.\d+"
)  # of a trajectory's second segment and those after it: the id of its first, a dot, a number


def number_trajectories(samples: Sequence[Sample]) -> IntArray:
    """[B] rows that are segments of one trajectory have one number, from 0 in the order in which trajectories
    appear.

    A sample `x.1`, `x.2`, … belongs to the sample `x` of its group; where there is no such sample it is a
    trajectory by itself.
    """
    present = {(sample.group_index, sample.id) for sample in samples}
    numbers = {}
    rows = []
    for sample in samples:
        match, key = SEGMENT_ID.fullmatch(sample.id), (sample.group_index, sample.id)
        if match and (first := (sample.group_index, match[1])) in present:
            key = first
        rows.append(numbers.setdefault(key, len(numbers)))
    return np.asarray(rows, np.int64)


TRAJECTORY = "trajectory"  # the metadata of the last sample of one, with the record of its turns


def split_trajectories(samples: Sequence[Sample]) -> tuple[tuple[Sample, ...], ...]:
    """The segments of each trajectory, in the order in which trajectories appear."""
    found = {}
    for number, sample in zip(number_trajectories(samples).tolist(), samples, strict=True):
        found.setdefault(number, []).append(sample)
    return tuple(map(tuple, found.values()))


def _finite(name: str, value: object) -> float:
    if isinstance(value, int | float | np.integer | np.floating | np.bool_):
        number = float(value)
        if math.isfinite(number):
            return number
    raise ValueError(f"{name} is {value!r}; it must be a finite number")


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one prompt, in launch order."""

    group_index: int  # unique in the run
    prompt_id: str  # id of the dataset row
    samples: tuple[
        Sample, ...
    ]  # G of them, fewer when some failed; more where trajectories have several segments

    @property
    def ends(self) -> tuple[Sample, ...]:
        """One sample per trajectory: the last of its segments. All samples, where none has several."""
        return tuple(segments[-1] for segments in split_trajectories(self.samples))

    @property
    def rewards(self) -> FloatArray:
        """Rewards of a scored group, one per sample; segments share theirs, and `ends` counts it once. Raises
        ValueError if a sample has none.
        """
        values = [sample.reward for sample in self.samples]
        if None in values:
            raise ValueError(f"group {self.group_index} has samples without a reward")
        return np.asarray(values, np.float32)


LOSS_FIELDS = {  # of RolloutBatch and of a loss's inputs, by the column that the record keeps them in
    "advantage": "advantages",
    "old": "old_log_probs",
    "mu": "rollout_log_probs",
    "ref": "ref_log_probs",
    "return": "returns",
    "value": "old_values",
    "trajectory": "trajectory_tokens",
}


@dataclass(frozen=True, kw_only=True)  # without slots: response_lengths is kept
class RolloutBatch:
    """What one training step consumes: B ragged rows. Every token-level field is one array [T_i] per row. SFT
    leaves rewards None.
    """

    tokens: tuple[IntArray, ...]
    loss_masks: tuple[BoolArray, ...]
    rewards: FloatArray | None = None  # [B]
    metadata: tuple[JSONObject, ...] = ()  # one per row, or empty
    rollout_log_probs: FloatRows | None = None  # nats; mu
    old_log_probs: FloatRows | None = None  # nats; trainer's recompute, when rl.recompute_old
    ref_log_probs: FloatRows | None = None  # nats; frozen reference
    teacher_log_probs: FloatRows | None = None  # nats; the policy's own where the teacher says nothing
    advantages: FloatRows | None = None
    # [B] of each row over the tokens that train, 0 of none; for the record
    mean_advantages: FloatArray | None = None
    returns: FloatRows | None = None  # what a critic's values are to become, in the reward's unit
    old_values: FloatRows | None = None  # the critic's own, before the first update on the batch
    group_indices: IntArray | None = None  # [B]
    weight_versions: tuple[IntArray, ...] | None = None
    turn_rewards: FloatRows | None = None  # as a sample has them; None: all are 0
    # how many tokens train in the row's trajectory, at least 1, at each token; None: every row is one
    trajectory_tokens: FloatRows | None = None
    # ids that are predicted at each place, from the tokens before it; None: the tokens themselves
    targets: tuple[IntArray, ...] | None = None
    # further token-level values, which a loss reads by name; backends make nothing of them
    extras: Mapping[str, FloatRows] = field(default_factory=dict)
    temperature: float = 1.0  # that the rollouts were sampled at; the trainer divides its logits by it
    samples: tuple[
        Sample, ...
    ] = ()  # the records behind the rows, for samples.jsonl; backends do not read them

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        by_row = ("rewards", "mean_advantages", "group_indices", "metadata")  # the others: by token
        given = vars(self) | {f"extras[{name!r}]": values for name, values in self.extras.items()}
        for name, value in given.items():
            if name in ("extras", "temperature", "samples") or value is None:
                continue
            if name == "metadata" and not value:
                continue
            if len(value) != rows:
                raise ValueError(f"RolloutBatch.{name} has {len(value)} rows; tokens has {rows}")
            for row, (inner, tokens) in enumerate(zip(value, self.tokens, strict=True)):
                if name not in by_row and len(inner) != len(tokens):
                    raise ValueError(
                        f"RolloutBatch.{name}[{row}] has {len(inner)} values for {len(tokens)} tokens"
                    )
        if not self.temperature > 0:
            raise ValueError(f"RolloutBatch.temperature is {self.temperature}; it must be above 0")

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def response_lengths(self) -> IntArray:
        """[B] number of tokens that train in each row."""
        return np.asarray([np.count_nonzero(mask) for mask in self.loss_masks], np.int64)


@record
class SamplingParams:
    """How one completion is sampled."""

    max_new_tokens: int  # at least 1
    temperature: float = 1.0  # 0 means greedy; log-probs are then those at temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    stop_token_ids: tuple[int, ...] = ()  # the stop token is part of the completion
    stop_texts: tuple[str, ...] = ()  # what is sampled ends with the token that completes one of them
    seed: int | None = None  # key of a counter-based stream: the same seed gives the same draws


@record
class GenerateRequest:
    """Token ids in."""

    request_id: str  # unique in the run; deterministic engines sort by it
    prompt_ids: IntArray  # [prompt length], at least 1
    sampling: SamplingParams
    affinity: str = ""  # requests of one key go to one engine of a fleet, for its prefix cache; empty: to any
    # key of requests that follow one another, each prompt beginning with the one before and its answer: they
    # go, before `affinity` counts, to the engine that answered the last, which keeps what it computed
    trajectory: str = ""
    adapter: str = ""  # one that the engine was given by this name; empty: what it serves as its version
    # What follows is answered in the fields of Completion that are named alike.
    score_prompt: bool = False  # asks for Completion.prompt_log_probs
    top_log_probs: int = 0  # k: the likeliest tokens at each sampled one
    prompt_top: int = 0  # k: the likeliest tokens at each of the prompt's
    # [prompt length − 1, K]: cell [i, j] is scored in place of the prompt's token i + 1; −1: nothing
    prompt_targets: IntArray | None = None
    # tokens to draw in place of each of the prompt's but its first; independent, and none of the answer
    prompt_draws: int = 0

    @property
    def asks_of_prompt(self) -> bool:
        """Whether anything is to be answered at the prompt's places."""
        asked = self.score_prompt or self.prompt_top or self.prompt_draws
        return bool(asked or self.prompt_targets is not None)


FinishReason = Literal["stop", "length", "abort"]


class TokenScores(NamedTuple):
    """K tokens at each of N places, and their log-probs there."""

    token_ids: IntArray  # [N, K]
    log_probs: FloatArray  # [N, K] nats


@record
class Completion:
    """Token ids out: what an engine answers to one request."""

    request_id: str
    token_ids: IntArray  # [n] sampled ids, the stop token or those of a stop text included
    log_probs: FloatArray  # [n] nats, of the distribution sampled from
    weight_versions: IntArray  # [n] the version that produced each token
    finish_reason: FinishReason
    # None: not asked for, or aborted before. Row i of an array of the prompt is of its token i + 1; all of
    # them are of the distribution at temperature 1, but for prompt_draws.
    prompt_log_probs: FloatArray | None = None  # [prompt length] nats, 0 for the first
    # [n, k] likeliest first, of the distribution sampled from: −infinity of what top_k and top_p left out
    top_log_probs: TokenScores | None = None
    prompt_top: TokenScores | None = None  # [prompt length − 1, k] likeliest first
    # [prompt length − 1, K] nats, NaN where nothing was to be scored
    prompt_targets: FloatArray | None = None
    prompt_draws: TokenScores | None = None  # [prompt length − 1, K] of the distribution drawn from


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """What an engine supports: a frozen statement that callers may rely on."""

    vocab_size: int
    context_length: int  # prompt and response together
    in_memory_update: bool = False  # begin_update, receive_bucket, finish_update
    update_from_checkpoint: bool = True
    shares_weights: bool = False  # generates with the trainer's own parameters
    keep_pause: bool = True  # pause("keep") freezes requests in flight, which go on after resume
    deterministic: bool = False
    name: str = "local"  # what errors and metrics call it; unique in a fleet
    seeds: bool = True  # sampling.seed fixes the random stream of a request
    version_spans: bool = True  # each token knows the version that produced it; else only whole answers do
    log_probs: bool = True  # of the distribution sampled from; without them nothing can train
    checksum: bool = False  # checksum() says what the weights are; not while they are an adapter's
    partial_checksum: bool = False  # it is of some of them only
    max_adapter_rank: int = 0  # of LoRA adapters: PEFT directories as weights of a version; 0: it serves none
    frees_memory: bool = True  # release_memory() gives memory back
    gaps: tuple[str, ...] = ()  # a sentence for each thing that it cannot do


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward with its parts and a remark that ends up in the sample's record."""

    reward: float
    parts: Numbers = field(default_factory=dict)
    note: str | None = None


class FilterDecision(NamedTuple):
    """Whether a group trains; a dropped one says why: a short name to count by, and a sentence."""

    keep: bool
    reason: str = ""  # lower_snake name; empty when kept
    detail: str = ""  # a sentence with the numbers


LossUnit = Literal["tokens", "sequences", "sequence_sums", "constant"]
LossParams = Mapping[str, float | int | bool | str]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name, so that it crosses ranks and wires."""

    name: str  # a key of losses.LOSSES, or module:function
    params: LossParams = field(default_factory=dict)  # passed to the loss by keyword
    unit: LossUnit = "tokens"  # what the global denominator counts
    constant: float | None = None  # the denominator when unit is "constant"
    per_token: bool = False  # forward_backward is to answer with TokenArrays too


@record
class OptimParams:
    """Settings of one optimizer step; they override the backend's own."""

    lr: float
    max_grad_norm: float | None = 1.0  # None: no clipping
    betas: tuple[float, float] | None = None  # of this step alone, as what follows; None: the backend's own
    eps: float | None = None
    weight_decay: float | None = None  # decoupled, of matrices

    def __post_init__(self) -> None:
        eps, decay = self.eps, self.weight_decay
        for name, fits, rule in (
            ("betas", all(0 <= beta < 1 for beta in self.betas or ()), "two numbers in [0, 1)"),
            ("eps", eps is None or 1e-38 <= eps < math.inf, "a finite number, at least 1e-38"),
            ("weight_decay", decay is None or 0 <= decay < math.inf, "a finite number, at least 0"),
        ):
            if not fits:
                raise ValueError(f"OptimParams.{name} is {getattr(self, name)}; it must be {rule}")


# --- what a backend answers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenArrays:
    """What an update saw of each token: one array [T_i] per row, 0.0 where nothing trains."""

    log_probs: FloatRows  # nats: the trainer's own at this update; of a scalar head its values
    # d(sum / denominator) / d(log-prob): the part of the loss's derivative that goes through the token
    slopes: FloatRows
    weights: FloatRows  # the correction's weight that multiplied the token's loss; 1 where the loss had none
    kls: FloatRows = ()  # nats: the exact KL to the reference; empty where the loss has none


@record
class TimedResult:
    """When a backend did what it was asked for."""

    seconds: float = field(default=0.0, compare=False)  # on the device thread; 0: not measured
    queued: int = field(default=0, compare=False)  # jobs of that thread that were to be done before it


@record
class ForwardBackwardResult(TimedResult):
    """What forward_backward did with a batch."""

    loss: float | None  # sum / denominator over the whole batch; None when skipped
    denominator: float  # of the loss's unit, over the whole batch
    metrics: Metrics
    skipped: str | None = None  # why nothing changed ("loss is nan"); None when it counted
    per_token: TokenArrays | None = None  # None: not asked for (LossSpec.per_token), or skipped


@record
class OptimStepResult(TimedResult):
    """What optim_step did."""

    step: int  # optimizer steps done so far, this one included
    lr: float
    grad_norm: float | None  # before clipping; None when it was not finite
    clipped: bool
    skipped: str | None = None  # why the step changed nothing ("gradient norm is inf"); None when it counted


# compact JSON of a value; raises ValueError on NaN and infinity
encode_json = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode
