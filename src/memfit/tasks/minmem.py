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
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from memfit.tasks.model import Ints
from memfit.tasks.tree import Tree

_Call = Generator[tuple[int, float], None, None]


@dataclass(slots=True)
class _Visit:
    """What is known of a node: nothing run yet while `trace` is empty."""

    cut: list[int] = field(default_factory=list)
    trace: list[int] = field(default_factory=list)
    residual: float = math.inf
    further: float = 0.0  # memory with which one more file of the cut can be explored


def minmem_order(tree: Tree) -> tuple[Ints, int]:
    """An optimal order of the tasks and its peak."""
    visits = [_Visit() for _ in range(tree.num_nodes)]
    available = float(tree.need_bytes.max())
    while True:
        _run(_explore(tree, visits, tree.root, available), tree, visits)
        further = visits[tree.root].further
        if math.isinf(further):
            break
        available = further
    order = np.array(visits[tree.root].trace[::-1], np.int64)
    return tree.only_tasks(order), int(available) + tree.base_bytes


def _run(call: _Call, tree: Tree, visits: list[_Visit]) -> None:
    """Recursion without the interpreter's stack: trees can be 10**5 deep."""
    stack = [call]
    while stack:
        try:
            node, available = next(stack[-1])
        except StopIteration:
            stack.pop()
            continue
        stack.append(_explore(tree, visits, node, available))


def _explore(tree: Tree, visits: list[_Visit], node: int, available: float) -> _Call:
    visit, size = visits[node], tree.output_bytes
    if not visit.trace:
        need = float(tree.need_bytes[node])
        if need > available:
            visit.residual, visit.further = math.inf, need
            return
        visit.trace, visit.cut = [node], tree.children.of(node)
        for child in visit.cut:
            visits[child].further = 0.0
    held = sum(int(size[j]) for j in visit.cut)
    candidates = [j for j in visit.cut if available - (held - size[j]) >= visits[j].further]
    while candidates:
        for j in candidates:
            yield j, available - (held - int(size[j]))
            if visits[j].residual <= size[j]:
                visit.cut.remove(j)
                visit.cut.extend(visits[j].cut)
                visit.trace.extend(visits[j].trace)
                held += int(visits[j].residual) - int(size[j])
                visits[j].trace = []  # now part of this trace; the cut's files carry their own state
        candidates = [j for j in visit.cut if available - (held - size[j]) >= visits[j].further]
    visit.residual = held
    visit.further = min((visits[j].further + held - int(size[j]) for j in visit.cut), default=math.inf)
