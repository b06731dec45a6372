"""Functions that the config names: imported once, checked, and named with the part that failed."""

import math
import sys
from functools import partial
from pathlib import Path

import pytest

from rollouts.config.plugins import load_function
from rollouts.errors import PlugInError
from tests.support.text_tables import cases

SCORE = "def score(sample):\n    return 1\n"
load = partial(load_function, role="reward")


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "r.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def message_of(name: str, base_dir: Path, role: str = "reward") -> str:
    with pytest.raises(PlugInError) as caught:
        load(name, role=role, base_dir=base_dir)
    assert str(caught.value).startswith(f"{role}={name!r}")
    return str(caught.value)


def test_functions_of_modules_files_and_objects_are_found(write, tmp_path):
    path = write("class Judge:\n    def score(self, sample):\n        return 7\njudge = Judge()\n", "t/r.py")
    before = list(sys.path)
    for name, expected in (("t/r.py:judge.score", 7), (f"{path}:judge.score", 7), ("math:sqrt", 2)):
        assert load(name, base_dir=tmp_path)(4) == expected
    assert load("builtins:max", base_dir=tmp_path) is max  # C tells no signature
    known = {"check_even": math.sqrt}
    assert load_function("check_even", role="filter", base_dir=tmp_path, built_in=known) is math.sqrt
    assert sys.path == before


def test_the_same_file_is_executed_once_and_files_of_one_name_stay_apart(write, tmp_path):
    text = "from dataclasses import dataclass\n@dataclass\nclass R:\n    x: int\ncalls = [R(1)]\n"
    text += "def f(s):\n    calls.append(s)\n    return calls\ndef g(s):\n    return calls\n"
    for folder in ("a", "b"):
        write(text, f"{folder}/r.py")
    load("a/r.py:f", base_dir=tmp_path)("x")
    assert len(load("../a/r.py:g", base_dir=tmp_path / "a")("y")) == 2
    assert len(load("../b/r.py:g", base_dir=tmp_path / "a")("y")) == 1


@cases("""
name                           | said
score                          | write module:function or path/file.py:function
r.py                           | write module:function or path/file.py:function
:f                             | write module:function or path/file.py:function
r.py:                          | write module:function or path/file.py:function
                               | write module:function or path/file.py:function
rr.py:score                    | /rr.py; did you mean r.py?
gone/rr.py:score               | there is no file
tasks/r:score                  | write path/file.py:function
no_such_package.rewards:score  | install no_such_package, put its
r.py:scor                      | r.py has no scor; did you mean score?
r.py:number                    | it is of type int; it must be a function
neighbour.py:score             | install helper, put its directory on PYTHONPATH
odd.py:score                   | RuntimeError: no score
""")
def test_a_name_that_means_no_function_is_refused(write, tmp_path, name, said):
    write(SCORE + "number = 3\n")
    write("import helper\n", "neighbour.py")
    write("", "helper.py")
    write("def __getattr__(name):\n    raise RuntimeError('no ' + name)\n", "odd.py")
    assert said in message_of(name, tmp_path)


def test_a_misspelt_built_in_function_gets_the_nearest_name(tmp_path):
    with pytest.raises(PlugInError, match=r"write a name of check_even, or .* did you mean check_even\?"):
        load_function("check_evn", role="filter", base_dir=tmp_path, built_in={"check_even": len})


@cases(r"""
text
raise ValueError('boom')
import sys; sys.exit(3)
def f(:
import no_such_package
raise KeyboardInterrupt
class E(Exception):\n    def __str__(self): return 1 / 0\nraise E
""")
@cases("name: raising_plugin:score raising_plugin.py:score")
def test_whatever_an_import_raises_is_kept_as_the_cause_and_may_be_corrected(
    write, tmp_path, monkeypatch, text, name
):
    write(text.replace("\\n", "\n"), "raising_plugin.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(PlugInError, match=r"importing .*raising_plugin.* failed") as caught:
        load(name, base_dir=tmp_path)
    assert caught.value.__cause__ is not None
    write(SCORE, "raising_plugin.py")
    assert load(name, base_dir=tmp_path)("x") == 1
    sys.modules.pop("raising_plugin", None)


@cases("""
role     | parameters               | fits
reward   | sample                   | fits
reward   | sample, scale=2          | fits
reward   | *samples                 | fits
reward   |                          |
reward   | sample, answer           |
reward   | *, sample                |
generate | sample, engine, sampling | fits
generate | sample, engine           |
filter   | group, batch             |
rows     | size, seed, digits       | fits
rows     | size                     |
""")
def test_a_function_must_take_what_its_role_passes(write, tmp_path, role, parameters, fits):
    write(f"def f({parameters}):\n    pass\n")
    if fits:
        assert callable(load_function("r.py:f", role=role, base_dir=tmp_path))
    else:
        assert f"but takes ({parameters})" in message_of("r.py:f", tmp_path, role)


@cases("role: reward group_reward filter curriculum")
@cases("""
start
def
async def
""")
def test_a_generator_function_is_refused_when_it_is_loaded(write, tmp_path, role, start):
    write(f"{start} score(*arguments):\n    yield 1.0\n")
    assert "it must return its answer" in message_of("r.py:score", tmp_path, role)


def test_a_curriculum_is_plain(write, tmp_path):
    write("async def score(step, statistics):\n    return {}\n")
    said = message_of("r.py:score", tmp_path, "curriculum")
    assert "it must be" not in said and "it is async; this one must be a plain function" in said
