"""How different responses are from each other. Tokens may be ids or words. Plain Python."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain

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
    counts = Counter(chain.from_iterable(_n_grams(response, n).elements() for response in responses))
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
    return _compute_bleus([hypothesis, *references], 1, max_n, smoothing)[0]


def compute_self_bleu(
    responses: Sequence[Sequence[Hashable]], *, max_n: int = 4, smoothing: float = SMOOTHING
) -> float:
    """Mean over responses of `compute_bleu` against all others: 1 if all are equal, low if they share few
    n-grams. Paper: 1802.01886.

    Time grows with the number of different n-grams, not with the square of the number of responses.
    Raises ValueError for fewer than two responses, which have nothing to be compared with.
    """
    _check(len(responses), 2, "responses", max_n, smoothing)
    return math.fsum(_compute_bleus(responses, len(responses), max_n, smoothing)) / len(responses)


def _check(count: int, least: int, what: str, max_n: int, smoothing: float) -> None:
    if count < least or max_n < 1 or not smoothing >= 0:
        raise ValueError(
            f"{count} {what}, max_n={max_n}, smoothing={smoothing}; the rule is: at least {least}, at least"
            " 1, not negative"
        )


def _n_grams(tokens: Sequence[Hashable], n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def _compute_bleus(
    texts: Sequence[Sequence[Hashable]], count: int, max_n: int, smoothing: float
) -> list[float]:
    """The BLEU of each of the first `count` texts against all others."""
    logs: list[list[float]] = [[] for _ in range(count)]
    for n in range(1, max_n + 1):
        grams = [_n_grams(text, n) for text in texts]
        highest: dict[tuple[Hashable, ...], tuple[int, int]] = {}  # the two highest counts in one text
        for gram, times in chain.from_iterable(found.items() for found in grams):
            first, second = highest.get(gram, (0, 0))
            highest[gram] = max(first, times), max(second, min(first, times))
        for found, terms in zip(grams[:count], logs, strict=True):
            # the highest count in another text is the second where this text has the first
            tops = ((times, highest[gram]) for gram, times in found.items())
            matches = sum(min(times, top[times == top[0]]) for times, top in tops) or smoothing
            if found or n == 1:
                terms.append(math.log(matches / found.total()) if matches and found else -math.inf)
    scores: list[float] = []
    for index, terms in enumerate(logs):
        length = len(texts[index])
        others = [len(text) for place, text in enumerate(texts) if place != index]
        closest = min(others, key=lambda other: (abs(other - length), other))
        brevity = min(0.0, 1.0 - closest / length) if length else 0.0
        scores.append(math.exp(brevity + math.fsum(terms) / len(terms)))
    return scores
