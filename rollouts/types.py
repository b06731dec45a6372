"""Words that two floors share: frozen records of numpy arrays and plain values. No torch, no trio.

Axes: P prompts, G samples per prompt, B = P*G rows, T tokens of one row (prompt and response).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
JSONValue = Any  # None, bool, int, finite float, str, and lists and str-keyed dicts of these


class ChatMessage(TypedDict):
    """One turn of a conversation. A row's other keys stay beside these, and the chat template sees them."""

    role: str  # system, user, assistant, tool, or what else the chat template knows
    content: str  # "" where the turn is nothing but tool calls
    reasoning_content: NotRequired[str]  # the thinking before the content
    tool_calls: NotRequired[
        list[dict[str, JSONValue]]
    ]  # {"type": "function", "function": {"name", "arguments"}}, arguments an object or its text
    tool_call_id: NotRequired[str]  # of a tool's turn: the call that it answers
    name: NotRequired[str]  # of who speaks, mostly the tool


class Status(StrEnum):
    """What became of a sample."""

    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # ended by itself
    TRUNCATED = "truncated"  # cut at the token limit
    ABORTED = "aborted"  # stopped by us; may be continued
    FAILED = "failed"  # could not be generated or scored; metadata["failure"] says why


ARRAY_KINDS = {"i": ("iu", "integers"), "f": ("fiu", "numbers"), "b": ("b", "0 and 1")}


def _frozen_array(owner: str, name: str, value: ArrayLike, dtype: Any, length: int | None) -> NDArray[Any]:
    source, wanted = np.asarray(value), np.dtype(dtype)
    if source.ndim != 1:
        raise ValueError(f"{owner}.{name} has {source.ndim} axes; it must be one-dimensional [T]")
    if length is not None and len(source) != length:
        raise ValueError(
            f"{owner}.{name} has {len(source)} values for {length} tokens; token-level fields have one value"
            " per token"
        )
    kinds, what = ARRAY_KINDS[wanted.kind]
    is_bits = wanted.kind == "b" and bool(np.isin(source, (0, 1)).all())
    if len(source) and source.dtype.kind not in kinds and not is_bits:
        raise ValueError(f"{owner}.{name} has dtype {source.dtype}; it must hold {what}")
    result = source.astype(wanted)
    result.flags.writeable = False
    return result


def check_json(name: str, value: object) -> None:
    """Raises ValueError, naming the path, if `value` is not JSON (None, bool, int, finite float, str, list,
    str-keyed dict).
    """
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; JSON has no such number")
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}; keys must be strings")
            check_json(f"{name}.{key}", inner)
        return
    if isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_json(f"{name}[{index}]", inner)
        return
    raise ValueError(
        f"{name} is a {type(value).__name__}; it must be a JSON value (numpy scalars: call .item())"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One prompt and what became of it. Lists are accepted for arrays; construction checks lengths, types and
    metadata.

    Where a token was not sampled its mask is 0, its log-prob 0.0 and its version -1. Token-level fields left
    empty are filled so. Raises ValueError naming the field that is wrong.
    """

    id: str  # unique in the run; samples of a group share a prompt, not an id
    prompt: str | tuple[ChatMessage, ...]  # text, or chat messages
    response: str = ""  # decoded response tokens, special tokens left out
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [T] prompt and response ids
    loss_mask: BoolArray = field(
        default_factory=lambda: np.zeros(0, np.bool_)
    )  # [T] 1 where the token trains
    rollout_log_probs: FloatArray = field(
        default_factory=lambda: np.zeros(0, np.float32)
    )  # [T] nats, of the distribution sampled from
    weight_versions: IntArray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # [T] version that produced the token
    reward: float | None = None  # None until scored
    rewards: Mapping[str, float] = field(default_factory=dict)  # named parts of the reward
    group_index: int | None = None  # which draw of a prompt this belongs to; None outside a manager
    status: Status = Status.PENDING
    metadata: Mapping[str, JSONValue] = field(
        default_factory=dict
    )  # JSON values only: the dataset row, notes, failures

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"Sample.id is {self.id!r}; it must be a string that is not empty")
        if not isinstance(self.prompt, str):
            put(self, "prompt", tuple(checked_messages(self.prompt, "Sample.prompt")))
        if not isinstance(self.response, str):
            raise ValueError(f"Sample.response is a {type(self.response).__name__}; it must be text")
        tokens = _frozen_array("Sample", "tokens", self.tokens, np.int64, None)
        if len(tokens) and int(tokens.min()) < 0:
            raise ValueError(f"Sample.tokens holds {int(tokens.min())}; token ids are not negative")
        count = len(tokens)
        put(self, "tokens", tokens)
        for name, dtype, blank in (
            ("loss_mask", np.bool_, 0),
            ("rollout_log_probs", np.float32, 0.0),
            ("weight_versions", np.int64, -1),
        ):
            value = getattr(self, name)
            filled = np.full(count, blank, dtype) if len(value) == 0 else value
            put(self, name, _frozen_array("Sample", name, filled, dtype, count))
        if not np.isfinite(self.rollout_log_probs).all():
            raise ValueError("Sample.rollout_log_probs holds a value that is not finite")
        if self.reward is not None:
            put(self, "reward", _finite("Sample.reward", self.reward))
        put(
            self,
            "rewards",
            {str(key): _finite(f"Sample.rewards[{key!r}]", value) for key, value in self.rewards.items()},
        )
        put(self, "status", Status(self.status))
        check_json("Sample.metadata", self.metadata)

    @property
    def response_length(self) -> int:
        """Number of tokens that train."""
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version of any token that trains; None if none does."""
        return int(self.weight_versions[self.loss_mask].min()) if self.loss_mask.any() else None


def checked_messages(messages: object, name: str) -> list[ChatMessage]:
    """The chat messages of a list, each as `checked_message` gives it. Raises ValueError, beginning with
    `name`, for anything else and for an empty list.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"{name} is of type {type(messages).__name__}; it must be a list of chat messages")
    if not messages:
        raise ValueError(f"{name} is an empty list; it must hold at least one chat message")
    checked: list[ChatMessage] = []
    for index, message in enumerate(messages):
        try:
            checked.append(checked_message(message))
        except ValueError as error:
            raise ValueError(f"{name}[{index}]{error}") from error
    return checked


OTHER_THINKING_KEYS = ("reasoning", "thinking")  # names that some datasets give to reasoning_content
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")


def checked_message(message: object) -> ChatMessage:
    """A copy of `message` as one turn, with every key that has a value.

    A content of text parts becomes one text, the parts put together with nothing between them. No content
    beside tool calls becomes "". A null elsewhere, or an empty list of tool calls, is an absent key.
    `reasoning` and `thinking` become reasoning_content. Raises ValueError with a text that goes on after the
    message's name, such as ".content is of type int; it must be text".
    """
    if not isinstance(message, Mapping):
        raise ValueError(
            f" is of type {type(message).__name__}; a chat message is an object with a role and a content"
        )
    turn: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    calls = _checked_tool_calls(turn.pop("tool_calls", []))
    if calls:
        turn.setdefault("content", "")
    for key in ("role", "content"):
        if key not in turn and key not in message:
            raise ValueError(f" has no {key}; a chat message is an object with a role and a content")
    role = turn.get("role")
    if not isinstance(role, str):
        raise ValueError(f".role is of type {type(role).__name__}; it must be text")
    if not role:
        raise ValueError(".role is empty; it must be system, user, assistant or tool")
    if calls and role != "assistant":
        raise ValueError(f" has the role {role} and tool_calls; only an assistant's turn calls tools")
    turn["content"] = _checked_content(turn.get("content"))
    for key in OTHER_THINKING_KEYS:
        if key in turn and turn.setdefault("reasoning_content", turn[key]) == turn[key]:
            del turn[key]
    _check_other_keys(turn)
    return cast(ChatMessage, turn | ({"tool_calls": calls} if calls else {}))


def _checked_content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f".content is of type {type(content).__name__}; it must be text")
    if not content:
        raise ValueError(".content is an empty list; it must be text, or a list of text parts")
    parts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text":
            raise ValueError(
                f".content[{index}] is a part of type {kind!r}; only text can train, so leave such rows out"
            )
        if not isinstance(text, str):
            raise ValueError(f'.content[{index}] has no text; a part is {{"type": "text", "text": "…"}}')
        parts.append(text)
    return "".join(parts)


def _check_other_keys(turn: Mapping[str, Any]) -> None:
    for key in ("reasoning_content", "tool_call_id", "name"):
        if not isinstance(turn.get(key, ""), str):
            raise ValueError(f".{key} is of type {type(turn[key]).__name__}; it must be text")
    for key in OTHER_THINKING_KEYS:
        if key in turn:
            raise ValueError(f" has another text in {key} than in reasoning_content; keep one of them")
    for key in MEDIA_KEYS:
        if turn.get(key):
            raise ValueError(f".{key}: only text can train, so leave such rows out")
    if "function_call" in turn:
        raise ValueError(
            '.function_call is the old way to call a tool; write tool_calls: [{"type": "function",'
            ' "function": {…}}]'
        )
    for key in ("weight", "train"):
        if turn.get(key, 1) in (0, False):
            raise ValueError(
                f".{key} is {turn[key]!r}, which is not read; the turns that train are chosen by sft.train_on"
            )
    for key, value in turn.items():
        if not isinstance(key, str):
            raise ValueError(f" has the key {key!r}; keys must be text")
        check_json(f".{key}", value)


def _checked_tool_calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f".tool_calls is of type {type(calls).__name__}; it must be a list of tool calls")
    return [_checked_tool_call(call, f".tool_calls[{index}]") for index, call in enumerate(calls)]


def _checked_tool_call(call: object, name: str) -> dict[str, Any]:
    form = '{"type": "function", "function": {"name": "…", "arguments": {…}}}'
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ValueError(f"{name} has no function; a tool call is {form}")
    if (call.get("type") or "function") != "function":
        raise ValueError(f"{name}.type is {call['type']!r}; a tool call is {form}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(
            f"{name}.function.name is {function.get('name')!r}; it must be text that is not empty"
        )
    parse_tool_arguments(function.get("arguments"), f"{name}.function.arguments")
    check_json(name, call)
    kept = {key: value for key, value in call.items() if value is not None}
    return {"type": "function", **kept, "function": dict(function)}


def parse_tool_arguments(arguments: object, name: str) -> dict[str, Any]:
    """The arguments of a tool call as an object, from one or from its JSON text. Raises ValueError, beginning
    with `name`, for others.
    """
    value: object = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{name} is {arguments!r}, which is not the JSON text of an object ({error})"
            ) from error
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} is {arguments!r}; it must be an object or its JSON text, {{}} for no arguments"
        )
    check_json(name, value)
    return dict(value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice!r} stands twice")
    return dict(pairs)


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
    numbers: dict[tuple[int | None, str], int] = {}
    rows: list[int] = []
    for sample in samples:
        match = SEGMENT_ID.fullmatch(sample.id)
        first = (sample.group_index, match[1] if match else sample.id)
        key = first if first in present else (sample.group_index, sample.id)
        rows.append(numbers.setdefault(key, len(numbers)))
    return np.asarray(rows, np.int64)


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool | int | float | np.integer | np.floating | np.bool_):
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
        return tuple(
            dict(zip(number_trajectories(self.samples).tolist(), self.samples, strict=True)).values()
        )

    @property
    def rewards(self) -> FloatArray:
        """Rewards of a scored group, one per sample; segments share theirs, and `ends` counts it once. Raises
        ValueError if a sample has none.
        """
        values = [sample.reward for sample in self.samples]
        if any(value is None for value in values):
            raise ValueError(f"group {self.group_index} has samples without a reward")
        return np.asarray(values, np.float32)


TOKEN_LEVEL = (  # fields of RolloutBatch beside `tokens` that have one array [T_i] per row
    "loss_masks",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "returns",
    "old_values",
    "weight_versions",
)


@dataclass(frozen=True, kw_only=True)  # without slots: response_lengths is kept
class RolloutBatch:
    """What one training step consumes: B ragged rows. Every token-level field is one array [T_i] per row. SFT
    leaves rewards None.
    """

    tokens: tuple[IntArray, ...]
    loss_masks: tuple[BoolArray, ...]
    rewards: FloatArray | None = None  # [B]
    metadata: tuple[Mapping[str, JSONValue], ...] = ()  # one per row, or empty
    rollout_log_probs: tuple[FloatArray, ...] | None = None  # nats; mu
    old_log_probs: tuple[FloatArray, ...] | None = None  # nats; trainer's recompute, when rl.recompute_old
    ref_log_probs: tuple[FloatArray, ...] | None = None  # nats; frozen reference
    advantages: tuple[FloatArray, ...] | None = None
    mean_advantages: FloatArray | None = (
        None  # [B] of each row over the tokens that train, 0 of none; for the record
    )
    returns: tuple[FloatArray, ...] | None = (
        None  # what a critic's values are to become, in the reward's unit
    )
    old_values: tuple[FloatArray, ...] | None = None  # the critic's own, before the first update on the batch
    group_indices: IntArray | None = None  # [B]
    weight_versions: tuple[IntArray, ...] | None = None
    temperature: float = 1.0  # that the rollouts were sampled at; the trainer divides its logits by it
    samples: tuple[
        Sample, ...
    ] = ()  # the records behind the rows, for samples.jsonl; backends do not read them

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        for name in TOKEN_LEVEL:
            value = getattr(self, name)
            if value is None:
                continue
            if len(value) != rows:
                raise ValueError(f"RolloutBatch.{name} has {len(value)} rows; tokens has {rows}")
            for row, (inner, tokens) in enumerate(zip(value, self.tokens, strict=True)):
                if len(inner) != len(tokens):
                    raise ValueError(
                        f"RolloutBatch.{name}[{row}] has {len(inner)} values for {len(tokens)} tokens"
                    )
        for name in ("rewards", "mean_advantages", "group_indices"):
            value = getattr(self, name)
            if value is not None and len(value) != rows:
                raise ValueError(f"RolloutBatch.{name} has {len(value)} values for {rows} rows")
        if self.metadata and len(self.metadata) != rows:
            raise ValueError(f"RolloutBatch.metadata has {len(self.metadata)} records for {rows} rows")
        if not self.temperature > 0:
            raise ValueError(f"RolloutBatch.temperature is {self.temperature}; it must be above 0")

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def response_lengths(self) -> IntArray:
        """[B] number of tokens that train in each row."""
        return np.asarray([np.count_nonzero(mask) for mask in self.loss_masks], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled."""

    max_new_tokens: int  # at least 1
    temperature: float = 1.0  # 0 means greedy; log-probs are then those at temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    stop_token_ids: tuple[int, ...] = ()  # the stop token is part of the completion
    seed: int | None = None  # key of a counter-based stream: the same seed gives the same draws


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Token ids in."""

    request_id: str  # unique in the run; deterministic engines sort by it
    prompt_ids: IntArray  # [prompt length], at least 1
    sampling: SamplingParams
    affinity: str = ""  # requests of one key go to one engine of a fleet, for its prefix cache; empty: to any
    score_prompt: bool = False  # asks for Completion.prompt_log_probs


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Token ids out: what an engine answers to one request."""

    request_id: str
    token_ids: IntArray  # [n] sampled ids, the stop token included
    log_probs: FloatArray  # [n] nats, of the distribution sampled from
    weight_versions: IntArray  # [n] the version that produced each token
    finish_reason: FinishReason
    prompt_log_probs: FloatArray | None = None  # [prompt length] nats, 0 for the first; None: not asked for


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
    version_spans: bool = (
        True  # each token knows the version that produced it; else only whole completions do
    )
    log_probs: bool = True  # of the distribution sampled from; without them nothing can train
    checksum: bool = False  # checksum() says what the weights are
    frees_memory: bool = True  # release_memory() gives memory back
    gaps: tuple[str, ...] = ()  # a sentence for each thing that it cannot do


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is."""

    running: int  # requests being decoded
    waiting: int  # requests that the engine has taken and not begun
    cache_usage: float | None = None  # share of the key-value cache in use; None: it does not say


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward with its parts and a remark that ends up in the sample's record."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Whether a group trains. A dropped group says why: a short name that metrics count by, and a
    sentence.
    """

    keep: bool
    reason: str = ""  # lower_snake name; empty when kept
    detail: str = ""  # a sentence with the numbers


LossUnit = Literal["tokens", "sequences", "sequence_sums", "constant"]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name, so that it crosses ranks and wires."""

    name: str  # a key of losses.LOSSES, or module:function
    params: Mapping[str, float | int | bool | str] = field(
        default_factory=dict
    )  # passed to the loss by keyword
    unit: LossUnit = "tokens"  # what the global denominator counts
    constant: float | None = None  # the denominator when unit is "constant"
    per_token: bool = False  # forward_backward is to answer with TokenArrays too


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimParams:
    """Settings of one optimizer step; they override the backend's own."""

    lr: float
    max_grad_norm: float | None = 1.0  # None: no clipping


# --- mergeable metric values --------------------------------------------------------------------------------


KindT = TypeVar("KindT", "Mean", "Total", "EffectiveShare", "ExplainedVariance")


def _add_sums(one: KindT, other: KindT) -> KindT:
    return type(one)(*(getattr(one, sums.name) + getattr(other, sums.name) for sums in fields(one)))


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that carries its count, so that means of parts merge exactly."""

    total: float
    count: float
    merge = _add_sums

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over parts."""

    value: float
    merge = _add_sums


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of the parts."""

    value: float

    def merge(self, other: Max) -> Max:
        return max(self, other, key=lambda one: one.value)


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest of the parts."""

    value: float

    def merge(self, other: Min) -> Min:
        return min(self, other, key=lambda one: one.value)


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """Effective sample size of weights over their number, (Σw)² / (n Σw²): 1 when all are equal. Sums merge;
    the share of parts would not.
    """

    total: float  # Σw
    square: float  # Σw²
    count: float  # n
    merge = _add_sums

    @property
    def value(self) -> float | None:
        return self.total**2 / (self.count * self.square) if self.count * self.square > 0 else None


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 − Var(target − prediction) / Var(target), biased variances of both: 1 is perfect, 0 no better than
    the mean. None for constant targets.
    """

    count: float
    target: float  # Σ target
    target_square: float  # Σ target²
    error: float  # Σ (target − prediction)
    error_square: float  # Σ (target − prediction)²
    merge = _add_sums

    @property
    def value(self) -> float | None:
        spread = self.count * self.target_square - self.target**2  # count² times the variance
        rounding = 1e-12 * self.count * self.target_square  # of the difference of two sums
        return 1.0 - (self.count * self.error_square - self.error**2) / spread if spread > rounding else None


Metric = Mean | Total | Max | Min | EffectiveShare | ExplainedVariance
Metrics = Mapping[str, Metric]


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """One mapping in which metrics of the same name are merged. Raises ValueError if a name has two kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            held = merged.get(name)
            if held is None:
                merged[name] = metric
            elif type(held) is type(metric):
                merged[name] = held.merge(cast(Any, metric))  # the kinds are equal
            else:
                raise ValueError(
                    f"metric {name} is a {type(held).__name__} in one part and a {type(metric).__name__} in"
                    " another"
                )
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers; a metric without a value (a mean of nothing) is absent."""
    return {name: value for name, metric in metrics.items() if (value := metric.value) is not None}


# --- what a backend answers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenArrays:
    """What an update saw of each token: one array [T_i] per row of its batch, 0.0 where the mask is 0 and in
    a row that was left out.
    """

    log_probs: tuple[FloatArray, ...]  # nats: the trainer's own at this update; of a scalar head its values
    slopes: tuple[
        FloatArray, ...
    ]  # d(sum / denominator) / d(log-prob): the part of the loss's derivative that goes through the token
    weights: tuple[
        FloatArray, ...
    ]  # the correction's weight that multiplied the token's loss; 1 where the loss had none


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult:
    """What forward_backward did with a batch."""

    loss: float | None  # sum / denominator over the whole batch; None when skipped
    denominator: float  # of the loss's unit, over the whole batch
    metrics: Metrics
    skipped: str | None = None  # why nothing changed ("loss is nan"); None when it counted
    per_token: TokenArrays | None = None  # None: not asked for (LossSpec.per_token), or skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepResult:
    """What optim_step did."""

    step: int  # optimizer steps done so far, this one included
    lr: float
    grad_norm: float | None  # before clipping; None when it was not finite
    clipped: bool
    skipped: str | None = None  # why the step changed nothing ("gradient norm is inf"); None when it counted


def encode_json(value: object) -> str:
    """Compact JSON; raises ValueError on NaN and infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
