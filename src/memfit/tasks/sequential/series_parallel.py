"""Optimal orders of series-parallel graphs whose items have one reader each (Kayaaslan, Lambert, Marchal, Ucar 2018).

         ┌─ a ─ b ─┐        every parallel branch is made linear first (recursively), then cut at its smallest moment:
    s ───┤         ├─ t
         └─ c ─ d ─┘        s [ a | c ]  smallest cut  [ b | d ] t
                              before                     after
    after the cut   merge the branches by hill - valley, as Liu merges subtrees
    before the cut  the same, on the branches read backwards

A graph with several sources or sinks gets a virtual one; what stays to the end is read by the virtual sink. A task whose
output is shared by several readers has no place in this model (its bytes would be counted per branch): `_single_reader_edges` gives None.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from memfit.tasks.graph import Ints, TaskGraph


@dataclass(frozen=True, slots=True)
class _Line:
    """A linearised part between two tasks. `cuts[k]` bytes flow through after its first k tasks, `hills[k]` while k runs."""

    tasks: tuple[int, ...]
    hills: tuple[int, ...]
    cuts: tuple[int, ...]  # one more than tasks


def series_parallel_order(graph: TaskGraph) -> tuple[Ints, int] | None:
    """An optimal order and its peak, or None when the graph is not series-parallel with single readers."""
    edges = _single_reader_edges(graph)
    if edges is None:
        return None
    chain = _reduce(graph, edges)
    if chain is None:
        return None
    n = graph.num_tasks
    order = np.array([t for t in chain.tasks if t < n], np.int64)
    return order, max((*chain.hills, *chain.cuts), default=0)


def _single_reader_edges(graph: TaskGraph) -> dict[tuple[int, int], int] | None:
    """Bytes on each edge, between task n (the virtual source) and n + 1 (the virtual sink)."""
    n, counts = graph.num_tasks, graph.readers.counts
    sized = graph.item_bytes > 0
    if np.any(counts[sized] > 1) or np.any(sized & graph.item_kept & (counts > 0)):
        return None
    weights: dict[tuple[int, int], int] = {(int(a), int(b)): 0 for a, b in graph.edges}
    source, sink = n, n + 1
    for task in range(n):
        if graph.predecessors.ptr[task] == graph.predecessors.ptr[task + 1]:
            weights[source, task] = 0
        if graph.successors.ptr[task] == graph.successors.ptr[task + 1]:
            weights[task, sink] = 0
    for item in np.flatnonzero(sized).tolist():
        readers = graph.readers.of(item)
        key = (int(graph.item_producer[item]), readers[0] if readers else sink)
        key = (source if key[0] < 0 else key[0], key[1])
        weights[key] = weights.get(key, 0) + int(graph.item_bytes[item])
    return weights


def _reduce(graph: TaskGraph, edges: dict[tuple[int, int], int]) -> _Line | None:
    """Series and parallel reductions until one edge from source to sink is left; every edge carries its chain."""
    n = graph.num_tasks
    source, sink = n, n + 1
    out: dict[int, dict[int, _Line]] = defaultdict(dict)
    into: dict[int, set[int]] = defaultdict(set)
    for (a, b), size in edges.items():
        out[a][b] = _Line((), (), (size,))
        into[b].add(a)
    ready = [t for t in range(n) if len(out[t]) == 1 and len(into[t]) == 1]
    waiting: dict[tuple[int, int], list[_Line]] = defaultdict(list)  # parallel branches, merged together once all are there
    memory = graph.memory_bytes
    while ready or waiting:
        if not ready:
            (a, b), branches = waiting.popitem()
            if b in out[a]:
                branches.append(out[a][b])
            out[a][b] = _parallel(branches)
            into[b].add(a)
            ready = [t for t in (a, b) if t < n and _is_inner(t, out, into, waiting)]
            continue
        task = ready.pop()
        if not _is_inner(task, out, into, waiting):
            continue
        (a,), (b,) = into[task], out[task]
        left, right = out[a].pop(task), out[task].pop(b)
        into[b].discard(task)
        into[task].clear()
        hill = left.cuts[-1] + int(memory[task]) + right.cuts[0]
        chain = _Line((*left.tasks, task, *right.tasks), (*left.hills, hill, *right.hills), (*left.cuts, *right.cuts))
        if b in out[a] or (a, b) in waiting:
            waiting[a, b].append(chain)
        else:
            out[a][b] = chain
            into[b].add(a)
    whole = out[source].get(sink)
    return whole if whole is not None and len(whole.tasks) == n else None


def _is_inner(task: int, out: dict[int, dict[int, _Line]], into: dict[int, set[int]], waiting: dict[tuple[int, int], list[_Line]]) -> bool:
    if len(out[task]) != 1 or len(into[task]) != 1:
        return False
    (b,), (a,) = out[task], into[task]
    return (task, b) not in waiting and (a, task) not in waiting


def _parallel(branches: list[_Line]) -> _Line:
    """All branches between the same two tasks, merged into one."""
    at = [min(range(len(c.cuts)), key=c.cuts.__getitem__) for c in branches]
    base = sum(c.cuts[k] for c, k in zip(branches, at, strict=True))
    after = _merge([(c.tasks[k:], c.hills[k:], c.cuts[k:]) for c, k in zip(branches, at, strict=True)], base)
    before = _merge([(c.tasks[:k][::-1], c.hills[:k][::-1], c.cuts[: k + 1][::-1]) for c, k in zip(branches, at, strict=True)], base)
    return _Line(
        (*before[0][::-1], *after[0]),
        (*before[1][::-1], *after[1]),
        (*before[2][:0:-1], *after[2]),
    )


_Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _merge(parts: list[_Part], base: int) -> tuple[list[int], list[int], list[int]]:
    """Parts that all begin at their smallest cut: run their segments by falling hill - valley."""
    segments = [(hill - valley, p, start, stop) for p, part in enumerate(parts) for start, stop, hill, valley in _segments(part)]
    segments.sort(key=lambda s: (-s[0], s[1], s[2]))
    tasks: list[int] = []
    hills: list[int] = []
    cuts = [base]
    for _, p, start, stop in segments:
        names, tops, levels = parts[p]
        for k in range(start, stop):
            held = cuts[-1] - levels[k]  # by the other parts
            tasks.append(names[k])
            hills.append(held + tops[k])
            cuts.append(held + levels[k + 1])
    return tasks, hills, cuts


def _segments(part: _Part) -> list[tuple[int, int, int, int]]:
    """(start, stop, hill, valley): hills fall, valleys rise, and no later moment dips below a valley."""
    _, hills, cuts = part
    found: list[tuple[int, int, int, int]] = []
    for k, hill in enumerate(hills):
        start, top, valley = k, hill, cuts[k + 1]
        while found and (top >= found[-1][2] or valley <= found[-1][3]):
            start, top = found[-1][0], max(top, found[-1][2])
            found.pop()
        found.append((start, k + 1, top, valley))
    return found
