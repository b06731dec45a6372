"""`rollouts export`: what a run has trained, as a directory that other programs load."""

import argparse
import shutil
from pathlib import Path

from rollouts.checkpoints.load import check_checkpoint, find_run_model
from rollouts.errors import RunDirError
from rollouts.run_dir import checkpoint_manifest, checkpoint_state_dir, parse_step


def run_export(arguments: argparse.Namespace) -> int:
    """Writes the model or adapter of a run, whole or not at all. Raises RunDirError for a directory that is
    there, CheckpointError for a checkpoint that is not whole, ModelError for an adapter whose base is gone.
    """
    from rollouts.models.directories import build_directory_once, is_adapter
    from rollouts.models.load import save_merged

    source, target = Path(find_run_model(arguments.model)), arguments.to
    if parse_step(source.name) is not None:
        check_checkpoint(source, hashes=True)

    def write(path: Path) -> None:
        if arguments.merge and is_adapter(source):
            save_merged(source, path, arguments.dtype)
            return
        left = {checkpoint_state_dir(source), checkpoint_manifest(source)}
        for file in set(source.iterdir()) - left:
            if file.is_file():
                shutil.copyfile(file, path / file.name)

    if not build_directory_once(target, write):
        raise RunDirError(f"{target} is there already; name a new directory")
    print(f"wrote {target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    return 0
