"""Task graphs to measure on: the harpoon family, random trees, random series-parallel graphs and random DAGs.

harpoon, level 1            root           each branch climbs to M and falls to a crumb: a post-order must keep b - 1
                          /  |  \\          branches at M / b, the optimal order only their crumbs
                       M/b  M/b  M/b
                        |    |    |        level k: every crumb is in turn the root of a harpoon of level k - 1
                        e    e    e
                        |    |    |
                        M    M    M
"""

from __future__ import annotations

import numpy as np

from memfit.core.errors import BadInput
from memfit.tasks.graph import TaskGraph, task_graph
from memfit.tasks.trees.tree import tree_graph


def harpoon(*, branches: int, levels: int, large: int, small: int) -> TaskGraph:
    """Best post-order M + e + levels (b - 1) M / b, optimal order M + e + levels (b - 1) e; about 2 b**levels nodes."""
    if branches < 2 or levels < 1 or large % branches or small < 0:
        raise BadInput(
            f"a harpoon of {branches} branches, {levels} levels and M = {large}: two or more branches that divide M, and one level or more."
        )
    parent, output = [-1], [0]

    def add(up: int, size: int) -> int:
        parent.append(up)
        output.append(size)
        return len(parent) - 1

    bases = [0]
    for _ in range(levels):
        bases = [add(add(base, large // branches), small) for base in bases for _ in range(branches)]
    for crumb in bases:
        add(crumb, large)
    return tree_graph(parent, output)


def random_tree(num_tasks: int, *, seed: int = 0, max_bytes: int = 500, attach: str = "uniform") -> TaskGraph:
    """Sizes uniform as in the literature: outputs in [1, max_bytes], working memory in [1, max_bytes / 500 or 1].

    `attach`: a node's parent is uniform among the earlier ones ("uniform"), or among the last 20 ("deep").
    """
    rng = np.random.default_rng(seed)
    low = np.maximum(np.arange(num_tasks) - 20, 0) if attach == "deep" else np.zeros(num_tasks, np.int64)
    parent = rng.integers(low, np.maximum(np.arange(num_tasks), 1))
    parent[0] = -1
    return tree_graph(
        parent,
        rng.integers(1, max_bytes + 1, num_tasks),
        rng.integers(1, max(max_bytes // 500, 1) + 1, num_tasks),
        rng.integers(1, 100, num_tasks).astype(np.float64),
    )


def random_series_parallel(num_tasks: int, *, seed: int = 0, max_bytes: int = 500) -> TaskGraph:
    """Grown by splitting random edges in series or doubling them in parallel; bytes are on the edges."""
    rng = np.random.default_rng(seed)
    edges = [(0, 1)]
    for task in range(2, num_tasks):
        at = int(rng.integers(len(edges)))
        a, b = edges[at]
        if rng.random() < 0.5:
            edges[at] = (a, task)
        else:
            edges.append((a, task))
        edges.append((task, b))
    return task_graph(
        output_bytes=np.zeros(max(num_tasks, 2), np.int64),
        memory_bytes=rng.integers(0, max_bytes // 10 + 1, max(num_tasks, 2)),
        edges=edges,
        edge_bytes=rng.integers(1, max_bytes + 1, len(edges)).tolist(),
    )


def random_dag(num_tasks: int, *, seed: int = 0, degree: float = 2.0, max_bytes: int = 500) -> TaskGraph:
    """Each task reads from about `degree` of the 30 before it."""
    rng = np.random.default_rng(seed)
    edges = []
    for task in range(1, num_tasks):
        first = max(0, task - 30)
        count = min(task - first, int(rng.poisson(degree)))
        edges += [(int(p), task) for p in first + rng.choice(task - first, size=count, replace=False)]
    return task_graph(
        output_bytes=rng.integers(1, max_bytes + 1, num_tasks),
        memory_bytes=rng.integers(0, max_bytes // 10 + 1, num_tasks),
        time=rng.integers(1, 100, num_tasks).astype(np.float64),
        edges=edges,
    )
