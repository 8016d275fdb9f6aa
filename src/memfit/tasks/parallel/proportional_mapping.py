"""Proportional mapping: the processors of a node are shared out to its subtrees by their work.

           root: 4             W = 30 | 10        p_child = p * W_child / sum W
          /       \\
     3 processors   1          balanced work; memory can be arbitrarily worse than on one processor
"""

from __future__ import annotations

import numpy as np

from memfit.tasks.graph import Floats
from memfit.tasks.judge import Run
from memfit.tasks.parallel.mapping import place
from memfit.tasks.trees.tree import Tree


def proportional(tree: Tree, processors: int) -> list[Run]:
    share = np.zeros(tree.num_nodes)
    share[tree.root] = processors
    for node in tree.postorder[::-1].tolist():
        children = tree.children.of(node)
        if children:
            share[children] = share_processors(tree, children, float(share[node]))
    return place(tree, share, np.zeros(tree.num_nodes, np.int64), tree.postorder)


def share_processors(tree: Tree, children: list[int], processors: float) -> Floats:
    """Shares by subtree work; subtrees without any work share equally what is left over, which is a vanishing part."""
    work = tree.subtree_time[children]
    least = max(float(work.max()), 1e-9) * 1e-9
    work = np.maximum(work, least)
    shares: Floats = processors * work / work.sum()
    return shares
