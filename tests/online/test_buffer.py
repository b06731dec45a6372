"""Prompts of a stream: what is admitted, what is drawn how often, and what a resumed run draws."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import trio

from rollouts.advantages.inputs import AdvantageInputs
from rollouts.config.online import OnlineConfig
from rollouts.config.tables import DataSourceConfig
from rollouts.data.datasets import find_asked_prompts
from rollouts.data.rows import MAX_ROW_BYTES
from rollouts.errors import DataError
from rollouts.online.buffer import WEIGHT, ExperienceBuffer, weigh_draws
from rollouts.types import Sample


class Clock:
    step = 1


def make_buffer(tmp_path, clock, *, prompts=(), streams=None, said=None, **config):
    return ExperienceBuffer(
        config=OnlineConfig(**config),
        streams=streams or {},
        rows={"made": [{"prompt": prompt} for prompt in prompts]},
        log=tmp_path / "stream.jsonl",
        step=lambda: clock.step,
        seed=0,
        say=(said if said is not None else []).append,
        held_out=frozenset({next(find_asked_prompts({"prompt": "a secret"}))}),
    )


def stream(path):
    return {"web": DataSourceConfig(kind="stream", path=str(path))}


def append(file, *rows):
    with file.open("a") as opened:
        opened.writelines(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows)


def ask(*texts):
    return [{"prompt": text} for text in texts]


def texts_of(prompts):
    return sorted(prompt.row["prompt"][-1]["content"] if isinstance(prompt.row["prompt"], list)
                  else prompt.row["prompt"] for prompt in prompts)  # fmt: skip


# --- priorities ---------------------------------------------------------------------------------------------


def set_priorities(buffer, values):
    """Makes the priorities these, of prompts that came now."""
    for entry, value in zip(buffer._entries.values(), values, strict=True):
        entry.spread = value - 1.01


def test_prompts_are_drawn_by_their_priority(tmp_path):
    # p = 1, .5, .1 to the power .6, over their sum
    clock = Clock()
    counts = Counter()
    buffer = make_buffer(tmp_path, clock, prompts="abc", max_draws=10**6, half_life=1e9)
    buffer._admit()
    for draw in range(4000):
        set_priorities_of_draws(buffer, (1.0, 0.5, 0.1))
        clock.step = draw + 2
        [prompt] = buffer.get_prompts(1)
        counts[prompt.row["prompt"]] += 1
    shares = [counts[name] / 4000 for name in "abc"]
    assert shares == pytest.approx([0.523302, 0.345251, 0.131448], abs=0.025)


def set_priorities_of_draws(buffer, values):
    """Makes the priorities these, whatever was drawn."""
    for entry, value in zip(buffer._entries.values(), values, strict=True):
        entry.spread = value - 0.01 - 1 / (1 + len(entry.weights))


def test_a_draw_weighs_what_its_priority_prefers(tmp_path):
    # (3 P)^-0.4 over the largest: .575440, .679590, 1; and with 1 .251189, .380731, 1
    for correction, expected in ((0.4, [0.575440, 0.679590, 1.0]), (1.0, [0.251189, 0.380731, 1.0])):
        clock = Clock()
        folder = make_folder(tmp_path / str(correction))
        buffer = make_buffer(folder, clock, prompts="abc", correction=correction)
        buffer._admit()
        set_priorities(buffer, (1.0, 0.5, 0.1))
        clock.step = 1
        found = {prompt.row["prompt"]: prompt.row[WEIGHT] for prompt in buffer.get_prompts(3)}
        # they came a step ago, all alike
        largest = max(found.values())
        assert [found[name] / largest for name in "abc"] == pytest.approx(expected, abs=1e-5)


def test_a_corrected_mean_is_that_of_the_stream(tmp_path):
    # Σ P_i w_i f_i / Σ P_i w_i with w = (N P)^-1 is the mean of f, whatever the priorities
    shares, values = np.asarray([0.523302, 0.345251, 0.131447]), np.asarray([1.0, 5.0, 9.0])
    weights = (3 * shares) ** -1.0
    assert (shares * weights * values).sum() / (shares * weights).sum() == pytest.approx(5.0)


def test_rewards_that_differ_draw_a_prompt_again_and_a_unanimous_group_does_not(tmp_path):
    buffer = make_buffer(tmp_path, Clock(), prompts="ab", max_draws=9)
    first = buffer.get_prompts(2)
    samples = []
    for group, prompt in enumerate(first):
        rewards = (1.0, 0.0) if prompt.row["prompt"] == "a" else (1.0, 1.0)
        samples += [
            Sample(id=f"{group}-{at}", prompt="p", group_index=group, reward=reward,
                   metadata={"prompt_id": prompt.prompt_id})
            for at, reward in enumerate(rewards)
        ]  # fmt: skip
    buffer.learn(samples)
    # a: .01 + .5 + 1/2, b: .01 + 1/2, both a step old
    entries = {entry.row["prompt"]: entry for entry in buffer._entries.values()}
    assert (entries["a"].spread, entries["b"].spread) == (0.5, 0.0)


def test_a_priority_halves_with_age(tmp_path):
    clock = Clock()
    buffer = make_buffer(tmp_path, clock, prompts="ab", half_life=10, alpha=1.0, correction=1.0)
    buffer._admit()
    old, new = buffer._entries.values()
    clock.step = 30
    old.step, new.step = 9, 29
    found = {prompt.row["prompt"]: prompt.row[WEIGHT] for prompt in buffer.get_prompts(2)}
    # ages 21 and 1: 2^-2.1 and 2^-.1, so that the weights are as 4 to 1
    assert found["a"] / found["b"] == pytest.approx(4.0)
    clock.step = 10**6  # 2^-100000 is 0 as a number
    assert all(math.isfinite(prompt.row[WEIGHT]) for prompt in buffer.get_prompts(2))


def test_one_source_has_no_more_than_its_share_while_others_have_prompts(tmp_path):
    clock = Clock()
    rows = [{"prompt": f"flood {n}", "source": "flood"} for n in range(40)]
    rows += [{"prompt": f"{n}", "source": f"user {n}"} for n in range(12)]
    buffer = ExperienceBuffer(
        config=OnlineConfig(max_source_share=0.25), streams={}, rows={"web": rows}, log=tmp_path / "x.jsonl",
        step=lambda: clock.step, seed=0, say=print,
    )  # fmt: skip
    assert sum(prompt.row["source"] == "flood" for prompt in buffer.get_prompts(8)) <= 2
    clock.step = 2
    assert len(buffer.get_prompts(20)) == 20  # what others lack it gives


# --- what arrives -------------------------------------------------------------------------------------------


async def read_once(buffer):
    async with trio.open_nursery() as nursery:
        await nursery.start(buffer.follow)
        nursery.cancel_scope.cancel()


async def test_lines_arrive_once_each_and_held_out_repeated_and_bad_ones_are_counted(tmp_path):
    file, said, clock = tmp_path / "a.jsonl", [], Clock()
    append(file, *ask("one", "two", "ONE ", "a secret"), "not json", {"question": "?"}, "")
    append(file, {"prompt": "x", "source": ["y"]}, *ask("much too long"), "7" * (MAX_ROW_BYTES + 1))
    with file.open("a") as opened:
        opened.write('{"prompt": "thr')
    buffer = make_buffer(make_folder(tmp_path / "run"), clock, streams=stream(file), said=said)
    buffer.check = fits
    await read_once(buffer)
    assert texts_of(buffer.get_prompts(2)) == ["one", "two"]
    found = buffer.statistics()
    assert (found["arrived"], found["repeated"], found["held_out"], found["malformed"]) == (2, 1, 1, 6)
    assert len(said) == 5 and all("a.jsonl, the line that ends at byte" in text for text in said)
    with file.open("a") as opened:
        opened.write('ee"}\n')
    await read_once(buffer)
    clock.step = 2
    assert "three" in texts_of(buffer.get_prompts(3))


def fits(row):
    if len(row["prompt"]) > 9:
        raise DataError("it is too long")


async def test_what_the_run_notes_itself_is_not_taken_from_a_line(tmp_path):
    append(tmp_path / "a.jsonl", {"prompt": "one", "trajectory": "x", "replayed": True, "answer": "1"})
    buffer = make_buffer(tmp_path, Clock(), streams=stream(tmp_path / "a.jsonl"))
    await read_once(buffer)
    [prompt] = buffer.get_prompts(1)
    assert prompt.row.keys() == {"source", "prompt", "answer", WEIGHT}


async def test_a_file_that_floods_leaves_room_for_the_others_and_for_rows(tmp_path):
    folder = make_folder(tmp_path / "in")
    append(folder / "a.jsonl", *ask(*(f"flood {number}" for number in range(500))))
    append(folder / "b.jsonl", *ask(*map(str, range(20))))
    rows = [f"row {number}" for number in range(400)]
    buffer = make_buffer(tmp_path, Clock(), prompts=rows, streams=stream(folder), capacity=60)
    await read_once(buffer)
    found = texts_of(buffer.get_prompts(60))
    assert [sum(text.startswith(kind) for text in found) for kind in ("flood", "row")] == [20, 20]


def make_folder(path):
    path.mkdir()
    return path


async def test_all_files_of_a_directory_are_read_and_a_file_that_shrinks_is_an_error(tmp_path):
    folder, clock = make_folder(tmp_path / "in"), Clock()
    append(folder / "a.jsonl", *ask("one"))
    append(folder / "b.jsonl", *ask("two"))
    (folder / "c.txt").write_text("no\n")
    (folder / "d.jsonl").mkdir()
    (folder / "e.jsonl").symlink_to("nowhere")
    buffer = make_buffer(tmp_path, clock, streams=stream(folder))
    await read_once(buffer)
    assert texts_of(buffer.get_prompts(2)) == ["one", "two"]
    (folder / "a.jsonl").write_text("")
    with pytest.RaisesGroup(pytest.RaisesExc(DataError, match=r"a\.jsonl has fewer bytes than the 18")):
        await read_once(buffer)


async def test_a_step_waits_for_as_many_prompts_as_it_needs(tmp_path):
    file, said, clock = tmp_path / "a.jsonl", [], Clock()
    append(file, *ask("one"))
    buffer = make_buffer(make_folder(tmp_path / "run"), clock, streams=stream(file), said=said)
    await read_once(buffer)
    assert buffer.get_prompts(2) == [] == buffer.get_prompts(2)
    assert said == ["step 1 waits for prompts: it needs 2, 1 are here"]  # it is said once
    arrived = trio.Event()
    buffer.note_arrivals = arrived.set
    append(file, *ask("two"))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(buffer.follow)
            await arrived.wait()
            nursery.cancel_scope.cancel()
    assert texts_of(buffer.get_prompts(2)) == ["one", "two"]


async def test_when_no_more_come_and_too_few_are_left_the_run_is_told(tmp_path):
    clock, ended = Clock(), []
    buffer = make_buffer(tmp_path, clock, prompts="abc", max_draws=1)
    buffer.end, buffer.is_closed = lambda: ended.append(clock.step), True
    await read_once(buffer)
    assert len(buffer.get_prompts(2)) == 2
    clock.step = 2
    assert buffer.get_prompts(2) == [] and ended == [2]


def test_what_is_beyond_the_capacity_waits_and_what_was_drawn_often_makes_room(tmp_path):
    clock = Clock()
    buffer = make_buffer(tmp_path, clock, prompts="abcdef", capacity=4, max_draws=1)
    assert texts_of(buffer.get_prompts(4)) == [*"abcd"]
    clock.step = 2
    assert buffer.get_prompts(1) == []  # their samples may still be in flight
    clock.step = 66
    assert texts_of(buffer.get_prompts(2)) == [*"ef"]
    assert len(buffer._entries) == 2


# --- what comes back, and resuming --------------------------------------------------------------------------


def test_a_returned_prompt_comes_first_with_the_weight_of_its_draw(tmp_path):
    buffer = make_buffer(tmp_path, Clock(), prompts="abcd")
    one, two = buffer.get_prompts(2)
    buffer.return_prompts([two, one])
    assert buffer.get_prompts(3)[:2] == [two, one]
    assert buffer.find_prompt(one.prompt_id, one.epoch) == one


def test_a_prompt_is_drawn_once_a_step_and_max_draws_times(tmp_path):
    clock, seen = Clock(), Counter()
    buffer = make_buffer(tmp_path, clock, prompts="abcdef", max_draws=2)
    for clock.step in range(1, 7):
        drawn = buffer.get_prompts(2)
        assert len({prompt.prompt_id for prompt in drawn}) == 2
        seen.update(prompt.row["prompt"] for prompt in drawn)
    assert set(seen.values()) == {2}
    clock.step = 7
    assert buffer.get_prompts(1) == []


async def test_a_resumed_run_draws_the_same_prompts_whatever_has_arrived_since(tmp_path):
    file, clock = tmp_path / "a.jsonl", Clock()
    run = make_folder(tmp_path / "run")

    async def go(buffer, steps, arrivals):
        """What each step draws; before some of them lines arrive."""
        drawn = []
        for clock.step in steps:
            append(file, *ask(*arrivals.get(clock.step, ())))
            await read_once(buffer)
            drawn.append([(prompt.prompt_id, prompt.epoch) for prompt in buffer.get_prompts(2)])
        return drawn

    arrivals = {1: "abc", 2: "d", 4: "ef", 5: "ghi"}
    buffer = make_buffer(run, clock, streams=stream(file))
    whole = await go(buffer, [1, 2], arrivals)
    saved = json.loads(json.dumps(buffer.state_dict()))
    whole += await go(buffer, [3, 4, 5, 6], arrivals)
    # everything is there at once now
    again = make_buffer(run, clock, streams=stream(file))
    again.load_state_dict(saved)
    assert await go(again, [3, 4, 5, 6], {}) == whole[2:]
    assert again.state_dict() == buffer.state_dict()
    assert len(set(map(str, whole))) == 6


async def test_a_resumed_run_draws_what_came_bit_by_bit_and_does_without_a_file_that_is_gone(tmp_path):
    file, clock, said = tmp_path / "a.jsonl", Clock(), []
    run = make_folder(tmp_path / "run")
    buffer = make_buffer(run, clock, streams=stream(file))
    saved = buffer.state_dict()
    for text in "abc":  # too few, twice
        append(file, *ask(text))
        await read_once(buffer)
        drawn = buffer.get_prompts(3)
    again = make_buffer(run, clock, streams=stream(file))
    again.load_state_dict(saved)
    await read_once(again)
    assert again.get_prompts(3) == drawn
    file.unlink()
    last = make_buffer(run, clock, streams=stream(file), said=said)
    last.load_state_dict(saved)
    await read_once(last)
    assert last.get_prompts(1) == [] and "web/a.jsonl: removed since the run read there" in said[0]


# --- advantages ---------------------------------------------------------------------------------------------


def test_advantages_are_weighed_over_the_largest_weight():
    samples = [
        Sample(id=str(at), prompt="p", metadata={WEIGHT: weight}) for at, weight in enumerate((0.5, 1.0, 2.0))
    ]
    inputs = AdvantageInputs(rewards=np.asarray([1.0, 2.0, 4.0]), group_indices=np.arange(3), samples=samples)
    assert weigh_draws(lambda inputs: inputs.rewards)(inputs).tolist() == [0.25, 1.0, 4.0]
    rows = weigh_draws(lambda inputs: [np.ones(2), np.ones(1), np.ones(3)])(inputs)
    assert [row.tolist() for row in rows] == [[0.25, 0.25], [0.5], [1.0, 1.0, 1.0]]
