"""A policy and its critic as one thing to save: both are written, and what is held of one is freed where the
other cannot be held.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from rollouts.backends.policy_and_critic import PolicyAndCritic
from rollouts.errors import BackendError


class Backend:
    """Captures `answer`, or raises it, and notes where it was told to write and to read."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.paths: list[Path] = []

    async def result(self) -> Any:
        await trio.lowlevel.checkpoint()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def capture(self) -> Backend:
        return self

    def save(self, path: Path) -> Backend:
        self.paths.append(path)
        return self

    load = save


class Copy:
    """What a captured state is written by."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.dropped = 0

    async def __call__(self, path: Path) -> None:
        assert path.is_dir()
        self.paths.append(path)

    def drop(self) -> None:
        self.dropped += 1


async def test_the_critic_lies_in_a_directory_of_its_own(tmp_path: Path):
    copies = Copy(), Copy()
    policy, critic = (Backend(copy) for copy in copies)
    both = PolicyAndCritic(policy, critic)
    await both.save(tmp_path).result()
    await both.load(tmp_path)
    write: Any = await both.capture().result()
    await write(tmp_path)
    assert (policy.paths, critic.paths) == ([tmp_path] * 2, [tmp_path / "critic"] * 2)
    assert [copy.paths for copy in copies] == [[tmp_path], [tmp_path / "critic"]]
    write.drop()
    assert [copy.dropped for copy in copies] == [1, 1]


@pytest.mark.parametrize("other", [None, BackendError("out of step")])
@pytest.mark.parametrize("held_first", [True, False])
async def test_what_is_held_of_one_is_freed_where_the_other_is_not(held_first: bool, other: Any):
    copy = Copy()
    answers = [copy, other] if held_first else [other, copy]
    capture = PolicyAndCritic(*map(Backend, answers)).capture()
    if other is None:
        assert await capture.result() is None
    else:
        with pytest.raises(BackendError, match="out of step"):
            await capture.result()
    assert copy.dropped == 1
