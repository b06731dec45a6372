"""The response is the answer, as text."""

from rollouts.errors import DataError
from rollouts.types import JSONValue, RewardResult, Sample


def exact_match(sample: Sample, *, key: str = "answer", ignore_case: bool = False) -> RewardResult:
    """1 if the response equals metadata[key], a text or a list of accepted ones, without white space around
    either; otherwise 0.

    Part `exact` is the reward itself. Raises DataError if the sample has no such key.
    """
    response = fold(sample.response, ignore_case)
    exact = float(any(response == fold(answer, ignore_case) for answer in read_answers(sample, key)))
    return RewardResult(exact, {"exact": exact})


def read_answer(sample: Sample, key: str) -> JSONValue:
    """metadata[key]. Raises DataError naming the sample and what it has instead, so that the sample fails and
    does not count as wrong.
    """
    answer = sample.metadata.get(key)
    if answer is None:
        raise DataError(
            f"sample {sample.id} has no metadata[{key!r}] to compare with; its row has"
            f" {', '.join(sample.metadata) or 'no fields'}"
        )
    return answer


def read_answers(sample: Sample, key: str) -> list[str]:
    """metadata[key] as a list of accepted answers, at least one. Raises DataError."""
    answers = read_answer(sample, key)
    accepted = [str(answer) for answer in (answers if isinstance(answers, list | tuple) else [answers])]
    if not accepted:
        raise DataError(
            f"sample {sample.id}: metadata[{key!r}] is an empty list; it must hold at least one accepted"
            " answer"
        )
    return accepted


def fold(text: str, ignore_case: bool) -> str:
    """The text without white space around it."""
    return text.strip().casefold() if ignore_case else text.strip()
