"""How different responses are from each other. Tokens may be ids or words. Plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

SMOOTHING = (
    0.1  # of a precision without a match; method 1 of Chen & Cherry 2014, which self-BLEU's authors use
)


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
    if not references or max_n < 1 or not smoothing >= 0:
        raise ValueError(
            f"{len(references)} references, max_n={max_n}, smoothing={smoothing}; the rule is: at least 1, at"
            " least 1, not negative"
        )
    if not hypothesis:
        return 0.0
    counts = [[Counter(_n_grams(reference, n)) for reference in references] for n in range(1, max_n + 1)]
    highest = [_highest(of_order) for of_order in counts]
    return _bleu(hypothesis, highest, [len(reference) for reference in references], smoothing)


def compute_self_bleu(
    responses: Sequence[Sequence[Hashable]], *, max_n: int = 4, smoothing: float = SMOOTHING
) -> float:
    """Mean over responses of `compute_bleu` against all others: 1 if all are equal, low if they share few
    n-grams. Paper: 1802.01886.

    Time grows with the number of different n-grams, not with the square of the number of responses.
    Raises ValueError for fewer than two responses, which have nothing to be compared with.
    """
    if len(responses) < 2 or max_n < 1 or not smoothing >= 0:
        raise ValueError(
            f"{len(responses)} responses, max_n={max_n}, smoothing={smoothing}; the rule is: at least 2, at"
            " least 1, not negative"
        )
    grams = [[Counter(_n_grams(response, n)) for response in responses] for n in range(1, max_n + 1)]
    tops = [_two_highest(of_order) for of_order in grams]
    lengths = [len(response) for response in responses]
    scores: list[float] = []
    for index, response in enumerate(responses):
        if not response:
            scores.append(0.0)
            continue
        others = [
            {
                gram: second if owner == index else first
                for gram in grams[order][index]
                for first, owner, second in [tops[order][gram]]
            }
            for order in range(max_n)
        ]
        scores.append(_bleu(response, others, lengths[:index] + lengths[index + 1 :], smoothing))
    return math.fsum(scores) / len(scores)


def _n_grams(tokens: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]


def _highest(counts: list[Counter[tuple[Hashable, ...]]]) -> dict[tuple[Hashable, ...], int]:
    """The largest count of each n-gram in any one reference."""
    highest: Counter[tuple[Hashable, ...]] = Counter()
    for count in counts:
        highest |= count
    return highest


def _two_highest(
    counts: list[Counter[tuple[Hashable, ...]]],
) -> dict[tuple[Hashable, ...], tuple[int, int, int]]:
    """Per n-gram: its largest count, the response that has it, and the largest count in any other
    response.
    """
    tops: dict[tuple[Hashable, ...], tuple[int, int, int]] = {}
    for owner, count in enumerate(counts):
        for gram, times in count.items():
            first, holder, second = tops.get(gram, (0, -1, 0))
            tops[gram] = (times, owner, first) if times > first else (first, holder, max(second, times))
    return tops


def _bleu(
    hypothesis: Sequence[Hashable],
    highest: Sequence[dict[tuple[Hashable, ...], int]],
    reference_lengths: Sequence[int],
    smoothing: float,
) -> float:
    logs: list[float] = []
    for n, allowed in enumerate(highest, start=1):
        counts = Counter(_n_grams(hypothesis, n))
        if not counts:
            break
        matches: float = sum(min(times, allowed.get(gram, 0)) for gram, times in counts.items())
        if matches == 0:
            matches = smoothing
        if matches == 0:
            return 0.0
        logs.append(math.log(matches / counts.total()))
    closest = min(reference_lengths, key=lambda length: (abs(length - len(hypothesis)), length))
    brevity = min(0.0, 1.0 - closest / len(hypothesis))
    return math.exp(brevity + math.fsum(logs) / len(logs))
