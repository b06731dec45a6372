"""Which requests of several users' adapters are done by one pass, and who waits for whom."""

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.backends.together import Asked
from rollouts.serve.combine import Combiner
from rollouts.serve.prometheus import Meters
from rollouts.serve.service import Service
from rollouts.types import ForwardBackwardResult, LossSpec, RolloutBatch
from tests.support.text_tables import cases

WINDOW_S, PASS_S = 0.02, 1.0
SPEC = LossSpec("sft")


def ask(backend):
    """What is asked of an adapter; a number is enough of a backend."""
    row = np.arange(4)
    return Asked(backend, RolloutBatch(tokens=(row,), loss_masks=(row > 0,)), SPEC)


@dataclass
class Device:
    """A device thread whose jobs take virtual time, one after the other."""

    place: trio.Lock = field(default_factory=trio.Lock)  # first come, first served
    passes: list[list[int]] = field(default_factory=list)  # who was in each
    begun: list[float] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)

    async def submit(self, job, seconds=0.0):
        async with self.place:
            await trio.sleep(seconds)

    def statistics(self):
        return {"queued": float(self.place.locked())}

    async def run(self, asked):
        numbers = [one.backend for one in asked]
        async with self.place:
            self.passes.append(numbers)
            self.begun.append(trio.current_time())
            await trio.sleep(PASS_S)
        return [
            ValueError(f"{number} is bad")
            if number in self.failing
            else ForwardBackwardResult(loss=float(number), denominator=1.0, metrics={})
            for number in numbers
        ]


@asynccontextmanager
async def open_combiner():
    device = Device()
    combiner = Combiner(device, WINDOW_S, device.run)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(combiner.run_passes)
        yield combiner, device
        nursery.cancel_scope.cancel()


async def train_often(combiner, number, times, between):
    """A client that does something between its requests, each of which has its own answer."""
    for _ in range(times):
        assert (await combiner.train(ask(number))).loss == number
        await between()


async def test_a_model_that_is_alone_waits_for_nobody(autojump_clock):
    async with open_combiner() as (combiner, device):
        for _ in range(3):
            start = trio.current_time()
            await combiner.train(ask(0))
            assert trio.current_time() == pytest.approx(start + PASS_S)
            await trio.sleep(WINDOW_S / 2)
    assert device.passes == [[0]] * 3


async def test_all_that_come_while_a_pass_runs_are_in_the_next_in_their_order(autojump_clock):
    async with open_combiner() as (combiner, device), trio.open_nursery() as nursery:
        nursery.start_soon(combiner.train, ask(0))
        for number in (5, 3, 8, 1):
            await trio.sleep(0.1)
            nursery.start_soon(combiner.train, ask(number))
    assert device.passes == [[0], [5, 3, 8, 1]]
    assert device.begun[1] == pytest.approx(device.begun[0] + PASS_S + WINDOW_S)  # once for model 0


@cases("""
step_s | think_s | …
0.0    | 0.005   |
0.05   | 0.005   | the last one's step ends long after the window
0.0    | 0.019   |
""")
async def test_eight_that_train_in_step_stay_together(step_s: float, think_s: float, autojump_clock):
    """Each awaits its answer, its step, which runs on the device, and the way over the network."""
    async with open_combiner() as (combiner, device), trio.open_nursery() as nursery:

        async def step():
            await trio.sleep(think_s / 2)
            await device.submit(lambda: None, step_s)
            await trio.sleep(think_s / 2)

        for number in range(8):
            nursery.start_soon(train_often, combiner, number, 10, step)
    assert [len(one) for one in device.passes[1:10]] == [8] * 9
    assert max(np.diff(device.begun)) < PASS_S + 8 * step_s + think_s + WINDOW_S + 1e-6


async def test_one_that_has_gone_costs_the_others_a_window_once(autojump_clock):
    async with open_combiner() as (combiner, device), trio.open_nursery() as nursery:
        nursery.start_soon(combiner.train, ask(9))
        nursery.start_soon(train_often, combiner, 0, 6, trio.lowlevel.checkpoint)
    late = np.diff(device.begun) - PASS_S
    assert [9 in one for one in device.passes].count(True) == 1
    np.testing.assert_allclose(sorted(late), [*[0.0] * (len(late) - 1), WINDOW_S], atol=1e-9)


async def test_a_device_that_never_rests_holds_nobody_longer_than_a_pass(autojump_clock):
    """As while the engine samples on it, and one of the last pass has gone."""
    async with open_combiner() as (combiner, device):
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(combiner.train, ask(number))

        async def sample():
            while True:
                await device.submit(lambda: None, 0.01)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(sample)
            start = trio.current_time()
            await combiner.train(ask(0))
            assert trio.current_time() - start < 2 * PASS_S + 3 * WINDOW_S
            nursery.cancel_scope.cancel()


async def test_nobody_starves_and_each_is_once_in_a_pass(autojump_clock):
    """Whoever comes is in the pass after the one that runs then."""
    draw, waits = random.Random(0), []
    async with open_combiner() as (combiner, device), trio.open_nursery() as nursery:

        async def train(number):
            for _ in range(20):
                came = len(device.passes)
                await combiner.train(ask(number))
                waits.append(len(device.passes) - came)
                await trio.sleep(draw.choice((0.0, 0.01, 0.7, 3.0)))

        for number in range(12):
            nursery.start_soon(train, number)
    assert len(waits) == 240 and max(waits) <= 2  # one may be about to begin
    assert all(len(one) == len(set(one)) for one in device.passes)


@cases("when: waits runs")
async def test_one_that_is_cancelled_disturbs_no_other(when, autojump_clock):
    async with open_combiner() as (combiner, device), trio.open_nursery() as nursery:
        nursery.start_soon(combiner.train, ask(0))
        await trio.sleep(0.1)
        scope = trio.CancelScope()

        async def leave():
            with scope:
                await combiner.train(ask(1))

        nursery.start_soon(leave)
        nursery.start_soon(train_often, combiner, 2, 1, trio.lowlevel.checkpoint)
        await trio.sleep(0.1 if when == "waits" else PASS_S + 0.1)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert [*combiner.waiting] == ([2] if when == "waits" else [])
    assert [*map(sorted, device.passes)] == [[0], [2] if when == "waits" else [1, 2]]


async def test_a_failure_is_raised_where_it_belongs(autojump_clock):
    """One that no pass has, as of a device that is closed, is raised to all; the next are done."""
    async with open_combiner() as (combiner, device):
        raised = []

        async def train(number):
            try:
                await combiner.train(ask(number))
            except ValueError:
                raised.append(number)

        async def train_all():
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(train, number)

        device.failing = {1}
        await train_all()
        assert raised == [1]

        async def refuse(asked):
            await trio.lowlevel.checkpoint()
            raise ValueError("the device is closed")

        run, combiner.run = combiner.run, refuse
        await train_all()
        assert sorted(raised) == [0, 1, 1, 2]
        combiner.run = run
        await train_all()
        assert sorted(raised) == [0, 1, 1, 1, 2]


@cases("""
changes                  | combined
                         | yes
deterministic = true     | no
ranks = 2                | no
adapter = false          | no
window_s = 0.0           | no
micro_batch_tokens = 4   | no
""")
async def test_what_gains_nothing_or_may_not_is_done_alone(changes: dict, combined: bool):
    """Deterministic mode, several ranks, whole models; and what fills a pass by itself."""
    settings = {"deterministic": False, "ranks": 1, "adapter": True, "window_s": 0.1}
    settings |= {"micro_batch_tokens": 5} | changes

    def note(name):
        async def work(*args):
            await trio.lowlevel.checkpoint()
            return ForwardBackwardResult(loss=None, denominator=1.0, metrics={}, skipped=name)

        return work

    backend = SimpleNamespace(
        trainer=SimpleNamespace(adapter="one" if settings["adapter"] else None),
        ranks=SimpleNamespace(world_size=settings["ranks"]),
        forward_backward=note("gradient"),
        compute_loss=note("loss"),
    )
    combiner = SimpleNamespace(train=note("combined"))
    service = SimpleNamespace(
        **settings, config=SimpleNamespace(**settings), combiner=combiner, meters=Meters()
    )
    batch = ask(0).batch
    done = [await Service.train(service, backend, batch, SPEC, gradient=flag) for flag in (True, False)]
    assert [one.skipped for one in done] == (["combined"] * 2 if combined else ["gradient", "loss"])
