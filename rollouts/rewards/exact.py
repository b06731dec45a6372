"""The response is the answer, as text."""

from __future__ import annotations

from rollouts.errors import DataError
from rollouts.types import JSONValue, RewardResult, Sample


def exact_match(sample: Sample, *, key: str = "answer", ignore_case: bool = False) -> RewardResult:
    """1 if the response equals metadata[key], a text or a list of accepted ones, without white space around
    either; otherwise 0.

    Part `exact` is the reward itself. Raises DataError if the sample has no such key.
    """
    response = _normalise(sample.response, ignore_case)
    answers = read_answer(sample, key)
    accepted = answers if isinstance(answers, list | tuple) else [answers]
    exact = float(any(response == _normalise(str(answer), ignore_case) for answer in accepted))
    return RewardResult(exact, {"exact": exact})


def read_answer(sample: Sample, key: str) -> JSONValue:
    """metadata[key]. Raises DataError naming the sample and what it has instead, so that the sample fails and
    does not count as wrong.
    """
    if sample.metadata.get(key) is None:
        raise DataError(
            f"sample {sample.id} has no metadata[{key!r}] to compare with; its row has"
            f" {', '.join(sample.metadata) or 'no fields'}"
        )
    return sample.metadata[key]


def _normalise(text: str, ignore_case: bool) -> str:
    text = text.strip()
    return text.casefold() if ignore_case else text
