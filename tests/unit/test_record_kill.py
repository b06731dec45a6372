"""kill -9 while every file of the record is written: what was logged is there, and nothing is torn but the
last line of a last part.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from functools import partial

import pytest

from rollouts.metrics.jsonl import iterate_rows, newest_attempts, next_attempt, parse_row, read_rows
from rollouts.metrics.token_shards import read_token_arrays
from rollouts.metrics.writer import open_files
from rollouts.run_dir import RunDir, list_parts
from tests.unit.killed_writer import run_writer

SERVER = multiprocessing.get_context("forkserver")  # a process of its own for each run, without its imports
SERVER.set_forkserver_preload([run_writer.__module__])
LONGEST_S = 0.06  # that a writer lives; kills fall anywhere in it
REPEATED = 3  # steps that an attempt does again, as after a checkpoint that was made some steps ago


def write_and_kill(run_dir, draw, nth):
    """The last step that the attempt had logged when it was killed; 0 for none. `nth`: see run_writer."""
    done = [row["step"] for row in newest_attempts(read_rows(run_dir.metrics))]
    first = max([1, *(step + 1 - REPEATED for step in done)])
    part_bytes = 1 if nth < 0 else draw.choice((1, 2_000, 100_000))  # 1: every call begins a part
    reader, output = SERVER.Pipe(duplex=False)
    arguments = (run_dir.root, output, nth, next_attempt(run_dir), first, part_bytes)
    process = SERVER.Process(target=run_writer, args=arguments)
    process.start()
    output.close()
    with os.fdopen(os.dup(reader.fileno()), "rb") as lines:
        assert lines.readline() == b"open\n"
        if nth == 0:
            time.sleep(draw.uniform(0, LONGEST_S))
            assert process.is_alive()
            process.kill()
        logged = [int(line) for line in lines]
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return max(logged, default=0)


def check_files(run_dir, attempt, logged):
    """The number of files that are torn. Asserts that nothing else is wrong with any, and that `logged` of
    the attempt is there.
    """
    torn = 0
    for path in run_dir.row_files:
        *complete, last = list_parts(path) or [path]
        assert all(part.read_bytes().endswith(b"\n") for part in complete)
        *lines, rest = last.read_bytes().split(b"\n") if last.exists() else [b""]
        assert {*map(type, map(json.loads, lines))} <= {dict}
        said = []
        list(iterate_rows(path, report=said.append))
        if rest and parse_row(rest) is None:  # else it lacks at most its newline
            assert f"{last}: the last line is torn ({len(rest)} bytes)" in said.pop()
            torn += 1
        assert said == []
    written = {row["step"] for row in read_rows(run_dir.metrics) if row["attempt"] == attempt}
    assert not logged or logged in written  # what was logged survives
    return torn


def check_whole(run_dir):
    """What readers see after the next attempt has opened the files."""
    for file in open_files(run_dir).values():
        file.close()
    repaired = partial(iterate_rows, report=pytest.fail)
    rows = {path.stem: newest_attempts(repaired(path)) for path in run_dir.row_files}
    steps = [(row["stage"], row["step"]) for row in rows["metrics"]]
    assert sorted(steps) == [("rl", step) for step in range(1, len(steps) + 1)]  # one row for each step
    assert max(Counter((row["step"], row["name"]) for row in rows["evaluations"]).values()) == 1
    assert rows["contributions"]
    for row in rows["contributions"]:  # arrays are written before the rows that name them
        assert read_token_arrays(run_dir, row)["tokens"].tolist() in ([5, 6, 7], [5, 8])
    for line in run_dir.updates_log.read_text().splitlines():
        assert line.count("loss") == 1 and line.endswith("tokens        3")


def kill_often(folder, places, *, seed):
    """How many files the kills have torn. A new run after twenty kills, so that reading all of it stays
    quick.
    """
    draw, torn = random.Random(seed), 0
    for start in range(0, len(places), 20):
        run_dir = RunDir(folder / f"run-{start}")
        for nth in places[start : start + 20]:
            attempt = next_attempt(run_dir)
            torn += check_files(run_dir, attempt, write_and_kill(run_dir, draw, nth))
        check_whole(run_dir)
    return torn


def test_ten_kills_lose_nothing_that_was_logged(tmp_path):
    torn = kill_often(tmp_path, [0, 9, 0, -5, 0, 20, 0, 12, 0, 0], seed=1)
    assert torn >= 2  # files were torn, and read and repaired


@pytest.mark.slow
def test_200_kills_at_random_instants_lose_nothing_that_was_logged(tmp_path):
    kill_often(tmp_path, 200 * [0], seed=2)


@pytest.mark.slow
def test_kills_inside_every_write_and_every_change_of_parts_lose_nothing_that_was_logged(tmp_path):
    assert kill_often(tmp_path, [*range(1, 21), *range(-20, 0)], seed=3) >= 10
