"""Bugs put into the real classes on purpose. Each is one that somebody could write; the simulator has to find
every one of them.
"""

import math
from collections.abc import Callable

import pytest
import trio

from rollouts.engines import fleet
from rollouts.engines.fleet import Fleet
from rollouts.engines.fleet_members import FleetMember
from rollouts.generation import collector
from rollouts.generation.collector import Collector
from rollouts.loops import rl
from rollouts.weight_sync import sync, update
from tests.sim.invariants import Invariant

# --- weight sync --------------------------------------------------------------------------------------------


def publish_before_verify(patch):
    real = sync.sync_weights_to_engines

    async def sync_eagerly(
        engines,
        plan,
        *,
        publish=lambda: None,
    ):
        publish()
        return await real(engines, plan, publish=publish)

    patch.setattr(sync, "sync_weights_to_engines", sync_eagerly)


def forget_to_resume(patch):
    """After an update that failed."""

    async def do_nothing(self):
        await trio.lowlevel.checkpoint()

    patch.setattr(update.EngineUpdate, "_resume_anyway", do_nothing)


def commit_without_proof(patch):
    """The version that an engine reports is believed."""
    patch.setattr(update, "check_agreement", lambda proof, *, tolerance: None)
    patch.setattr(update, "check_change", lambda previous, now: None)


# --- fleet --------------------------------------------------------------------------------------------------


def deliver_during_updates(patch):
    """Replies are not held back until their engine has proven what made them."""

    async def deliver(self, call):
        await trio.lowlevel.checkpoint()

    patch.setattr(FleetMember, "_hold", deliver)
    patch.setattr(FleetMember, "_accept", lambda self, completion: None)


def forget_failed_requests(patch):
    """A request whose engine failed is never asked again."""

    patch.setattr(fleet, "back_off_s", lambda *numbers: math.inf)


def keep_the_seat_of_failed_requests(patch):
    real = Fleet._leave_seat

    def leave(self, call, live):
        if call.avoid is None:
            real(self, call, live)

    patch.setattr(Fleet, "_leave_seat", leave)


def serve_restarted_engines(patch):
    """Without an update: with the weights that the server began with."""
    real = FleetMember._come_back

    def come_back(self):
        real(self)
        if self.version >= 0:
            self._set("healthy")

    patch.setattr(FleetMember, "_come_back", come_back)


# --- manager ------------------------------------------------------------------------------------------------


def lose_prompts_of_failed_groups(patch):
    """The prompts of groups that engines failed are not given back."""
    patch.setattr(collector, "INFRASTRUCTURE", "no class")


def count_trained_groups_twice(patch):
    real = Collector.deliver

    def deliver(self):
        batch = real(self)
        self.ledger.trained += 1
        return batch

    patch.setattr(Collector, "deliver", deliver)


def give_back_what_trained(patch):
    """The prompt of a group that trains is drawn again in the same epoch."""
    real = Collector.deliver

    def deliver(self):
        prompts = {group.prompt.key: group.prompt for group in self._kept.values()}
        batch = real(self)
        self.data_buffer.return_prompts([prompts[batch.metadata[0]["epoch"], batch.metadata[0]["prompt_id"]]])
        return batch

    patch.setattr(Collector, "deliver", deliver)


def accept_late_replies(patch):
    """Nothing asks how old the weights of an answer are: not the choice of a batch, not what waits for one,
    not the loop.
    """

    def admit(self, place, group):
        group.deadline = -group.index  # the newest are delivered first
        place[group.index] = group

    patch.setattr(Collector, "_is_stale", lambda self, oldest: False)
    patch.setattr(Collector, "_admit", admit)
    patch.setattr(collector, "can_deliver", lambda done, running, **of: len(done) >= of["num_prompts"])
    patch.setattr(
        Collector, "_find_room", lambda self: 10 * self.config.num_prompts - len(self.open_groups())
    )
    patch.setattr(rl, "check_staleness", lambda lags, *, max_staleness: None)


# a bug, and the invariants of which one must find it
PLANTED_BUGS: dict[Callable[[pytest.MonkeyPatch], None], tuple[Invariant, ...]] = {
    accept_late_replies: ("tokens",),
    publish_before_verify: ("published",),
    forget_to_resume: ("paused",),
    commit_without_proof: ("weights", "tokens"),
    deliver_during_updates: ("tokens",),
    forget_failed_requests: ("progress",),
    keep_the_seat_of_failed_requests: ("seats",),
    serve_restarted_engines: ("weights", "serving"),
    lose_prompts_of_failed_groups: ("prompts",),
    count_trained_groups_twice: ("ledger",),
    give_back_what_trained: ("prompts", "assertion"),
}
