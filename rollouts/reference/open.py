"""A frozen model that scores: which weights it holds, and where it runs.

open_reference(path, dtype=…, where="trainer") ──► in this process, on the device thread that the trainer uses too
                              where="process"  ──► in a process of its own, started and ended here (process.py)
                              where="http://…" ──► on a vLLM or SGLang server that somebody runs (http.py)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from rollouts.device_thread import DeviceThread
from rollouts.errors import ConfigError
from rollouts.models.load import load_hf_model
from rollouts.models.log_probs import ForwardPlan
from rollouts.protocols import LogProbScorer
from rollouts.reference.forward_plan import plan_forward
from rollouts.reference.quantize import (
    compare_log_probs,
    describe_kl_bias,
    load_torchao,
    quantize_model,
    sample_probe,
)
from rollouts.reference.score import FrozenReference, score_batch
from rollouts.types import RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ReferenceDtype = Literal["float32", "bfloat16", "8bit", "4bit"]
DTYPES = ("float32", "bfloat16", "8bit", "4bit")
Say = Callable[[str], None]


class Reference(LogProbScorer, Protocol):
    """A LogProbScorer that says what was measured when it was opened."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """reference/… of a quantised model (see rollouts.reference.quantize.compare_log_probs); empty of an
        exact one.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedReference:
    """A model that is ready to score."""

    model: PreTrainedModel
    plan: ForwardPlan
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the quantisation


def load_reference(
    path: Path,
    *,
    dtype: ReferenceDtype = "float32",
    device: str = "cpu",
    micro_batch_tokens: int = 8192,
    probe: RolloutBatch | None = None,
    say: Say = lambda _: None,
) -> LoadedReference:
    """The model in a directory on `device`, without gradients, with the shortcuts that are exact for it.
    Blocks.

    8bit and 4bit: loaded in float32 on the CPU, where it scores `probe` (None: rows that it samples itself)
    before and after it is quantised; the difference goes into `metrics` and, in words, to `say`. Raises
    ModelError, and ConfigError for a dtype that is none or that needs a library which is not installed.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"the reference's dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if dtype in ("float32", "bfloat16"):
        loaded: Any = load_hf_model(path, dtype=getattr(torch, dtype)).to(device)  # pyright: ignore[reportArgumentType]
        return LoadedReference(loaded.requires_grad_(False), plan_forward(loaded))
    load_torchao()  # before the minutes that a large model takes
    model: Any = load_hf_model(path).requires_grad_(False)
    exact_plan = plan_forward(model)
    probe = sample_probe(model) if probe is None else probe
    exact = score_batch(model, probe, plan=exact_plan, micro_batch_tokens=micro_batch_tokens)
    quantize_model(model, 8 if dtype == "8bit" else 4)
    model = model.to(device)
    plan = plan_forward(model)
    metrics = compare_log_probs(
        score_batch(model, probe, plan=plan, micro_batch_tokens=micro_batch_tokens), exact, probe
    )
    say(describe_kl_bias(metrics, dtype))
    return LoadedReference(model, plan, metrics)


@asynccontextmanager
async def open_reference(
    path: Path,
    *,
    dtype: ReferenceDtype = "float32",
    where: str = "trainer",
    device_thread: DeviceThread,
    device: str = "cpu",
    micro_batch_tokens: int = 8192,
    probe: RolloutBatch | None = None,
    say: Say = lambda _: None,
    log_dir: Path | None = None,
    torch_threads: int | None = None,
    server: Literal["vllm", "sglang"] = "vllm",
    server_model: str = "policy",
    api_key: str | None = None,
    vocab_size: int | None = None,
) -> AsyncIterator[Reference]:
    """The model at `path` as a frozen LogProbScorer.

    where: "trainer", "process" (which needs `log_dir`; `torch_threads` are its own), or the http(s) address
    of a running `server` that serves the same model as `server_model` (needs `vocab_size`; dtype and device
    are the server's own). Raises ConfigError, ModelError, and for processes and servers ScoringError and
    EngineError.
    """
    if where == "trainer":
        loaded = await device_thread.submit(
            lambda: load_reference(
                path, dtype=dtype, device=device, micro_batch_tokens=micro_batch_tokens, probe=probe, say=say
            )
        )
        yield FrozenReference(
            loaded.model, device_thread, loaded.plan, micro_batch_tokens, metrics=loaded.metrics
        )
    elif where == "process":
        from rollouts.reference.process import open_reference_process

        if log_dir is None:
            raise ConfigError("a reference in a process of its own needs log_dir, where its output goes")
        options: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "micro_batch_tokens": micro_batch_tokens,
            "torch_threads": torch_threads,
        }
        async with open_reference_process(path, log_dir=log_dir, say=say, probe=probe, **options) as scorer:
            yield scorer
    elif where.startswith(("http://", "https://")):
        from rollouts.reference.http import open_http_reference

        if vocab_size is None:
            raise ConfigError(
                "a reference on a server needs vocab_size: a token id outside it may end the server"
            )
        async with open_http_reference(
            where, kind=server, model=server_model, api_key=api_key, vocab_size=vocab_size
        ) as scorer:
            yield scorer
    else:
        raise ConfigError(
            f"where={where!r} of a reference must be 'trainer', 'process' or the http(s) address of a server"
        )
