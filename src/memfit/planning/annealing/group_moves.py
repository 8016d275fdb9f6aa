"""A run moves together with what stands in its way: earlier with the runs it reads from, later with the runs that read it.

    before   a b c x d     x reads b, b reads a: x to the front takes a and b along      a b x c d

Alone it may only go as far as these let it. A group that makes way for another one as a whole is one change here and many small ones
otherwise, the first of which holds more than the limit allows.
"""

from __future__ import annotations

from memfit.jit.kernel import kernel
from memfit.planning.annealing.move_cost import do_move, weigh_move
from memfit.planning.annealing.move_table import BASE, COUNT, FORM, POS, Table, event_of
from memfit.planning.model.reduce import Arrays, Ints

CROWD = 16
"""Runs that move together at most."""


@kernel
def add(group: Ints, count: int, y: int) -> int:
    for i in range(count):
        if group[i] == y:
            return count
    group[count] = y
    return count + 1


@kernel
def gather(a: Arrays, st: Table, ev: Ints, x: int, q: int, group: Ints) -> int:
    """Fill in x and the runs that come along when it goes to q; how many, 0 for too many, or for all that are between."""
    early = q < st[POS, x]
    group[0] = x
    count, done = 1, 0
    while done < count:
        y = group[done]
        f = st[FORM, y]
        done += 1
        if a.seeded[f] or not a.replayable[f]:
            return 0
        first, last = (a.in_ptr[f], a.in_ptr[f + 1]) if early else (a.out_ptr[f], a.out_ptr[f + 1])
        for k in range(first, last):
            s = a.in_idx[k] if early else a.out_idx[k]
            i = event_of(st, ev, s, y)
            if early:
                i -= 1
                while i >= st[BASE, s] and not ev[i] & 1:
                    i -= 1
                if i < st[BASE, s] or st[POS, ev[i] >> 1] < q:
                    continue
                if count + 1 >= CROWD:
                    return 0
                count = add(group, count, ev[i] >> 1)
            else:
                i += 1
                while i < st[BASE, s] + st[COUNT, s] and not ev[i] & 1 and st[POS, ev[i] >> 1] <= q:
                    if count + 1 >= CROWD:
                        return 0
                    count = add(group, count, ev[i] >> 1)
                    i += 1
    return count if count <= abs(st[POS, x] - q) else 0


@kernel
def push(a: Arrays, st: Table, ev: Ints, p: int, q: int, count: int, group: Ints, log: Ints) -> tuple[int, int]:
    """The run at p goes to q with its group, all but the last of them; returns where that one is and where it belongs.

    `log` has where each was and is.
    """
    for i in range(count):  # from the side they go to
        k = i
        for j in range(i + 1, count):
            if (st[POS, group[j]] < st[POS, group[k]]) == (q < p):
                k = j
        group[i], group[k] = group[k], group[i]
    to = q
    for i in range(count - 1):
        at = st[POS, group[i]]
        log[2 * i], log[2 * i + 1] = at, to
        move(a, st, ev, at, to)
        to += 1 if q < p else -1
    return st[POS, group[count - 1]], to


@kernel
def push_back(a: Arrays, st: Table, ev: Ints, count: int, log: Ints) -> None:
    for i in range(count - 1, -1, -1):
        move(a, st, ev, log[2 * i + 1], log[2 * i])


@kernel
def move(a: Arrays, st: Table, ev: Ints, p: int, q: int) -> None:
    if p != q:
        do_move(a, st, ev, p, q, weigh_move(a, st, ev, p, q))
