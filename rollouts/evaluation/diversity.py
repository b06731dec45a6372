"""How different responses are from each other. Tokens may be ids or words. Plain Python."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain

# of a precision without a match; method 1 of Chen & Cherry 2014, which self-BLEU's authors use
SMOOTHING = 0.1
MAX_N = 4


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


def compute_self_bleu(responses: Sequence[Sequence[Hashable]]) -> float:
    """Mean over responses of the BLEU of each against all others: 1 if all are equal, low if they share few
    n-grams. Paper: 1802.01886.

    BLEU: brevity penalty · geometric mean over n = 1 … 4 of the clipped n-gram precisions. A precision
    without a match counts SMOOTHING matches; orders longer than the response are left out. The brevity
    penalty is against the response whose length is closest, the shorter one of two. An empty response has 0.
    Papers: Papineni et al. 2002; Chen & Cherry 2014.

    Time grows with the number of different n-grams, not with the square of the number of responses. Raises
    ValueError for fewer than two responses, which have nothing to be compared with.
    """
    if len(responses) < 2:
        raise ValueError(f"{len(responses)} responses; self-BLEU compares at least 2")
    logs = [[] for _ in responses]
    for n in range(1, MAX_N + 1):
        grams = [_n_grams(response, n) for response in responses]
        highest = {}  # the two highest counts in one response
        for gram, times in chain.from_iterable(found.items() for found in grams):
            first, second = highest.get(gram, (0, 0))
            highest[gram] = max(first, times), max(second, min(first, times))
        for found, terms in zip(grams, logs, strict=True):
            # the highest count in another response is the second where this one has the first
            tops = ((times, highest[gram]) for gram, times in found.items())
            matches = sum(min(times, top[times == top[0]]) for times, top in tops) or SMOOTHING
            if found or n == 1:
                terms.append(math.log(matches / found.total()) if found else -math.inf)
    scores = []
    lengths = sorted(map(len, responses))
    for response, terms in zip(responses, logs, strict=True):
        length = len(response)
        at = bisect_left(lengths, length)  # the first of its length: a second one comes next
        beside = lengths[max(at - 1, 0) : at] + lengths[at + 1 : at + 2]
        closest = min(beside, key=lambda other: abs(other - length))
        brevity = min(0.0, 1.0 - closest / length) if length else 0.0
        scores.append(math.exp(brevity + math.fsum(terms) / len(terms)))
    return math.fsum(scores) / len(scores)


def _n_grams(tokens: Sequence[Hashable], n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))
