"""The response is close to the answer, as text."""

import re
import string
from collections import Counter

from rollouts.rewards.check import import_extra
from rollouts.rewards.exact import fold, read_answers
from rollouts.types import RewardResult, Sample

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def fuzzy_match(sample: Sample, *, key: str = "answer", ignore_case: bool = False) -> RewardResult:
    """How alike the response and metadata[key] are, 0 to 1; of several accepted answers the nearest. White
    space around is left out.

    1 - d / (len(response) + len(answer)), with d the number of characters to insert or delete; 1 for two
    empty texts. This is the ratio of rapidfuzz over 100. Part `similarity` is the reward itself. Raises
    DataError if the sample has no such key or an empty list of answers, ConfigError naming the extra if
    rapidfuzz is not installed.
    """
    indel = import_extra("rapidfuzz.distance", "fuzzy_match").Indel
    response = fold(sample.response, ignore_case)
    similarity = max(
        indel.normalized_similarity(response, fold(answer, ignore_case))
        for answer in read_answers(sample, key)
    )
    return RewardResult(similarity, {"similarity": similarity})


def f1_match(sample: Sample, *, key: str = "answer") -> RewardResult:
    """The F1 score of the response's words against those of metadata[key], 0 to 1; of several accepted
    answers the best.

    2·p·r / (p + r), p and r the shared words (with their number) over those of the response and of the
    answer. Lower case, punctuation and the articles a, an, the left out first. If either has no words left it
    is 1 if both have none, otherwise 0. Part `f1` is the reward itself. Paper: Rajpurkar et al. 2016, "SQuAD:
    100,000+ Questions for Machine Comprehension of Text", arXiv:1606.05250, section 6.1. Raises DataError if
    the sample has no such key or an empty list of answers.
    """
    words = normalise_words(sample.response)

    def compare(answer: str) -> float:
        wanted = normalise_words(answer)
        if not words or not wanted:
            return float(words == wanted)
        return 2 * (Counter(words) & Counter(wanted)).total() / (len(words) + len(wanted))

    f1 = max(map(compare, read_answers(sample, key)))
    return RewardResult(f1, {"f1": f1})


def normalise_words(text: str) -> list[str]:
    """The words of a text in lower case, without ASCII punctuation and English articles."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()
