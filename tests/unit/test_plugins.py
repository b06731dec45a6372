"""Functions that the config names: imported once, checked, and named with the part that failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollouts.config.plugins import Role, load_function
from rollouts.errors import PlugInError


@pytest.fixture
def write(tmp_path: Path):
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def message_of(name: str, base_dir: Path, role: Role = "reward") -> str:
    with pytest.raises(PlugInError) as caught:
        load_function(name, role=role, base_dir=base_dir)
    return str(caught.value)


def test_a_function_of_an_installed_module_is_found(tmp_path):
    import math

    assert load_function("math:sqrt", role="reward", base_dir=tmp_path) is math.sqrt
    assert load_function("os.path:join", role="filter", base_dir=tmp_path)("a", "b") == "a/b"


def test_a_function_of_a_file_is_found_relative_to_the_base_directory(write, tmp_path):
    write("tasks/r.py", "def score(sample):\n    return 0.5\n")
    assert load_function("tasks/r.py:score", role="reward", base_dir=tmp_path)("x") == 0.5


def test_an_absolute_file_needs_no_base_directory(write):
    path = write("r.py", "def score(sample):\n    return 2\n")
    assert load_function(f"{path}:score", role="reward", base_dir=Path("/nowhere"))("x") == 2


def test_the_same_file_is_executed_once_even_under_two_names(write, tmp_path):
    write(
        "r.py",
        "calls = []\ncalls.append(1)\ndef score(sample):\n    return len(calls)\ndef other(sample):\n   "
        " return calls\n",
    )
    (tmp_path / "tasks").mkdir()
    score = load_function("r.py:score", role="reward", base_dir=tmp_path)
    other = load_function("../r.py:other", role="reward", base_dir=tmp_path / "tasks")
    assert load_function("r.py:score", role="reward", base_dir=tmp_path) is score
    assert (score("x"), other("x")) == (1, [1])


def test_files_of_the_same_name_in_two_directories_stay_apart(write, tmp_path):
    write("a/r.py", "def score(sample):\n    return 'a'\n")
    write("b/r.py", "def score(sample):\n    return 'b'\n")
    found = [
        load_function(f"{name}/r.py:score", role="reward", base_dir=tmp_path)("x") for name in ("a", "b")
    ]
    assert found == ["a", "b"]


def test_a_file_may_define_dataclasses(write, tmp_path):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass R:\n    x:"
        " int\ndef f(s):\n    return R(1).x\n"
    )
    write("r.py", text)
    assert load_function("r.py:f", role="reward", base_dir=tmp_path)("x") == 1


def test_loading_leaves_the_import_path_alone(write, tmp_path):
    write("r.py", "def score(sample):\n    return 1\n")
    before = list(sys.path)
    load_function("r.py:score", role="reward", base_dir=tmp_path)
    assert sys.path == before


@pytest.mark.parametrize("name", ["score", "r.py", ":score", "r.py:", ""])
def test_a_name_without_its_two_parts_is_refused(name, tmp_path):
    assert "write module:function or path/file.py:function" in message_of(name, tmp_path)


def test_a_missing_file_is_named_in_full(tmp_path):
    assert (
        message_of("no.py:score", tmp_path) == f"reward='no.py:score': there is no file {tmp_path / 'no.py'}"
    )


def test_the_nearest_file_is_suggested(write, tmp_path):
    write("rewards.py", "")
    assert message_of("reward.py:score", tmp_path).endswith(
        f"there is no file {tmp_path / 'reward.py'}; did you mean rewards.py?"
    )
    gone = tmp_path / "gone"
    assert message_of("gone/reward.py:score", tmp_path).endswith(
        f"there is no file {gone / 'reward.py'}, nor a directory {gone}"
    )


def test_a_built_in_function_is_known_by_its_name(tmp_path):
    known = {"check_even": len}
    assert load_function("check_even", role="filter", base_dir=tmp_path, built_in=known) is len
    with pytest.raises(PlugInError) as caught:
        load_function("check_evn", role="filter", base_dir=tmp_path, built_in=known)
    assert (
        str(caught.value)
        == "filter='check_evn' does not name a function (did you mean check_even?); write a name of"
        " check_even, or module:function or path/file.py:function"
    )


def test_a_path_that_is_no_python_file_is_told_apart_from_a_module(tmp_path):
    assert "looks like a file" in message_of("tasks/reward:score", tmp_path)


def test_a_missing_module_is_named(tmp_path):
    assert "there is no module no_such_package" in message_of("no_such_package.rewards:score", tmp_path)


def test_a_module_that_fails_to_import_another_is_not_called_missing(write, tmp_path, monkeypatch):
    write("importer_of_nothing.py", "import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        "importing importer_of_nothing failed: ModuleNotFoundError: No module named 'no_such_package'"
        in message_of("importer_of_nothing:score", tmp_path)
    )


@pytest.mark.parametrize("text", ["raise ValueError('boom')", "import sys; sys.exit(3)", "def f(:"])
@pytest.mark.parametrize("as_module", [False, True])
def test_a_file_that_raises_on_import_keeps_the_cause_and_may_be_corrected(
    write, tmp_path, monkeypatch, text, as_module
):
    path = write("raising_plugin.py", text)
    name = "raising_plugin:score" if as_module else "raising_plugin.py:score"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(
        PlugInError, match=r"importing .* failed: (ValueError: boom|SystemExit: 3|SyntaxError)"
    ) as caught:
        load_function(name, role="reward", base_dir=tmp_path)
    assert caught.value.__cause__ is not None
    path.write_text("def score(sample):\n    return 1\n", encoding="utf-8")
    assert load_function(name, role="reward", base_dir=tmp_path)("x") == 1
    sys.modules.pop("raising_plugin", None)


def test_a_file_that_imports_its_neighbour_is_told_why_that_fails(write, tmp_path):
    write("neighbour_helper.py", "x = 1\n")
    write("r.py", "import neighbour_helper\n")
    assert "neighbour_helper lies beside it but is not installed" in message_of("r.py:score", tmp_path)


def test_a_missing_function_gets_the_nearest_name(write, tmp_path):
    path = write("r.py", "def exact_answer(sample):\n    return 1\n")
    assert (
        message_of("r.py:exact_anser", tmp_path)
        == f"reward='r.py:exact_anser': {path} has no exact_anser; did you mean exact_answer?"
    )


def test_a_value_that_cannot_be_called_is_refused(write, tmp_path):
    write("r.py", "score = 3\n")
    assert (
        message_of("r.py:score", tmp_path)
        == "reward='r.py:score': score is of type int; it must be a function"
    )


@pytest.mark.parametrize(
    ("role", "parameters", "fits"),
    [
        ("reward", "sample", True),
        ("reward", "sample, scale=2", True),
        ("reward", "*samples", True),
        ("reward", "", False),
        ("reward", "sample, answer", False),
        ("reward", "*, sample", False),
        ("reward", "sample, *, scale", False),
        ("generate", "sample, engine, sampling", True),
        ("generate", "sample, engine", False),
        ("filter", "group", True),
        ("filter", "group, batch", False),
        ("loss", "anything, at, all, goes", True),
    ],
)
def test_a_function_must_take_what_its_role_passes(write, tmp_path, role, parameters, fits):
    write("r.py", f"async def f({parameters}):\n    pass\n")
    if fits:
        assert callable(load_function("r.py:f", role=role, base_dir=tmp_path))
    else:
        assert "is called with" in message_of("r.py:f", tmp_path, role)


def test_a_wrong_signature_is_shown(write, tmp_path):
    write("r.py", "def f(sample, engine): ...\n")
    assert (
        message_of("r.py:f", tmp_path, "generate")
        == "generate='r.py:f': it is called with 3 positional arguments (sample, engine, sampling) but takes"
        " (sample, engine): too many positional arguments"
    )


def test_a_method_of_an_object_in_the_file_is_found(write, tmp_path):
    write("r.py", "class Judge:\n    def score(self, sample):\n        return 7\njudge = Judge()\n")
    assert load_function("r.py:judge.score", role="reward", base_dir=tmp_path)("x") == 7


def test_a_function_without_a_signature_is_let_through(tmp_path):
    assert load_function("builtins:max", role="reward", base_dir=tmp_path) is max


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt",
        "class E(BaseException): pass\nraise E('x')",
        "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E",
    ],
)
def test_whatever_a_file_raises_on_import_names_the_setting_and_leaves_no_half_made_module(
    write, tmp_path, text
):
    path = write("r.py", text)
    before = set(sys.modules)
    assert f"reward='r.py:score': importing {path} failed: " in message_of("r.py:score", tmp_path)
    assert not [name for name in set(sys.modules) - before if name.startswith("rollouts_plugin_")]
    path.write_text("def score(sample):\n    return 1.0  # corrected\n")
    assert load_function("r.py:score", role="reward", base_dir=tmp_path)("x") == 1.0


def test_a_module_that_raises_when_it_is_looked_into_names_the_setting(write, tmp_path):
    write("r.py", "def __getattr__(name):\n    raise RuntimeError('no ' + name)\n")
    assert "looking up score in " in (message := message_of("r.py:score", tmp_path)) and message.endswith(
        "failed: RuntimeError: no score"
    )


@pytest.mark.parametrize("role", ["reward", "group_reward", "filter", "reward_combine", "curriculum"])
@pytest.mark.parametrize("start", ["def", "async def"])
def test_a_generator_function_is_refused_when_it_is_loaded(write, tmp_path, role: Role, start: str):
    write("r.py", f"{start} score(*arguments):\n    yield 1.0\n")
    assert message_of("r.py:score", tmp_path, role).endswith(
        "it is a generator function (it has a yield); it must return its answer"
    )


def test_a_combine_function_is_plain(write, tmp_path):
    write("r.py", "async def score(parts):\n    return 1.0\n")
    assert message_of("r.py:score", tmp_path, "reward_combine").endswith(
        "it is async; this one must be a plain function"
    )
