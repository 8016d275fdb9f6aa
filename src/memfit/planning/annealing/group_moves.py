"""Moves of several executions at once: an execution goes to another place and takes along those that stand in its way.

    before   a b c x d     x reads b, b reads a: when x moves to the front, a and b go with it      a b x c d

Towards the front it takes the executions it reads from, towards the end those that read it. Moved one by one, the first of them would
hold more than the limit allows and be rejected.
"""

from __future__ import annotations

from memfit.jit.kernel import kernel
from memfit.planning.annealing.move_cost import do_move, weigh_move
from memfit.planning.annealing.move_table import ROW, Table, find_event
from memfit.planning.model.reduce import Arrays, Ints

MAX_GROUP = 16
"""The most executions that move together."""


@kernel
def add_member(group: Ints, count: int, y: int) -> int:
    """Add execution y unless the group has it; returns how many there are."""
    for i in range(count):
        if group[i] == y:
            return count
    group[count] = y
    return count + 1


@kernel
def gather(a: Arrays, st: Table, ev: Ints, x: int, q: int, group: Ints) -> int:
    """Fill `group` with x and the executions that go with it to q; returns how many, 0 if there are too many or nothing would stay between."""
    early = q < st[ROW.pos, x]
    group[0] = x
    count, done = 1, 0
    while done < count:
        y = group[done]
        f = st[ROW.form, y]
        done += 1
        if a.seeded[f] or not a.replayable[f]:
            return 0
        first, last = (a.in_ptr[f], a.in_ptr[f + 1]) if early else (a.out_ptr[f], a.out_ptr[f + 1])
        for k in range(first, last):
            s = a.in_idx[k] if early else a.out_idx[k]
            i = find_event(st, ev, s, y)
            if early:
                i -= 1
                while i >= st[ROW.base, s] and not ev[i] & 1:
                    i -= 1
                if i < st[ROW.base, s] or st[ROW.pos, ev[i] >> 1] < q:
                    continue
                if count + 1 >= MAX_GROUP:
                    return 0
                count = add_member(group, count, ev[i] >> 1)
            else:
                i += 1
                while i < st[ROW.base, s] + st[ROW.num_events, s] and not ev[i] & 1 and st[ROW.pos, ev[i] >> 1] <= q:
                    if count + 1 >= MAX_GROUP:
                        return 0
                    count = add_member(group, count, ev[i] >> 1)
                    i += 1
    return count if count <= abs(st[ROW.pos, x] - q) else 0


@kernel
def push(a: Arrays, st: Table, ev: Ints, p: int, q: int, count: int, group: Ints, log: Ints) -> tuple[int, int]:
    """Move all of the group but its last member; returns where that one is and where it belongs, for the caller to weigh.

    `log` has the old and the new place of each, for `push_back`.
    """
    for i in range(count):  # those nearest to q first
        k = i
        for j in range(i + 1, count):
            if (st[ROW.pos, group[j]] < st[ROW.pos, group[k]]) == (q < p):
                k = j
        group[i], group[k] = group[k], group[i]
    to = q
    for i in range(count - 1):
        at = st[ROW.pos, group[i]]
        log[2 * i], log[2 * i + 1] = at, to
        move(a, st, ev, at, to)
        to += 1 if q < p else -1
    return st[ROW.pos, group[count - 1]], to


@kernel
def push_back(a: Arrays, st: Table, ev: Ints, count: int, log: Ints) -> None:
    """Undo `push`."""
    for i in range(count - 1, -1, -1):
        move(a, st, ev, log[2 * i + 1], log[2 * i])


@kernel
def move(a: Arrays, st: Table, ev: Ints, p: int, q: int) -> None:
    if p != q:
        do_move(a, st, ev, p, q, weigh_move(a, st, ev, p, q))
