"""Every path inside a run directory, in one place.

    runs/NAME/
      config.toml            as resolved
      metrics.jsonl          one row a step
      samples.jsonl          one row a sample
      evaluations.jsonl      one row an evaluation
      summary.json           written last
      checkpoints/STAGE/step_N/          Hugging Face model directory, training state in state/, manifest.json written last
      weights/vN/                        snapshots for engines that read from disk
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

STEP_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Makes nothing on disk."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def stage_checkpoints(self, stage: str) -> Path:
        return self.checkpoints / stage

    def checkpoint(self, stage: str, step: int) -> Path:
        return self.checkpoints / stage / f"step_{step}"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def weight_snapshot(self, version: int) -> Path:
        return self.weights / f"v{version}"


def checkpoint_state_dir(checkpoint: Path) -> Path:
    """Where a checkpoint keeps training state, beside the model files."""
    return checkpoint / "state"


def checkpoint_manifest(checkpoint: Path) -> Path:
    """The file that makes a checkpoint complete; written last."""
    return checkpoint / "manifest.json"


def parse_step(name: str) -> int | None:
    """N of `step_N`, None for any other name."""
    match = STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None
