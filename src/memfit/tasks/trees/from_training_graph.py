"""A captured training step as a task graph: ops are tasks, storages are items; nothing is recomputed, only reordered.

op ──writes──> storage ──read by──> ops      views keep their storage: whoever reads a view reads the storage
in place       the new storage takes the old one's bytes: both are one item, and its other readers come first
"""

from __future__ import annotations

import numpy as np

from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.tasks.graph import TaskGraph, link


def from_training_graph(graph: Graph, costs: Costs | None = None) -> TaskGraph:
    """Every op once, in its first form. Without costs every op takes time 1 and no workspace."""
    first = {t: graph.producers[t][0] for t in range(len(graph.tensors)) if graph.producers[t]}
    for t in graph.sources:
        first.pop(t, None)
    owner = _owners(graph)
    size: dict[int, int] = {}
    producer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    kept: set[int] = set()
    for tensor in graph.tensors:
        item = owner[tensor.storage]
        size.setdefault(item, graph.storages[item].size_bytes)
        readers.setdefault(item, set()).update(graph.readers[tensor.id])
        maker = first.get(tensor.id, -1)
        producer[item] = min(producer.get(item, maker), maker)
    kept.update(owner[graph.storage_of(t)] for t in graph.results)
    items = sorted(size)
    rows = [(size[i], producer[i], i in kept, sorted(readers[i] - {producer[i]})) for i in items]
    overwriters = _overwriters(graph)
    rows += [(0, op.id, False, sorted(_waiting(graph, op.id, first, overwriters))) for op in graph.ops]
    return TaskGraph(
        names=[op.id for op in graph.ops],
        memory_bytes=np.array(costs.workspace_bytes if costs else [0] * len(graph.ops), np.int64),
        time=np.array(costs.op_time_ns if costs else [1] * len(graph.ops), np.float64),
        item_bytes=np.array([r[0] for r in rows], np.int64),
        item_producer=np.array([r[1] for r in rows], np.int64),
        item_kept=np.array([r[2] or (not r[3] and r[0] > 0 and r[1] < 0) for r in rows], np.bool_),
        readers=link(
            np.array([k for k, r in enumerate(rows) for _ in r[3]], np.int64),
            np.array([x for r in rows for x in r[3]], np.int64),
            len(rows),
        ),
    )


def _owners(graph: Graph) -> list[int]:
    """The storage whose bytes each storage uses: itself, or the one it took over."""
    owner = list(range(len(graph.storages)))
    for op in graph.ops:
        for new, old in op.inplace_of:
            owner[graph.storage_of(new)] = owner[graph.storage_of(old)]
    return owner


def _overwriters(graph: Graph) -> dict[int, list[int]]:
    """Storage -> ops that overwrite it in place."""
    found: dict[int, list[int]] = {}
    for op in graph.ops:
        for _, old in op.inplace_of:
            found.setdefault(graph.storage_of(old), []).append(op.id)
    return found


def _waiting(graph: Graph, op: int, first: dict[int, int], overwriters: dict[int, list[int]]) -> set[int]:
    """Ops that must come after this one: readers of what it makes, and ops that overwrite what it reads."""
    found = {r for t in graph.ops[op].outputs if first.get(t) == op for r in graph.readers[t]}
    for t in graph.ops[op].inputs:
        found.update(other for other in overwriters.get(graph.storage_of(t), ()) if other > op)
    return found - {op}
