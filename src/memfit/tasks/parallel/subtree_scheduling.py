"""ParSubtrees (Marchal, Sinnen, Vivien): P subtrees in parallel, each optimally on one processor, then the rest serially.

    root                    the tree is split from the top: the heaviest subtree is replaced by its children
   /    \\                  while that shortens  max(parallel subtrees) + everything else
[ A ]   inner
       /     \\             time  [ A      ][ inner, root ]
    [ B ]   [ C ]                 [ B   ]                   memory at most P times the sequential optimum (and the
                                  [ C  ]                    outputs of subtrees that wait)
"""

from __future__ import annotations

import heapq

import numpy as np

from memfit.tasks.judge import Run
from memfit.tasks.sequential.liu import liu_order
from memfit.tasks.trees.tree import Tree


def par_subtrees(tree: Tree, processors: int) -> list[Run]:
    roots = _split_tree(tree, processors)
    order, _ = liu_order(tree)
    owner = _owners(tree, roots)
    lanes: dict[int, list[int]] = {r: [] for r in roots}
    rest: list[int] = []
    for task in order.tolist():
        (lanes[owner[task]] if owner[task] >= 0 else rest).append(task)
    runs: list[Run] = []
    longest = 0.0
    for lane in lanes.values():
        now = _serial(tree, lane, 0.0, runs)
        longest = max(longest, now)
    _serial(tree, rest, longest, runs)
    return sorted(runs, key=lambda r: r.start)  # stable: at one instant a lane's order, and the rest last


def _serial(tree: Tree, tasks: list[int], now: float, runs: list[Run]) -> float:
    for task in tasks:
        stop = now + float(tree.time[task])
        runs.append(Run(task, now, stop))
        now = stop
    return now


def _split_tree(tree: Tree, processors: int) -> list[int]:
    """Roots of the subtrees that run in parallel: the best stage of splitting the heaviest subtree again and again."""
    work = tree.subtree_time.tolist()
    total = work[tree.root]
    heap = [(-work[tree.root], tree.root)]
    best, best_roots = total, [tree.root]
    while True:
        largest = [r for _, r in heapq.nsmallest(processors, heap)]
        makespan = work[largest[0]] + total - sum(work[r] for r in largest)
        if makespan < best:
            best, best_roots = makespan, largest
        weight, node = heapq.heappop(heap)
        children = tree.children.of(node)
        if not children or total + weight >= best:  # a leaf is heaviest, or the split-off part alone is already longer
            return best_roots
        for child in children:
            heapq.heappush(heap, (-work[child], child))


def _owners(tree: Tree, roots: list[int]) -> list[int]:
    owner = np.full(tree.num_nodes, -1, np.int64).tolist()
    for r in roots:
        owner[r] = r
    parent = tree.parent.tolist()
    for node in tree.postorder[::-1].tolist():
        if owner[node] < 0 and parent[node] >= 0:
            owner[node] = owner[parent[node]]
    return [int(o) for o in owner]
