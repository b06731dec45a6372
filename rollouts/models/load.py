"""From a model's name to a directory, and from a directory to a torch module and a tokenizer. Runs no code
and unpickles nothing from disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError

from rollouts.errors import ModelError
from rollouts.models.bundled import choose_model_cache, make_bundled_model
from rollouts.models.directories import check_model_directory
from rollouts.models.gguf import make_gguf_model
from rollouts.models.quiet import quiet_transformers
from rollouts.models.tiny import make_tiny
from rollouts.models.tokenizers import (
    check_chat_template_compiles,
    check_tokenizer_fits,
    find_turn_end_ids,
    read_chat_template,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ModelHead = Literal["tokens", "scalar"]
"""What a model says at each position: log-probs of the next token, or one number. See
rollouts.models.scalar_head.
"""

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
HUB_IGNORED = ["original/*", "consolidated*"]  # the same weights in the format of their authors
# ends of names of what is not a causal model
OTHER_HEADS = ("Model", "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering")
# what transformers raises on directories that it cannot use
LOAD_ERRORS = (
    OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError, SafetensorError,
)  # fmt: skip
HUB_WAY_OUT = "check the spelling, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT, or give a directory or file"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def resolve_model(
    name: str, *, cache_dir: Path | None = None, seed: int = 0, head: ModelHead = "tokens"
) -> Path:
    """The directory of a model that is ready to load, with load_hf_model or, for head="scalar", with
    load_scalar_model.

    "bundled:NAME": converted once from an installed package. "tiny:KIND": random, made from `seed` (see
    rollouts.models.tiny). A directory: checked. A *.gguf file: converted once. "org/model:file.gguf": such a
    file on the Hugging Face hub. Anything else is a name on the hub, downloaded into the hub's own cache, or
    found there when offline. `cache_dir` replaces where made and converted models are kept. Raises ModelError
    that says what is missing. Blocks: seconds for a conversion, minutes for a download.
    """
    kind, _, rest = name.partition(":")
    cache, path = choose_model_cache(cache_dir), Path(name).expanduser()
    if kind == "bundled":
        path = make_bundled_model(rest, cache)
    elif kind == "tiny":
        path = make_tiny(rest, seed, cache)
    elif name.endswith(".gguf") and not path.is_dir():
        path = make_gguf_model(path if path.is_file() else _download_gguf(name), cache)
    elif not name or not path.is_dir():
        unlike_hub = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
        if not name or path.exists() or unlike_hub:
            raise ModelError(
                f"model.name={name!r} is not a directory; give a directory, a .gguf file, a hub name like"
                " 'org/model', 'bundled:…' or 'tiny:byte'"
            )
        path = _download(name, head)
    check_model_directory(path)
    _find_class(path, head)
    return path


def _find_class(path: Path, head: ModelHead) -> str:
    return find_scalar_class(path) if head == "scalar" else find_causal_class(path)


def _download(name: str, head: ModelHead) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        with quiet_transformers():
            # gigabytes of a model that cannot be used are not asked for
            _find_class(Path(hf_hub_download(name, "config.json")).parent, head)
            return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name={name!r} is no directory here, and the hub did not give it"
            f" ({describe_error(error)}); {HUB_WAY_OUT}"
        ) from error


def _download_gguf(name: str) -> Path:
    """A GGUF file named as org/model:file.gguf; a path that is not there has no colon, or says that it is
    one.
    """
    from huggingface_hub import hf_hub_download

    repository, colon, file = name.partition(":")
    if not colon or not file or repository.startswith((".", "~", "/")) or repository.count("/") != 1:
        raise ModelError(
            f"model.name={name!r} is not a file here; give the path of a .gguf file, or 'org/model:file.gguf'"
            " for one on the hub"
        )
    try:
        with quiet_transformers():
            return Path(hf_hub_download(repository, file))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name={name!r}: the hub did not give {file!r} of {repository!r}"
            f" ({describe_error(error)}); {HUB_WAY_OUT}"
        ) from error


def describe_error(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10), 1)[0][:300] or 'no message'}"


# --- classes ------------------------------------------------------------------------------------------------


def find_causal_class(path: Path) -> str:
    """Name of transformers' class for the causal language model in a directory, by its config.json alone:
    before any weight is read.

    Raises ModelError, with the way out, for what cannot be trained: another kind of model, code in the
    directory, packed weights.
    """
    config, what, found = _read_class(path)
    written = config["architectures"]
    if found not in written and _has_other_head(config):
        raise ModelError(f"{what} was not trained to predict the next token; use a model named …ForCausalLM")
    return found


def find_scalar_class(path: Path) -> str:
    """Name of transformers' class for the model in a directory with one number as its head, by its
    config.json alone.

    The directory holds a causal language model or such a model itself. Raises ModelError as find_causal_class
    does, and for other heads.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    config, what, causal = _read_class(path)
    written = config["architectures"]
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(str(config.get("model_type")))
    if found is None:
        raise ModelError(
            f"{what} cannot have a scalar head: transformers has no …ForSequenceClassification for it; use a"
            " Llama, Qwen or Gemma"
        )
    if not {found, causal} & set(written) and _has_other_head(config):
        raise ModelError(
            f"{what} has neither the head of a causal language model nor a scalar one; use a model named"
            f" {causal} or {found}"
        )
    # 2 where nothing is written, as for transformers
    labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    if found in written and labels != 1:
        raise ModelError(
            f"{what} has {labels} labels, and a scalar head has one; use a reward model with num_labels=1, or"
            f" the model named {causal}"
        )
    return found


def has_own_scalar_head(path: Path) -> bool:
    """Whether the files in a directory that find_scalar_class accepts hold the scalar head; else it is a
    causal model's, and the head is new.
    """
    return find_scalar_class(path) in _read_class(path)[0]["architectures"]


def _has_other_head(config: dict[str, Any]) -> bool:
    written = config["architectures"]
    others = config.get("is_encoder_decoder") or all(name.endswith(OTHER_HEADS) for name in written)
    return bool(written) and bool(others)


def _read_class(path: Path) -> tuple[dict[str, Any], str, str]:
    """config.json with a list of architectures, the model in words, and transformers' causal class of a type
    that can be trained, whatever head the directory has. Raises ModelError for a type that cannot.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
        config["architectures"] = [str(name) for name in config.get("architectures") or []]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(
            f"{path / 'config.json'} cannot be read ({error}); copy the model directory again"
        ) from error
    kind, quantization = str(config.get("model_type")), config.get("quantization_config")
    what = f"the model in {path} (model_type={kind!r}, architectures={config['architectures']})"
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    problem = ""
    if found is None and config.get("auto_map"):
        problem = (
            "needs code from its directory (auto_map), which is never run; use a model that transformers"
            " itself implements"
        )
    elif found is None:
        problem = (
            "is not a causal language model that transformers has; use a decoder-only model, one named"
            " …ForCausalLM"
        )
    elif found.endswith("ForConditionalGeneration"):
        problem = "reads images or sound as well; use its text-only model, one named …ForCausalLM"
    elif quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        problem = (
            f"has weights packed by {method!r} (quantization_config), which cannot train; use the model it"
            " was made from"
        )
    if problem or found is None:
        raise ModelError(f"{what} {problem}")
    return config, what, found


# --- loading ------------------------------------------------------------------------------------------------


def load_hf_model(path: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal language model in a directory, on the CPU, in evaluation mode, with every weight from the
    files.

    safetensors only, no code from the directory, SDPA attention where the model has it (one with capped
    scores has not). Raises ModelError if it cannot be loaded, is of another kind (see find_causal_class), or
    the files lack a weight.
    """
    from transformers import AutoModelForCausalLM

    check_model_directory(path)
    model, missing = load_pretrained(AutoModelForCausalLM, path, find_causal_class(path), dtype=dtype)
    check_complete(path, missing)
    return model


def load_pretrained(
    auto: Any, path: Path, class_name: str, **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """What an Auto class of transformers loads, and the weights that the files lack, which it has made up.
    Raises ModelError.
    """
    try:
        with quiet_transformers():
            model, loading = auto.from_pretrained(
                str(path),
                output_loading_info=True,
                use_safetensors=True,
                attn_implementation=choose_attention(class_name),
                **LOCAL,
                **options,
            )
    except LOAD_ERRORS as error:
        raise ModelError(f"the model in {path} cannot be loaded ({describe_error(error)})") from error
    return model, set(loading["missing_keys"])


def check_complete(path: Path, missing: set[str]) -> None:
    """Raises ModelError if weights are missing: transformers would train them from random values."""
    if missing:
        raise ModelError(
            f"the weights in {path} lack {min(missing)} (and {len(missing) - 1} more); copy the model"
            " directory again"
        )


def choose_attention(class_name: str) -> str:
    """The attention that a class of transformers runs with here: SDPA where it has it, "eager" where it has
    not (one with capped scores).
    """
    import transformers

    return "sdpa" if getattr(getattr(transformers, class_name, None), "_supports_sdpa", False) else "eager"


def load_tokenizer(path: Path, *, chat_template: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory; it has a padding token (where it has none of its own, one that ends
    an answer) and a chat template.

    `chat_template` is a Jinja file that takes the place of the directory's own. Raises ModelError if it
    cannot be loaded, lacks a chat template or every token that could end an answer, or has ids that the model
    beside it has no embedding for.
    """
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(path), **LOCAL)
    except LOAD_ERRORS as error:
        raise ModelError(f"the tokenizer in {path} cannot be loaded ({describe_error(error)})") from error
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer in {path} has no chat template; use an instruction-tuned model, set"
            " model.chat_template, or put a chat_template.jinja beside it"
        )
    check_chat_template_compiles(tokenizer, str(chat_template or path))
    stop_ids = stop_token_ids(tokenizer, path)
    if not stop_ids:
        raise ModelError(
            f"the tokenizer in {path} has no end token, its chat template ends turns with text, and there is"
            " no eos_token_id in a generation_config.json, so no answer would end; set eos_token in its"
            " tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or str(tokenizer.convert_ids_to_tokens(stop_ids[0]))
    if (path / "config.json").is_file():
        check_tokenizer_fits(tokenizer, read_text_config(path), str(path))
    return tokenizer


def read_text_config(path: Path) -> dict[str, Any]:
    """The settings of the language model in a directory, defaults filled in, without those of what it may see
    or hear. Raises ModelError.
    """
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(path), **LOCAL)
    except LOAD_ERRORS as error:
        raise ModelError(f"{path / 'config.json'} cannot be read ({describe_error(error)})") from error
    return config.get_text_config(decoder=True).to_dict()


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, path: Path) -> tuple[int, ...]:
    """Sorted ids that end a completion: the tokenizer's end token, what its chat template ends an assistant's
    turn with (which is what SFT teaches), and those of the directory's generation_config.json.

    Raises ModelError if the file is not JSON or its ids are not integers.
    """
    own_id: Any = tokenizer.eos_token_id
    ids: set[Any] = {*find_turn_end_ids(tokenizer), own_id} - {None}
    file = path / "generation_config.json"
    if file.is_file():
        try:
            more = json.loads(file.read_text("utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{file} cannot be read ({error})") from error
        ids.update(more if isinstance(more, list) else [] if more is None else [more])
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ModelError(f"{file} has eos_token_id={sorted(map(str, ids))}; the ids must be integers")
    return tuple(sorted(ids))
