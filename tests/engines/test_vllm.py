"""The vLLM engine on a real vLLM server. Needs ROLLOUTS_VLLM_PYTHON, or vLLM in .venv-vllm."""

from __future__ import annotations

import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import transformers
import trio

from rollouts.engines.openai import open_openai_engine
from rollouts.engines.server import ServerEngine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.errors import EngineError, EngineSetupError, RequestRefused
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import LONG, at_work, disturb, make_request
from rollouts.types import Completion

from .conftest import CONTEXT_LENGTH, VOCAB_SIZE, RunningServer, run_vllm
from .model_checks import (
    check_greedy_beside_sampled,
    check_log_probs,
    check_tokens_after_a_frozen_update,
    load,
)

pytestmark = pytest.mark.engines


def open_engine(server: RunningServer, **changes: Any) -> AbstractAsyncContextManager[ServerEngine]:
    return open_vllm_engine(server.url, **({"api_key": server.api_key, "vocab_size": VOCAB_SIZE} | changes))


@pytest.mark.parametrize("check", [*engine_contracts.CHECKS, *engine_contracts.MODEL_CHECKS])
async def test_contract(check: Any, vllm_server: RunningServer):
    await check(lambda: open_engine(vllm_server))


async def test_updates_show_in_version_log_probs_and_checksum(
    vllm_server: RunningServer, snapshots: tuple[Path, Path]
):
    await engine_contracts.check_update_from_checkpoint(lambda: open_engine(vllm_server), *snapshots)


async def test_frozen_request_comes_back_whole_with_two_versions(
    vllm_server: RunningServer, snapshots: tuple[Path, Path]
):
    await engine_contracts.check_keep_pause_spans_two_versions(lambda: open_engine(vllm_server), snapshots[1])


async def test_bad_snapshots_change_nothing(
    vllm_server: RunningServer, snapshots: tuple[Path, Path], tmp_path: Path
):
    await engine_contracts.check_bad_snapshots_change_nothing(
        lambda: open_engine(vllm_server), snapshots[1], tmp_path
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
async def test_log_probs_are_the_models_own_at_its_temperature(
    temperature: float, vllm_server: RunningServer, snapshots: tuple[Path, Path]
):
    request = make_request(prompt=(5, 6, 7, 8), max_new_tokens=24, temperature=temperature, seed=3)
    await check_log_probs(lambda: open_engine(vllm_server), snapshots[0], request, atol=2e-4)


async def test_greedy_beside_sampled_requests_keeps_log_probs_of_temperature_1(
    vllm_server: RunningServer, snapshots: tuple[Path, Path]
):
    await check_greedy_beside_sampled(lambda: open_engine(vllm_server), snapshots[0], atol=2e-4)


async def test_tokens_after_a_frozen_update_are_the_new_models_own(
    vllm_server: RunningServer, snapshots: tuple[Path, Path]
):
    await check_tokens_after_a_frozen_update(lambda: open_engine(vllm_server), *snapshots, atol=5e-4)


async def test_frozen_request_is_aborted_with_what_it_has(vllm_server: RunningServer):
    async with open_engine(vllm_server) as engine:

        async def freeze_and_abort(_: list[Completion]) -> None:
            await engine.pause("keep")
            await (
                engine.abort_all()
            )  # what the server counts as running may be of a moment ago; the answer tells
            await engine.resume()

        answer = await disturb(engine, freeze_and_abort)
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.token_ids) < LONG


async def test_frozen_request_finishes_under_pause_wait(vllm_server: RunningServer):
    async with open_engine(vllm_server) as engine:
        async with at_work(engine) as answers:
            await engine.pause("keep")
            await engine.pause("wait")
            await trio.lowlevel.checkpoint()
            assert [len(answer.token_ids) for answer in answers] == [LONG]
        await engine.resume()


async def test_server_that_fails_in_a_load_has_no_version_until_an_update_succeeds(
    vllm_server: RunningServer, snapshots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # the snapshot passes our check and is gone when the server looks for it, as when the two see different
    # file systems
    gone = tmp_path / "gone"
    shutil.copytree(snapshots[1], gone)
    async with open_engine(vllm_server) as engine:
        await load(engine, snapshots[0])
        version = await engine.weight_version()
        before = await engine.generate(make_request(temperature=0.0))
        await engine.pause("keep")
        send = engine._server.control

        async def lose_and_send(path: str, body: Any = None) -> bytes:
            shutil.rmtree(gone, ignore_errors=True)
            return await send(path, body)

        with monkeypatch.context() as patch:
            patch.setattr(engine._server, "control", lose_and_send)
            with pytest.raises(
                EngineError, match=f"could not load {gone} and may have its weights in pieces"
            ):
                await engine.update_weights_from_checkpoint(gone, version + 1)
        assert await engine.weight_version() == -1
        await engine.update_weights_from_checkpoint(snapshots[0], version)
        await engine.resume()
        after = await engine.generate(make_request(temperature=0.0))
        assert await engine.health()
    assert after.weight_versions.tolist() == [version] * 4
    np.testing.assert_allclose(before.log_probs, after.log_probs, atol=1e-4)


async def test_snapshot_of_another_model_is_refused_before_the_server_hears_of_it(
    vllm_server: RunningServer, snapshots: tuple[Path, Path], tmp_path: Path
):
    tensors = safetensors.torch.load_file(snapshots[1] / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    lacking, wide, strange = tmp_path / "lacking", tmp_path / "wide", tmp_path / "strange"
    for path, content in (
        (lacking, tensors),
        (wide, tensors | {"model.norm.weight": norm.repeat(2)}),
        (strange, tensors | {"model.norm.weight": norm, "model.odd.weight": norm.clone()}),
    ):
        path.mkdir()
        safetensors.torch.save_file(content, path / "model.safetensors")
    async with open_engine(vllm_server) as engine:
        version = await engine.weight_version()
        await engine.pause("keep")
        for path, message in (
            (lacking, "has the shape None"),
            (wide, r"\(128,\)"),
            (strange, "model.odd.weight"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.update_weights_from_checkpoint(path, version + 1)
        await engine.resume()
        assert await engine.weight_version() == version


async def test_update_without_a_pause_is_refused(vllm_server: RunningServer, snapshots: tuple[Path, Path]):
    async with open_engine(vllm_server) as engine:
        with pytest.raises(EngineError, match=r"call pause\(\)"):
            await engine.update_weights_from_checkpoint(snapshots[0], 99)


async def test_token_outside_the_vocabulary_never_reaches_the_server(vllm_server: RunningServer):
    async with open_engine(vllm_server) as engine:
        with pytest.raises(RequestRefused, match="prompt_ids holds 259"):
            await engine.generate(make_request(prompt=(1, 259)))


async def test_top_p_log_probs_are_those_of_the_tokens_kept(vllm_server: RunningServer):
    async with open_engine(vllm_server) as engine:
        completion = await engine.generate(make_request(max_new_tokens=16, top_p=1e-6))
    np.testing.assert_allclose(completion.log_probs, 0.0, atol=1e-5)  # one token is kept, and it is certain


async def test_engine_left_paused_by_an_earlier_run_serves_again(vllm_server: RunningServer):
    async with open_engine(vllm_server) as engine:
        await engine.pause("keep")
    async with open_engine(vllm_server) as engine:
        assert (await engine.generate(make_request())).finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"api_key": "wrong"}, "--api-key"),
        ({"vocab_size": 50_000}, "does --model name the same model"),
        ({"context_length": CONTEXT_LENGTH + 1}, f"--max-model-len {CONTEXT_LENGTH + 1}"),
    ],
)
async def test_opening_with_what_does_not_fit_names_the_flag(
    changes: dict[str, Any], flag: str, vllm_server: RunningServer
):
    with pytest.raises(EngineSetupError, match=flag):
        async with open_engine(vllm_server, **changes):
            pass


async def test_memory_that_a_cpu_cannot_give_back_is_said_so(vllm_server: RunningServer):
    async with open_engine(vllm_server) as engine:
        assert not engine.features.frees_memory
        with pytest.raises(EngineError, match="--enable-sleep-mode"):
            await engine.release_memory()


async def test_weight_transfer_that_is_off_names_the_flag(vllm_server: RunningServer):
    async with open_engine(vllm_server) as engine:
        with pytest.raises(EngineSetupError, match="--weight-transfer-config"):
            await engine.dialect.init_weight_transfer({})


@pytest.mark.parametrize("speaks", ["ids", "text"])
async def test_openai_engine_evaluates_on_the_same_server(
    speaks: str, vllm_server: RunningServer, snapshots: tuple[Path, Path]
):
    tokenizer = transformers.AutoTokenizer.from_pretrained(snapshots[0])
    async with (
        open_engine(vllm_server) as exact,
        open_openai_engine(
            vllm_server.url,
            model="policy",
            api_key=vllm_server.api_key,
            vocab_size=VOCAB_SIZE,
            context_length=CONTEXT_LENGTH,
            tokenizer=tokenizer if speaks == "text" else None,
        ) as engine,
    ):
        request = make_request(prompt=(65, 66, 67), max_new_tokens=6, temperature=0.0)
        expected, completion = await exact.generate(request), await engine.generate(request)
        assert np.isnan(completion.log_probs).all()
        if speaks == "ids":
            assert completion.token_ids.tolist() == expected.token_ids.tolist()
        else:
            assert tokenizer.decode(completion.token_ids) == tokenizer.decode(
                expected.token_ids, skip_special_tokens=True
            )
        assert await engine.health()


@pytest.mark.parametrize(
    ("flags", "dev_mode", "named"),
    [
        (("--enable-scale-out",), True, "--logprobs-mode processed_logprobs"),
        (("--enable-scale-out", "--logprobs-mode", "processed_logprobs"), False, "VLLM_SERVER_DEV_MODE=1"),
    ],
    ids=["raw-log-probs", "no-dev-mode"],
)  # the other settings are tried in unit tests, without a server of their own
async def test_server_without_a_setting_is_refused_by_the_name_of_its_flag(
    flags: tuple[str, ...],
    dev_mode: bool,
    named: str,
    vllm_python: Path,
    snapshots: tuple[Path, Path],
    tmp_path: Path,
):
    with (
        run_vllm(vllm_python, snapshots[0], tmp_path / "server.log", *flags, dev_mode=dev_mode) as server,
        pytest.raises(EngineSetupError, match=named),
    ):
        async with open_engine(server):
            pass
