"""The best post-order: each subtree is finished before the next begins (Liu 1986).

          R          P_i = peak of the subtree of i, f_i = what it leaves
        / | \\        peak = max( P_1, f_1 + P_2, f_1 + f_2 + P_3, ..., f_1 + f_2 + f_3 + m_R + f_R )
       1  2  3       least when the children come by non-increasing P - f

Not optimal in general (see `liu.py`, and the harpoon of `generators.py`), close to it on assembly trees.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel_above
from memfit.tasks.graph import COMPILE_FROM, Ints
from memfit.tasks.trees.tree import Tree


def best_postorder(tree: Tree) -> tuple[Ints, int]:
    """The order of the tasks and its peak."""
    peaks, sorted_children = subtree_peaks(tree)
    order = np.empty(tree.num_nodes, np.int64)
    _walk(order, tree.children.ptr, sorted_children, tree.root)
    return tree.keep_tasks(order), int(peaks[tree.root]) + tree.base_bytes


def subtree_peaks(tree: Tree) -> tuple[Ints, Ints]:
    """Peak of every subtree under its best post-order, and all children lists sorted for it."""
    peaks = np.empty(tree.num_nodes, np.int64)
    children = tree.children.ids.copy()
    _peaks(tree.postorder, tree.children.ptr, children, tree.output_bytes, tree.need_bytes, peaks)
    return peaks, children


@kernel_above(COMPILE_FROM)
def _peaks(postorder: Ints, child_ptr: Ints, children: Ints, output: Ints, need: Ints, peaks: Ints) -> None:
    for k in range(len(postorder)):
        node = postorder[k]
        begin, end = child_ptr[node], child_ptr[node + 1]
        count = end - begin
        build = count // 2 if count > 1 else 0
        while count > 1:  # heap sort: the least P - f to the end
            if build > 0:
                build -= 1
                a = build
            else:
                count -= 1
                children[begin], children[begin + count] = children[begin + count], children[begin]
                a = 0
            while 2 * a + 1 < count:
                b = 2 * a + 1
                left = children[begin + b]
                if b + 1 < count:
                    right = children[begin + b + 1]
                    if peaks[right] - output[right] < peaks[left] - output[left]:
                        b += 1
                        left = right
                mine = children[begin + a]
                if peaks[mine] - output[mine] <= peaks[left] - output[left]:
                    break
                children[begin + a], children[begin + b] = left, mine
                a = b
        held, peak = 0, need[node]
        for at in range(begin, end):
            child = children[at]
            peak = max(peak, held + peaks[child])
            held += output[child]
        peaks[node] = peak


@kernel_above(COMPILE_FROM)
def _walk(order: Ints, child_ptr: Ints, children: Ints, root: int) -> None:
    stack = np.empty(len(order), np.int64)
    stack[0] = root
    top, at = 1, len(order)
    while top > 0:
        top -= 1
        node = stack[top]
        at -= 1
        order[at] = node
        for k in range(child_ptr[node], child_ptr[node + 1]):
            stack[top] = children[k]
            top += 1
