"""MinMem (Jacquelin, Marchal, Robert, Ucar 2011): the same optimum as Liu's, found by exploring the tree from its root.

    out-tree: a node's file f is there before it runs; running it makes its children's files

        root            explore(root, A): run what fits in A, and stop at the cut of files that are smallest to hold
       /    \\
     [a]    b           a cut file is replaced by its subtree's own cut when that holds no more than the file did
           / \\          "need more than A" raises A to the least amount that lets one cut file go further
         [c] [d]

An in-tree is explored from its root as an out-tree; the trace reversed is its order, with the same peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np

from memfit.tasks.graph import Ints
from memfit.tasks.trees.tree import Tree

_Call = Generator[tuple[int, float], None, None]


@dataclass(slots=True)
class _Visit:
    """What is known of a node: nothing run yet while `trace` is empty."""

    cut: dict[int, None] = field(default_factory=dict)  # as an ordered set
    trace: list[int] = field(default_factory=list)
    residual: float = math.inf
    further: float = 0.0  # memory with which one more file of the cut can be explored


def minmem_order(tree: Tree) -> tuple[Ints, int]:
    """An optimal order of the tasks and its peak."""
    visits = [_Visit() for _ in range(tree.num_nodes)]
    size, need = tree.output_bytes.tolist(), tree.need_bytes.tolist()

    def explore(node: int, available: float) -> _Call:
        visit = visits[node]
        if not visit.trace:
            if need[node] > available:
                visit.residual, visit.further = math.inf, need[node]
                return
            visit.trace, visit.cut = [node], dict.fromkeys(tree.children.of(node))
        held = sum(size[j] for j in visit.cut)
        candidates = [j for j in visit.cut if available - (held - size[j]) >= visits[j].further]
        while candidates:
            for j in candidates:
                yield j, available - (held - size[j])
                if visits[j].residual <= size[j]:
                    del visit.cut[j]
                    visit.cut.update(visits[j].cut)
                    visit.trace.extend(visits[j].trace)
                    held += int(visits[j].residual) - size[j]
                    visits[j].trace = []  # now part of this trace; the files of its cut carry their own state
            candidates = [j for j in visit.cut if available - (held - size[j]) >= visits[j].further]
        visit.residual = held
        visit.further = min((visits[j].further + held - size[j] for j in visit.cut), default=math.inf)

    available = float(max(need))
    _run(explore, tree.root, available)
    while not math.isinf(visits[tree.root].further):
        available = visits[tree.root].further
        _run(explore, tree.root, available)
    order = np.array(visits[tree.root].trace[::-1], np.int64)
    return tree.keep_tasks(order), int(available) + tree.base_bytes


def _run(explore: Callable[[int, float], _Call], root: int, available: float) -> None:
    """Recursion without the interpreter's stack: trees can be 10**5 deep."""
    stack = [explore(root, available)]
    while stack:
        try:
            node, share = next(stack[-1])
        except StopIteration:
            stack.pop()
            continue
        stack.append(explore(node, share))
