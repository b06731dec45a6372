"""What judges: models that do not change, which clients ask for log-probs and scores by name ("base" is the
base model), and POST /runs/{run}/evaluate: what a run's weights say to prompts.

serve.references ─► loaded when first asked for, the least recently used makes room
                 ─► rows are scored on the device thread ─► log-probs, or a reward model's scores

evaluate ─► the run's next turn ─► a snapshot in the engine ─► samples ─┬─► reward
                                   or responses that were given ────────┘
                                ─► the run's own log-probs and entropies, the reference's ─► metrics
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from statistics import pstdev
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
import trio
from msgspec import Meta, Struct

from rollouts.data.chat import tokenize_prompt
from rollouts.data.scores import make_score_batch, read_scores
from rollouts.errors import ConfigError, ModelError, RolloutsError, ServiceRefused
from rollouts.evaluation.evaluate import EvaluationResult, evaluate
from rollouts.evaluation.policy_metrics import measure_responses
from rollouts.generation.generate import append_completion
from rollouts.generation.samples import convert_to_batch
from rollouts.models.load import load_tokenizer
from rollouts.protocols import InferenceEngine, RewardFn
from rollouts.reference.cache import find_frozen_model
from rollouts.reference.score import FrozenReference
from rollouts.reference.server import Served, digest_vocabulary
from rollouts.rewards.check import describe
from rollouts.rewards.exact import exact_match
from rollouts.rewards.fuzzy import f1_match, fuzzy_match
from rollouts.rewards.math import numeric_match
from rollouts.rewards.multiple_choice import multiple_choice_match
from rollouts.rewards.reward_model import open_model_reward
from rollouts.serve.bodies import NotNegative, Positive, Text, read_body
from rollouts.serve.sampling import Loaded, generate_all
from rollouts.serve.store import Result, Row, answer, remove
from rollouts.serve.wire import check_ids
from rollouts.types import (
    Completion,
    Fields,
    FloatRows,
    GenerateRequest,
    IntArray,
    Numbers,
    RolloutBatch,
    Sample,
    SamplingParams,
)
from rollouts.weight_sync.snapshots import export_snapshot

if TYPE_CHECKING:
    from rollouts.serve.app import Call
    from rollouts.serve.models import Model
    from rollouts.serve.service import Service

BASE = "base"


class Rows(Struct):
    """What is to be scored: sequences, and which of their tokens. Without masks all but the first of each."""

    tokens: list[list[int]]
    masks: list[list[bool]] | None = None
    temperature: Annotated[float, Meta(gt=0)] = 1.0


@asynccontextmanager
async def lease_reference(service: "Service", name: str) -> AsyncIterator[FrozenReference]:
    """The model of that name, in memory. Raises ServiceRefused for a name that there is not, and for a model
    that cannot be loaded, or cannot score what it is given. The base model is asked as the others are.
    """
    base, features = service.base, service.features

    async def score_base(batch: RolloutBatch) -> FloatRows:
        try:
            return await base.forward_start(batch)
        except Exception:
            await base.reset()  # the next rows may be better
            raise

    try:
        if name == BASE:
            own: Any = SimpleNamespace(
                score=score_base,
                vocab_size=features.vocab_size,
                context_length=features.context_length,
                is_reward_model=False,
            )
            yield own
        else:
            async with service.references.lease(find_model(service, name)) as (model,):
                yield model
    except (ConfigError, ModelError) as error:
        raise ServiceRefused(f"reference {name!r}: {error}") from error


def find_model(service: "Service", name: str) -> str:
    """What the config says that the name is. Raises ServiceRefused with 404."""
    known = {BASE: str(service.base_path), **service.config.references}
    if name not in known:
        raise ServiceRefused(f"there is no reference {name!r}; there is {', '.join(sorted(known))}", 404)
    return known[name]


async def score_rows(service: "Service", model: FrozenReference, batch: RolloutBatch) -> FloatRows:
    """[T_i] per row; 0.0 where the loss mask is 0. Raises ServiceRefused naming the first row that the model
    cannot score.
    """
    total, max_tokens = sum(map(len, batch.tokens)), service.config.request_tokens
    if total > max_tokens:
        raise ServiceRefused(f"the rows have {total} tokens, and one request at most {max_tokens}", 413)
    for index, (row, mask) in enumerate(zip(batch.tokens, batch.loss_masks, strict=True)):
        check_ids(row, model.vocab_size, f"tokens[{index}]")
        if mask[:1].any():
            raise ServiceRefused(f"masks[{index}] has the first token, which nothing predicts")
        count = len(row) - model.is_reward_model  # the token behind a sequence is computed by nobody
        if model.context_length and count > model.context_length:
            raise ServiceRefused(
                f"tokens[{index}] has {count}, and the model's context is {model.context_length}"
            )
    return await model.score(batch)


class ServedReference(NamedTuple):
    """A LogProbScorer: a reference by its name, in memory while it scores."""

    service: "Service"
    name: str

    async def score(self, batch: RolloutBatch) -> FloatRows:
        """What score_rows gives."""
        async with lease_reference(self.service, self.name) as model:
            return await score_rows(self.service, model, batch)


# --- evaluation ---------------------------------------------------------------------------------------------


# they compare a text with an answer in a moment, where requests are answered too
REWARDS: Mapping[str, RewardFn] = {
    reward.__name__: reward
    for reward in (exact_match, f1_match, fuzzy_match, multiple_choice_match, numeric_match)
}


class Evaluate(Struct):
    """What is to be evaluated: prompts that the run answers, or that have been answered already."""

    prompts: Annotated[list[str | list[int | Fields]], Meta(min_length=1)]  # text is one user turn
    answers: list[Text | int | float | list[Text]] | None = None  # one for each prompt, for a reward
    responses: list[str | list[int]] | None = None  # one for each prompt, in place of samples
    samples_per_prompt: Annotated[int, Meta(ge=1, le=1024)] = 1
    max_new_tokens: Positive = 256
    temperature: NotNegative = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: int = 0
    reference: Text | None = None  # a name of GET /references
    reward: Text | None = None  # of REWARDS, or a reward model of GET /references
    samples: bool = False  # whether they are in the result


async def evaluate_model(service: "Service", model: "Model", row: Row) -> Result:
    """The metrics of measure_responses, and those of EvaluationResult, of which the ones with an @ need a
    reward. What fails beside the run's own backend leaves the run as it was: ServiceRefused.
    """
    body, scores = read_body(row["body"], Evaluate), list[FloatRows]()
    try:
        result = await take_samples(service, model, body, row["id"])
        told = [sample for sample in result.scored if sample.response_length]
        batch = convert_to_batch(told, temperature=body.temperature)
        if told and body.reference is not None:
            scores = [await ServedReference(service, body.reference).score(batch)]
    except ServiceRefused:
        raise
    except RolloutsError as error:
        raise ServiceRefused(describe(error)) from error
    if told:
        scores = [*await model.backend.forward_with_entropy(batch), *scores]

    def summarise() -> Numbers:
        found = {name.removeprefix("eval//"): value for name, value in result.metrics("").items()}
        if body.reward is None:
            found = {name: value for name, value in found.items() if "@" not in name}
        else:
            rewards = [sample.reward or 0.0 for sample in result.scored]
            found |= {"reward/mean": result.mean_reward, "reward/std": pstdev(rewards)}
        return found | (measure_responses(batch, scores) if told else {})

    return answer(
        type="evaluate",
        num_samples=len(result.samples),
        num_tokens=int(batch.response_lengths.sum()),
        metrics=await trio.to_thread.run_sync(summarise),
        samples=msgspec.to_builtins(result.samples if body.samples else (), enc_hook=np.ndarray.tolist),
    )


def read_texts(service: "Service", body: Evaluate) -> list[tuple[IntArray, IntArray | None]]:
    """The prompts, and the responses to them if they were given. Raises ServiceRefused, DataError,
    ModelError.
    """
    tokenizer, features, prompts = service.tokenizer, service.features, body.prompts
    for name, given in {"answers": body.answers, "responses": body.responses}.items():
        if given is not None and len(given) != len(prompts):
            raise ServiceRefused(f"there are {len(prompts)} prompts and {len(given)} {name}")
    if body.reward in REWARDS and body.answers is None:
        raise ServiceRefused(f"reward={body.reward!r} compares with answers; give one for each prompt")
    columns: Fields = {
        "prompts": (prompts, partial(tokenize_prompt, tokenizer=tokenizer)),
        "responses": (body.responses or (), partial(tokenizer.encode, add_special_tokens=False)),
    }
    tokens: dict[str, list[IntArray]] = defaultdict(list)
    for kind, (texts, encode) in columns.items():
        for index, text in enumerate(texts):
            is_text = isinstance(text, str) or any(isinstance(part, dict) for part in text)
            ids, where = np.asarray(encode(text) if is_text else text), f"{kind}[{index}]"
            check_ids(ids, features.vocab_size, where)
            if not len(ids):
                raise ServiceRefused(f"{where} has no token")
            tokens[kind].append(ids)
    found = [*zip_longest(tokens["prompts"], tokens["responses"])]
    new = body.max_new_tokens
    lengths = [len(ids) + (new if response is None else len(response)) for ids, response in found]
    total, limit = sum(lengths) * body.samples_per_prompt, service.config.request_tokens
    if max(lengths) > features.context_length or total > limit:
        raise ServiceRefused(
            f"the longest sample may have {max(lengths)} tokens, and all together {total}; the context holds"
            f" {features.context_length}, and one request {limit}"
        )
    return found


@asynccontextmanager
async def open_sampled(service: "Service", model: "Model", name: str) -> AsyncIterator[Loaded]:
    """The run's weights as they are, in the engine, until the block ends."""
    folder = service.folder / "samplers" / name
    try:
        await export_snapshot(model.backend, folder, model_dir=service.base_path)
        async with service.samplers.lease(str(folder)) as (loaded,):
            yield loaded
    finally:
        with trio.CancelScope(shield=True):
            await service.samplers.forget(str(folder))
            await remove(folder)


@asynccontextmanager
async def open_reward(service: "Service", name: str | None) -> AsyncIterator[RewardFn]:
    """The reward of that name; 0 without one. Raises ServiceRefused."""
    if name is None:
        yield lambda sample: 0.0
    elif name in REWARDS:
        yield REWARDS[name]
    else:
        async with lease_reference(service, name) as model:
            if not model.is_reward_model:
                raise ServiceRefused(f"reward={name!r} is no reward model, and none of {', '.join(REWARDS)}")
        async with open_model_reward(ServedReference(service, name)) as reward:
            yield reward


async def take_samples(service: "Service", model: "Model", body: Evaluate, name: str) -> EvaluationResult:
    """The responses, with their rewards. Raises NotEnoughSamples, and what is the engine's failure."""
    texts = await trio.to_thread.run_sync(read_texts, service, body)

    async def respond(sample: Sample, engine: InferenceEngine, sampling: SamplingParams) -> Sample:
        (ids, said), own = texts[sample.group_index or 0], f"{name}:{sample.id}"  # others evaluate, too
        if said is None:
            asked = GenerateRequest(request_id=own, prompt_ids=ids, sampling=sampling)
            (found,) = await generate_all(service, loaded, [asked])
        else:
            await trio.lowlevel.checkpoint()
            nothing: Any = np.zeros(len(said), np.int64)
            found = Completion(
                request_id=own,
                token_ids=said,
                log_probs=nothing,
                weight_versions=nothing,
                finish_reason="stop",
            )
        return append_completion(sample, ids, found, service.tokenizer)

    sampled: Any = nullcontext() if body.responses else open_sampled(service, model, name)
    answers: list[Any] = body.answers or [None] * len(texts)
    async with open_reward(service, body.reward) as reward, sampled as loaded:
        return await evaluate(
            [{"prompt": "", "answer": one} for one in answers],
            service.engine,
            generate=respond,
            reward=reward,
            sampling=SamplingParams(
                max_new_tokens=body.max_new_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                stop_token_ids=service.stop_ids,
            ),
            samples_per_prompt=body.samples_per_prompt,
            seed=body.seed,
        )


# --- routes -------------------------------------------------------------------------------------------------


def list_references(call: "Call") -> Fields:
    """Names, and what they are."""
    known = {BASE: call.service.name, **call.service.config.references}
    return {"references": [{"name": name, "model": model} for name, model in known.items()]}


async def describe_reference(call: "Call", name: str) -> Served:
    """What a client is to know before it sends rows. The model is looked for, but not loaded."""
    model = find_model(call.service, name)

    def look() -> Served:
        path, head = find_frozen_model(model)
        return Served(head, digest_vocabulary(load_tokenizer(path)), call.service.config.request_tokens)

    try:
        return await trio.to_thread.run_sync(look)
    except ModelError as error:
        raise ServiceRefused(f"reference {name!r}: {error}") from error


async def score(call: "Call", name: str) -> Fields:
    """Log-probs of rows, of a reward model the score of each."""
    rows, service = call.read(Rows), call.service
    masks = rows.masks or [[False] + [True] * (len(row) - 1) for row in rows.tokens]
    if [*map(len, masks)] != [*map(len, rows.tokens)] or not all(masks):
        raise ServiceRefused("tokens and masks must be of as many rows, each of as many values, at least one")
    tokens, flags = (tuple(map(np.asarray, of)) for of in (rows.tokens, masks))
    async with lease_reference(service, name) as model:
        if model.is_reward_model:
            batch = make_score_batch(tokens)
            return {"scores": read_scores(await score_rows(service, model, batch), batch).tolist()}
        batch = RolloutBatch(tokens=tokens, loss_masks=flags, temperature=rows.temperature)
        return {"log_probs": [row.tolist() for row in await score_rows(service, model, batch)]}


def submit_evaluation(call: "Call", run: str) -> Fields:
    """Queues it: the run's weights as they are when its turn comes, between two other requests."""
    call.read(Evaluate)
    return call.queue(run, None, "evaluate")


EVALUATE = {
    "GET /references": list_references,
    "GET /references/{name}": describe_reference,
    "POST /references/{name}/score": score,
    "POST /runs/{run}/evaluate": submit_evaluation,
}
