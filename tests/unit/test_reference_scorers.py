"""A reference scores alike wherever it runs: in the trainer, in a process of its own, on a server. And what
each does when things break.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.device_thread import open_device_thread
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
    ScoringError,
)
from rollouts.models.tiny import make_tiny
from rollouts.protocols import LogProbScorer
from rollouts.reference.http import open_http_reference
from rollouts.reference.open import open_reference
from rollouts.reference.score import open_frozen_reference
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import RolloutBatch
from tests.unit.reference_server import KEY, open_reference_server

PLACES = ("trainer", "process", "vllm", "sglang")
BATCH = make_batch(groups=2, size=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", 0, tmp_path_factory.mktemp("models"))


@asynccontextmanager
async def open_scorer(place: Any, path: Path, folder: Path) -> AsyncIterator[LogProbScorer]:
    options: dict[str, Any] = {"log_dir": folder, "torch_threads": 1, "vocab_size": 259, "api_key": KEY}
    async with open_device_thread(name="reference", torch_threads=1) as thread:
        if place in ("vllm", "sglang"):
            async with (
                open_reference_server(path) as (url, _),
                open_reference(path, where=url, server=place, device_thread=thread, **options) as one,
            ):
                yield one
        else:
            async with open_reference(path, where=place, device_thread=thread, **options) as one:
                yield one


async def score_plainly(path: Path, batch: RolloutBatch):
    async with (
        open_device_thread(name="plain", torch_threads=1) as thread,
        open_frozen_reference(path, device_thread=thread) as reference,
    ):
        return await reference.score(batch)


def assert_same(found, expected, *, atol: float = 1e-4) -> None:
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, two, atol=atol)


# --- what all promise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
async def test_contract(place: str, path: Path, tmp_path: Path):
    """The log-probs of FrozenReference, at its temperature where that can be; 0.0 outside the masks; for many
    calls at once. Rows and batches may train nothing.
    """
    batches = [make_batch(seed, groups=2, size=2) for seed in range(5)]
    nothing = replace(BATCH, loss_masks=tuple(np.zeros(len(row), bool) for row in BATCH.tokens))
    warm = replace(BATCH, temperature=0.5)
    holes = replace(
        BATCH, loss_masks=tuple(mask & (np.arange(len(mask)) % 2 == 0) for mask in BATCH.loss_masks)
    )
    found: dict[int, Any] = {}
    async with open_scorer(place, path, tmp_path) as scorer:

        async def score(index: int) -> None:
            found[index] = await scorer.score(batches[index])

        async with trio.open_nursery() as nursery:
            for index in range(len(batches)):
                nursery.start_soon(score, index)
        assert [row.tolist() for row in await scorer.score(nothing)] == [
            [0.0] * len(row) for row in BATCH.tokens
        ]
        assert await scorer.score(RolloutBatch(tokens=(), loss_masks=())) == ()
        with_holes = await scorer.score(holes)
        if place in ("trainer", "process"):
            assert_same(await scorer.score(warm), await score_plainly(path, warm))
    for index, batch in enumerate(batches):
        assert_same(found[index], await score_plainly(path, batch))
        for row, mask in zip(found[index], batch.loss_masks, strict=True):
            assert (row[~mask] == 0).all()
            assert (row[mask] < 0).all()
    assert_same(with_holes, await score_plainly(path, holes))
    assert all((row[~mask] == 0).all() for row, mask in zip(with_holes, holes.loss_masks, strict=True))


@pytest.mark.parametrize("place", ["vllm", "sglang"])
async def test_temperature_is_refused_where_a_server_cannot_apply_it(place: str, path: Path, tmp_path: Path):
    async with open_scorer(place, path, tmp_path) as scorer:
        with pytest.raises(ConfigError, match="temperature 1 only"):
            await scorer.score(replace(BATCH, temperature=0.5))


async def test_what_makes_no_place_is_refused(path: Path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"where": "moon"}, "where='moon'"),
        ({"where": "process"}, "needs log_dir"),
        ({"where": "http://127.0.0.1:1"}, "needs vocab_size"),
        ({"dtype": "3bit"}, "3bit"),
    ]
    async with open_device_thread(name="reference", torch_threads=1) as thread:
        for options, message in cases:
            with pytest.raises(ConfigError, match=message):
                async with open_reference(path, device_thread=thread, **options):
                    pass


# --- servers ------------------------------------------------------------------------------------------------


def open_http(url: str, **changes: Any):
    return open_http_reference(url, **({"kind": "vllm", "vocab_size": 259, "api_key": KEY} | changes))


async def test_only_what_is_needed_is_sent_and_no_more_at_once_than_allowed(path: Path):
    batch = make_batch(groups=4, size=4)
    masks = [mask & (np.arange(len(mask)) < len(mask) - 1) for mask in batch.loss_masks]
    async with open_reference_server(path) as (url, server), open_http(url, in_flight=3) as scorer:
        await scorer.score(replace(batch, loss_masks=tuple(masks)))
    sent = sorted(tuple(body["prompt"]) for _, body in server.asked)
    wanted = [
        tuple(row[: np.flatnonzero(mask)[-1] + 1].tolist())
        for row, mask in zip(batch.tokens, masks, strict=True)
        if mask.any()
    ]
    assert sent == sorted(wanted)
    assert server.most_busy <= 3


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        ("vllm", lambda made: (200, {"choices": []}), "0 choices"),
        ("vllm", lambda made: (200, {"choices": [{"prompt_logprobs": None}]}), "prompt_logprobs"),
        (
            "vllm",
            lambda made: (
                200,
                {"choices": [{"prompt_logprobs": made["choices"][0]["prompt_logprobs"][:-1]}]},
            ),
            "log-probs for",
        ),
        (
            "vllm",
            lambda made: (
                200,
                {"choices": [{"prompt_logprobs": [None, *[{"1000": {"logprob": -1.0}}] * 40]}]},
            ),
            "1000",
        ),
        ("vllm", lambda made: (200, {"choices": [{"prompt_logprobs": [None] * 40}]}), "log-probs for"),
        (
            "sglang",
            lambda made: (200, {"meta_info": {"input_token_logprobs": [[None, 1000, None]] * 4}}),
            "of token 1000",
        ),
        ("sglang", lambda made: (200, {"meta_info": {"input_token_logprobs": []}}), "0 log-probs"),
    ],
)
async def test_an_answer_that_is_not_about_the_tokens_is_never_repaired(
    kind: Any, spoil: Any, message: str, path: Path, autojump_clock
):
    async with open_reference_server(path) as (url, server), open_http(url, kind=kind) as scorer:
        server.spoil = spoil
        with pytest.raises(ReplyError, match=message):
            await scorer.score(BATCH)


async def test_log_probs_that_the_server_does_not_have_are_an_error(path: Path, autojump_clock):
    def spoil(made: Any) -> tuple[int, Any]:
        for entry in made["choices"][0]["prompt_logprobs"][1:]:
            for value in entry.values():
                value["logprob"] = wrong
        return 200, made

    async with open_reference_server(path) as (url, server), open_http(url) as scorer:
        server.spoil = spoil
        wrong = -9999.0
        with pytest.raises(ReplyError, match="stands for NaN"):
            await scorer.score(BATCH)
        wrong = 0.5
        with pytest.raises(ScoringError, match="at most 0"):
            await scorer.score(BATCH)


async def test_a_busy_server_is_asked_again_and_one_that_stays_so_is_an_error(path: Path, autojump_clock):
    answers = [503, 200, 500]
    async with open_reference_server(path) as (url, server), open_http(url, in_flight=1) as scorer:
        server.spoil = lambda made: (answers.pop(0), made) if answers else None
        assert len(await scorer.score(BATCH)) == len(BATCH)
        assert not answers
        server.spoil = lambda made: (500, {"error": "out of memory"})
        with pytest.raises(InfrastructureError, match="out of memory"):
            await scorer.score(BATCH)


async def test_settings_that_cannot_work_are_told_at_once(path: Path):
    async with open_reference_server(path, context=16) as (url, _):
        for changes, error, message in (
            ({"model": "other"}, EngineSetupError, "serves \\['policy'\\]"),
            ({"api_key": "wrong"}, EngineError, "401"),
            ({"vocab_size": 0}, ConfigError, "vocab_size=0"),
        ):
            with pytest.raises(error, match=message):
                async with open_http(url, **changes):
                    pass
        async with open_http(url) as scorer:
            for tokens, error, message in (
                ([5, 300, 7], DataError, "the id 300"),
                ([5, -1, 7], DataError, "the id -1"),
                ([1] * 16, EngineSetupError, "at most 15"),
            ):
                row = np.asarray(tokens)
                with pytest.raises(error, match=message):
                    await scorer.score(RolloutBatch(tokens=(row,), loss_masks=(np.arange(len(row)) > 0,)))
            with pytest.raises(DataError, match="first token"):
                await scorer.score(RolloutBatch(tokens=(np.arange(3),), loss_masks=(np.ones(3, bool),)))
