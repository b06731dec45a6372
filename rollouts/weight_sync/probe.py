"""The probe: a fixed request whose answer shows which weights an engine really serves.

engine's greedy answer ──► trainer's log-probs of the same tokens ──► agree within the tolerance?
                       └─► the same engine's answer before ─────────► moved, where the weights did?
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import trio

from rollouts.errors import WeightSyncError
from rollouts.protocols import InferenceEngine, TrainFuture, TrainingBackend
from rollouts.types import Completion, FloatArray, GenerateRequest, IntArray, RolloutBatch, SamplingParams

NOTICEABLE = 1e-5  # nats; a smaller move of the trainer may be lost in an engine's rounding
TOLERANCES = {
    "float32": 1e-3,
    "bfloat16": 5e-2,
    "float16": 5e-2,
}  # nats between two implementations of one model, by the coarser dtype
LEAST_AGREED = 4  # tokens of an answer that must be those of a stored one; all where it has fewer
MOST_ANSWERS = 32  # of a trainer whose first tokens are nearly tied
NEAR_TIE = 2.0  # tolerances; two greedy choices that differ by more were no tie


@dataclass(frozen=True, slots=True)
class Probe:
    """What is asked, and how far engine and trainer may differ in their log-probs."""

    prompt_ids: IntArray  # [prompt length]
    tolerance: float  # nats; float32 engines agree to 1e-4, 16-bit ones to about 5e-2
    num_tokens: int = 16  # greedy tokens of the answer
    tolerances: Mapping[str, float] = field(
        default_factory=dict
    )  # by engine name, for engines of another dtype than the rest

    def tolerance_of(self, name: str) -> float:
        return self.tolerances.get(name, self.tolerance)


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """One engine's answer and what the trainer thinks of the same tokens."""

    version: int
    token_ids: IntArray  # [n]
    engine_log_probs: FloatArray  # [n] nats
    trainer_log_probs: FloatArray  # [n] nats
    full_token_ids: IntArray | None = (
        None  # all that the engine said, where it was compared on the beginning only
    )
    full_log_probs: FloatArray | None = None

    @property
    def difference(self) -> float:
        """Largest |engine − trainer| in nats; NaN if either has one."""
        return float(np.abs(self.engine_log_probs - self.trainer_log_probs).max())

    def same_answer(self, other: ProbeReply) -> bool:
        """Whether the engine said exactly the same: all tokens and log-probs, bit for bit, also where only
        the beginning was compared.
        """
        (tokens, log_probs), (other_tokens, other_log_probs) = self._said(), other._said()
        return np.array_equal(tokens, other_tokens) and np.array_equal(log_probs, other_log_probs)

    def _said(self) -> tuple[IntArray, FloatArray]:
        if self.full_token_ids is None or self.full_log_probs is None:
            return self.token_ids, self.engine_log_probs
        return self.full_token_ids, self.full_log_probs


@dataclass(frozen=True, slots=True)
class Verified:
    """What is remembered of an engine that proved its version."""

    reply: ProbeReply
    checksum: str | None  # of the engine's weights, where it gives one
    digest: str | None  # of the snapshot they came from; None: they came in memory


Judge = Callable[[InferenceEngine, Completion], Awaitable[ProbeReply]]
"""From an engine's answer to what the trainer thinks of it. Raises WeightSyncError if the answer cannot be of those weights."""


def make_probe_prompt(vocab_size: int, length: int = 8) -> IntArray:
    """Ids spread evenly over the vocabulary: any model has an opinion about them."""
    return np.linspace(0, vocab_size - 1, num=length + 2, dtype=np.int64)[1:-1]


async def ask_probe(probe: Probe, engine: InferenceEngine, *, version: int, request_id: str) -> Completion:
    """The engine's greedy answer. Raises WeightSyncError if it is empty or carries another version; what the
    engine raises.
    """
    sampling = SamplingParams(max_new_tokens=probe.num_tokens, temperature=0.0)
    completion = await engine.generate(
        GenerateRequest(request_id=request_id, prompt_ids=probe.prompt_ids, sampling=sampling)
    )
    if not len(completion.token_ids):
        raise WeightSyncError(
            f"the answer to the probe is empty ({completion.finish_reason}); nothing can be compared"
        )
    if (completion.weight_versions != version).any():
        found = sorted(set(completion.weight_versions.tolist()))
        raise WeightSyncError(
            f"the probe was answered with weight versions {found} after an update to version {version}"
        )
    return completion


def check_agreement(reply: ProbeReply, *, tolerance: float) -> None:
    """Raises WeightSyncError unless engine and trainer agree on every token of the answer."""
    if not reply.difference <= tolerance:  # NaN is no agreement
        raise WeightSyncError(
            f"the engine at version {reply.version} differs from the trainer by {reply.difference:.3g} nats"
            f" on the probe; the tolerance is {tolerance:.3g}: it does not serve the weights that were sent"
        )


def check_change(previous: Verified, now: Verified) -> bool:
    """Whether the checksum alone proves that the weights changed. Raises WeightSyncError if they should have
    and nothing shows it.

    They should have when the snapshots differ, or, where weights came in memory, when the trainer's own
    log-probs moved. Checksums, where both are known, decide: an engine whose arithmetic varies from call to
    call answers otherwise even with the old weights.
    """
    if previous.reply.version == now.reply.version or not _should_differ(previous, now):
        return False
    same_answer = now.reply.same_answer(previous.reply)
    known = previous.checksum is not None and now.checksum is not None
    if known and previous.checksum != now.checksum:
        return same_answer
    if known or same_answer:
        how = f"has the checksum {now.checksum} that it had" if known else "answers the probe exactly as"
        raise WeightSyncError(
            f"the engine says version {now.reply.version} but {how} at version {previous.reply.version}, "
            "though the trainer's weights are others: it still serves the old weights"
        )
    return False


def _should_differ(previous: Verified, now: Verified) -> bool:
    if previous.digest is not None and now.digest is not None:
        return previous.digest != now.digest
    before, after = previous.reply, now.reply
    shared = min(len(before.token_ids), len(after.token_ids))
    if not np.array_equal(before.token_ids[:shared], after.token_ids[:shared]):
        return True
    return (
        float(np.abs(before.trainer_log_probs[:shared] - after.trainer_log_probs[:shared]).max()) > NOTICEABLE
    )


# --- judges -------------------------------------------------------------------------------------------------


def judge_by_trainer(probe: Probe, backend: TrainingBackend) -> Judge:
    """A Judge that asks the trainer. Answers that come while it computes are scored in one batch next, equal
    ones once.
    """
    waiting: list[_Question] = []
    computing = trio.Lock()

    async def judge(engine: InferenceEngine, completion: Completion) -> ProbeReply:
        question = _Question(completion.token_ids)
        waiting.append(question)
        async with computing:
            if question.log_probs is None:  # else someone before us had it in his batch
                await _answer(probe, backend, tuple(waiting))
                waiting[:] = [other for other in waiting if other.log_probs is None]
        assert question.log_probs is not None
        return ProbeReply(
            int(completion.weight_versions[0]), completion.token_ids, completion.log_probs, question.log_probs
        )

    return judge


@dataclass(slots=True, eq=False)
class _Question:
    token_ids: IntArray
    log_probs: FloatArray | None = None  # None until the trainer has answered


async def _answer(probe: Probe, backend: TrainingBackend, questions: Sequence[_Question]) -> None:
    distinct = list({question.token_ids.tobytes(): question.token_ids for question in questions}.values())
    rows = tuple(np.concatenate([probe.prompt_ids, token_ids]) for token_ids in distinct)
    masks = tuple(np.arange(len(row)) >= len(probe.prompt_ids) for row in rows)
    scored = await backend.forward(RolloutBatch(tokens=rows, loss_masks=masks)).result()
    by_answer = {
        token_ids.tobytes(): row[mask] for token_ids, row, mask in zip(distinct, scored, masks, strict=True)
    }
    for question in questions:
        question.log_probs = by_answer[question.token_ids.tobytes()]


@runtime_checkable
class AnsweringBackend(Protocol):
    """A trainer that can say beforehand what it would answer."""

    def complete_greedily(self, prompt_ids: IntArray, count: int) -> TrainFuture[FloatArray]:
        """[count, V] log-probs at each of its own greedy tokens after `prompt_ids`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TrainerAnswer:
    """Tokens that the trainer would say, and what it thought of every other one in their place."""

    token_ids: IntArray  # [n]
    log_probs: FloatArray  # [n, V] nats


async def ask_trainer(probe: Probe, backend: AnsweringBackend) -> list[TrainerAnswer] | None:
    """The trainer's greedy answer to the probe; and, for every other token that is nearly tied in one of the
    first places, the answer that goes on from it, and so on in those. None where they are more than
    MOST_ANSWERS.

    An engine with the same weights may take any of them. Beyond the first places it has said enough to be
    compared.
    """
    tie = NEAR_TIE * max(probe.tolerance, *probe.tolerances.values(), 0.0)
    answers: list[TrainerAnswer] = []
    none = TrainerAnswer(np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
    waiting = [none]  # beginnings, with what the trainer thought of each of their tokens
    while waiting:
        if len(answers) + len(waiting) > MOST_ANSWERS:
            return None
        begun = waiting.pop()
        count = len(begun.token_ids)
        rest = await backend.complete_greedily(
            np.concatenate([probe.prompt_ids, begun.token_ids]), probe.num_tokens - count
        ).result()
        rows = np.concatenate([begun.log_probs, rest]) if count else rest
        tokens = np.concatenate([begun.token_ids, rest.argmax(-1)])
        answers.append(TrainerAnswer(tokens, rows))
        for place in range(count, min(LEAST_AGREED, probe.num_tokens) - 1):
            tied = np.flatnonzero(rows[place] >= rows[place].max() - tie)
            others = [token for token in tied.tolist() if token != tokens[place]]
            if len(answers) + len(waiting) + len(others) > MOST_ANSWERS:
                return None
            waiting += [
                TrainerAnswer(np.asarray([*tokens[:place], token]), rows[: place + 1]) for token in others
            ]
    return answers


def judge_by_answers(answers: Sequence[TrainerAnswer], *, tolerance_of: Callable[[str], float]) -> Judge:
    """A Judge that needs the trainer no more: by what ask_trainer found when it had the weights."""

    async def judge(engine: InferenceEngine, completion: Completion) -> ProbeReply:
        await trio.lowlevel.checkpoint()
        return compare_with_answers(answers, completion, tolerance=tolerance_of(engine.features.name))

    return judge


def compare_with_answers(
    answers: Sequence[TrainerAnswer], completion: Completion, *, tolerance: float
) -> ProbeReply:
    """The tokens of an engine's answer up to the first that the trainer would not have said, with what the
    trainer thinks of each.

    Raises WeightSyncError where that one was no near tie, or comes before LEAST_AGREED tokens: so few prove
    nothing.
    """
    said = completion.token_ids
    agreed, answer = max(
        ((count_agreed(answer.token_ids, said), answer) for answer in answers), key=lambda pair: pair[0]
    )
    compared = min(agreed + 1, len(said), len(answer.token_ids))
    version = int(completion.weight_versions[0])
    if (
        compared
        and not 0 <= int(said[:compared].min()) <= int(said[:compared].max()) < answer.log_probs.shape[1]
    ):
        raise WeightSyncError(
            "the engine answers the probe with tokens outside the trainer's vocabulary of"
            f" {answer.log_probs.shape[1]}"
        )
    expected = answer.log_probs[np.arange(compared), said[:compared]]
    if compared > agreed:
        gap = float(answer.log_probs[agreed].max() - expected[agreed])
        if not gap <= NEAR_TIE * tolerance:
            raise WeightSyncError(
                f"the engine answers the probe with token {int(said[agreed])} at position {agreed}, where the"
                f" trainer at version {version} would say {int(answer.token_ids[agreed])} ({gap:.3g} nats"
                " apart): it does not serve the weights that were sent"
            )
    if compared < min(LEAST_AGREED, len(answer.token_ids)):
        raise WeightSyncError(
            f"the engine's answer to the probe has {len(said)} tokens, of which {compared} can be compared"
            f" with the trainer's at version {version}; at least {min(LEAST_AGREED, len(answer.token_ids))}"
            " are needed to prove its weights"
        )
    full = (said, completion.log_probs) if compared < len(said) else (None, None)
    return ProbeReply(
        version,
        said[:compared],
        completion.log_probs[:compared],
        expected,
        full_token_ids=full[0],
        full_log_probs=full[1],
    )


def count_agreed(expected: IntArray, said: IntArray) -> int:
    """How many first tokens are the same."""
    count = min(len(expected), len(said))
    differ = np.flatnonzero(expected[:count] != said[:count])
    return int(differ[0]) if len(differ) else count


def judge_by_stored(stored: ProbeReply, *, tolerance_of: Callable[[str], float]) -> Judge:
    """A Judge for weights that the trainer has no more: by an answer that was verified when it had them."""

    async def judge(engine: InferenceEngine, completion: Completion) -> ProbeReply:
        await trio.lowlevel.checkpoint()
        return compare_with_stored(stored, completion, tolerance=tolerance_of(engine.features.name))

    return judge


def compare_with_stored(stored: ProbeReply, completion: Completion, *, tolerance: float) -> ProbeReply:
    """The tokens of the answer on which it and the stored one agree, with the trainer's log-probs of that
    time, and the answer as a whole.

    Where two choices are nearly tied, equal weights may take the other; what follows is another text. Raises
    WeightSyncError if they part where there was no tie, or before LEAST_AGREED tokens: so few prove nothing.
    """
    expected, said = stored.token_ids, completion.token_ids
    agreed = count_agreed(expected, said)
    if agreed < min(len(expected), len(said)):
        gap = abs(float(completion.log_probs[agreed]) - float(stored.trainer_log_probs[agreed]))
        if not gap <= NEAR_TIE * tolerance:
            raise WeightSyncError(
                f"the engine answers the probe with token {int(said[agreed])} at position {agreed}, where"
                f" version {stored.version} was verified with token {int(expected[agreed])} ({gap:.3g} nats"
                " apart): it does not serve the weights that were sent"
            )
    if agreed < min(LEAST_AGREED, len(expected)):
        raise WeightSyncError(
            f"the engine's answer to the probe has {len(said)} tokens, of which {agreed} are those with which"
            f" version {stored.version} was verified, before they part; at least"
            f" {min(LEAST_AGREED, len(expected))} are needed to prove its weights"
        )
    return ProbeReply(
        stored.version,
        said[:agreed],
        completion.log_probs[:agreed],
        stored.trainer_log_probs[:agreed],
        full_token_ids=said,
        full_log_probs=completion.log_probs,
    )
