"""train.py, but that a run whose servers all fail gives up after 5 s."""

from __future__ import annotations

import runpy
from pathlib import Path

import rollouts.engines.open

rollouts.engines.open.DOWN_LIMIT_S = 5.0  # before who imports its value
runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "integration_training" / "train.py"), run_name="__main__"
)
