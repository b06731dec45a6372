"""Decode steps recorded once per size and replayed: on a GPU a step of many small kernels takes as long as
launching them.

    ids, positions ──► static buffers ──► the recording of (rows, length) ──► static logits
                                             │ first use: the eager step, then the recording, then both are compared
                                             └ forgotten when the keys and values moved in memory, or a weight did

Rows and lengths are rounded up to a few sizes. The rows that this adds write to position 0 of slots nobody
has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rollouts.engines.local.decoder import FastDecoder
from rollouts.engines.local.interface import Decoder, tolerance_of
from rollouts.engines.local.kv_slots import KVSlots

RECORDINGS = 128  # of which each holds some MB; the oldest goes first
SHORTEST = 64  # positions

Step = Callable[[], None]
Recorder = Callable[
    [Step], Step
]  # what it returns does again what the step did, with whatever lies in the same buffers then


def record_on_gpu(decoder: Decoder[Any]) -> Decoder[Any]:
    """The decoder with its steps recorded as CUDA graphs, where it is the fast one and on a GPU; else as it
    is.
    """
    if decoder.device.type != "cuda" or not isinstance(decoder, FastDecoder):
        return decoder
    return RecordedDecoder(decoder, CudaRecorder())  # pragma: gpu


class CudaRecorder:  # pragma: gpu
    """Records CUDA graphs, all in one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()  # libraries allocate their workspaces of this stream
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class RecordedDecoder:
    """A fast decoder whose decode steps are replayed. Where a recording fails or differs from the eager step,
    all steps are eager from then on.
    """

    def __init__(self, decoder: FastDecoder, recorder: Recorder) -> None:
        self._decoder = decoder
        self._recorder: Recorder | None = recorder
        self._recordings: dict[tuple[int, int], Step] = {}  # by rows and length
        self._recorded_at: tuple[tuple[int, ...], int] | None = (
            None  # where weights, and which keys and values, were when recorded
        )
        self._storages: tuple[int, ...] = ()  # of the weights, now
        self._ids: Tensor | None = None  # [max_rows]
        self._positions: Tensor | None = None  # [max_rows]
        self._logits: Tensor | None = None  # [max_rows, V]

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    def make_slots(self, *, max_rows: int, max_length: int) -> KVSlots:
        """Empty slots of this model's shape, and buffers for so many rows. Only the slots made last may be
        decoded.
        """
        self._recordings.clear()
        self._ids, self._positions = (
            torch.zeros(max_rows, dtype=torch.int64, device=self.device) for _ in range(2)
        )
        self._logits = torch.empty(
            max_rows, self._decoder.lm_head.out_features, dtype=self.dtype, device=self.device
        )
        return self._decoder.make_slots(max_rows=max_rows, max_length=max_length)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The decoder's own context. Between two of them, and only then, weights may move in memory."""
        with self._decoder.computing():
            self._storages = self._decoder.storages()
            yield

    def prefill(self, ids: Tensor, lengths: Tensor, slots: Tensor, kv: KVSlots) -> Tensor:
        return self._decoder.prefill(ids, lengths, slots, kv)

    def decode(self, ids: Tensor, positions: Tensor, kv: KVSlots, *, length: int) -> Tensor:
        """Logits [B, V] as FastDecoder.decode gives them, in a buffer that the next step overwrites."""
        if self._recorder is None:
            return self._decoder.decode(ids, positions, kv, length=length)
        assert self._ids is not None and self._positions is not None and self._logits is not None, (
            "make_slots comes first"
        )
        count = len(ids)
        rows, length = (
            round_up(count, 1, parts=4, limit=kv.max_rows),
            round_up(length, SHORTEST, parts=8, limit=kv.max_length),
        )
        kv.reserve(rows, length)
        self._forget_moved(kv)
        self._ids[:count], self._positions[:count] = ids, positions
        self._positions[count:rows] = 0
        replay = self._recordings.get((rows, length))
        if replay is None:
            return self._record(rows, length, kv)[:count]
        replay()
        return self._logits[:count]

    def _forget_moved(self, kv: KVSlots) -> None:
        now = (self._storages, kv.moves)
        if now != self._recorded_at:
            self._recordings.clear()
            self._recorded_at = now

    def _record(self, rows: int, length: int, kv: KVSlots) -> Tensor:
        """The eager step's logits [rows, V]. Replaying the same step writes the same keys and values again,
        so it can be tried at once.
        """
        recorder, ids, positions, logits = self._recorder, self._ids, self._positions, self._logits
        assert recorder is not None and ids is not None and positions is not None and logits is not None

        def step() -> None:
            with self._casting_anew():
                logits[:rows] = self._decoder.decode(ids[:rows], positions[:rows], kv, length=length)

        step()
        eager = logits[:rows].clone()
        logits[:rows] = float("nan")  # which a recording that does nothing would leave
        try:
            replay = recorder(step)
            replay()
            difference = float(
                (eager.float().log_softmax(-1) - logits[:rows].float().log_softmax(-1)).abs().max()
            )
        except RuntimeError as error:
            self._give_up(f"cannot be recorded ({error})")
            return eager
        limit = tolerance_of(self.dtype)
        if not difference <= limit:
            self._give_up(f"differ by {difference:.3g} nats when replayed, the limit is {limit:g}")
            return eager
        if len(self._recordings) == RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[rows, length] = replay
        return eager

    def _casting_anew(self) -> Any:
        """Autocast that keeps no converted weights: a recording must convert them each time, or it would
        never see an update.
        """
        dtype = self._decoder.autocast_dtype
        return (
            nullcontext()
            if dtype is None
            else torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)
        )

    def _give_up(self, why: str) -> None:
        self._recorder = None
        self._recordings.clear()
        warnings.warn(
            f"the embedded engine's decode steps {why}; they run one kernel at a time, which is slower",
            RuntimeWarning,
            stacklevel=2,
        )


def round_up(value: int, least: int, *, parts: int, limit: int) -> int:
    """The next of a few sizes: each power of two and the steps of 1/`parts` of it below, but for those finer
    than `least`; at most `limit`.
    """
    block = max(least, (1 << (value - 1).bit_length()) // parts)
    return min(limit, -(-value // block) * block)
