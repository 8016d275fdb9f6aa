"""Mappings of a tree onto P processors that may work together on one node (node parallelism): timing from shares.

    shares        root 4          a mapping gives every node its number of processors (a share, perhaps a fraction) and
                 /      \\        says whether a node's children run side by side or one after another;
               a 3      b 1       a node of time w on p processors takes w / p

`place` turns that into runs; `all_to_all_mapping.py`, `proportional_mapping.py` and `memory_aware_mapping.py` each fill in the shares.
"""

from __future__ import annotations

import numpy as np

from memfit.tasks.graph import Floats, Ints
from memfit.tasks.judge import Run
from memfit.tasks.trees.tree import Tree


def place(tree: Tree, share: Floats, group: Ints, sequence: Ints) -> list[Run]:
    """Runs of all tasks. Children of equal `group` run side by side, groups one after another as they come in `sequence`,
    a post-order whose children come as they are to be run."""
    n, parent = tree.num_nodes, tree.parent.tolist()
    duration = (tree.time / np.maximum(share, 1e-300)).tolist()
    groups, inner, order = group.tolist(), [0.0] * n, sequence.tolist()
    parts: list[dict[int, float]] = [{} for _ in range(n)]  # of each node: group -> its longest subtree
    for node in order:
        inner[node] = sum(parts[node].values())
        if parent[node] >= 0:
            spans = parts[parent[node]]
            spans[groups[node]] = max(spans.get(groups[node], 0.0), inner[node] + duration[node])
    begin = [0.0] * n
    offsets = [_offsets(spans) for spans in parts]
    for node in reversed(order):
        if parent[node] >= 0:
            begin[node] = begin[parent[node]] + offsets[parent[node]][groups[node]]
    return _runs(tree, order, [b + i for b, i in zip(begin, inner, strict=True)], duration, share)


def _offsets(spans: dict[int, float]) -> dict[int, float]:
    found, at = {}, 0.0
    for key, span in spans.items():
        found[key] = at
        at += span
    return found


def _runs(tree: Tree, order: list[int], start: list[float], duration: list[float], share: Floats) -> list[Run]:
    """Sorted by start, then by `order`. Sums of fractions differ by a hair from branch to branch, which would let a task of no
    length start before the one it waits for: instants are put on a grid of 2**-40 of the makespan."""
    span = max((s + d for s, d in zip(start, duration, strict=True)), default=0.0)
    grid = 2.0 ** np.ceil(np.log2(span) - 40) if span > 0 else 1.0
    runs = []
    for node in order:
        if node < tree.num_tasks:
            begin, stop = (round(t / grid) * grid for t in (start[node], start[node] + duration[node]))
            runs.append(Run(node, begin, stop, float(share[node])))
    return sorted(runs, key=lambda r: r.start)
