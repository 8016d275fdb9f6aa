"""List scheduling on P processors: whenever one is free, start the ready task that comes first in a priority; memory unseen.

    ready by priority  [c, e, b]       processor 0  [ a ][ c ]...
                                       processor 1  [ d ][ e ]...      within 2 - 1/P of the shortest makespan (Graham)

Two priorities of Marchal, Sinnen and Vivien for trees, which also make sense on DAGs:
ParInnerFirst    inner nodes before leaves, leaves in the order of the sequential traversal: stays near its memory
ParDeepestFirst  the longest path to the root first: a short makespan, memory as it comes
"""

from __future__ import annotations

import heapq

import numpy as np

from memfit.tasks.bounds import path_times
from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.judge import Run


def par_inner_first(graph: TaskGraph, processors: int, order: Ints) -> list[Run]:
    rank = np.empty(graph.num_tasks, np.int64)
    rank[order] = np.arange(graph.num_tasks)
    leaf = graph.predecessors.counts == 0
    longest = path_times(graph)
    # inner nodes by depth (deepest first), leaves after them in the order given
    inner = np.argsort(np.argsort(-longest, kind="stable"), kind="stable")
    return list_schedule(graph, processors, np.where(leaf, graph.num_tasks + rank, inner))


def par_deepest_first(graph: TaskGraph, processors: int, order: Ints) -> list[Run]:
    longest = path_times(graph)
    rank = np.empty(graph.num_tasks, np.int64)
    rank[order] = np.arange(graph.num_tasks)
    leaf = graph.predecessors.counts == 0
    by_depth = np.lexsort((rank, leaf, -longest))  # inner nodes first on ties, then the sequential order
    priority = np.empty(graph.num_tasks, np.int64)
    priority[by_depth] = np.arange(graph.num_tasks)
    return list_schedule(graph, processors, priority)


def list_schedule(graph: TaskGraph, processors: int, priority: Ints) -> list[Run]:
    """Runs in the order in which they start; a lower number goes first."""
    missing, ranks, duration = graph.predecessors.counts.tolist(), priority.tolist(), graph.time.tolist()
    ptr, ids = graph.successors.ptr.tolist(), graph.successors.ids.tolist()
    ready = [(ranks[t], t) for t in range(graph.num_tasks) if missing[t] == 0]
    heapq.heapify(ready)
    running: list[tuple[float, int, int]] = []
    runs: list[Run] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < processors:
            _, task = heapq.heappop(ready)
            runs.append(Run(task, now, now + duration[task]))
            heapq.heappush(running, (now + duration[task], len(runs), task))
        now = running[0][0]
        while running and running[0][0] <= now:
            _, _, task = heapq.heappop(running)
            for s in ids[ptr[task] : ptr[task + 1]]:
                missing[s] -= 1
                if missing[s] == 0:
                    heapq.heappush(ready, (ranks[s], s))
    return runs
