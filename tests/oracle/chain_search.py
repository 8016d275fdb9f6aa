"""Exhaustive search over chain schedules: Dijkstra over everything a machine with storage levels could do. Knows no recurrence.

A node is (next backward step, state in the working buffer or -1, what each level holds as a bit mask). Dropping a state is free
and done when room is needed; states past the next backward step are never useful again and are forgotten.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

Node = tuple[int, int, tuple[int, ...]]


def cheapest(
    num_steps: int, slots: Sequence[int], writes: Sequence[float], reads: Sequence[float], forward: float, backward: float
) -> float:
    """The least cost of B_l … B_0 from x_0 in the working buffer, or infinity."""
    start: Node = (num_steps, 0, (0,) * len(slots))
    best = {start: 0.0}
    heap = [(0.0, start)]
    while heap:
        distance, node = heapq.heappop(heap)
        if distance > best[node]:
            continue
        if node[0] < 0:
            return distance
        for cost, neighbour in _neighbours(node, slots, writes, reads, forward, backward):
            if distance + cost < best.get(neighbour, math.inf):
                best[neighbour] = distance + cost
                heapq.heappush(heap, (distance + cost, neighbour))
    return math.inf


def _neighbours(
    node: Node, slots: Sequence[int], writes: Sequence[float], reads: Sequence[float], forward: float, backward: float
) -> Iterator[tuple[float, Node]]:
    need, buffer, held = node
    if 0 <= buffer < need:
        yield forward, (need, buffer + 1, held)
    if buffer == need:
        useful = (1 << need) - 1
        yield backward, (need - 1, -1, tuple(mask & useful for mask in held))
    for level, mask in enumerate(held):
        states = [i for i in range(need + 1) if mask >> i & 1]
        for state in states:
            if state != buffer:
                yield reads[level], (need, state, held)
        if buffer < 0 or mask >> buffer & 1:
            continue
        rooms = [mask] if len(states) < slots[level] else [mask ^ (1 << i) for i in states]
        for room in rooms if slots[level] else []:
            yield writes[level], (need, buffer, (*held[:level], room | 1 << buffer, *held[level + 1 :]))
