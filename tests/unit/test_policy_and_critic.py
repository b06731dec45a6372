"""A policy and its critic as one thing to save: both are written, both are freed, and a failure of either is
told.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from rollouts.backends.policy_and_critic import PolicyAndCritic, SavedBackend
from rollouts.errors import BackendError


class Answer:
    """A TrainFuture that has its answer, or never gets one."""

    def __init__(self, value: Any = None, *, never: bool = False) -> None:
        self._value = value
        self._never = never

    async def result(self) -> Any:
        if self._never:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.result().__await__()

    def done(self) -> bool:
        return not self._never


class Copy:
    """What a captured state is written by."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped = 0

    async def __call__(self, path: Path) -> None:
        (path / "model.safetensors").write_text(self.name)

    def drop(self) -> None:
        self.dropped += 1


class Backend:
    """Answers everything with one answer, and notes where it was told to write and to read."""

    def __init__(self, answer: Answer, *, size: int = 1) -> None:
        self.answer = answer
        self.size = size
        self.paths: list[Path] = []

    def state_bytes(self) -> int:
        return self.size

    def capture(self) -> Answer:
        return self.answer

    def save(self, path: Path) -> Answer:
        self.paths.append(path)
        return self.answer

    def load(self, path: Path) -> Answer:
        return self.save(path)

    def reset(self) -> Answer:
        return self.answer


def pair(policy: Backend, critic: Backend) -> PolicyAndCritic:
    return PolicyAndCritic(cast(SavedBackend, policy), cast(SavedBackend, critic))


async def test_the_critic_lies_in_a_directory_of_its_own(tmp_path: Path):
    policy, critic = Backend(Answer()), Backend(Answer())
    await pair(policy, critic).save(tmp_path).result()
    await pair(policy, critic).load(tmp_path)
    assert (policy.paths, critic.paths) == ([tmp_path] * 2, [tmp_path / "critic"] * 2)


async def test_what_was_captured_of_both_is_written_together(tmp_path: Path):
    copies = Copy("policy"), Copy("critic")
    write = await pair(*(Backend(Answer(copy)) for copy in copies)).capture().result()
    assert write is not None
    await write(tmp_path)
    assert (
        (tmp_path / "model.safetensors").read_text(),
        (tmp_path / "critic" / "model.safetensors").read_text(),
    ) == ("policy", "critic")
    cast(Any, write).drop()
    assert [copy.dropped for copy in copies] == [1, 1]


@pytest.mark.parametrize("first_has_room", [True, False])
async def test_no_room_for_one_frees_the_other(first_has_room: bool):
    copy = Copy("held")
    answers = [Answer(copy), Answer(None)]
    assert (
        await pair(*(Backend(answer) for answer in (answers if first_has_room else answers[::-1])))
        .capture()
        .result()
        is None
    )
    assert copy.dropped == 1


async def test_a_copy_that_fails_frees_the_other_and_is_told():
    copy = Copy("held")
    with pytest.raises(BackendError, match="out of memory"):
        await pair(Backend(Answer(BackendError("out of memory"))), Backend(Answer(copy))).capture().result()
    assert copy.dropped == 1
