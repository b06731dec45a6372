"""Rows of a made-up run directory for the tests of what looks at runs."""

import json
import struct
import zlib

import numpy as np
from safetensors.numpy import save

from rollouts.cli import main
from tests.support.text_tables import write_jsonl

HEAD = {"schema": 1, "stage": "rl", "step": 1, "policy_version": 0, "attempt": 1, "time_unix": 1.0}


def write_rows(path, *rows):
    """Writes rows, each with what HEAD has and it lacks; the path."""
    path.parent.mkdir(exist_ok=True, parents=True)
    return write_jsonl(path, *({**HEAD, **row} for row in rows))


def read_command(capsys, *words):
    """What a command prints that succeeds."""
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def write_run(root, **metrics):
    """A run of 20 steps of RL that is finished; `metrics` are added to each step. `a__b` stands for `a/b`."""
    more = {name.replace("__", "/"): value for name, value in metrics.items()}
    rows = [
        {
            "step": step,
            "policy_version": step - 1,
            "time_unix": 100.0 + step,
            "reward/mean": step / 20,
            "loss/total": 1 / step,
            "time/step": 2.0,
            "time/generate": 1.5,
            **more,
        }
        for step in range(1, 21)
    ]
    write_rows(root / "metrics.jsonl", *rows)
    (root / "config.toml").write_text(f'seed = 0\n[output]\ndir = "{root}"\n')
    (root / "summary.json").write_text(json.dumps({"mode": "rl", "accuracy": {"base": 0.0, "rl": 0.5}}))
    return root


def write_block(root, sample, **columns):
    """Where the arrays of a sample lie in a shard of one block, written as the format is described."""
    kinds = {"tokens": "<i4", "mask": "|u1"}
    body = save({name: np.array(values, kinds.get(name, "<f4")) for name, values in columns.items()})
    (root / "tokens").mkdir()
    prefix = struct.pack("<QI", len(body), zlib.crc32(sample.encode() + body))
    (root / "tokens/rl-1-000000.bin").write_bytes(prefix + body)
    return {"shard": "rl-1-000000.bin", "offset": 0, "length": len(columns["tokens"])}
