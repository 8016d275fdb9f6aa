"""In-trees: every output has one reader. A forest gets a root of size 0 that reads the outputs of all its roots.

      3   root: node `parent[i]` reads the output of node i; nodes are positions, the root is the last of `postorder`
     / \\
    1   2
    |
    0
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memfit.core.errors import BadInput
from memfit.jit.kernel import kernel_above
from memfit.tasks.graph import COMPILE_FROM, Floats, Ints, Links, TaskGraph, link, task_graph


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """`parent` is -1 at the root. Nodes past `num_tasks` (at most one, the root that joins a forest) are not tasks.

    `base_bytes` are held throughout: they add to every peak and change no order.
    """

    parent: Ints
    output_bytes: Ints
    memory_bytes: Ints
    time: Floats
    num_tasks: int
    base_bytes: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def root(self) -> int:
        return int(self.postorder[-1])

    @cached_property
    def children(self) -> Links:
        inner = np.flatnonzero(self.parent >= 0)
        return link(self.parent[inner], inner, self.num_nodes)

    @cached_property
    def postorder(self) -> Ints:
        order = np.empty(self.num_nodes, np.int64)
        _depth_first(self.children.ptr, self.children.ids, int(np.flatnonzero(self.parent < 0)[0]), order)
        return order

    @cached_property
    def children_bytes(self) -> Ints:
        total = np.zeros(self.num_nodes, np.int64)
        inner = self.parent >= 0
        np.add.at(total, self.parent[inner], self.output_bytes[inner])
        return total

    @cached_property
    def need_bytes(self) -> Ints:
        return self.children_bytes + self.memory_bytes + self.output_bytes

    @cached_property
    def subtree_time(self) -> Floats:
        total = self.time.copy()
        add_up(self.postorder, self.parent, total)
        return total

    def keep_tasks(self, order: Ints) -> Ints:
        return order[order < self.num_tasks]


@kernel_above(COMPILE_FROM)
def _depth_first(child_ptr: Ints, child_ids: Ints, root: int, order: Ints) -> None:
    """Post-order with the children of a node in the order of the links."""
    n = len(order)
    stack = np.empty(n, np.int64)
    stack[0] = root
    top, at = 1, n
    while top > 0:  # node, then its children from the last to the first: that is the post-order read backwards
        top -= 1
        node = stack[top]
        at -= 1
        order[at] = node
        for k in range(child_ptr[node], child_ptr[node + 1]):
            stack[top] = child_ids[k]
            top += 1


@kernel_above(COMPILE_FROM)
def add_up(postorder: Ints, parent: Ints, values: Floats) -> None:
    """Turn values of nodes into values of subtrees, in place."""
    for k in range(len(postorder)):
        node = postorder[k]
        if parent[node] >= 0:
            values[parent[node]] += values[node]


def recognize_tree(graph: TaskGraph) -> Tree | None:
    """The graph as an in-tree, or None when some output has several readers or part of it is kept."""
    counts, n = graph.readers.counts, graph.num_tasks
    made = graph.item_producer >= 0
    if n == 0 or np.any(counts[made] > 1) or np.any(graph.item_kept[made] & (counts[made] > 0)) or np.any(~graph.item_kept[~made]):
        return None
    reader = np.full(len(counts), -1, np.int64)
    reader[counts == 1] = graph.readers.ids[graph.readers.ptr[:-1][counts == 1]]
    lowest, highest = np.full(n, n, np.int64), np.full(n, -2, np.int64)
    np.minimum.at(lowest, graph.item_producer[made], reader[made])
    np.maximum.at(highest, graph.item_producer[made], reader[made])
    highest[highest == -2], lowest[lowest == n] = -1, -1  # a task that makes nothing
    if np.any(lowest != highest):
        return None
    return join_roots(highest, graph.output_bytes, graph.memory_bytes, graph.time, graph.initial_bytes)


def join_roots(parent: Ints, output_bytes: Ints, memory_bytes: Ints, time: Floats, base_bytes: int = 0) -> Tree:
    n, roots = len(parent), np.flatnonzero(parent < 0)
    if len(roots) > 1:
        parent = np.append(parent, -1)
        parent[roots] = n
        output_bytes, memory_bytes, time = np.append(output_bytes, 0), np.append(memory_bytes, 0), np.append(time, 0.0)
    return Tree(parent=parent, output_bytes=output_bytes, memory_bytes=memory_bytes, time=time, num_tasks=n, base_bytes=base_bytes)


def tree_graph(
    parent: Iterable[int] | Ints,
    output_bytes: Iterable[int] | Ints,
    memory_bytes: Iterable[int] | Ints | None = None,
    time: Iterable[float] | Floats | None = None,
) -> TaskGraph:
    """A task graph from the parent of each node (-1 at a root): the usual way to write a tree down."""
    up = np.asarray(parent if isinstance(parent, np.ndarray) else list(parent), np.int64)
    if len(up) and (up.min() < -1 or up.max() >= len(up)):
        raise BadInput(f"a parent is {int(up.max())} in a tree of {len(up)} nodes: parents are positions, -1 at a root.")
    inner = np.flatnonzero(up >= 0)
    edges = np.stack([inner, up[inner]], axis=1)
    return task_graph(output_bytes=output_bytes, memory_bytes=memory_bytes, time=time, edges=edges)
