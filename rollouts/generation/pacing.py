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

from collections.abc import Collection, Iterable


def can_deliver(finished: Collection[int], running: Iterable[int], *, num_prompts: int, version: int) -> bool:
    """Whether P groups can be delivered at `version` (v) so that what stays open can be consumed in time.
    `finished` and `running` are the deadlines of the open groups. Takes O(n log n) steps.

    Those delivered are the P of the finished with the earliest deadlines. A running group counts against the
    room of later batches only if its deadline is before the last of these: for any later d P are delivered.
    """
    if len(finished) < num_prompts:
        return False
    last = sorted(finished)[num_prompts - 1]
    return all(
        number <= num_prompts * max(0, deadline - version)
        for number, deadline in enumerate(sorted(running), 1)
        if deadline < last
    )
