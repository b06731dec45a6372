"""`rollouts evaluate`: a model, or a checkpoint of a run, evaluated as a run evaluates its weights. It is
train.py in the mode evaluate, for which the model, the config and the directory are found here.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from integration_training.train import main
from rollouts.checkpoints.load import check_checkpoint, find_run_model
from rollouts.errors import ConfigError
from rollouts.models.directories import is_adapter
from rollouts.run_dir import parse_step


def run_evaluate(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """The exit code. Raises ConfigError for a model without a config, RunDirError for a run without a
    checkpoint, CheckpointError for one that is not whole.
    """
    model, config, data = find_run_model(arguments.model), arguments.config, arguments.data
    path, words = Path(model).absolute(), list(overrides)
    name = path.name.replace(":", "-")
    recorded = path / "../../../config.toml"  # of a checkpoint's run
    if parse_step(name) is not None and recorded.is_file():
        check_checkpoint(path, hashes=True)
        name, config = f"{path.parts[-4]}-{path.parent.name}-{name}", config or recorded
    if config is None:
        raise ConfigError(
            f"{model} is no run, whose config would say what is asked and how it is scored; name a TOML file"
            " with an [eval] table: --config FILE"
        )
    if data:
        kind = "parquet" if data.suffix == ".parquet" else "jsonl"
        words += ["--eval.data.kind", kind, "--eval.data.path", str(data), "--eval.data.size", "none"]
    if arguments.against:
        words += ["--eval.against", find_run_model(arguments.against)]
    words = ["--config", str(config), "--mode", "evaluate", "--output.dir", f"runs/evaluate-{name}", *words]
    # of an adapter the model is the config's
    return main([*words, "--model.lora.init_from" if is_adapter(path) else "--model.name", model])
