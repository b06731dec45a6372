"""From a model's name to a directory, and from a directory to a torch module and a tokenizer. Runs no code and unpickles nothing from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollouts.errors import ModelError
from rollouts.models.bundled import choose_model_cache, make_bundled_model, make_tiny_byte_model
from rollouts.models.directories import check_model_directory
from rollouts.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
HUB_IGNORED = ["original/*", "consolidated*"]  # the same weights in the format of their authors


def resolve_model(name: str, *, cache_dir: Path | None = None, seed: int = 0) -> Path:
    """The directory of a model that is ready to load.

    "bundled:NAME": converted once from an installed package. "tiny:byte": random, made from `seed`. A directory: checked. Anything else
    is a name on the Hugging Face hub, downloaded into the hub's own cache, or found there when offline. `cache_dir` replaces where the
    first two are kept. Raises ModelError that says what is missing. Blocks: seconds for a conversion, minutes for a download.
    """
    kind, _, rest = name.partition(":")
    if kind == "bundled":
        return _checked(make_bundled_model(rest, choose_model_cache(cache_dir)))
    if kind == "tiny":
        if rest != "byte":
            raise ModelError(f"model.name={name!r} is not known; the tiny model is 'tiny:byte'")
        return _checked(make_tiny_byte_model(seed, choose_model_cache(cache_dir)))
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked(path)
    if not name or path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"model.name={name!r} is not a directory; give a directory, a hub name like 'org/model', 'bundled:…' or 'tiny:byte'")
    return _checked(_download(name))


def _checked(path: Path) -> Path:
    check_model_directory(path)
    return path


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with quiet_transformers():
            return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name={name!r} is no directory here, and the hub did not give it ({type(error).__name__}: {_first_line(error)}); check the "
            "spelling, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT, or give a directory"
        ) from error


def load_hf_model(path: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal language model in a directory, on the CPU, in evaluation mode, with every weight from the files.

    safetensors only, no code from the directory, SDPA attention. Raises ModelError if it cannot be loaded or the files lack a weight.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    check_model_directory(path)
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False, "attn_implementation": "sdpa"}
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, SafetensorError) as error:
        raise ModelError(f"the model in {path} cannot be loaded ({type(error).__name__}: {_first_line(error)})") from error
    model, loading = loaded
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers would train them from random values
        raise ModelError(f"the weights in {path} lack {missing[0]} (and {len(missing) - 1} more); copy the model directory again")
    return model


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory; it has a padding token (the end token where it has none of its own) and a chat template.

    Raises ModelError if it cannot be loaded or lacks an end token or a chat template.
    """
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        raise ModelError(f"the tokenizer in {path} cannot be loaded ({type(error).__name__}: {_first_line(error)})") from error
    if tokenizer.chat_template is None:
        raise ModelError(f"the tokenizer in {path} has no chat template; use an instruction-tuned model, or put a chat_template.jinja beside it")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokenizer in {path} has neither a padding nor an end token; set eos_token in its tokenizer_config.json")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, path: Path) -> tuple[int, ...]:
    """Sorted ids that end a completion: the tokenizer's end token and those of the directory's generation_config.json.

    Raises ModelError if the file is not JSON or its ids are not integers.
    """
    own_id: Any = tokenizer.eos_token_id
    ids: set[Any] = set() if own_id is None else {own_id}
    generation_config = path / "generation_config.json"
    if generation_config.is_file():
        try:
            more = json.loads(generation_config.read_text("utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{generation_config} cannot be read ({error})") from error
        ids.update(more if isinstance(more, list) else [] if more is None else [more])
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ModelError(f"{generation_config} has eos_token_id={sorted(map(str, ids))}; the ids must be integers")
    return tuple(sorted(ids))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
