"""DataBuffer: a seeded endless stream, prompts given back, exact resume."""

from typing import Any

import pytest

from rollouts.data.data_buffer import DataBuffer, PromptRow
from rollouts.errors import DataError
from tests.support.text_tables import cases


def make_rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {index}", "answer": str(index)} for index in range(count)]


def test_the_order_is_the_one_that_older_runs_saw():
    # written down once: a change would make old checkpoints continue in another order
    order = [int(prompt.prompt_id[4:]) for prompt in DataBuffer(make_rows(8), seed=7).get_prompts(8)]
    assert order == [0, 1, 3, 5, 7, 2, 4, 6]


def test_the_state_of_other_rows_is_refused_and_changes_nothing():
    rows = make_rows(3)
    saved = DataBuffer(rows, seed=0)
    saved.get_prompts(1)
    reordered = [{"answer": row["answer"], "prompt": row["prompt"]} for row in rows]  # of keys alone
    DataBuffer(reordered, seed=5).load_state_dict(saved.state_dict())
    for others in (rows[::-1], [*rows[:2], rows[2] | {"answer": "other"}], [*rows, {"prompt": "more"}]):
        other = DataBuffer(others, seed=0)
        said = rf"{saved.fingerprint} \(3 rows\), this one is {other.fingerprint} \({len(others)} rows\)"
        with pytest.raises(DataError, match=said):
            other.load_state_dict(saved.state_dict())
        assert other.statistics()["drawn"] == 0


def test_only_prompts_that_are_out_can_be_returned():
    buffer = DataBuffer(make_rows(3), seed=0)
    drawn = buffer.get_prompts(4)
    with pytest.raises(DataError, match="is not out"):
        buffer.return_prompts([drawn[0], drawn[0]])
    buffer.return_prompts([drawn[0]])
    undrawn = next(f"row-{index}" for index in range(3) if f"row-{index}" != drawn[3].prompt_id)
    others = PromptRow(undrawn, 1, {}), PromptRow("row-0", 2, {}), PromptRow("row-0", -1, {})
    for prompt in (drawn[0], *others):
        with pytest.raises(DataError, match="is not out"):
            buffer.return_prompts([prompt])
    assert buffer.statistics()["returned"] == 1


@cases("""
rows                                               | message
[]                                                 | has no rows
[{"prompt": "a"}, {"prompt": " "}]                 | row 1: prompt is empty
[{"prompt": "a"}, {"question": "b"}]               | row 1: neither `prompt` nor `messages`
[{"messages": [{"role": "user", "content": "a"}]}] | row 0: no `prompt`
[{"prompt": "a", "score": NaN}]                    | row 0: score is nan
""")
def test_rows_that_cannot_be_asked_are_refused_at_the_start(rows: Any, message):
    with pytest.raises(DataError, match=message):
        DataBuffer(rows, seed=0)
