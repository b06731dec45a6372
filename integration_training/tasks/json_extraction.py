"""JSON extraction: a sentence about a person becomes an object with the fields that were asked for.

[rl.data]
kind = "python"
function = "integration_training.tasks.json_extraction:make_rows"
size = 2000
seed = 1

[rl.rollout]
reward = "integration_training.tasks.json_extraction:extracts_fields"
filters = ["integration_training.tasks.json_extraction:keep_mixed"]
"""

import json
import random

from integration_training.tasks import Row, keep_mixed, make_task
from rollouts.types import RewardResult, Sample

__all__ = ["keep_mixed"]  # the filter of this task

NAMES = """
Ada Boris Chen Dalia Emeka Freya Goran Hana Ivo Juno Kofi Lena Mila
Nuri Olga Pablo
""".split()  # noqa: SIM905
CITIES = "Lima Oslo Kyoto Accra Quito Riga Cairo Perth Turin Hanoi Porto Austin".split()  # noqa: SIM905
JOBS = "nurse baker pilot teacher welder farmer chemist tailor".split()  # noqa: SIM905
SENTENCES = (
    "{name} is a {age}-year-old {job} who lives in {city}.",
    "In {city} there is a {job} named {name}, aged {age}.",
    "At {age}, {name} moved to {city} to work as a {job}.",
    "The {job} {name} ({age}) was born in Rome but calls {city} home.",
)
FIELDS = ("name", "age", "job", "city")


def _make_row(draw: random.Random) -> Row:
    """A sentence with two to four fields to extract."""
    person = {
        "name": draw.choice(NAMES),
        "age": draw.randint(18, 90),
        "job": draw.choice(JOBS),
        "city": draw.choice(CITIES),
    }
    chosen = draw.sample(FIELDS, draw.randint(2, 4))
    asked = [field for field in FIELDS if field in chosen]
    sentence = draw.choice(SENTENCES).format(**person)
    prompt = f"{sentence}\nAnswer with a JSON object that has the keys {', '.join(asked)} and nothing else."
    return {"prompt": prompt, "answer": json.dumps({field: person[field] for field in asked}), "asked": asked}


make_rows = make_task("json", _make_row)


def extracts_fields(sample: Sample) -> RewardResult:
    """0 unless the response is one JSON object; then 0.2, and 0.8 times the share of fields that are right,
    extra keys counting as wrong.

    An age may be a number or its digits as text. Parts: `parsed` and `fields`.
    """
    wanted = json.loads(sample.metadata["answer"])
    try:
        found = json.loads(sample.response)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        return RewardResult(0.0, {"parsed": 0.0, "fields": 0.0}, note=f"not a JSON object: {error}")
    right = sum(_same(found[key], value) for key, value in wanted.items() if key in found)
    fields = right / len(wanted.keys() | found.keys())
    return RewardResult(0.2 + 0.8 * fields, {"parsed": 1.0, "fields": fields})


def _same(found: object, wanted: object) -> bool:
    return not isinstance(found, bool | float) and str(found).strip() == str(wanted)
