r"""The response chooses one of several lettered answers.

The first of these rules that finds a letter decides, and in each the last place counts:
1. the last \boxed{…}, if a letter is all that it holds, with \text or brackets around it or without;
2. a sentence: "answer is B", "Answer: (b)", "**Answer:** B", "correct option is B", "I choose B", "option B
   is correct", "B is the right answer";
3. lines that hold only a letter, "B", "B.", "(B)", "**B**", or begin with one and a point, bracket or colon,
   "B. Paris": all such lines must name the same letter, for a list of the choices is not a choice.
Letters may be small in rules 1 and 2 where nothing but punctuation follows ("answer: b", not "the answer is a
pity"). Ambiguous are a sentence that goes on with another letter ("A or B", "A and C", "A/B") and lines of
different letters: no letter is chosen.
"""

import re

from rollouts.errors import DataError
from rollouts.rewards.exact import read_answer
from rollouts.types import RewardResult, Sample

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DEFAULT_CHOICES = 10  # A to J, as many as the largest common benchmark has
OPEN = r"[\s*_`\"'(\[{$]*(?:\\(?:text|textbf|mathrm|mathbf)\{)?[\s*(]*"
CLOSE = r"[*_`\"')\]}$]*"
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
BOXED_LETTER = re.compile(OPEN + r"([A-Za-z])[\s.:*)]*[}\s)]*")
# after the letter: the end, punctuation, or a word that goes on with the sentence and not with a noun ("A
# car")
AFTER = (
    CLOSE
    + r"(?=\s*$|\s*\n|\s*[.,:;!?)\]/&<]|\s+(?i:because|since|as|so|or|and|with|which|not|is)\b|\s+[-–—(])"
)
SMALL_AFTER = CLOSE + r"(?=\s*$|\s*\n|\s*[.,:;!?)\]<])"
SENTENCE_STARTS = (
    (
        r"(?i:\banswer\b[\s*_]*(?:is|was|would be|must be|should"
        r" be|:|=)[\s*_:]*(?:clearly\s+)?(?:(?:the\s+)?(?:option|choice|letter)\s+)?)"
    ),
    r"(?i:\b(?:correct|right|best)\s+(?:option|choice|letter)\s*(?:is|:)\s*:?)",
    r"(?i:\bi\s+(?:would\s+)?(?:choose|pick|select)\s+(?:(?:the\s+)?(?:option|choice|letter|answer)\s+)?)",
)
SENTENCES = [
    re.compile(start + OPEN + r"(?:([A-Z])" + AFTER + "|([a-z])" + SMALL_AFTER + ")")
    for start in SENTENCE_STARTS
] + [re.compile(r"(?<![A-Za-z0-9])[*(]*([A-Z])[*)]*\s+(?i:is\s+(?:the\s+)?(?:correct|right|best)\b)")]
ANOTHER_LETTER = re.compile(
    r"[*_)\]}]*\s*(?:,?\s*(?i:or|and)\b|/|&|,)\s*(?i:option\s+|choice\s+)?[*_(\[]*([A-Z])(?![A-Za-z'])"
)
LINE = re.compile(
    r"^[ \t>#-]*[*_`(\[]*([A-Z])(?:[*_`)\].:]+[ \t]*$|[ \t]*$|[*_`]*[.):\]][*_`]*[ \t]+\S)", re.MULTILINE
)


def multiple_choice_match(
    sample: Sample, *, key: str = "answer", choices_key: str = "choices"
) -> RewardResult:
    """1 if the letter that the response chooses is metadata[key], otherwise 0; what chooses is said at the
    top of this module.

    metadata[key] is a letter, or a whole number counting the choices from 0. metadata[choices_key], where it
    is there, is the list of choices: only so many letters count; without it A to J. Parts: `choice`, the
    reward itself, and `chosen`, 1 if exactly one letter was chosen; otherwise the note says why none was.
    Raises DataError if the answer is missing or none of the letters.
    """
    where, choices = f"sample {sample.id}: metadata", sample.metadata.get(choices_key)
    if choices is None:
        choices = LETTERS[:DEFAULT_CHOICES]
    elif not isinstance(choices, list | tuple) or not 2 <= len(choices) <= len(LETTERS):
        raise DataError(
            f"{where}[{choices_key!r}] is {str(choices)[:80]!r}; it must be a list of 2 to {len(LETTERS)}"
            " choices"
        )
    letters, answer = LETTERS[: len(choices)], read_answer(sample, key)
    wanted = answer.strip().strip("().").upper() if isinstance(answer, str) else ""
    if type(answer) is int and 0 <= answer < len(letters):
        wanted = letters[answer]
    elif len(wanted) != 1 or wanted not in letters:
        rule = f"it must be a letter from A to {letters[-1]} or a number from 0 to {len(letters) - 1}"
        raise DataError(f"{where}[{key!r}] is {str(answer)[:80]!r}; {rule}")
    letter, why = find_choice(sample.response, letters)
    right = float(letter == wanted)
    return RewardResult(right, {"choice": right, "chosen": float(letter is not None)}, why)


def find_choice(text: str, letters: str = LETTERS[:DEFAULT_CHOICES]) -> tuple[str | None, str | None]:
    """The letter that a text chooses by the rules of this module, a capital; or None, and why."""
    boxed = BOXED_LETTER.fullmatch(["", *BOXED.findall(text)][-1])
    if boxed and boxed[1].upper() in letters:
        return boxed[1].upper(), None
    # where a sentence names its letter, and where it ends
    named = [
        (match.start(match.lastindex or 0), match[match.lastindex or 0].upper(), match.end())
        for pattern in SENTENCES
        for match in pattern.finditer(text)
    ]
    if named := [one for one in named if one[1] in letters]:
        _, letter, end = max(named)
        other = ANOTHER_LETTER.match(text, end)
        if other and other[1] in letters and other[1] != letter:
            return None, f"ambiguous: it chooses {letter} and {other[1]} at once"
        return letter, None
    lines = sorted({letter for letter in LINE.findall(text) if letter in letters})
    if len(lines) > 1:
        return None, f"ambiguous: lines begin with {', '.join(lines)}"
    return (lines[0], None) if lines else (None, "no choice was found")
