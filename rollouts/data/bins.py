"""Items into bins, by sizes and costs alone: filled, spread evenly, or divided where padding is least.

Everything here is deterministic, and at most O(n log n).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollouts.types import IntArray

Costs = NDArray[np.float64]


def fill_bins(sizes: IntArray, capacity: int) -> IntArray:
    """[n] the bin of each item, as few bins as best fit finds: the largest item first, each into the fullest
    bin that has room for it.

    An item above the capacity gets a bin of its own. Bins are numbered from 0, none is empty. O(n log n).
    """
    bins = np.zeros(len(sizes), np.int64)
    rooms: list[int] = []  # that some bin has, rising, each once: never more than `capacity` + 1 numbers
    having: dict[int, list[int]] = {}  # bins by room
    used = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            chosen, room = used, capacity - size
            used += 1
        else:
            alike = having[rooms[at]]
            chosen, room = alike.pop(), rooms[at] - size
            if not alike:
                del having[rooms.pop(at)]
        bins[item] = chosen
        if room in having:
            having[room].append(chosen)
        elif room >= 0:
            insort(rooms, room)
            having[room] = [chosen]
    return bins


def spread_over_bins(
    sizes: IntArray, costs: Costs, count: int, capacity: int, *, ranks: int
) -> IntArray | None:
    """[n] the bin of each item, `count` bins of which `ranks` at a time are computed and wait for the
    dearest; None if an item finds no room.

    The largest item first, each into the cheapest bin that has room for it, so that bins cost the same. Where
    one item alone costs more, its round waits for it anyway: the first `ranks` bins then take more, up to
    what it costs or their room. What an item costs above its round is made up for by a later bin, which
    begins with that. An item above the capacity fills a bin. O((n + count) log count).
    """
    sizes = np.minimum(sizes, capacity)
    total, dearest_first = float(costs.sum()), np.sort(costs)[::-1]
    first = later = total / count
    if count > ranks and len(costs) and dearest_first[0] > first:
        first = min(
            max(min(float(dearest_first[0]), capacity * total / max(float(sizes.sum()), 1.0)), first),
            total / ranks,
        )
        later = (total - ranks * first) / (count - ranks)
    load = np.zeros(count)
    load[:ranks] = later - first
    lightest = count - 1
    for place, cost in enumerate(dearest_first[:count].tolist()):
        excess = cost - (first if place < ranks else later)
        if excess > 0 and lightest >= ranks:
            load[lightest] = min(excess, later)
            lightest -= 1
    room = [capacity] * count
    cheapest = [(start, number) for number, start in enumerate(load.tolist())]
    heapq.heapify(cheapest)
    parked: list[
        tuple[int, float, int]
    ] = []  # (-room, load, bin): they have no room for the last item, but may for smaller ones
    bins = np.zeros(len(sizes), np.int64)
    for item in np.lexsort((-costs, -sizes)).tolist():
        size = int(sizes[item])
        while parked and -parked[0][0] >= size:
            _, cost, number = heapq.heappop(parked)
            heapq.heappush(cheapest, (cost, number))
        while cheapest and room[cheapest[0][1]] < size:
            cost, number = heapq.heappop(cheapest)
            heapq.heappush(parked, (-room[number], cost, number))
        if not cheapest:
            return None
        cost, number = cheapest[0]
        bins[item] = number
        room[number] -= size
        heapq.heapreplace(cheapest, (cost + float(costs[item]), number))
    return bins


def compute_round_cost(costs: Sequence[float] | Costs, ranks: int) -> float:
    """What all rounds cost together when `ranks` bins at a time are computed, the dearest first: each round
    its dearest bin.
    """
    return float(np.sort(np.asarray(costs, np.float64))[::-1][::ranks].sum())


def divide_lengths(lengths: Sequence[int] | IntArray, budget: int, cost: int) -> list[tuple[int, int]]:
    """[first, last) of every micro-batch over `lengths`, which fall: the division with the fewest padded
    tokens, each micro-batch costing `cost`.

    Each holds (last - first)·lengths[first] <= budget padded tokens, or one row. Exactly the cheapest
    division, in O(n): with best[n] the cost of the first n rows, every `first` offers best[first] + cost +
    (last - first)·lengths[first] for each `last` within its reach. A later `first` rises more slowly and
    reaches farther, so once it is cheaper it stays so; a queue holds those that will be cheapest, in their
    order.
    """
    rows = [int(length) for length in lengths]
    best, came_from = [0] * (len(rows) + 1), [0] * (len(rows) + 1)
    queue: list[tuple[int, int]] = []  # (first, the `last` from which on it is cheapest)
    head = 0

    def overtakes(earlier: int, later: int) -> int:
        """The smallest `last` for which `later` is cheaper, or `earlier` out of reach."""
        reach = earlier + max(budget // rows[earlier], 1) + 1
        above = (
            best[later] - later * rows[later] - best[earlier] + earlier * rows[earlier]
        )  # what `later` is dearer at last = 0
        slope = rows[earlier] - rows[later]
        crossing = above // slope + 1 if slope else (0 if above < 0 else reach)
        return max(min(crossing, reach), later + 1)

    for last in range(1, len(rows) + 1):
        new, start = last - 1, last
        while len(queue) > head:
            start = overtakes(queue[-1][0], new)
            if start > queue[-1][1]:
                break
            queue.pop()
            start = last
        queue.append((new, max(start, last)))
        while len(queue) > head + 1 and queue[head + 1][1] <= last:
            head += 1
        first = queue[head][0]
        best[last] = best[first] + cost + (last - first) * rows[first]
        came_from[last] = first
    cuts: list[tuple[int, int]] = []
    last = len(rows)
    while last:
        cuts.append((came_from[last], last))
        last = came_from[last]
    return cuts[::-1]
