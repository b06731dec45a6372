"""How many groups may be open, and which of them the next batch must have, so that nothing is too old when it
is consumed.

P groups are consumed by each batch, and each batch is one version of the trainer. v is the trainer's version
when the batch in the making is consumed, e ≤ v that of the engines (e < v between updates, where sync_every >
1, and while the trainer works on the batch before), s is max_staleness. A group is *open* from its launch
until it is trained or dropped, between batches too. Its *deadline* is the oldest version of its tokens + s:
the last version that may consume it; before there are tokens, that is e + s.

    admit     in launch order, while fewer than W = P * (e + s - v + 1) groups are open, those of the batch in
              the making among them
    deliver   P finished groups, earliest deadline first, then oldest launch; but only when for every d ≥ v at
              least N(d) - P * (d - v) of the N(d) open groups with a deadline up to d are among the finished

Why this bounds the lag. Call the books *even* when N(d) ≤ P * (d - v + 1) for every d ≥ v: the batches v, …,
d can consume all that must be consumed by d. No group is too old in even books, since N(v) ≤ P fit into this
batch and none has a deadline before v. The books stay even:
  - admitting: the new group's deadline e + s is the latest, since e never falls; below W open groups, N(e +
    s) ≤ P * (e + s - v + 1) after it, and N(d) for d < e + s has not changed.
  - a group that is dropped, or goes on from newer tokens than it was counted with: no N(d) grows.
  - delivering: at least N(d) - P * (d - v) of them leave, so N(d) ≤ P * (d - v) = P * (d - (v + 1) + 1),
    which is even for v + 1.
What is needed fits into the batch, since even books say N(d) - P * (d - v) ≤ P; and everything open runs or
has finished, so waiting ends.

AReaL's capacity rule, (s + v + 1) * P minus what was ever accepted or runs, is `admit` alone: it bounds how
many are on the way, and a long answer that is overtaken again and again may still become too old.
torchtitan's windowed FIFO bounds the age too, but waits for the head of the window; here an old group is
waited for only in the last batch that can still have it, which with a large s is never. Short answers gain
nothing: whoever is launched is trained, later if it is longer, and only filters, failures and age (which the
rule above excludes) can prevent it. The first few batches of a run are still shorter than average, as its
longest answers are on the way.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Pace:
    """The deadlines of all open groups while one batch is made. is_full() takes O(n) steps, choose()
    O(n log n).
    """

    num_prompts: int  # P
    max_staleness: int  # s
    policy_version: int  # v
    engine_version: int  # e, at most v
    # an update of engines that are too far behind is under way, so that nothing is launched until it is done
    waits_for_engines: bool
    deadlines: dict[int, int] = field(default_factory=dict)  # of open groups, by group index
    finished: dict[int, int] = field(default_factory=dict)  # the same, of those of them that have finished

    @property
    def room(self) -> int:
        """How many more groups may be launched now; 0 or less: none.

        The window W is at least P, even if the engines are too far behind for anything to train: that is then
        found out, unless it is waited for.
        """
        batches = self.engine_version + self.max_staleness - self.policy_version + 1
        return self.num_prompts * max(0 if self.waits_for_engines else 1, batches) - len(self.deadlines)

    def open(self, group_index: int, *, oldest: int | None = None) -> None:
        """Counts a group that runs; `oldest` is the oldest version of its tokens, None if there are none."""
        assert group_index not in self.deadlines, f"group {group_index} is open already"
        oldest = self.engine_version if oldest is None else oldest
        self.deadlines[group_index] = oldest + self.max_staleness

    def finish(self, group_index: int, *, oldest: int | None) -> None:
        """An open group can be delivered."""
        self.close(group_index)
        self.open(group_index, oldest=oldest)
        self.finished[group_index] = self.deadlines[group_index]

    def close(self, group_index: int) -> None:
        """A group has left: trained or dropped."""
        del self.deadlines[group_index]
        self.finished.pop(group_index, None)

    def is_full(self) -> bool:
        """Whether P groups can be delivered now so that what stays open can be consumed in time."""
        if len(self.finished) < self.num_prompts:
            return False
        finished_by = Counter(self.finished.values())
        open_ = finished = 0
        for deadline, count in sorted(Counter(self.deadlines.values()).items()):
            open_ += count
            finished += finished_by[deadline]
            needed = open_ - self.num_prompts * max(0, deadline - self.policy_version)
            # more than P are needed only if the trainer has skipped versions
            if finished < min(needed, self.num_prompts):
                return False
        return True

    def choose(self) -> list[int]:
        """The groups of the batch, by group index."""
        by_deadline = sorted(sorted(self.finished), key=self.finished.__getitem__)
        return sorted(by_deadline[: self.num_prompts])
