"""Malformed rows: named by file, line and field, skipped up to a share, and never shifting the order of the
others.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.config.tables import DataSourceConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.data.datasets import load_sources, read_source
from rollouts.data.rows import MAX_ROW_BYTES
from rollouts.errors import DataError
from tests.support.text_tables import cases, read_cells

FILES = Path(__file__).parents[1] / "data/malformed"
FOUND = dict(  # by file: how the sentence begins, mostly with the field
    read_cells("""
not_json | not JSON: Expecting property name enclosed in double quotes at column 2
not_utf8 | not UTF-8 at byte 15 of the line
not_an_object | the row is of type list; it must be an object with `prompt` or `messages`
null_row | the row is null; it must be an object
nan | not JSON: NaN is not a JSON number
cut_off | not JSON: Unterminated string starting at at column 12; the file ends in the middle of this line
missing_prompt | neither `prompt` nor `messages`; the row has promt; did you mean prompt?
null_prompt | prompt is null; it must be text or chat messages
number_prompt | prompt is of type int; it must be a list of chat messages
empty_prompt | prompt is empty
empty_messages | messages is an empty list
message_is_text | messages[1] is of type str
content_is_number | messages[0].content is of type int; it must be text
content_part_without_text | messages[0].content[0] has no text
role_is_list | prompt[0].role is of type list; it must be text
role_is_empty | prompt[0].role is empty
tool_call_without_name | messages[1].tool_calls[0].function.name is
tools_are_a_number | tools is of type int
infinity_by_overflow | score is inf; JSON has no such number
double_key | not JSON: the key 'x' stands twice in one object
half_a_surrogate | prompt has half a surrogate pair at character 2
too_deep | x has more than
""")
)


def jsonl(path, **changes):
    return DataSourceConfig(kind="jsonl", path=str(path), **changes)


@cases("name", FOUND)
def test_a_malformed_row_is_named_by_file_line_and_field(name):
    path = FILES / f"{name}.jsonl"
    found = read_source(jsonl(path), name="rl.data")
    (bad,) = found.bad
    line = 3 if name == "cut_off" else 2
    assert bad.startswith(f"{path}:{line}: {FOUND[name]}")
    wanted = ["good 1", "good 3"]
    wanted.insert(line - 1, None)
    assert [row and row["prompt"] for row in found.rows] == wanted


def test_a_row_longer_than_the_limit_is_malformed_and_the_next_line_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    frame = len('{"prompt": ""}')
    fits, too_long = (f'{{"prompt": "{"x" * (MAX_ROW_BYTES - frame + extra)}"}}' for extra in (0, 1))
    path.write_text(f"{fits}\n{too_long}\n{'x' * 3 * MAX_ROW_BYTES}\n" + '{"prompt": "after"}\n' + too_long)
    found = read_source(jsonl(path), name="rl.data")
    rule = f"the line has more than {MAX_ROW_BYTES} bytes; shorten it or leave it out"
    assert found.bad == tuple(f"{path}:{line}: {rule}" for line in (2, 3, 5))
    assert found.rows[3] == {"prompt": "after"}


# --- how many may be malformed ------------------------------------------------------------------------------


def test_more_than_the_share_stops_with_the_counts_and_the_first_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(10 * '{"prompt": "good"}\n' + 7 * "{\n" + 83 * '{"prompt": "good"}\n')
    with pytest.raises(DataError) as caught:
        load_sources([jsonl(path, max_bad_fraction=0.06)], name="rl.data")
    first, *lines, last = str(caught.value).split("\n")
    said = "rl.data: 7 of 100 rows are malformed, more than max_bad_fraction=0.06 allows; mend"
    assert first.startswith(said)
    assert [line.split(": not JSON")[0] for line in lines] == [f"  {path}:{line}" for line in range(11, 16)]
    assert last == "  and 2 more"
    load_sources([jsonl(path, max_bad_fraction=0.07)], name="rl.data")


# --- the order of the others --------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=2, max_size=12).filter(any), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_draw_that_meets_a_hole_goes_on_to_the_next(is_row, seed):
    rows = [{"prompt": f"question {index}"} for index in range(len(is_row))]
    whole = [prompt.key for prompt in DataBuffer(rows, seed=seed).get_prompts(3 * len(rows))]
    expected = [(epoch, prompt_id) for epoch, prompt_id in whole if is_row[int(prompt_id[4:])]]
    buffer = DataBuffer([row if there else None for row, there in zip(rows, is_row, strict=True)], seed=seed)
    assert [prompt.key for prompt in buffer.get_prompts(len(expected))] == expected
    assert buffer.statistics()["drawn"] == len(expected)
