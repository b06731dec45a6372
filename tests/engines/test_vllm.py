"""What only a vLLM server does, on a real one. Needs ROLLOUTS_VLLM_PYTHON, or vLLM in .venv-vllm."""

import shutil

import numpy as np
import pytest
import transformers
import trio

from rollouts.engines.openai import open_openai_engine
from rollouts.errors import EngineError, EngineSetupError
from rollouts.testing.engine_contracts import LONG, at_work, make_request
from tests.support.text_tables import cases

from .conftest import CONTEXT_LENGTH, VOCAB_SIZE, open_engine, run_server
from .model_checks import load

pytestmark = pytest.mark.engines


async def test_frozen_request_finishes_under_pause_wait(vllm_server):
    async with open_engine(vllm_server) as engine:
        async with at_work(engine) as answers:
            await engine.pause("keep")
            await engine.pause("wait")
            await trio.lowlevel.checkpoint()
            assert [len(answer.token_ids) for answer in answers.values()] == [LONG]
        await engine.resume()


async def test_server_that_fails_in_a_load_has_no_version_until_an_update_succeeds(
    vllm_server, snapshots, tmp_path, monkeypatch
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
        send = engine.dialect.server.control

        async def lose_and_send(*arguments, **options):
            shutil.rmtree(gone, ignore_errors=True)
            return await send(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(engine.dialect.server, "control", lose_and_send)
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


async def test_top_p_log_probs_are_those_of_the_tokens_kept(vllm_server):
    async with open_engine(vllm_server) as engine:
        completion = await engine.generate(make_request(max_new_tokens=16, top_p=1e-6))
    np.testing.assert_allclose(completion.log_probs, 0.0, atol=1e-5)  # one token is kept, and it is certain


@cases("speaks: ids text")
async def test_openai_engine_evaluates_on_the_same_server(speaks, vllm_server, snapshots):
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


# the other settings are tried in unit tests, without a server of their own
@cases("""
flags                        | dev_mode | named
--logprobs-mode raw_logprobs | 1        | --logprobs-mode processed_logprobs
--enforce-eager              | 0        | VLLM_SERVER_DEV_MODE=1
""")
async def test_server_without_a_setting_is_refused_by_the_name_of_its_flag(
    flags, dev_mode, named, snapshots, tmp_path
):
    environment = {"VLLM_SERVER_DEV_MODE": dev_mode}
    opened = run_server("vllm", snapshots[0], tmp_path, *flags.split(), **environment)
    with opened as server, pytest.raises(EngineSetupError, match=named):
        async with open_engine(server):
            pass
