"""How different responses are from each other. Tokens may be ids or words. Plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

Gram = tuple[Hashable, ...]
# of a precision without a match; method 1 of Chen & Cherry 2014, which self-BLEU's authors use
SMOOTHING = 0.1


def compute_distinct_n(responses: Sequence[Sequence[Hashable]], n: int) -> float | None:
    """Different n-grams over all n-grams of all responses together, in (0, 1]; None if no response has n
    tokens.

    It falls with the amount of text: compare only samples of about the same size. Paper: 1510.03055. Raises
    ValueError unless n >= 1.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    counts = Counter(gram for response in responses for gram in _n_grams(response, n))
    return len(counts) / counts.total() if counts else None


def compute_bleu(
    hypothesis: Sequence[Hashable],
    references: Sequence[Sequence[Hashable]],
    *,
    max_n: int = 4,
    smoothing: float = SMOOTHING,
) -> float:
    """BLEU of one sentence, in [0, 1]: brevity penalty · geometric mean over n = 1 … max_n of the clipped
    n-gram precisions.

    A precision without a match counts `smoothing` matches (0: the result is then 0). Orders longer than the
    hypothesis are left out. The brevity penalty is against the reference whose length is closest, the shorter
    one of two. An empty hypothesis has 0. Papers: Papineni et al. 2002; Chen & Cherry 2014. Raises ValueError
    unless there is a reference, max_n >= 1 and smoothing >= 0.
    """
    _check(len(references), 1, "references", max_n, smoothing)
    tops = [_two_highest(references, n) for n in range(1, max_n + 1)]
    highest = [{gram: first for gram, (first, _, _) in top.items()} for top in tops]
    return _bleu(hypothesis, highest, [len(reference) for reference in references], smoothing)


def compute_self_bleu(
    responses: Sequence[Sequence[Hashable]], *, max_n: int = 4, smoothing: float = SMOOTHING
) -> float:
    """Mean over responses of `compute_bleu` against all others: 1 if all are equal, low if they share few
    n-grams. Paper: 1802.01886.

    Time grows with the number of different n-grams, not with the square of the number of responses.
    Raises ValueError for fewer than two responses, which have nothing to be compared with.
    """
    _check(len(responses), 2, "responses", max_n, smoothing)
    tops = [_two_highest(responses, n) for n in range(1, max_n + 1)]
    lengths = [len(response) for response in responses]
    scores: list[float] = []
    for index, response in enumerate(responses):
        others: list[dict[Gram, int]] = []
        for n, top in enumerate(tops, start=1):
            found = {gram: top[gram] for gram in _n_grams(response, n)}
            others.append(
                {gram: second if owner == index else first for gram, (first, owner, second) in found.items()}
            )
        scores.append(_bleu(response, others, lengths[:index] + lengths[index + 1 :], smoothing))
    return math.fsum(scores) / len(scores)


def _check(count: int, least: int, what: str, max_n: int, smoothing: float) -> None:
    if count < least or max_n < 1 or not smoothing >= 0:
        raise ValueError(
            f"{count} {what}, max_n={max_n}, smoothing={smoothing}; the rule is: at least {least}, at least"
            " 1, not negative"
        )


def _n_grams(tokens: Sequence[Hashable], n: int) -> list[Gram]:
    return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]


def _two_highest(texts: Sequence[Sequence[Hashable]], n: int) -> dict[Gram, tuple[int, int, int]]:
    """Per n-gram: its largest count in one text, which text has it, and the largest count in any other."""
    tops: dict[Gram, tuple[int, int, int]] = {}
    for owner, text in enumerate(texts):
        for gram, times in Counter(_n_grams(text, n)).items():
            first, holder, second = tops.get(gram, (0, -1, 0))
            tops[gram] = (times, owner, first) if times > first else (first, holder, max(second, times))
    return tops


def _bleu(
    hypothesis: Sequence[Hashable],
    highest: Sequence[dict[Gram, int]],
    reference_lengths: Sequence[int],
    smoothing: float,
) -> float:
    logs: list[float] = []
    for n, allowed in enumerate(highest, start=1):
        counts = Counter(_n_grams(hypothesis, n))
        matches = sum(min(times, allowed.get(gram, 0)) for gram, times in counts.items()) or smoothing
        if matches and counts:
            logs.append(math.log(matches / counts.total()))
        elif counts or n == 1:  # no match, or an empty hypothesis
            return 0.0
    closest = min(reference_lengths, key=lambda length: (abs(length - len(hypothesis)), length))
    brevity = min(0.0, 1.0 - closest / len(hypothesis))
    return math.exp(brevity + math.fsum(logs) / len(logs))
