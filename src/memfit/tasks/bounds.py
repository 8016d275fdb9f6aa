"""Lower bounds on the peak of any order of any task graph: what proves an answer optimal, or says how far it may be off.

single task      some task needs its inputs, its working memory and its outputs at once
what must live   while i runs, everything made before i (ancestors) and read after it (descendants) is there
forest           let every output keep only one of its readers, and forget the other edges: each order of the graph is
                 one of that forest, holding no more, so Liu's optimum for the forest is a bound
"""

from __future__ import annotations

import numpy as np

from memfit.tasks.graph import Floats, Ints, TaskGraph
from memfit.tasks.sequential.liu import liu_order
from memfit.tasks.trees.tree import join_roots

_CLOSURE_LIMIT = 2_000  # tasks up to which ancestors and descendants are kept as bit sets


def peak_lower_bound(graph: TaskGraph) -> int:
    """The best of the bounds; holds for one processor and for any number of them."""
    if not graph.num_tasks:
        return graph.initial_bytes
    bounds = [single_task_bound(graph), forest_bound(graph)]
    if graph.num_tasks <= _CLOSURE_LIMIT:
        bounds.append(forced_live_bound(graph))
    return max(bounds)


def single_task_bound(graph: TaskGraph) -> int:
    return max(int(graph.need_bytes.max(initial=0)), graph.initial_bytes, graph.final_bytes)


def forest_bound(graph: TaskGraph) -> int:
    """The better of two forests: every item goes to its latest reader in topological order, or to its earliest."""
    n = graph.num_tasks
    position = np.empty(n, np.int64)
    position[graph.topological_order] = np.arange(n)
    always = int(graph.item_bytes[(graph.item_producer < 0) & graph.item_kept].sum())
    return always + max(_forest_peak(graph, _one_reader(graph, position, latest=latest)) for latest in (True, False))


def _forest_peak(graph: TaskGraph, chosen: list[int]) -> int:
    """Liu's optimum when item k is read by `chosen[k]` alone (-1: stays). A task's items must go one way: the most bytes win."""
    n = graph.num_tasks
    parent, output = [-1] * n, [-1] * n
    share: dict[tuple[int, int], int] = {}
    for producer, reader, size in zip(graph.item_producer.tolist(), chosen, graph.item_bytes.tolist(), strict=True):
        if producer >= 0:
            share[producer, reader] = share.get((producer, reader), 0) + size
    for (producer, reader), size in share.items():
        if size > output[producer]:
            parent[producer], output[producer] = reader, size
    carried = np.maximum(np.array(output, np.int64), 0)
    memory = graph.memory_bytes + graph.output_bytes - carried  # what goes elsewhere is held at least while the task runs
    return liu_order(join_roots(np.array(parent, np.int64), carried, memory, graph.time))[1]


def _one_reader(graph: TaskGraph, position: Ints, *, latest: bool) -> list[int]:
    chosen = [-1] * len(graph.item_bytes)
    ptr, ids, at = graph.readers.ptr.tolist(), graph.readers.ids.tolist(), position.tolist()
    for item in range(len(chosen)):
        mine = ids[ptr[item] : ptr[item + 1]]
        if mine:
            chosen[item] = max(mine, key=at.__getitem__) if latest else min(mine, key=at.__getitem__)
    return chosen


def forced_live_bound(graph: TaskGraph) -> int:
    """For each task: its need, and all that its ancestors made and its descendants (or the end) still want."""
    n = graph.num_tasks
    order = graph.topological_order.tolist()
    before, after = [0] * n, [0] * n
    for task in order:
        for p in graph.predecessors.of(task):
            before[task] |= before[p] | (1 << p)
    for task in reversed(order):
        for s in graph.successors.of(task):
            after[task] |= after[s] | (1 << s)
    live = [0] * n
    for item, producer in enumerate(graph.item_producer.tolist()):
        size = int(graph.item_bytes[item])
        if size:
            _add_forced(graph, item, producer, size, before, after, live)
    return max(int(graph.need_bytes[t]) + live[t] for t in range(n))


def _add_forced(graph: TaskGraph, item: int, producer: int, size: int, before: list[int], after: list[int], live: list[int]) -> None:
    """Add the item to every task that runs after its producer and before some reader, and does not read it itself."""
    readers = graph.readers.of(item)
    span = ((1 << graph.num_tasks) - 1) if producer < 0 else after[producer]
    if not graph.item_kept[item]:
        wanted = 0
        for r in readers:
            wanted |= before[r]
        span &= wanted
    for r in readers:
        span &= ~(1 << r)
    while span:
        low = span & -span
        live[low.bit_length() - 1] += size
        span ^= low


def makespan_lower_bound(graph: TaskGraph, processors: float) -> float:
    """No schedule of tasks that run on one processor each is shorter than the work shared out, or than the longest path."""
    if not graph.num_tasks:
        return 0.0
    return max(float(graph.time.sum()) / processors, float(path_times(graph).max()))


def path_times(graph: TaskGraph) -> Floats:
    """For each task the longest path from its start to the end of the graph."""
    longest = graph.time.copy()
    ptr, ids = graph.successors.ptr.tolist(), graph.successors.ids.tolist()
    values = longest.tolist()
    for task in reversed(graph.topological_order.tolist()):
        rest = max((values[s] for s in ids[ptr[task] : ptr[task + 1]]), default=0.0)
        values[task] += rest
    return np.array(values)
