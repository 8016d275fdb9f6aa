"""A sequence with repeats that can be changed in place: executions are taken out, put in and moved, and what is held is kept up to date.

    positions   0  1  2  3  4  5        events of x (made at 1, read at 2, made again at 4, read at 5): its lives are [1, 2] and [4, 5]
    forms       a  b  c  d  b  e        take out position 4: e reads the value of 1, x lives [1, 4]; put it back: as before
    x              ├──┤     ├──┤

Any sequence is a state, also one in which something is read before it is made: `BAD` counts the storages to which that happens, and
whoever walks on stops where it is 0. A change costs as much as the lives of what the execution reads and makes, and the shift.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Ints

FORM, POS = 0, 1
"""By execution: its form, its position."""
ORDER, USAGE = 2, 3
"""By position: its execution; what is held while it runs. The place after the last one has what is held in the end."""
BASE, ROOM, COUNT, TOUCHED = 4, 5, 6, 7
"""By storage: where its events begin, how many there is room for, how many there are; whether it is being changed."""
SPARE = 8
"""Numbers of executions that are not in use."""
STATE = 9
CHANGE = 10
"""By position: how much more it and all after it will hold than those before, while a change is weighed (`weigh.py`)."""
LENGTH, OVER, TIME, BAD, LIMIT, SPARES, TOLL, TARGET, LOW, HIGH, WILL_HOLD = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
"""Columns of row STATE: the number of positions; bytes over the limit, summed over positions; the time; storages that are read too early;
the limit; spare numbers; what a position over the limit counts extra; for searches, a position over the limit; the first and last position
with something in CHANGE, and what the run that moves will hold where it goes."""
FAR = 2**62

Table = Ints


@kernel
def timeline(a: Arrays, seq: Ints, limit: int, longest: int, repeats: int, toll: int) -> tuple[Table, Ints]:
    """The table and the events of a sequence that may grow to `longest` positions, `repeats` times as many events per storage."""
    num = len(a.size)
    st = np.zeros((11, max(longest + 2, num, 12)), np.int64)
    for f in range(len(a.time)):
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            st[ROOM, a.in_idx[k]] += repeats
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            st[ROOM, a.out_idx[k]] += repeats
    for p in range(len(seq)):
        f = seq[p]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            st[ROOM, a.in_idx[k]] += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            st[ROOM, a.out_idx[k]] += 1
    total = 0
    for s in range(num):
        st[BASE, s] = total
        total += st[ROOM, s]
    ev = np.empty(total, np.int64)
    st[STATE, LENGTH], st[STATE, LIMIT], st[STATE, TOLL] = len(seq), limit, toll
    st[STATE, LOW], st[STATE, HIGH] = FAR, -1
    for p in range(len(seq)):
        f = seq[p]
        st[FORM, p], st[POS, p], st[ORDER, p] = f, p, p
        st[STATE, TIME] += a.time[f]
        list_events(a, st, ev, p, f)
    for x in range(len(seq), longest):
        st[SPARE, longest - 1 - x] = x
    st[STATE, SPARES] = longest - len(seq)
    st[ORDER, len(seq)] = longest  # the end is an execution of nothing
    for p in range(len(seq) + 1):
        st[USAGE, p] = a.base_bytes + (a.workspace[seq[p]] if p < len(seq) else 0)
        st[STATE, OVER] += excess_at(st, p)
    for s in range(num):
        spread(a, st, ev, s, 1)
    return st, ev


@kernel
def list_events(a: Arrays, st: Table, ev: Ints, x: int, f: int) -> None:
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        ev[st[BASE, s] + st[COUNT, s]] = 2 * x
        st[COUNT, s] += 1
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        ev[st[BASE, s] + st[COUNT, s]] = 2 * x + 1
        st[COUNT, s] += 1


@kernel
def event_of(st: Table, ev: Ints, s: int, x: int) -> int:
    i = st[BASE, s]
    while ev[i] >> 1 != x:
        i += 1
    return int(i)


@kernel
def strike_event(st: Table, ev: Ints, s: int, x: int) -> None:
    first, count = st[BASE, s], st[COUNT, s]
    for i in range(event_of(st, ev, s, x), first + count - 1):
        ev[i] = ev[i + 1]
    st[COUNT, s] = count - 1


@kernel
def counted(over: int, toll: int) -> int:
    """What a position counts that holds `over` bytes more than the limit."""
    return over + toll if over > 0 else 0


@kernel
def add_life(st: Table, low: int, high: int, amount: int) -> None:
    limit, toll, over = st[STATE, LIMIT], st[STATE, TOLL], 0
    usage = st[USAGE, low : high + 1]
    for i in range(len(usage)):
        was = usage[i] - limit
        now = was + amount
        usage[i] += amount
        over += counted(now, toll) - counted(was, toll)
    st[STATE, OVER] += over


@kernel
def spread(a: Arrays, st: Table, ev: Ints, s: int, sign: int) -> None:
    """Add (1) or take away (-1) the lives of storage s, and whether it is read too early; its events are put in order on the way."""
    first, count = st[BASE, s], st[COUNT, s]
    for i in range(first + 1, first + count):
        e, j = ev[i], i
        p = st[POS, e >> 1]
        while j > first and st[POS, ev[j - 1] >> 1] > p:
            ev[j] = ev[j - 1]
            j -= 1
        ev[j] = e
    size, pinned = sign * a.size[s], a.pinned[s]
    begin, end = -1, -1
    if a.source[s]:
        begin = 0
    for i in range(first, first + count):
        e = ev[i]
        p = st[POS, e >> 1]
        if e & 1 == 0:
            if begin < 0:
                st[STATE, BAD] += sign
                begin = 0  # as if it had been there from the start: every life then begins at the start or where it is made
            end = max(end, p)
        elif pinned and begin >= 0:
            add_life(st, p, p, size)  # a second copy, for this step alone
        else:
            if begin >= 0 and end >= begin:
                add_life(st, begin, end, size)
            begin = p
            end = st[STATE, LENGTH] if pinned else p
    if begin >= 0 and end >= begin:
        add_life(st, begin, end, size)
    if pinned and begin < 0:
        st[STATE, BAD] += sign


@kernel
def spread_all(a: Arrays, st: Table, ev: Ints, f: int, sign: int) -> None:
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        st[TOUCHED, a.in_idx[k]] = sign < 0
        spread(a, st, ev, a.in_idx[k], sign)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        st[TOUCHED, a.out_idx[k]] = sign < 0
        spread(a, st, ev, a.out_idx[k], sign)


@kernel
def crossing(a: Arrays, st: Table, p: int) -> int:
    """What is held into position p, storages being changed left out."""
    held = int(st[USAGE, p])
    if p < st[STATE, LENGTH]:
        f = st[FORM, st[ORDER, p]]
        held -= a.workspace[f]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            if not st[TOUCHED, a.out_idx[k]]:
                held -= a.size[a.out_idx[k]]
    return held


@kernel
def excess_at(st: Table, p: int) -> int:
    return counted(st[USAGE, p] - st[STATE, LIMIT], st[STATE, TOLL])


@kernel
def close_up(st: Table, p: int, q: int) -> None:
    """What is at p + 1 to q moves down by one."""
    usage, order = st[USAGE, p : q + 1], st[ORDER, p : q + 1]
    for i in range(len(usage) - 1):
        usage[i] = usage[i + 1]
        order[i] = order[i + 1]
    for i in range(len(usage) - 1):
        st[POS, order[i]] = p + i


@kernel
def open_up(st: Table, p: int, q: int) -> None:
    """What is at p to q - 1 moves up by one."""
    usage, order = st[USAGE, p : q + 1], st[ORDER, p : q + 1]
    for i in range(len(usage) - 1, 0, -1):
        usage[i] = usage[i - 1]
        order[i] = order[i - 1]
    for i in range(1, len(usage)):
        st[POS, order[i]] = p + i


@kernel
def take_out(a: Arrays, st: Table, ev: Ints, p: int) -> None:
    """Remove the execution at p."""
    x, n = st[ORDER, p], st[STATE, LENGTH]
    f = st[FORM, x]
    spread_all(a, st, ev, f, -1)
    st[STATE, OVER] -= excess_at(st, p)
    close_up(st, p, n)
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        strike_event(st, ev, a.in_idx[k], x)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        strike_event(st, ev, a.out_idx[k], x)
    st[STATE, LENGTH] = n - 1
    st[STATE, TIME] -= a.time[f]
    st[SPARE, st[STATE, SPARES]] = x
    st[STATE, SPARES] += 1
    spread_all(a, st, ev, f, 1)


@kernel
def has_room(a: Arrays, st: Table, f: int) -> bool:
    room = bool(st[STATE, SPARES] > 0)
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        room &= st[COUNT, a.in_idx[k]] < st[ROOM, a.in_idx[k]]
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        room &= st[COUNT, a.out_idx[k]] < st[ROOM, a.out_idx[k]]
    return room


@kernel
def put_in(a: Arrays, st: Table, ev: Ints, p: int, f: int) -> None:
    """Run form f before what is at p now."""
    n = st[STATE, LENGTH]
    spread_all(a, st, ev, f, -1)
    held = crossing(a, st, p)
    open_up(st, p, n + 1)
    st[STATE, SPARES] -= 1
    x = st[SPARE, st[STATE, SPARES]]
    st[FORM, x], st[POS, x], st[ORDER, p] = f, p, x
    st[USAGE, p] = held + a.workspace[f]
    st[STATE, OVER] += excess_at(st, p)
    st[STATE, LENGTH] = n + 1
    st[STATE, TIME] += a.time[f]
    list_events(a, st, ev, x, f)
    spread_all(a, st, ev, f, 1)


@kernel
def sequence_of(st: Table) -> Ints:
    seq = np.empty(st[STATE, LENGTH], np.int64)
    for p in range(len(seq)):
        seq[p] = st[FORM, st[ORDER, p]]
    return seq
