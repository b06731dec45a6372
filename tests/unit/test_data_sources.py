"""Every kind of source: files, Parquet, the package datasets, reasoning-gym's composite, Python functions;
and columns.
"""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rollouts.config.tables import DataSourceConfig
from rollouts.data.datasets import load_sources, read_source
from rollouts.errors import DataError

QUESTIONS = [
    {"question": {"text": f"q {index}"}, "answers": [str(index), "other"], "id": index} for index in range(5)
]
COLUMNS = {"prompt": "question.text", "answer": "answers.0"}


def message_of(**settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(**settings)
    return str(caught.value)


def load(**settings: Any) -> list[dict[str, Any]]:
    return load_sources([DataSourceConfig(**settings)], name="rl.data").samples


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def prompts(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["prompt"] for row in rows]


# --- files --------------------------------------------------------------------------------------------------


def test_a_pattern_means_its_files_in_the_order_of_their_names(tmp_path: Path):
    (tmp_path / "part-b.jsonl").write_bytes(lines([{"prompt": "3"}]))
    (tmp_path / "part-a.jsonl.gz").write_bytes(gzip.compress(lines([{"prompt": "1"}, {"prompt": "2"}])))
    (tmp_path / "part-dir.jsonl").mkdir()
    (tmp_path / "other.jsonl").write_bytes(lines([{"prompt": "no"}]))
    assert prompts(load(kind="jsonl", path=f"{tmp_path}/part-*")) == ["1", "2", "3"]
    assert prompts(load(kind="jsonl", path=f"{tmp_path}/**/part-*", size=2)) == ["1", "2"]


def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path):
    whole = gzip.compress(lines([{"prompt": f"{index} {index**9}"} for index in range(500)]))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "cannot be read: Compressed file ended before" in message_of(
        kind="jsonl", path=str(tmp_path / "cut.jsonl.gz")
    )
    (tmp_path / "plain.jsonl.gz").write_bytes(lines([{"prompt": "a"}]))
    assert "cannot be read: Not a gzipped file" in message_of(
        kind="jsonl", path=str(tmp_path / "plain.jsonl.gz")
    )


# --- columns ------------------------------------------------------------------------------------------------


def test_a_renamed_field_loses_its_old_name_and_an_empty_name_leaves_one_out(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(
        lines([{"question": "q", "prompt": "never asked", "a.b": 1, "junk": 2}])
    )
    columns = {"prompt": "question", "answer": "a.b", "junk": "", "absent": ""}
    assert load(kind="jsonl", path=str(tmp_path / "rows.jsonl"), columns=columns) == [
        {"prompt": "q", "answer": 1}
    ]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("qestion", "there is no qestion: the row has question, answers, id; did you mean question?"),
        ("question.txt", "there is no question.txt: question of the row has text; did you mean text?"),
        ("question.text.x", "there is no question.text.x: question.text of the row is 'q 0'"),
        ("answers.2", "there is no answers.2: answers of the row is ['0', 'other']"),
    ],
)
def test_a_missing_column_is_answered_with_what_there_is(tmp_path: Path, path: str, problem: str):
    (tmp_path / "rows.jsonl").write_bytes(lines(QUESTIONS[:1]))
    assert message_of(kind="jsonl", path=str(tmp_path / "rows.jsonl"), columns={"prompt": path}).endswith(
        f"rows.jsonl:1: {problem}"
    )


# --- Parquet ------------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_rows_are_the_rows_of_jsonl(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", QUESTIONS[:3])
    write_parquet(tmp_path / "b.parquet", QUESTIONS[3:])
    (tmp_path / "rows.jsonl").write_bytes(lines(QUESTIONS))
    by_line = load(kind="jsonl", path=str(tmp_path / "rows.jsonl"), columns=COLUMNS, system_prompt="be brief")
    assert (
        load(kind="parquet", path=f"{tmp_path}/*.parquet", columns=COLUMNS, system_prompt="be brief")
        == by_line
    )
    assert (
        load(kind="parquet", path=f"{tmp_path}/*.parquet", columns=COLUMNS, system_prompt="be brief", size=4)
        == by_line[:4]
    )


def test_parquet_values_become_json(tmp_path: Path):
    when = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    row = {
        "prompt": "p",
        "when": when,
        "day": when.date(),
        "price": decimal.Decimal("1.50"),
        "list": [1.5, None],
        "nested": {"flag": True},
    }
    (found,) = load(kind="parquet", path=str(write_parquet(tmp_path / "a.parquet", [row])))
    assert found == {**row, "when": "2026-01-02T03:04:05+00:00", "day": "2026-01-02", "price": "1.50"}
    json.dumps(found, allow_nan=False)


def write_odd_column(path: Path, values: list[Any], storage: str, kind: Any) -> str:
    """A file of rows 'p 0', 'p 1', … beside a column `odd` of these values seen as another type."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    plain = pa.array(values, getattr(pa, storage)())
    odd = pa.Array.from_buffers(kind(pa), len(plain), plain.buffers())
    parquet.write_table(
        pa.table({"prompt": [f"p {index}" for index in range(len(values))], "odd": odd}), path
    )
    return str(path)


ODD_VALUES = {
    "a_time_beyond_9999": ([0, 2**60, 0], "int64", lambda pa: pa.timestamp("us"), "timestamp[us]"),
    "text_that_is_not_utf8": ([b"a", b"caf\xe9", b"c"], "binary", lambda pa: pa.string(), "string"),
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_a_parquet_value_that_python_cannot_hold_spoils_its_own_row_alone(tmp_path: Path, name: str):
    values, storage, kind, shown = ODD_VALUES[name]
    path = write_odd_column(tmp_path / "a.parquet", values, storage, kind)
    found = read_source(DataSourceConfig(kind="parquet", path=path), name="rl.data")
    assert [row and row["prompt"] for row in found.rows] == ["p 0", None, "p 2"]
    (bad,) = found.bad
    assert (bad.number, bad.field) == (1, "odd")
    assert str(bad).startswith(f"{path} row 1: odd is of type {shown} and cannot be read (")
    assert str(bad).endswith('leave the field out with columns.odd = "", or convert it')
    assert prompts(load(kind="parquet", path=path, columns={"odd": ""})) == ["p 0", "p 1", "p 2"]


# --- the package datasets -----------------------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def test_what_save_to_disk_wrote_is_read_by_split(tmp_path: Path, hf: Any):
    whole = hf.DatasetDict(
        {"train": hf.Dataset.from_list(QUESTIONS[:3]), "test": hf.Dataset.from_list(QUESTIONS[3:])}
    )
    whole.save_to_disk(tmp_path / "saved")
    assert prompts(load(kind="hf", dataset=str(tmp_path / "saved"), columns=COLUMNS)) == ["q 0", "q 1", "q 2"]
    assert prompts(
        load(kind="hf", dataset=str(tmp_path / "saved"), columns=COLUMNS, split="test", size=1)
    ) == ["q 3"]
    assert "it has no split tests; it has train, test; did you mean test?" in message_of(
        kind="hf", dataset=str(tmp_path / "saved"), split="tests"
    )


def test_a_directory_of_data_files_is_read(tmp_path: Path, hf: Any):
    before = set(threading.enumerate())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines(QUESTIONS))
    (folder / "test.jsonl").write_bytes(lines(QUESTIONS[:1]))
    source = {"kind": "hf", "dataset": str(folder), "columns": COLUMNS, "size": 3}
    assert load(**source) == [
        {"prompt": f"q {index}", "answer": str(index), **QUESTIONS[index]} for index in range(3)
    ]
    assert "Bad split: tran" in message_of(**source, split="tran") or "Unknown split" in message_of(
        **source, split="tran"
    )
    assert "there is no qestion: the row has question, answers, id; did you mean question?" in message_of(
        **{**source, "columns": {"prompt": "qestion"}}
    )
    assert "size=9 but" in message_of(**{**source, "size": 9})
    assert set(threading.enumerate()) <= before  # no event loop and no progress monitor was left running


def test_one_local_file_is_read_and_others_kinds_are_refused(tmp_path: Path, hf: Any):
    (tmp_path / "rows.csv").write_text("prompt,answer\nq,1\n")
    assert load(kind="hf", dataset=str(tmp_path / "rows.csv")) == [{"prompt": "q", "answer": 1}]
    (tmp_path / "rows.pkl").write_bytes(b"")
    assert "is a file of an unknown kind" in message_of(kind="hf", dataset=str(tmp_path / "rows.pkl"))


def test_formats_that_may_unpickle_are_refused_unread(tmp_path: Path, hf: Any):
    import tarfile

    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "0.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with tarfile.open(folder / "train.tar", "w") as tar:
        tar.add(tmp_path / "0.pickle", "0.pickle")
    assert "is in a format that is not read (webdataset)" in message_of(kind="hf", dataset=str(folder))


# --- reasoning-gym's composite ------------------------------------------------------------------------------


def composite(*datasets: Any, **params: Any) -> dict[str, Any]:
    return {
        "kind": "reasoning_gym",
        "dataset": "composite",
        "size": 30,
        "seed": 3,
        "params": {"datasets": list(datasets), **params},
    }


def test_composite_mixes_datasets_by_weight_and_says_which_one_made_a_row():
    chain = {"name": "chain_sum", "weight": 3, "config": {"min_terms": 2, "max_terms": 2}}
    rows = load(**composite(chain, {"name": "leg_counting"}))
    made_by = [row["source_dataset"] for row in rows]
    assert set(made_by) == {"chain_sum", "leg_counting"}
    assert made_by.count("chain_sum") > made_by.count("leg_counting")
    assert all(row["metadata"]["num_terms"] == 2 for row in rows if row["source_dataset"] == "chain_sum")
    assert rows == load(**composite(chain, {"name": "leg_counting"}))


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        ({"name": "chain_sums"}, "'chain_sums' is not one of reasoning-gym's"),
        ({"weight": 1}, "None is not one of"),
        ({"name": "chain_sum", "wieght": 1}, "unexpected keyword argument 'wieght'"),
        ({"name": "chain_sum", "config": {"min_term": 1}}, "unexpected keyword argument 'min_term'"),
        ({"name": "chain_sum", "config": 3}, "rl.data.dataset='composite' with rl.data.params="),
        ("chain_sum", "rl.data.dataset='composite' with rl.data.params="),
    ],
)
def test_what_is_wrong_in_composite_is_named(dataset: Any, problem: str):
    assert problem in message_of(**composite(dataset))


# --- Python functions ---------------------------------------------------------------------------------------

MAKERS = """
import itertools

taken = []

def forever(size, seed, start=0):
    for number in itertools.count(start):
        taken.append(number)
        yield {"prompt": f"{seed}: {number}"}

def as_tuple(*, size, seed):
    return tuple({"prompt": str(index), "pair": (index, index)} for index in range(size + 5))

class Dataset:
    def __len__(self):
        return 3
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


@pytest.fixture
def makers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "makers.py"
    path.write_text(MAKERS)

    def settings(function: str, **changes: Any) -> dict[str, Any]:
        return {"kind": "python", "function": f"{path}:{function}", "size": 3, **changes}

    return settings


def test_a_function_may_give_a_generator_without_end_a_tuple_or_a_dataset(makers: Any):
    assert prompts(load(**makers("forever", seed=7, params={"start": 2}))) == ["7: 2", "7: 3", "7: 4"]
    assert load(**makers("as_tuple"))[1] == {"prompt": "1", "pair": [1, 1]}
    assert prompts(load(**makers("as_dataset"))) == ["0", "1", "2"]


def test_what_a_function_raises_is_named_and_kept(makers: Any):
    with pytest.raises(
        DataError, match=r"^rl\.data\.function='.*makers\.py:breaks' raised KeyError after 1 rows: 'boom'$"
    ) as caught:
        load(**makers("breaks"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "raised TypeError after 0 rows" in message_of(**makers("forever", params={"begin": 2}))
