"""The cache of reference models: never above its budget, one load a model, nobody waits for ever, whatever is
cancelled or fails.
"""

import random
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.device_thread import open_device_thread
from rollouts.errors import BackendClosed, ConfigError, ModelError
from rollouts.models.forward_plan import plan_forward
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.reference.cache import ModelSize, ReferenceCache, open_reference_cache
from rollouts.reference.quantize import count_bytes_by_headers
from rollouts.reference.score import score_batch
from rollouts.testing.torch_contracts import make_batch
from tests.support.text_tables import cases

BATCH = make_batch()


class Memory:
    """Loads models that only have a size, and keeps its own account of what is in memory."""

    def __init__(self, sizes, budget, *, steps=2):
        self.sizes, self.budget, self.steps = sizes, budget, steps
        self.live, self.loads = Counter(), Counter()  # bytes and times, by name
        self.fails, self.most = set(), 0

    def _set(self, name, size):
        assert size <= self.live.get(name, size), f"{name} is loaded twice"
        self.live[name] = size
        if not size:
            del self.live[name]
        self.most = max(self.most, self.live.total())
        assert self.most <= self.budget, self.live

    async def measure(self, name):
        await trio.lowlevel.checkpoint()
        return self.sizes[name]

    @asynccontextmanager
    async def open_model(self, name):
        self.loads[name] += 1
        self._set(name, self.sizes[name].loading)
        try:
            for _ in range(self.steps):
                await trio.lowlevel.checkpoint()
            if name in self.fails:
                raise ModelError(f"{name} cannot be loaded")
        except BaseException:
            self._set(name, 0)
            raise
        self._set(name, self.sizes[name].held)
        yield name
        await trio.lowlevel.checkpoint()
        self._set(name, 0)

    def open(self):
        return aclosing(ReferenceCache(self.budget, self.measure, self.open_model))


def same(*names):
    return {name: ModelSize(4, 4) for name in names}


@cases("""
sizes                      | …
{"a": [9, 9]}              | too big
{"a": [2, 9]}              | too big while it loads
{"a": [5, 5], "b": [5, 5]} | too big together
""")
async def test_what_can_never_fit_is_refused_and_nothing_is_given_up_for_it(sizes: Any):
    memory = Memory({name: ModelSize(*size) for name, size in sizes.items()} | same("small"), 8)
    async with memory.open() as cache:
        async with cache.lease("small"):
            pass
        with pytest.raises(ConfigError, match="budget_bytes is 8"):
            async with cache.lease(*sizes):
                pass
        assert [*memory.live] == ["small"]


async def test_nothing_is_leased_after_the_end():
    async with Memory(same("a"), 4).open() as cache:
        pass
    with pytest.raises(BackendClosed):
        async with cache.lease("a"):
            pass


@cases("seed: 0 1 2 3")
async def test_thousands_of_random_leases(seed: int):
    """Random models, holds, failures and cancellations. `Memory` checks the budget at every change, and that
    no model is loaded twice; the end is reached within the deadline.
    """
    rng = random.Random(seed)
    held = rng.choices(range(1, 7), k=12)
    sizes = {f"model{at}": ModelSize(size, size + rng.choice([0, 0, 1, 3])) for at, size in enumerate(held)}
    memory = Memory(sizes, 12, steps=3)
    served = Counter()

    async def use(cache, task):
        own = random.Random(f"{seed} {task}")
        for _ in range(60):
            names = own.sample(sorted(sizes), own.choice([1, 1, 1, 2]))
            with trio.CancelScope() as scope:
                if own.random() < 0.2:
                    nursery.start_soon(cancel_later, scope, own.randint(0, 30))
                try:
                    async with cache.lease(*names) as models:
                        assert models == tuple(names)
                        for _ in range(own.randint(0, 8)):
                            await trio.lowlevel.checkpoint()
                            assert all(memory.live[name] == sizes[name].held for name in names), (
                                "given up while in use"
                            )
                        served.update(names)
                except ModelError:
                    memory.fails.clear()
                except ConfigError:
                    served["refused"] += 1
            if own.random() < 0.02:
                memory.fails.add(own.choice(sorted(sizes)))

    async def cancel_later(scope, steps):
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    with trio.fail_after(60):
        async with memory.open() as cache:
            async with trio.open_nursery() as nursery:
                for task in range(40):
                    nursery.start_soon(use, cache, task)
            counts = cache.statistics()
            assert counts["bytes"] == memory.live.total()
    assert counts["loads"] == memory.loads.total()
    assert counts["peak_bytes"] == memory.most
    assert served.total() > 1500
    assert all(served[name] > 0 for name in sizes)
    assert not memory.live


# --- real models --------------------------------------------------------------------------------------------


async def test_real_models_score_as_they_do_alone_within_the_budget():
    paths = [resolve_model(f"tiny:{kind}") for kind in ("llama", "qwen3", "gemma")]
    budget = sum(sorted(count_bytes_by_headers(path, "float32") for path in paths)[1:])
    async with (
        open_device_thread(name="cache", torch_threads=1) as thread,
        open_reference_cache(budget_bytes=budget, device_thread=thread) as cache,
    ):

        async def score(path):
            async with cache.lease(str(path)) as (reference,):
                found = await reference.score(BATCH)
            model = load_hf_model(path)
            expected = score_batch(model, BATCH, plan=plan_forward(model), micro_batch_tokens=8192)
            np.testing.assert_equal(found, expected)

        async with trio.open_nursery() as nursery:
            for path in paths * 2:
                nursery.start_soon(score, path)
        assert cache.statistics()["peak_bytes"] <= budget
        async with cache.lease(str(paths[0])) as (reference,):
            pass
        await reference.release()
        with pytest.raises(BackendClosed, match="lease"):
            await reference.score(BATCH)


@cases("kind: byte llama qwen3 gemma mamba moe")
@cases("dtype: float32 bfloat16")
def test_headers_say_how_large_a_model_will_be(kind, dtype):
    import torch

    path = resolve_model(f"tiny:{kind}")
    size = load_hf_model(path, dtype=getattr(torch, dtype)).get_memory_footprint()
    assert size <= count_bytes_by_headers(path, dtype) <= size + 64 * 1024
