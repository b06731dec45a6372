"""`check RUN` finds damaged rows, checkpoints and trackers; `check CONFIG` asks the servers it names."""

import json
from functools import partial
from pathlib import Path

import httpx
import pytest

from rollouts.checkpoints.load import compute_manifest, encode_manifest
from rollouts.cli import main
from rollouts.config.tables import EngineConfig
from rollouts.preflight.checks import check_servers, check_written_run
from rollouts.preflight.findings import Findings
from rollouts.run_dir import RunDir
from tests.support.text_tables import cases, write_jsonl
from tests.unit.run_rows import read_command


@pytest.fixture
def run(tmp_path) -> Path:
    root = tmp_path / "run"
    checkpoint = root / "checkpoints/rl/step_2"
    checkpoint.mkdir(parents=True)
    rows = [{"stage": "rl", "step": step, "attempt": 1, "time_unix": 1.0} for step in (1, 2)]
    write_jsonl(root / "metrics.jsonl", *rows)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    manifest = compute_manifest(checkpoint, stage="rl", step=2)
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))
    return root


def check_levels(root: Path, *, deep: bool = False) -> dict[str, str]:
    return {finding.subject: finding.level for finding in check_written_run(RunDir(root), deep=deep)}


def test_a_torn_line_is_a_warning_and_a_damaged_one_an_error(run):
    assert check_levels(run, deep=True) == {"metrics.jsonl": "ok", "checkpoints": "ok"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "r')
    assert check_levels(run)["metrics.jsonl"] == "warning"
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert check_levels(run)["metrics.jsonl"] == "error"


def test_a_flipped_bit_shows_only_when_every_byte_is_read(run):
    weights = run / "checkpoints/rl/step_2/model.safetensors"
    weights.write_bytes(b"weighTs")
    assert check_levels(run)["checkpoints"] == "ok"
    assert check_levels(run, deep=True)["checkpoints/rl/step_2"] == "error"
    weights.write_bytes(b"weights and more")
    assert check_levels(run)["checkpoints/rl/step_2"] == "error"
    weights.unlink()
    assert check_levels(run)["checkpoints/rl/step_2"] == "error"


def test_the_command_exits_with_2_where_something_is_wrong(run, capsys):
    (run / "trackers").mkdir()
    (run / "trackers/statsd.json").write_text(json.dumps({"schema": 1, "id": "a", "files": {}, "number": 0}))
    out = read_command(capsys, "check", run, "--deep")
    assert "warning  tracker statsd: it does not have all rows" in out
    assert "this run is whole (1 warning)" in out
    (run / "checkpoints/rl/step_2/manifest.json").unlink()
    assert main(["check", str(run)]) == 2
    assert "error    checkpoints/rl/step_2: " in capsys.readouterr().out
    assert main(["check", str(run.parent)]) == 2


# address | answers with the key | answers without it | levels of the findings | what is said
@cases("""
url         | with_key                     | without_key | levels | word
127.0.0.1:1 | /health=200 /server_info=200 | | ok | sglang 0.5.23, healthy
10.0.0.5:1 | /health=200 /server_info=200 | /server_info=401 | ok | healthy
10.0.0.5:1 | /health=200 /server_info=200 | /health=200 /server_info=200 | ok warning | whoever reaches it
127.0.0.1:1 | /health=503 | | error | 503 Service
127.0.0.1:1 | /health=200 /server_info=401 | | error | SGLANG_API_KEY
127.0.0.1:1 | | | error | ConnectError
""")
def test_a_server_is_healthy_or_named_with_the_way_out(monkeypatch, url, with_key, without_key, levels, word):
    def answer(request):
        answers = with_key if "authorization" in request.headers else without_key
        codes = dict(pair.split("=") for pair in answers.split())
        if request.url.path not in codes:
            raise httpx.ConnectError("refused")
        content = {"version": "0.5.23", "api_key": "secret-key"}
        return httpx.Response(int(codes[request.url.path]), json=content)

    monkeypatch.setenv("SGLANG_API_KEY", "key")
    config = EngineConfig(kind="sglang", urls=[f"http://{url}"])
    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    check_servers(config, findings := Findings())
    assert [finding.level for finding in findings] == levels.split()
    assert word in findings[-1].message
    assert "secret-key" not in repr(findings)
