"""Out-trees by reversal: read backwards, an order of an in-tree is one of the out-tree with all edges turned, same peak.

    in-tree     a ─┐            out-tree    ┌─> a        the file on an edge is made by one end and freed by the other;
                   ├─> root        root ────┤            backwards, the two ends change places
                b ─┘                        └─> b

Holds for items that have one reader each and are freed by it. A task whose one output is read by several others, or a
leaf whose output stays to the end, is outside of that theorem: `recognize_out_tree` then gives None, and `series_parallel.py` or
the search over closed sets takes over.
"""

from __future__ import annotations

import numpy as np

from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.sequential.liu import liu_order
from memfit.tasks.trees.tree import Tree, join_roots


def out_tree_order(mirror: Tree) -> tuple[Ints, int]:
    """The optimal order of an out-tree, given its mirror image."""
    order, peak = liu_order(mirror)
    return order[::-1].copy(), peak


def recognize_out_tree(graph: TaskGraph) -> Tree | None:
    """The mirror image as an in-tree: every task has at most one predecessor, every item exactly one reader. Or None."""
    n, counts = graph.num_tasks, graph.readers.counts
    sized = graph.item_bytes > 0
    if n == 0 or np.any(graph.predecessors.counts > 1) or np.any(counts[sized] != 1):
        return None
    if np.any(graph.item_producer[sized] < 0) or np.any(graph.item_kept & sized):
        return None
    parent = np.full(n, -1, np.int64)
    parent[graph.edges[:, 1]] = graph.edges[:, 0]
    carried = np.zeros(n, np.int64)  # bytes each task reads: its file in the mirror image
    np.add.at(carried, graph.readers.ids[graph.readers.ptr[:-1][sized]], graph.item_bytes[sized])
    return join_roots(parent, carried, graph.memory_bytes, graph.time)
