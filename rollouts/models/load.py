"""From a model's name to a directory, and from a directory to a torch module and a tokenizer. Runs no code
and unpickles nothing from disk.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError, TemplateSyntaxError

from rollouts.data.chat import NO_PARAMS, find_end, make_template
from rollouts.errors import DataError, ModelError
from rollouts.models.directories import (
    LOCAL,
    ModelHead,
    check_model_directory,
    choose_model_cache,
    find_class,
    is_adapter,
    naming_errors,
    quiet_transformers,
    read_json,
)
from rollouts.models.export import save_hf_model
from rollouts.models.lora import apply_adapter, find_head, read_base
from rollouts.models.made import find_bundled_file, make_gguf_model, make_tiny
from rollouts.models.sharded import load_sharded_weights, make_meta_model
from rollouts.types import ChatMessage, Fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
HUB_IGNORED = ["original/*", "consolidated*"]  # the same weights in the format of their authors
CALL = {"type": "function", "id": "abcdef123", "function": {"name": "name", "arguments": {"key": "value"}}}
# what a template raises: its author's own refusals, and what its expressions meet in the messages
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
HUB_WAY_OUT = "check the spelling, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT, or give a directory or file"


def resolve_model(
    name: str, *, cache_dir: Path | None = None, seed: int = 0, head: ModelHead = "tokens"
) -> Path:
    """The directory of a model that is ready to load, with load_hf_model and the same `head`.

    "bundled:NAME": converted once from an installed package. "tiny:KIND": random, made from `seed` (see
    rollouts.models.made). A directory: checked. A *.gguf file: converted once. Anything else is a name on the
    Hugging Face hub, downloaded into the hub's own cache, or
    found there when offline. `cache_dir` replaces where made and converted models are kept. Raises ModelError
    that says what is missing. Blocks: seconds for a conversion, minutes for a download.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    kind, _, rest = name.partition(":")
    cache, path = choose_model_cache(cache_dir), Path(name).expanduser()
    if kind == "bundled":
        path = make_gguf_model(find_bundled_file(rest), cache)
    elif kind == "tiny":
        path = make_tiny(rest, seed, cache)
    elif name.endswith(".gguf") and path.is_file():
        path = make_gguf_model(path, cache)
    elif not name or not path.is_dir():
        unlike_hub = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
        if not name or unlike_hub or path.exists() or name.endswith(".gguf"):
            raise ModelError(
                f"model.name={name!r} is not a directory or file here; give a directory, a .gguf file, a hub"
                " name like 'org/model', 'bundled:…' or 'tiny:byte'"
            )
        missing = f"model.name={name!r} is not here, and the hub did not give it"
        with naming_errors(missing, HUB_WAY_OUT), quiet_transformers():
            # gigabytes of a model that cannot be used are not asked for
            find_class(Path(hf_hub_download(name, "config.json")).parent, head)
            path = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
    check_model_directory(path)
    find_class(path, head)
    return path


# --- loading ------------------------------------------------------------------------------------------------


def load_hf_model(
    path: Path, *, dtype: torch.dtype = torch.float32, head: ModelHead = "tokens"
) -> "PreTrainedModel":
    """The causal language model in a directory, on the CPU, in evaluation mode, with every weight from the
    files; for head="scalar" the model with one scalar head, which is 0 if the directory is a causal model's.

    An adapter's directory gives the model that it names with the adapter added to its weights.

    safetensors only, no code from the directory, SDPA attention where the model has it (one with capped
    scores has not). Raises ModelError if it cannot be loaded, is of another kind, or its files and its
    config.json do not agree on the weights.
    """
    base = read_base(path).path if is_adapter(path) else path
    model = make_meta_model(base, dtype=dtype, head=head)
    if dtype.itemsize == 2:  # as transformers itself: routers of experts are not computed in 16 bits
        exact = tuple(model._keep_in_fp32_modules_strict or ())
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if any(part in name for part in exact):
                weight.data = weight.data.float()
    load_sharded_weights(model, base, new_head=True)
    if base != path:
        apply_adapter(model, path)
    return model


def save_merged(source: Path, target: Path, dtype: str | None = None) -> None:
    """Writes the model directory of the base with the adapter in `source` added to its weights, each sum
    rounded once; without `dtype` in that of the base. Raises ModelError.
    """
    base = read_base(source).path
    stored = str(dtype or read_text_config(base).get("dtype") or "float32").removeprefix("torch.")
    model = load_hf_model(source, head=find_head(source))
    save_hf_model(model, target, load_tokenizer(base), dtype=getattr(torch, stored))


def load_tokenizer(path: Path, *, chat_template: Path | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer in a model directory; it has a padding token (where it has none of its own, one that ends
    an answer) and a chat template.

    `chat_template` is a Jinja file that takes the place of the directory's own. Raises ModelError if it
    cannot be loaded, lacks a chat template or every token that could end an answer, or has ids that the model
    beside it has no embedding for.
    """
    from transformers import AutoTokenizer

    with naming_errors(f"the tokenizer in {path} cannot be loaded"), quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(str(path), **LOCAL)
    if chat_template:
        way_out = "give the path of a Jinja file"
        with naming_errors(f"the chat template {chat_template} cannot be read", way_out):
            tokenizer.chat_template = chat_template.read_text("utf-8")
        if not tokenizer.chat_template.strip():
            raise ModelError(f"the chat template {chat_template} is empty; {way_out}")
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer in {path} has no chat template; use an instruction-tuned model, set"
            " model.chat_template, or put a chat_template.jinja beside it"
        )
    with suppress(*TEMPLATE_ERRORS):  # what it refuses is not looked at: the rows will show what it takes
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{chat_template or path}: the chat template is no Jinja: line {error.lineno}:"
                f" {error.message}"
            ) from error
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
        check_tokenizer_fits(tokenizer, read_text_config(path)["vocab_size"], str(path))
    return tokenizer


def read_text_config(path: Path) -> Fields:
    """The settings of the language model in a directory, defaults filled in, without those of what it may see
    or hear. Raises ModelError.
    """
    from transformers import AutoConfig

    with naming_errors(f"{path / 'config.json'} cannot be read"), quiet_transformers():
        config = AutoConfig.from_pretrained(str(path), **LOCAL)
    return config.get_text_config(decoder=True).to_dict()


def stop_token_ids(tokenizer: "PreTrainedTokenizerBase", path: Path) -> tuple[int, ...]:
    """Sorted ids that end a completion: the tokenizer's end token, what its chat template ends an assistant's
    turn with (which is what SFT teaches), and those of the directory's generation_config.json.

    Raises ModelError if the file is not JSON or its ids are not integers.
    """
    own_id: Any = tokenizer.eos_token_id
    ids = find_turn_end_ids(tokenizer) | {own_id} - {None}
    file = path / "generation_config.json"
    if file.is_file():
        with naming_errors(f"{file} cannot be read"):
            more = read_json(file).get("eos_token_id")
        ids.update(more if isinstance(more, list) else [] if more is None else [more])
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ModelError(f"{file} has eos_token_id={sorted(map(str, ids))}; the ids must be integers")
    return tuple(sorted(ids))


def find_turn_end_ids(tokenizer: "PreTrainedTokenizerBase") -> set[Any]:
    """Ids of the tokens with which the chat template ends a plain answer, and a tool call where it writes
    one. Found by writing both, with a system turn before them where it refuses them without one.

    Empty if there is no template, it refuses them, or it ends them with text.
    """
    ends = set[str]()
    for answer in ({"content": "plain answer"}, {"content": "", "tool_calls": [CALL]}):
        for system in ([], [ChatMessage(role="system", content="system")]):
            with suppress(DataError, ModelError):
                question = ChatMessage(role="user", content="question")
                messages = [*system, question, {"role": "assistant", **answer}]
                template = make_template(messages, tokenizer, NO_PARAMS, None)
                prompt = template.render(messages[:-1], add_generation_prompt=True)
                body = template.render(messages).removeprefix(prompt)
                end = find_end(body, messages, template)
                ends |= {end[0]} if end else set()
                break
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    return {one for one in ids if one not in (None, tokenizer.unk_token_id)}


def check_tokenizer_fits(tokenizer: "PreTrainedTokenizerBase", size: int, where: str) -> None:
    """Raises ModelError, beginning with `where`, unless every id that the tokenizer can give is one of the
    `size` that the model has an embedding for. A vocabulary larger than the tokenizer is usual (padded), and
    fine.
    """
    outside = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= size)
    if outside:
        first_id, token = outside[0]
        raise ModelError(
            f"{where}: the tokenizer's ids reach {outside[-1][0]}, the model's vocabulary has {size} (0 to"
            f" {size - 1}); the first token outside is {token!r} with id {first_id}; use the tokenizer that"
            " came with the model"
        )
