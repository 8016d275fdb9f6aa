"""Liu's optimal traversal of an in-tree (Liu 1987): the least peak over all orders, not only post-orders.

    memory   hill 1                      a subtree's schedule is cut where its future never dips lower again:
       |     /\\      hill 2             segments (hill, valley) with falling hills and rising valleys
       |    /  \\     /\\   hill 3
       |   /    \\   /  \\  /\\_ f          children are merged segment by segment, largest hill - valley first:
       |__/      \\_/    \\/                 what climbs high and falls deep goes first
               valley 1  valley 2

Segments are kept as increments over the valley before them, so a merge moves no numbers but its own; subtrees lie on a
stack in post-order, and the nodes of a segment are a linked list, so joining two segments is one link.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel_above
from memfit.tasks.graph import COMPILE_FROM, Ints
from memfit.tasks.trees.tree import Tree


def liu_order(tree: Tree) -> tuple[Ints, int]:
    """An optimal order of the tasks and its peak."""
    order = np.empty(tree.num_nodes, np.int64)
    peak = _liu(tree.postorder, tree.children.counts, tree.children_bytes, tree.memory_bytes, tree.output_bytes, order)
    return tree.keep_tasks(order), int(peak) + tree.base_bytes


@kernel_above(COMPILE_FROM)
def _liu(postorder: Ints, num_children: Ints, children_bytes: Ints, memory: Ints, output: Ints, order: Ints) -> int:
    n = len(postorder)
    rise, gain = np.empty(n, np.int64), np.empty(n, np.int64)  # hill and valley of a segment over the valley before it
    head, tail = np.empty(n, np.int64), np.empty(n, np.int64)
    link = np.full(n, -1, np.int64)
    length = np.empty(n, np.int64)  # segments of each subtree on the stack
    top = 0
    lists = 0
    for k in range(n):
        node = postorder[k]
        count = num_children[node]
        total = 0
        for c in range(count):
            total += length[lists - 1 - c]
        lists -= count
        start = top - total
        if count > 1:
            # sort by hill - valley, falling; each child's own segments already are, so ties do not matter. A short list by
            # insertion, a long one by heap sort (numpy's sorts inside a kernel triple the time to compile it)
            if total < 24:
                for a in range(start + 1, top):
                    r, g, h, t = rise[a], gain[a], head[a], tail[a]
                    b = a - 1
                    while b >= start and rise[b] - gain[b] < r - g:
                        rise[b + 1], gain[b + 1], head[b + 1], tail[b + 1] = rise[b], gain[b], head[b], tail[b]
                        b -= 1
                    rise[b + 1], gain[b + 1], head[b + 1], tail[b + 1] = r, g, h, t
            else:
                build, size = total // 2, total
                while size > 1:
                    if build > 0:
                        build -= 1
                        a = build
                    else:
                        size -= 1
                        p, q = start, start + size
                        rise[p], rise[q] = rise[q], rise[p]
                        gain[p], gain[q] = gain[q], gain[p]
                        head[p], head[q] = head[q], head[p]
                        tail[p], tail[q] = tail[q], tail[p]
                        a = 0
                    while 2 * a + 1 < size:  # sift down: the smallest difference on top goes to the end
                        b = 2 * a + 1
                        if b + 1 < size and rise[start + b + 1] - gain[start + b + 1] < rise[start + b] - gain[start + b]:
                            b += 1
                        p, q = start + a, start + b
                        if rise[p] - gain[p] <= rise[q] - gain[q]:
                            break
                        rise[p], rise[q] = rise[q], rise[p]
                        gain[p], gain[q] = gain[q], gain[p]
                        head[p], head[q] = head[q], head[p]
                        tail[p], tail[q] = tail[q], tail[p]
                        a = b
            # replay: a segment whose hill is not below the last one's swallows it
            write = start
            for a in range(start, top):
                r, g, h, t = rise[a], gain[a], head[a], tail[a]
                while write > start and (gain[write - 1] + r >= rise[write - 1] or g <= 0):
                    write -= 1
                    r = max(rise[write], gain[write] + r)
                    g += gain[write]
                    link[tail[write]] = h
                    h = head[write]
                rise[write], gain[write], head[write], tail[write] = r, g, h, t
                write += 1
            top = write
        # the node itself, at the end
        base = children_bytes[node]
        hill = base + memory[node] + output[node]
        valley = output[node]
        first = node
        while top > start:
            before = base - gain[top - 1]
            last_hill = before + rise[top - 1]
            if hill < last_hill and valley > base:
                break
            top -= 1
            hill = max(hill, last_hill)
            link[tail[top]] = first
            first = head[top]
            base = before
        rise[top], gain[top], head[top], tail[top] = hill - base, valley - base, first, node
        top += 1
        length[lists] = top - start
        lists += 1
    at = 0
    for s in range(top):  # the segments of the root in their order, each a linked list
        node = head[s]
        while node != tail[s]:
            order[at] = node
            at += 1
            node = link[node]
        order[at] = node
        at += 1
    return rise[0]  # type: ignore[no-any-return]
