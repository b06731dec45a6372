"""Model directories as files: what a usable one holds, what tells two apart, and how one is made so that
nobody ever sees half of it. No torch.

Transformers without its warnings and progress bars, which would draw over ours; its errors in one line.

Which class of transformers a model directory is for, by its config.json alone: a causal language model, or
one with a scalar head. What cannot be trained is refused here.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from rollouts.errors import ModelError
from rollouts.run_dir import fsync_path
from rollouts.types import Fields, Texts

# --- transformers without its noise -------------------------------------------------------------------------


# of each call of transformers: nothing from a hub, no code from a directory
LOCAL: Fields = {"local_files_only": True, "trust_remote_code": False}
# what transformers and the hub raise on directories and names that they cannot use
LOAD_ERRORS = (
    OSError, ValueError, LookupError, RuntimeError, ImportError, AttributeError, TypeError, SafetensorError,
)  # fmt: skip

# transformers imports torchao where it is there, which says at length what it does without
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers logs errors only and draws no progress bars; afterwards both are as they were.
    Process-wide.
    """
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def naming_errors(what: str, way_out: str = "copy the model directory again") -> Iterator[None]:
    """Inside, what transformers, a hub or a file raises is a ModelError: `what`, its own words, the way
    out.
    """
    try:
        yield
    except LOAD_ERRORS as error:
        raise ModelError(f"{what} ({describe_error(error)}); {way_out}") from error


def describe_error(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10), 1)[0][:300] or 'no message'}"


# --- directories --------------------------------------------------------------------------------------------


WEIGHT_INDEX = "model.safetensors.index.json"
WHOLE_FILE = "model.safetensors"
CONFIG_FILES = ("config.json", "generation_config.json")  # of which each rank makes its model
ADAPTER_CONFIG = "adapter_config.json"
WHOLE_BYTES = 8 * 2**20  # files up to here are hashed whole
# of a longer one: as many pieces of so many bytes, evenly spread, the first and the last among them
BLOCKS, BLOCK_BYTES = 32, 64 * 2**10


def choose_model_cache(cache_dir: Path | None) -> Path:
    """Where made models lie: `cache_dir` if given, else models/ in $ROLLOUTS_CACHE, else in
    ~/.cache/rollouts.
    """
    return cache_dir or Path(os.environ.get("ROLLOUTS_CACHE") or "~/.cache/rollouts").expanduser() / "models"


def is_adapter(path: Path) -> bool:
    """Whether a directory holds a LoRA adapter and no model."""
    return (path / ADAPTER_CONFIG).is_file()


def check_model_directory(path: Path) -> None:
    """Raises ModelError unless `path` holds config.json and safetensors weights, every shard of an index
    included.
    """
    problem = ""
    if not path.is_dir():
        problem = "does not exist; check model.name"
    elif is_adapter(path):
        problem = (
            "is a LoRA adapter without its model; name the model and set model.lora.init_from to the adapter,"
            f" or make a model of both: rollouts export {path} DIR --merge"
        )
    elif not (path / "config.json").is_file():
        problem = "has no config.json; a Hugging Face model directory has one beside its weights"
    elif (path / WEIGHT_INDEX).is_file():
        missing = [name for name in read_shard_names(path) if not (path / name).is_file()]
        if missing:
            problem = f"lacks {missing[0]} (and {len(missing) - 1} more) of {WEIGHT_INDEX}; copy it again"
    elif not any(path.glob("*.safetensors")):
        if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
            problem = "has pickled weights only, which are never loaded; convert them to safetensors"
        else:
            problem = "is without weights: it has no *.safetensors; copy the weights beside config.json"
    if problem:
        raise ModelError(f"model directory {path} {problem}")


def read_json(path: Path) -> Any:
    """What the file says. Raises OSError or ValueError if it cannot be read."""
    return json.loads(path.read_text("utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Writes the file, for a person to read too."""
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def read_shard_names(path: Path) -> list[str]:
    """Sorted file names of the shards in the directory's weight index. Raises ModelError if the index cannot
    be read, or names a file elsewhere.
    """
    with naming_errors(f"{path / WEIGHT_INDEX} cannot be read"):
        weight_map = read_json(path / WEIGHT_INDEX)["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{path / WEIGHT_INDEX} names the file {name!r}; shards lie beside their index")
    return names


def list_weight_files(path: Path) -> list[str]:
    """Names of the files with weights that loading the model reads, whether they are there or not."""
    if (path / WHOLE_FILE).is_file() or not (path / WEIGHT_INDEX).is_file():
        return [WHOLE_FILE]
    return read_shard_names(path)


class FileTensor(NamedTuple):
    """One tensor of a safetensors file."""

    name: str  # in the file
    file: Path
    shape: tuple[int, ...]


def list_tensors(path: Path) -> list[FileTensor]:
    """Every tensor that loading the model reads, by the headers of its files alone. Raises ModelError naming
    the file that is missing, cut or no safetensors.
    """
    found = []
    for file in (path / name for name in list_weight_files(path)):
        # opening also checks the file's size
        with naming_errors(f"{file} cannot be read"), safe_open(file, "np") as opened:
            names = opened.keys()
            found += [FileTensor(name, file, tuple(opened.get_slice(name).get_shape())) for name in names]
    return found


def compute_model_digests(path: Path) -> Texts:
    """ "SIZE:SHA-256" of each file from which a model is made, by name: the config, and the weights that are
    loaded. A missing file has none.

    Files above 8 MiB are hashed by their size and 32 blocks of 64 KiB: a directory of 100 GB in 20 files
    costs 40 MiB of reading. So another model, another revision, a file that is cut or has its weights in
    another place is told apart; a copy in which few bytes differ, as by a failing disk, only where they lie
    in a block. Raises ModelError if a file cannot be read.
    """
    found = {}
    for name in (*CONFIG_FILES, WEIGHT_INDEX, *list_weight_files(path)):
        with naming_errors(f"{path / name} cannot be read"), suppress(FileNotFoundError):
            digest, size = hashlib.sha256(), (path / name).stat().st_size
            count, length = (1, size) if size <= WHOLE_BYTES else (BLOCKS, BLOCK_BYTES)
            with (path / name).open("rb") as file:
                for number in range(count):
                    file.seek((size - length) * number // max(count - 1, 1))
                    digest.update(file.read(length))
            found[name] = f"{size}:{digest.hexdigest()}"
    return found


def build_directory_once(path: Path, write: Callable[[Path], None]) -> bool:
    """True if `write` made `path` now, False if it was there. Afterwards `path` is complete: it appears by a
    rename, synced to disk.

    A second process that wants the same directory waits for the first (a file lock that dies with its holder)
    and then uses what it made. When `write` raises, nothing is left behind.
    """
    if path.is_dir():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_dir():
            return False
        # of a process that was killed; a live one would hold the lock
        for leftover in path.parent.glob(f".tmp-{path.name}-*"):
            shutil.rmtree(leftover)
        temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            write(temporary)
            fsync_tree(temporary)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_path(path.parent)
    return True


def fsync_tree(root: Path) -> None:
    """Returns once every file and directory below `root`, and `root`, is on disk."""
    for path in sorted((root, *root.rglob("*")), reverse=True):  # a directory after what it names
        fsync_path(path)


ModelHead = Literal["tokens", "scalar"]
"""What a model says at each position: log-probs of the next token, or one number. See
rollouts.models.layers.
"""

# --- the class ----------------------------------------------------------------------------------------------


# ends of names of what is not a causal model
OTHER_HEADS = ("Model", "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering")


def has_own_scalar_head(path: Path) -> bool:
    """Whether the files in a directory that a scalar model can be made of hold the scalar head; else it is a
    causal model's, and the head is new.
    """
    found, config = find_class(path, "scalar")
    return found in config["architectures"]


def find_class(path: Path, head: ModelHead) -> tuple[str, Fields]:
    """Name of transformers' class for the model in a directory with that head, and its config.json, with a
    list of architectures: all that is read.

    The directory holds a causal language model, or one with a scalar head itself. Raises ModelError, with the
    way out, for what cannot be trained: another kind of model or head, code in the directory, packed weights.
    """
    from transformers.models.auto import modeling_auto

    with naming_errors(f"{path / 'config.json'} cannot be read"):
        config = read_json(path / "config.json")
        written = config["architectures"] = [str(name) for name in config.get("architectures") or []]
    kind, packed = str(config.get("model_type")), config.get("quantization_config")
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")
    scalar = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind, "")
    found = causal if head == "tokens" else scalar
    other = written and (
        config.get("is_encoder_decoder") or all(name.endswith(OTHER_HEADS) for name in written)
    )
    # 2 where nothing is written, as for transformers
    labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    problems = {
        "needs code from its directory (auto_map), which is never run; use a model that transformers itself"
        " implements": not causal and config.get("auto_map"),
        "is not a causal language model that transformers has; use a decoder-only model, one named"
        " …ForCausalLM": not causal,
        "reads images or sound as well; use its text-only model, one named …ForCausalLM": causal.endswith(
            "ForConditionalGeneration"
        ),
        f"has weights packed by {method!r} (quantization_config), which cannot train; use the model it was"
        " made from": packed,
        "cannot have a scalar head: transformers has no …ForSequenceClassification for it; use a Llama, Qwen"
        " or Gemma": not found,
        "was not trained to predict the next token; use a model named …ForCausalLM": head == "tokens"
        and other
        and causal not in written,
        "has neither the head of a causal language model nor a scalar one; use a model named"
        f" {causal} or {scalar}": head == "scalar" and other and not {causal, scalar} & set(written),
        f"has {labels} labels, and a scalar head has one; use a reward model with num_labels=1, or the model"
        f" named {causal}": head == "scalar" and scalar in written and labels != 1,
    }
    for problem, holds in problems.items():
        if holds:
            raise ModelError(f"the model in {path} (model_type={kind!r}, architectures={written}) {problem}")
    return found, config
