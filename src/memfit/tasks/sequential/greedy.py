"""Greedy orders of a general DAG: the ready task that is best now, by one of several readings of "best".

    ready: a, b, c      release   what holds least afterwards (least working peak on ties)
                        peak      what needs least while it runs
                        forest    the order in which Liu would take the tasks if every output had one reader
                        depth     the successors of what ran last first (how dask.order thinks)

Each is cheap (a heap); the best of them is where the searches start from.
"""

from __future__ import annotations

import heapq

import numpy as np

from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.judge import judge_order
from memfit.tasks.sequential.liu import liu_order
from memfit.tasks.trees.tree import join_roots


def greedy_order(graph: TaskGraph) -> tuple[Ints, int]:
    """The best of the greedy orders and its peak."""
    candidates = [graph.topological_order, depth_first_order(graph), priority_order(graph, _forest_ranks(graph))]
    candidates += [_best_now(graph, rule) for rule in ("release", "peak")]
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
    order, _ = liu_order(join_roots(parent, graph.output_bytes, graph.memory_bytes, graph.time))
    ranks = np.empty(n, np.int64)
    ranks[order] = np.arange(n)
    return ranks


def _best_now(graph: TaskGraph, rule: str) -> Ints:
    """Run the ready task with the best key. A key only gets better, when a task becomes the last reader of an item: then it is entered
    again, and the older entry is skipped."""
    missing, left = graph.predecessors.counts.tolist(), graph.readers.counts.tolist()
    size, kept = graph.item_bytes.tolist(), graph.item_kept.tolist()
    adds, needs = graph.output_bytes.tolist(), (graph.memory_bytes + graph.output_bytes).tolist()
    read_ptr, read_ids = graph.reads.ptr.tolist(), graph.reads.ids.tolist()
    done = bytearray(graph.num_tasks)

    def entry(task: int) -> tuple[int, int, int]:
        freed = sum(size[k] for k in read_ids[read_ptr[task] : read_ptr[task + 1]] if left[k] == 1 and not kept[k])
        gain = adds[task] - freed
        return (gain, needs[task], task) if rule == "release" else (needs[task] if gain > 0 else gain, gain, task)

    queue = [entry(t) for t in range(graph.num_tasks) if missing[t] == 0]
    heapq.heapify(queue)
    order = []
    while queue:
        task = heapq.heappop(queue)[2]
        if done[task]:
            continue
        done[task] = 1
        order.append(task)
        for k in read_ids[read_ptr[task] : read_ptr[task + 1]]:
            left[k] -= 1
            if left[k] == 1:
                last = next((r for r in graph.readers.of(k) if not done[r]), None)
                if last is not None and missing[last] == 0:
                    heapq.heappush(queue, entry(last))
        for s in graph.successors.of(task):
            missing[s] -= 1
            if missing[s] == 0:
                heapq.heappush(queue, entry(s))
    return np.array(order, np.int64)
