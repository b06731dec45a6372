"""Rows of every kind of source: read, renamed, made JSON, refused by name, and kept apart from held-out
prompts.
"""

import datetime as dt
import decimal
import gzip
import json
import tarfile
import threading
from typing import Any

import pytest

from rollouts.config.tables import DataSourceConfig
from rollouts.data.datasets import (
    exclude_prompts,
    find_asked_prompts,
    load_sources,
    read_source,
    unique_prompts,
)
from rollouts.data.mixture import make_mixture
from rollouts.data.rows import row_to_conversation
from rollouts.errors import DataError
from tests.support.text_tables import cases, write_jsonl

QUESTIONS = [
    {"question": {"text": f"q {index}"}, "answers": [str(index), "other"], "id": index} for index in range(5)
]
COLUMNS = {"prompt": "question.text", "answer": "answers.0"}


def load(kind="jsonl", **settings):
    settings |= {key: str(settings[key]) for key in ("path", "dataset") if key in settings}
    return load_sources([DataSourceConfig(kind=kind, **settings)], name="rl.data").samples


def message_of(**settings):
    with pytest.raises(DataError) as caught:
        load(**settings)
    return str(caught.value)


def load_prompts(**settings):
    return [row["prompt"] for row in load(**settings)]


# --- files --------------------------------------------------------------------------------------------------


def test_a_pattern_means_its_files_in_the_order_of_their_names(tmp_path):
    write_jsonl(tmp_path / "part-b.jsonl", {"prompt": "3"})
    (tmp_path / "part-a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "1"}\n{"prompt": "2"}\n'))
    (tmp_path / "part-dir.jsonl").mkdir()
    assert load_prompts(path=write_jsonl(tmp_path / "[o]ther.jsonl", {"prompt": "no"})) == ["no"]
    assert load_prompts(path=tmp_path / "part-*") == ["1", "2", "3"]
    assert load_prompts(path=tmp_path / "**/part-*", size=2) == ["1", "2"]


def test_only_a_newline_ends_a_line_and_blank_lines_are_no_rows(tmp_path):
    separators = "one\u2028two\u0085three\x0cfour"
    line = json.dumps({"prompt": separators}, ensure_ascii=False).encode()
    path = write_jsonl(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + line + b"\n\n  \r\n", {"prompt": "b"})
    assert load_prompts(path=path) == [separators, "b"]


@cases("""
path           | problem
no.jsonl       | there is no such file (looked for
.              | cannot be read: Is a directory
cut.jsonl.gz   | cannot be read: Compressed file ended before
plain.jsonl.gz | cannot be read: Not a gzipped file
""")
def test_a_file_that_cannot_be_read_to_its_end_is_refused(tmp_path, monkeypatch, path, problem):
    monkeypatch.chdir(tmp_path)
    whole = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % index**9 for index in range(500)))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    write_jsonl(tmp_path / "plain.jsonl.gz", {"prompt": "a"})
    message = message_of(path=path)
    assert message.startswith(f"rl.data.path={path!r}") and problem in message


def test_a_system_prompt_goes_before_every_prompt_that_has_none(tmp_path):
    own, brief = ({"role": "system", "content": text} for text in ("own", "be brief"))
    asked, answered = turns("q"), turns("q", "a")
    rows = {"prompt": "q"}, {"prompt": [own, *asked]}, {"messages": answered}
    found = load(path=write_jsonl(tmp_path / "rows.jsonl", *rows), system_prompt="be brief")
    expected = {"prompt": [brief, *asked]}, {"prompt": [own, *asked]}, {"messages": [brief, *answered]}
    assert found == [*expected]


# --- columns ------------------------------------------------------------------------------------------------


def test_a_renamed_field_loses_its_old_name_and_an_empty_name_leaves_one_out(tmp_path):
    path = write_jsonl(
        tmp_path / "rows.jsonl", {"question": "q", "prompt": "never asked", "a.b": 1, "junk": 2}
    )
    columns = {"prompt": "question", "answer": "a.b", "junk": "", "absent": ""}
    assert load(path=path, columns=columns) == [{"prompt": "q", "answer": 1}]


@cases("""
column          | problem
qestion         | the row has question, answers, id; did you mean question?
question.txt    | question of the row has text; did you mean text?
question.text.x | question.text of the row is 'q 0'
answers.2       | answers of the row is ['0', 'other']
""")
def test_a_missing_column_is_answered_with_what_there_is(tmp_path, column, problem):
    message = message_of(path=write_jsonl(tmp_path / "rows.jsonl", QUESTIONS[0]), columns={"prompt": column})
    assert message.endswith(f"rows.jsonl:1: there is no {column}: {problem}")


# --- Parquet ------------------------------------------------------------------------------------------------


def write_parquet(path, table):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(table) if isinstance(table, list) else table, path)
    return path


def test_parquet_rows_are_the_rows_of_jsonl_and_their_values_become_json(tmp_path):
    write_parquet(tmp_path / "a.parquet", QUESTIONS[:3])
    write_parquet(tmp_path / "b.parquet", QUESTIONS[3:])
    settings = {"columns": COLUMNS, "system_prompt": "be brief"}
    by_line = load(path=write_jsonl(tmp_path / "rows.jsonl", *QUESTIONS), **settings)
    settings |= {"kind": "parquet", "path": tmp_path / "*.parquet"}
    assert load(**settings) == by_line
    assert load(**settings, size=4) == by_line[:4]
    when = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    row = {"prompt": "p", "when": when, "day": when.date(), "price": decimal.Decimal("1.50"), "list": [None]}
    (found,) = load(kind="parquet", path=write_parquet(tmp_path / "values.parquet", [row]))
    assert found == {**row, "when": "2026-01-02T03:04:05+00:00", "day": "2026-01-02", "price": "1.50"}


@cases("seen_as: timestamp[us] string")
def test_a_parquet_value_that_python_cannot_hold_spoils_its_own_row_alone(tmp_path, seen_as):
    pa = pytest.importorskip("pyarrow")
    if seen_as == "string":
        plain, seen = pa.array([b"a", b"caf\xe9", b"c"]), pa.string()
    else:
        plain, seen = pa.array([0, 2**60, 0]), pa.timestamp("us")
    table = {"prompt": ["p 0", "p 1", "p 2"], "odd": pa.Array.from_buffers(seen, 3, plain.buffers())}
    path = write_parquet(tmp_path / "a.parquet", pa.table(table))
    found = read_source(DataSourceConfig(kind="parquet", path=str(path)), name="rl.data")
    assert [row and row["prompt"] for row in found.rows] == ["p 0", None, "p 2"]
    (bad,) = found.bad
    assert bad.startswith(f"{path} row 1: odd is of type {seen_as} and cannot be read (")
    assert load_prompts(kind="parquet", path=path, columns={"odd": ""}) == ["p 0", "p 1", "p 2"]


# --- the package datasets -----------------------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def test_what_save_to_disk_wrote_is_read_by_split(tmp_path, hf):
    parts = {"train": QUESTIONS[:3], "test": QUESTIONS[3:]}
    saved = hf.DatasetDict({name: hf.Dataset.from_list(part) for name, part in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    source = {"kind": "hf", "dataset": tmp_path / "saved", "columns": COLUMNS}
    assert load_prompts(**source) == ["q 0", "q 1", "q 2"]
    assert load_prompts(**source, split="test", size=1) == ["q 3"]
    assert "it has no split tests; it has train, test; did you mean test?" in message_of(
        **source, split="tests"
    )


def test_a_directory_of_data_files_is_read(tmp_path, hf):
    before = set(threading.enumerate())
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder/train.jsonl", *QUESTIONS)
    write_jsonl(tmp_path / "folder/test.jsonl", QUESTIONS[0])
    source = {"kind": "hf", "dataset": tmp_path / "folder", "columns": COLUMNS, "size": 3}
    assert load_prompts(**source) == ["q 0", "q 1", "q 2"]
    assert "plit" in message_of(**source, split="tran")
    assert set(threading.enumerate()) <= before  # no event loop and no progress monitor was left running


def test_formats_that_may_unpickle_are_refused_unread(tmp_path, hf):
    (tmp_path / "rows.csv").write_text("prompt,answer\nq,1\n")
    assert load(kind="hf", dataset=tmp_path / "rows.csv") == [{"prompt": "q", "answer": 1}]
    pickle = write_jsonl(tmp_path / "rows.pkl", b"cos\nsystem\n(S'false'\ntR.")
    assert "is a file of an unknown kind" in message_of(kind="hf", dataset=pickle)
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "folder/train.tar", "w") as tar:
        tar.add(pickle, "0.pickle")
    assert "is in a format that is not read (webdataset)" in message_of(
        kind="hf", dataset=tmp_path / "folder"
    )


# --- rows that are made -------------------------------------------------------------------------------------


def gym(*datasets, **changes):
    composite = {"dataset": "composite", "seed": 3, "params": {"datasets": list(datasets)}}
    return {"kind": "reasoning_gym", "size": 30, **composite, **changes}


def test_reasoning_gym_rows_have_prompt_answer_and_plain_metadata():
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = load(**gym(dataset="chain_sum", size=3, params=params))
    assert len(rows) == 3 and json.loads(json.dumps(rows)) == rows  # no tuples left
    for row in rows:
        assert row["source_dataset"] == "chain_sum" and row["metadata"]["num_terms"] == 2
        assert row["metadata"]["expression"] in row["prompt"] and int(row["answer"]) in range(-9, 19)


@cases("""
dataset                                              | problem
{"name": "chain_sums"}                               | Dataset 'chain_sums' not registered
{"weight": 1}                                        | missing 1 required positional argument: 'name'
{"name": "chain_sum", "wieght": 1}                   | unexpected keyword argument 'wieght'
{"name": "chain_sum", "config": {"min_term": 1}}     | unexpected keyword argument 'min_term'
{"name": "chain_sum", "config": 3}                   | cannot be read
"chain_sum"                                          | cannot be read
""")
def test_what_is_wrong_in_composite_is_named(dataset: Any, problem):
    message = message_of(**gym(dataset))
    assert message.startswith("rl.data.dataset='composite' with rl.data.params=") and problem in message


MAKERS = """
import itertools

def forever(size, seed, start=0):
    for number in itertools.count(start):
        yield {"prompt": f"{seed}: {number}"}

class Dataset:
    def __getitem__(self, index):
        if index == 3:
            raise IndexError
        return {"prompt": str(index)}

def as_dataset(size, seed):
    return Dataset()

def breaks(size, seed):
    yield {"prompt": "a"}
    raise KeyError("boom")
"""


def test_a_function_may_give_a_generator_without_end_or_a_dataset(tmp_path):
    (tmp_path / "makers.py").write_text(MAKERS)

    def make(function, **changes):
        return {"kind": "python", "function": f"{tmp_path}/makers.py:{function}", "size": 3, **changes}

    assert load_prompts(**make("forever", seed=7, params={"start": 2})) == ["7: 2", "7: 3", "7: 4"]
    assert load_prompts(**make("as_dataset")) == ["0", "1", "2"]
    with pytest.raises(
        DataError, match=r"makers\.py:breaks' raised KeyError after 1 rows: 'boom'$"
    ) as caught:
        load(**make("breaks"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "raised TypeError after 0 rows" in message_of(**make("forever", params={"begin": 2}))


# --- what rows are used for ---------------------------------------------------------------------------------


@cases("""
row                                              | problem
{"messages": [{"role": "user", "content": "q"}]} | messages has no assistant turn
{"prompt": "q"}                                  | no `messages` and no `answer`
{"prompt": "q", "answer": 7}                     | answer is 7; SFT trains on it, so it must be text
{"prompt": "q", "answer": ""}                    | answer is ''
""")
def test_an_sft_row_without_something_to_train_on_is_refused(row: Any, problem):
    with pytest.raises(DataError, match=f"^{problem}"):
        row_to_conversation(row)


def turns(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_the_same_question_has_one_key_however_it_is_written():
    forms = [
        {"prompt": "What is 3+4?"},
        {"prompt": "  what is\n3+4? "},
        {"prompt": [{"role": "system", "content": "be brief"}, *turns("What is 3+4?")]},
        {"messages": turns("What is 3+4?", "7")},
        {"prompt": "What is \uff13+4?"},  # a full-width three
    ]
    assert len({next(find_asked_prompts(form)) for form in forms}) == 1
    assert unique_prompts([{"prompt": "What is 34?"}, *forms]) == [{"prompt": "What is 34?"}, forms[0]]


@cases("""
held_out | kept         | …
a        | [1, 3]
c 1 d    | [0, 1, 2]    | inside a longer conversation
d        | [0, 1, 2, 3] | asked alone, it is another question
""")
def test_rows_that_train_on_a_held_out_prompt_leave(held_out, kept: Any):
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": "b"},
        {"messages": turns("A", "1")},
        {"messages": turns("c", "1", "d", "2")},
    ]
    others = [{"prompt": turns(*held_out.split())}]
    found, removed = exclude_prompts(make_mixture(rows), others, name="sft.data")
    assert (found.samples, removed) == ([rows[at] for at in kept], 4 - len(kept))
