"""Exhaustive search for short chains: the cheapest schedule there is, by Dijkstra over all that the levels could hold.

    node   (next backward step, state in the buffer, what each level holds)
    edges  F (uf)   B (ub)   write to a level (w_k, in place of any state there if it is full)   read from a level (r_k)

It assumes no recurrence, so it settles what `unsorted_levels.py` cannot prove; the number of nodes grows so fast that it ends at
a handful of steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.problem import Chain

MAX_NODES = 60_000
Node = tuple[int, int, tuple[frozenset[int], ...]]


def search_all(chain: Chain) -> tuple[float, tuple[Move, ...]] | None:
    """The least cost and its moves; None when there are too many nodes or no schedule."""
    start: Node = (chain.num_steps, 0, (frozenset(),) * len(chain.levels))
    best: dict[Node, float] = {start: 0.0}
    came: dict[Node, tuple[Node, tuple[Move, ...]]] = {}
    heap: list[tuple[float, int, Node]] = [(0.0, 0, start)]
    tick = 0
    while heap and tick < MAX_NODES:
        distance, _, node = heapq.heappop(heap)
        if distance > best[node]:
            continue
        if node[0] < 0:
            return distance, _path(came, node)
        for cost, neighbour, moves in _edges(chain, node):
            if distance + cost < best.get(neighbour, float("inf")):
                best[neighbour] = distance + cost
                came[neighbour] = (node, moves)
                tick += 1
                heapq.heappush(heap, (distance + cost, tick, neighbour))
    return None


def _path(came: dict[Node, tuple[Node, tuple[Move, ...]]], node: Node) -> tuple[Move, ...]:
    parts: list[tuple[Move, ...]] = []
    while node in came:
        node, moves = came[node]
        parts.append(moves)
    return tuple(move for part in reversed(parts) for move in part)


def _edges(chain: Chain, node: Node) -> Iterator[tuple[float, Node, tuple[Move, ...]]]:
    need, buffer, held = node
    if 0 <= buffer < need:
        yield chain.forward_cost, (need, buffer + 1, held), (Advance(buffer, buffer + 1),)
    if buffer == need:  # what lies past the next backward step is of no more use
        drops = tuple(Drop(step, k) for k, states in enumerate(held) for step in sorted(states) if step >= need)
        kept = tuple(frozenset(s for s in states if s < need) for states in held)
        yield chain.backward_cost, (need - 1, -1, kept), (*drops, Back(need))
    for k, states in enumerate(held):
        for step in states:
            if buffer < 0:  # a read into a buffer in use would only have made what is in it pointless
                yield chain.levels[k].read_cost, (need, step, held), (Read(step, k),)
        if buffer < 0 or buffer in states or not chain.capacity(k):
            continue
        victims = [None] if len(states) < chain.capacity(k) else sorted(states)
        for victim in victims:
            after = (*held[:k], states - {victim} | {buffer}, *held[k + 1 :])
            drop = () if victim is None else (Drop(victim, k),)
            yield chain.levels[k].write_cost, (need, buffer, after), (*drop, Write(buffer, k))
