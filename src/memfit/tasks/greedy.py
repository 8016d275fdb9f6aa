"""Greedy orders of a general DAG: the ready task that is best now, by one of several readings of "best".

    ready: a, b, c      release   what holds least afterwards (least working peak on ties)
                        peak      what needs least while it runs
                        forest    the order in which Liu would take the tasks if every output had one reader
                        depth     the successors of what ran last first (how dask.order thinks)

Each is cheap (a heap, or one pass over the ready set); the best of them is where the searches start from.
"""

from __future__ import annotations

import heapq

import numpy as np

from memfit.tasks.judge import judge_order
from memfit.tasks.liu import liu_order
from memfit.tasks.model import Ints, TaskGraph
from memfit.tasks.tree import joined

_SCAN_LIMIT = 20_000  # tasks up to which the whole ready set is looked at in every step


def greedy_order(graph: TaskGraph) -> tuple[Ints, int]:
    """The best of the greedy orders and its peak."""
    candidates = [graph.topological_order, depth_first_order(graph), priority_order(graph, _forest_ranks(graph))]
    if graph.num_tasks <= _SCAN_LIMIT:
        candidates += [_scan(graph, rule) for rule in ("release", "peak")]
    judged = [(judge_order(graph, order).peak_bytes, k) for k, order in enumerate(candidates)]
    peak, best = min(judged)
    return candidates[best], peak


def priority_order(graph: TaskGraph, rank: Ints) -> Ints:
    """Run the ready task of least rank."""
    missing, ranks = graph.predecessors.counts.tolist(), rank.tolist()
    ptr, ids = graph.successors.ptr.tolist(), graph.successors.ids.tolist()
    queue = [(ranks[t], t) for t in range(graph.num_tasks) if missing[t] == 0]
    heapq.heapify(queue)
    order = []
    while queue:
        _, task = heapq.heappop(queue)
        order.append(task)
        for s in ids[ptr[task] : ptr[task + 1]]:
            missing[s] -= 1
            if missing[s] == 0:
                heapq.heappush(queue, (ranks[s], s))
    return np.array(order, np.int64)


def depth_first_order(graph: TaskGraph) -> Ints:
    """Newest ready task first, those that need least on top."""
    missing = graph.predecessors.counts.tolist()
    need = graph.need_bytes.tolist()
    stack = sorted((t for t in range(graph.num_tasks) if missing[t] == 0), key=lambda t: -need[t])
    order = []
    while stack:
        task = stack.pop()
        order.append(task)
        freed = []
        for s in graph.successors.of(task):
            missing[s] -= 1
            if missing[s] == 0:
                freed.append(s)
        stack += sorted(freed, key=lambda t: -need[t])
    return np.array(order, np.int64)


def _forest_ranks(graph: TaskGraph) -> Ints:
    """Positions in Liu's order of the forest in which every task goes to its first reader."""
    n = graph.num_tasks
    position = np.empty(n, np.int64)
    position[graph.topological_order] = np.arange(n)
    parent = np.full(n, -1, np.int64)
    for task in range(n):
        readers = graph.successors.of(task)
        if readers:
            parent[task] = min(readers, key=position.__getitem__)
    order, _ = liu_order(joined(parent, graph.output_bytes, graph.memory_bytes, graph.time))
    ranks = np.empty(n, np.int64)
    ranks[order] = np.arange(n)
    return ranks


def _scan(graph: TaskGraph, rule: str) -> Ints:
    missing, left = graph.predecessors.counts.tolist(), graph.readers.counts.tolist()
    size, kept = graph.item_bytes.tolist(), graph.item_kept.tolist()
    reads = [[k for k in graph.reads.of(t) if not kept[k] and size[k]] for t in range(graph.num_tasks)]
    adds = graph.output_bytes.tolist()
    needs = (graph.memory_bytes + graph.output_bytes).tolist()
    ready = [t for t in range(graph.num_tasks) if missing[t] == 0]
    order = []
    while ready:
        keys = []
        for t in ready:
            gain = adds[t] - sum(size[k] for k in reads[t] if left[k] == 1)
            keys.append((gain, needs[t], t) if rule == "release" else (needs[t] if gain > 0 else gain, gain, t))
        at = min(range(len(ready)), key=keys.__getitem__)
        task = ready[at]
        ready[at] = ready[-1]
        ready.pop()
        order.append(task)
        for k in graph.reads.of(task):
            left[k] -= 1
        for s in graph.successors.of(task):
            missing[s] -= 1
            if missing[s] == 0:
                ready.append(s)
    return np.array(order, np.int64)
