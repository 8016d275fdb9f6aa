"""All-to-all mapping: all P processors work on every node, in the best post-order: least memory, no tree parallelism.

time   [ a on 0..P-1 ][ b on 0..P-1 ][ root on 0..P-1 ]      makespan = work / P, peak = that of the post-order
"""

from __future__ import annotations

from memfit.tasks.judge import Run
from memfit.tasks.sequential.postorder import best_postorder
from memfit.tasks.trees.tree import Tree


def all_to_all(tree: Tree, processors: int) -> list[Run]:
    order, _ = best_postorder(tree)
    runs, now = [], 0.0
    for task in order.tolist():
        stop = now + float(tree.time[task]) / processors
        runs.append(Run(task, now, stop, float(processors)))
        now = stop
    return runs
