"""Memory-aware mapping (after Agullo et al.): proportional where every subtree fits its share of the memory, else serial.

    node with p processors and M bytes for each of them
       children side by side, p_c processors each:  allowed when peak_c <= p_c * M for every child
       otherwise                                     one group after another, each with all p processors; what earlier
                                                     groups leave behind lowers M for the later ones
    groups: as many children as fit side by side are taken together, in the order of the best post-order

Never exceeds P * M, and fails only when the best post-order itself does.
"""

from __future__ import annotations

import numpy as np

from memfit.core.errors import InfeasibleBudget
from memfit.core.units import format_bytes
from memfit.tasks.graph import Floats, Ints
from memfit.tasks.judge import Run
from memfit.tasks.parallel.mapping import place
from memfit.tasks.parallel.proportional_mapping import share_processors
from memfit.tasks.sequential.postorder import subtree_peaks
from memfit.tasks.trees.tree import Tree

_LARGEST_GROUP = 64


def memory_aware(tree: Tree, processors: int, memory_bytes: int) -> list[Run]:
    """Runs that stay within `memory_bytes` in all, if the best post-order does."""
    peaks, sorted_children = subtree_peaks(tree)
    available = memory_bytes - tree.base_bytes
    if peaks[tree.root] > available:
        raise InfeasibleBudget(
            f"{format_bytes(memory_bytes)} is below the {format_bytes(int(peaks[tree.root]) + tree.base_bytes)} of the best post-order, "
            "which is where the memory-aware mapping ends: give it that, or choose membooking, which starts from the optimal order.",
            minimum_bytes=None,
        )
    n = tree.num_nodes
    share, limit, group = np.zeros(n), np.zeros(n), np.zeros(n, np.int64)
    share[tree.root], limit[tree.root] = processors, available
    ptr, peak_list = tree.children.ptr, peaks.tolist()
    for node in tree.postorder[::-1].tolist():
        children = sorted_children[ptr[node] : ptr[node + 1]].tolist()
        if children:
            _assign(tree, children, float(share[node]), float(limit[node]), peak_list, share, limit, group)
    order = _walk(tree, sorted_children)
    return place(tree, share, group, order)


def _assign(
    tree: Tree, children: list[int], processors: float, memory: float, peaks: list[int], share: Floats, limit: Floats, group: Ints
) -> None:
    """Split `children` into groups; inside a group, processors and memory go by work."""
    rest_peak = [0]  # of the children from each one on, done one by one
    for child in reversed(children):
        rest_peak.append(max(peaks[child], int(tree.output_bytes[child]) + rest_peak[-1]))
    rest_peak.reverse()
    at = number = 0
    while at < len(children):
        size = len(children) if not at and _fits(tree, children, processors, memory, peaks) else 0
        size = size or _group_size(tree, children, at, processors, memory, peaks, rest_peak)
        taken = children[at : at + size]
        parts = share_processors(tree, taken, processors).tolist()
        for child, part in zip(taken, parts, strict=True):
            share[child], group[child], limit[child] = part, number, memory * part / processors if size > 1 else memory
        memory -= int(tree.output_bytes[taken].sum())
        at, number = at + size, number + 1


def _group_size(tree: Tree, children: list[int], at: int, processors: float, memory: float, peaks: list[int], rest_peak: list[int]) -> int:
    """How many children from `at` on run side by side and leave enough for the rest to be done one by one."""
    size = min(len(children) - at, _LARGEST_GROUP)
    while size > 1:
        taken = children[at : at + size]
        held = int(tree.output_bytes[taken].sum())
        if rest_peak[at + size] + held <= memory and _fits(tree, taken, processors, memory, peaks):
            return size
        size //= 2
    return 1


def _fits(tree: Tree, children: list[int], processors: float, memory: float, peaks: list[int]) -> bool:
    if len(children) == 1:
        return peaks[children[0]] <= memory
    parts = share_processors(tree, children, processors)
    return all(peaks[c] <= memory * part / processors for c, part in zip(children, parts.tolist(), strict=True))


def _walk(tree: Tree, sorted_children: Ints) -> Ints:
    """Post-order with the children as sorted."""
    order, stack, ptr = [], [tree.root], tree.children.ptr.tolist()
    ids = sorted_children.tolist()
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(ids[ptr[node] : ptr[node + 1]])
    return np.array(order[::-1], np.int64)
