"""Exhaustive oracles for task graphs: every order, by the definitions and nothing else. Slow on purpose, shares no code with src."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations


@dataclass(frozen=True)
class Plain:
    """A graph as dictionaries: outputs, working memory, edges with the bytes that are theirs alone."""

    output: tuple[int, ...]
    memory: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        return len(self.output)

    def live(self, done: frozenset[int]) -> int:
        """Bytes alive when exactly these tasks have ended."""
        total = 0
        for task in done:
            readers = {b for a, b, _ in self.edges if a == task}
            if not readers or readers - done:
                total += self.output[task]
            total += sum(own for a, b, own in self.edges if a == task and b not in done)
        return total

    def ready(self, done: frozenset[int]) -> list[int]:
        return [t for t in range(self.size) if t not in done and all(a in done for a, b, _ in self.edges if b == t)]

    def during(self, done: frozenset[int], task: int) -> int:
        return self.live(done) + self.memory[task] + self.output[task] + sum(own for a, _, own in self.edges if a == task)


def least_peak(graph: Plain) -> int:
    """The least peak over all orders."""
    everything = frozenset(range(graph.size))

    @cache
    def rest(done: frozenset[int]) -> int:
        if done == everything:
            return 0
        return min(max(graph.during(done, t), rest(done | {t})) for t in graph.ready(done))

    return rest(frozenset())


def least_io_of_order(graph: Plain, order: list[int], memory: int) -> int | None:
    """The least bytes written for a fixed order with divisible outputs (plain edges only), over all integer evictions.

    State: bytes of each live output in memory before a step; written amounts only grow. For tiny sizes.
    """
    readers = {t: [b for a, b, _ in graph.edges if a == t] for t in range(graph.size)}
    position = {t: k for k, t in enumerate(order)}
    states: dict[tuple[tuple[int, int, int], ...], int] = {(): 0}  # (task, bytes inside, bytes with a copy on disk) -> written
    for step, task in enumerate(order):
        inputs = {a for a, b, _ in graph.edges if b == task}
        need = sum(graph.output[a] for a in inputs) + graph.memory[task] + graph.output[task]
        if need > memory:
            return None
        following: dict[tuple[tuple[int, int, int], ...], int] = {}
        for state, written in states.items():
            others = [entry for entry in state if entry[0] not in inputs]
            for kept in _choices([entry[1] for entry in others], memory - need):
                cost, entries = written, []
                for (t, _, disk), stays in zip(others, kept, strict=True):
                    out = graph.output[t] - stays
                    cost += max(0, out - disk)
                    entries.append((t, stays, max(disk, out)))
                for t in inputs:
                    disk = next(entry[2] for entry in state if entry[0] == t)
                    if any(position[r] > step for r in readers[t]):
                        entries.append((t, graph.output[t], disk))
                entries.append((task, graph.output[task], 0))
                key = tuple(sorted(entries))
                if cost < following.get(key, cost + 1):
                    following[key] = cost
        states = following
    return min(states.values())


def _choices(inside: list[int], room: int) -> list[tuple[int, ...]]:
    """Ways to keep at most `room` bytes in all, at most what is inside of each; only maximal ones are useful but all are tried."""
    if not inside:
        return [()]
    return [(k, *rest) for k in range(min(inside[0], room) + 1) for rest in _choices(inside[1:], room - k)]


def all_dags(size: int) -> list[tuple[tuple[int, int], ...]]:
    """All edge sets whose edges go from lower to higher numbers."""
    pairs = list(combinations(range(size), 2))
    return [tuple(p for k, p in enumerate(pairs) if mask >> k & 1) for mask in range(1 << len(pairs))]


def all_trees(size: int) -> list[tuple[int, ...]]:
    """All parent lists in which a node's parent comes later, the last node being a root; forests included."""
    found: list[tuple[int, ...]] = [()]
    for node in range(size - 1, -1, -1):
        found = [(up, *rest) for rest in found for up in (-1, *range(node + 1, size))]
    return found
