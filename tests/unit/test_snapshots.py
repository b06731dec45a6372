"""A snapshot is a model directory that is complete, or it is not there. The embedded engine needs none."""

import json
import subprocess
import sys
import textwrap
import threading
from functools import partial
from unittest.mock import Mock

import msgspec
import pytest
import torch
import trio
from safetensors import safe_open
from safetensors.torch import load_file

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.errors import SnapshotError, WeightSyncError
from rollouts.models.export import TensorFile, save_hf_model
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.testing.fakes import ScriptedEngine, open_fake_backend
from rollouts.testing.torch_contracts import BATCH, assert_weights_equal, train
from rollouts.weight_sync.snapshots import DiskSnapshots, clear_after_restart, export_snapshot, list_snapshots
from rollouts.weight_sync.sync import WeightSync
from rollouts.weight_sync.update import make_probe
from tests.support.text_tables import cases


def open_backend(model_path):
    optim = OptimConfig(lr=1e-2)
    return open_pytorch_backend(model_path, optim=optim, total_steps=10, threads=1, autocast="off")


def read_tensors(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@cases("kind: llama moe")  # tied embeddings; experts that files have one by one
async def test_a_snapshot_has_the_names_and_bits_that_saving_the_model_writes(kind, tmp_path):
    """Also one that is written from a copy, after the trainer has changed its weights."""
    path = tmp_path / "v1"
    async with open_backend(resolve_model(f"tiny:{kind}")) as backend:
        await train(backend)
        made = await export_snapshot(backend, path, shard_bytes=50_000)
        held = await DiskSnapshots(tmp_path).hold(backend)
        await backend.device_thread.submit(lambda: save_hf_model(backend.model, tmp_path / "saved"))
        await train(backend)
        again = await export_snapshot(held, tmp_path / "v2", shard_bytes=50_000)
        moved = await export_snapshot(backend, tmp_path / "v3", shard_bytes=50_000)
    assert again.digest == made.digest != moved.digest
    assert_weights_equal(read_tensors(path), read_tensors(tmp_path / "saved"))
    assert (path / "config.json").read_bytes() == (tmp_path / "saved/config.json").read_bytes()
    shards, manifest = sorted(path.glob("*.safetensors")), json.loads((path / "manifest.json").read_text())
    assert len(shards) > 3 and sum(shard.stat().st_size for shard in shards) == made.weight_bytes
    assert (manifest["version"], manifest["files"]) == (1, msgspec.to_builtins(list(made.files)))
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in shards:
        with safe_open(shard, framework="pt") as opened:
            assert set(opened.keys()) == {name for name, file in weight_map.items() if file == shard.name}
            assert len(opened.keys()) == 1 or shard.stat().st_size < 120_000  # with 64 KiB of header


async def test_a_snapshot_is_a_model_directory_in_the_dtype_that_engines_serve(tmp_path):
    model_path = resolve_model("tiny:moe")
    async with open_backend(model_path) as backend:
        await export_snapshot(backend, tmp_path / "v0", dtype=torch.bfloat16, model_dir=model_path)
        weights = await backend.get_weights()
    loaded = load_hf_model(tmp_path / "v0", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "v0/config.json").read_text())["dtype"] == "bfloat16"
    wanted = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    assert_weights_equal(dict(loaded.named_parameters()), wanted)
    assert load_tokenizer(tmp_path / "v0").chat_template == load_tokenizer(model_path).chat_template


async def test_a_snapshot_that_was_made_before_is_verified_and_an_earlier_run_s_is_never_served(tmp_path):
    folder = tmp_path / "weights"
    for name in ("v3", "v4", "v4-2", "v5", ".tmp-v5-0a", "other"):
        (folder / name).mkdir(parents=True)
    async with open_backend(resolve_model("tiny:byte")) as backend:
        keeper = DiskSnapshots(folder)
        made = await keeper.export(backend, 4)
        assert sorted(path.name for path in folder.iterdir()) == ["other", "v3", "v4", "v4-2", "v4-3"]
        assert await keeper.export(backend, 4) == made
        for file in sorted(made.path.glob("*.json")):
            whole = file.read_bytes()
            for damaged in (whole[:-3], bytes([whole[0] ^ 1]) + whole[1:], None):
                file.unlink() if damaged is None else file.write_bytes(damaged)
                if file.name != "manifest.json":
                    with pytest.raises(SnapshotError, match=file.name):
                        await keeper.export(backend, 4)
            file.write_bytes(whole)
        await keeper.prune(made.path)
        assert list_snapshots(folder) == [(4, made.path)]


async def test_a_full_disk_fails_the_snapshot_and_not_the_backend(tmp_path, monkeypatch):
    async with open_backend(resolve_model("tiny:byte")) as backend:
        with monkeypatch.context() as patch:
            patch.setattr(TensorFile, "append", Mock(side_effect=OSError(28, "No space left on device")))
            with pytest.raises(SnapshotError, match="No space left"):
                await export_snapshot(backend, tmp_path / "w/v1")
        assert list((tmp_path / "w").iterdir()) == []
        await backend.forward(BATCH)  # works still
        await export_snapshot(backend, tmp_path / "w/v1")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch, trio
    from rollouts.models.export import TensorFile
    from rollouts.weight_sync import snapshots

    class Backend:  # no model, so that transformers need not be imported
        async def stream_weights(self, sink):
            for number in range(5):
                sink([(f"weight.{number}", torch.zeros(1000))])
            await trio.lowlevel.checkpoint()

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    async def export(where):
        if where == "shard":
            TensorFile.finish = die
        elif where == "manifest":
            snapshots.msgspec.to_builtins = die  # the manifest's entries
        elif where == "rename":
            Path.rename = lambda self, target: die() if self.is_dir() else os.rename(self, target)
        await snapshots.export_snapshot(Backend(), Path(sys.argv[1]) / where / "v1", shard_bytes=5_000)

    for where in ("nowhere", "shard", "manifest", "rename"):  # a child each
        child = os.fork()
        if not child:
            trio.run(export, where)
            os._exit(0)
        print(where, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_no_snapshot(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    said = subprocess.check_output(command, text=True, timeout=300)
    assert " ".join(said.split()) == "nowhere 0 shard -9 manifest -9 rename -9"
    assert (tmp_path / "nowhere/v1/manifest.json").exists()
    for where in ("shard", "manifest", "rename"):
        folder = tmp_path / where
        (left,) = folder.iterdir()
        assert left.name.startswith(".tmp-v1-") and list_snapshots(folder) == []
        assert (left / "manifest.json").exists() == (where == "rename")
        clear_after_restart(folder, 5)
        assert list(folder.iterdir()) == []


async def test_a_shard_that_is_complete_after_the_export_was_cancelled_harms_nobody(tmp_path, monkeypatch):
    at_the_end, goes_on, written = trio.Event(), threading.Event(), trio.Event()
    finish = TensorFile.finish

    def finish_late(file):
        trio.from_thread.run_sync(at_the_end.set, trio_token=token)
        assert goes_on.wait(10)
        finish(file)

    class Backend:
        async def stream_weights(self, sink):
            def work():  # one bucket of two shards
                sink([(f"weight.{number}", torch.zeros(1000)) for number in range(2)])
                trio.from_thread.run_sync(written.set, trio_token=token)

            await trio.to_thread.run_sync(work, abandon_on_cancel=True)

    token = trio.lowlevel.current_trio_token()
    monkeypatch.setattr(TensorFile, "finish", finish_late)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(export_snapshot, Backend(), tmp_path / "v1", shard_bytes=5_000))
        await at_the_end.wait()
        nursery.cancel_scope.cancel()
    goes_on.set()
    with trio.fail_after(10):
        await written.wait()  # the shard was announced before
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-v1-") and len(list(left.iterdir())) == 2


# --- the embedded engine ------------------------------------------------------------------------------------


async def test_a_shared_engine_has_nothing_to_load_and_must_report_the_version():
    async with open_fake_backend() as backend:
        engine = ScriptedEngine(shares_weights=True, version=2)
        sync = WeightSync(make_probe(256, tolerance=10.0))
        assert await sync(backend, [engine], 2) == {} and engine.requests == []
        with pytest.raises(WeightSyncError, match="reports weight version 2 after an update to version 4"):
            await sync(backend, [engine], 4)


@cases("kind: byte gemma moe")
async def test_an_embedded_engine_proves_new_weights_and_never_old_ones(kind):
    async with (
        open_backend(resolve_model(f"tiny:{kind}")) as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=8) as engine,
    ):
        # one that compares with the trainer, and one whose tolerance hides everything
        syncs = [WeightSync(make_probe(engine.features.vocab_size, tolerance=x)) for x in (1e-4, 100.0)]
        for version in (0, 1):
            for sync in syncs:
                metrics = await sync(backend, [engine], version)
                assert metrics["weight_sync/probe_difference/max"] < 1e-5
            assert await engine.weight_version() == version
            await train(backend)
            await backend.set_weight_version(version + 1)
        old, begin, take = await engine.copy_weights(), engine.begin_update, engine.receive_bucket

        async def begin_with_old():
            await begin()
            take([*old.items()])

        engine.begin_update, engine.receive_bucket = begin_with_old, lambda bucket: None
        for sync, says in zip(
            syncs, ("differs from the trainer", "still serves the old weights"), strict=True
        ):
            with pytest.raises(WeightSyncError, match=says):
                await sync(backend, [engine], 2)
