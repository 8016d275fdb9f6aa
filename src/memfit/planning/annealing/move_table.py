"""The state of annealing: a sequence with repeats that is changed in place, together with the bytes each position holds.

    positions   0  1  2  3  4  5        events of x (made at 1, read at 2, made again at 4, read at 5): its lives are [1, 2] and [4, 5]
    forms       a  b  c  d  b  e        remove position 4: e reads the value of 1, x lives [1, 4]; insert it again: as before
    x              ├──┤     ├──┤

Any sequence is a state, also one in which something is read before it is made: `bad` counts such storages, and a search only accepts
states where it is 0. A change costs as much as the lives of what the execution reads and makes, plus the shift of the rows.

Events of a storage are numbers 2 x (execution x reads it) or 2 x + 1 (x makes it), in order of position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Ints


class _Rows(NamedTuple):
    form: int = 0  # by execution: its form
    pos: int = 1  # by execution: its position
    order: int = 2  # by position: its execution
    usage: int = 3  # by position: bytes held while it runs; the place after the last one has what is held in the end
    base: int = 4  # by storage: where its events begin
    room: int = 5  # by storage: how many events there is room for
    num_events: int = 6  # by storage
    touched: int = 7  # by storage: whether it is being changed
    spare: int = 8  # numbers of executions that are not in use
    state: int = 9  # single numbers, see `STATE`
    change: int = 10  # by position: how much more it and all after it will hold, while a move is weighed (`move_cost.py`)


class _State(NamedTuple):
    length: int = 0  # positions
    over: int = 1  # bytes over the limit, summed over positions
    time: int = 2
    bad: int = 3  # storages that are read before they are made
    limit: int = 4
    spares: int = 5  # spare numbers of executions
    toll: int = 6  # bytes that a position over the limit counts extra
    target: int = 7  # a position over the limit, for searches
    low: int = 8  # first position with something in row `change`
    high: int = 9  # last one
    will_hold: int = 10  # bytes that a moving execution will hold where it goes


ROW, STATE = _Rows(), _State()
"""`table[ROW.usage, p]`; `table[ROW.state, STATE.over]`."""
FAR = 2**62

Table = Ints


@kernel
def make_table(a: Arrays, seq: Ints, limit: int, longest: int, repeats: int, toll: int) -> tuple[Table, Ints]:
    """The table and the events of a sequence that may grow to `longest` positions, with room for `repeats` times the events of the step."""
    num = len(a.size)
    st = np.zeros((11, max(longest + 2, num, 12)), np.int64)
    for f in range(len(a.time)):
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            st[ROW.room, a.in_idx[k]] += repeats
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            st[ROW.room, a.out_idx[k]] += repeats
    for p in range(len(seq)):
        f = seq[p]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            st[ROW.room, a.in_idx[k]] += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            st[ROW.room, a.out_idx[k]] += 1
    total = 0
    for s in range(num):
        st[ROW.base, s] = total
        total += st[ROW.room, s]
    ev = np.empty(total, np.int64)
    st[ROW.state, STATE.length], st[ROW.state, STATE.limit], st[ROW.state, STATE.toll] = len(seq), limit, toll
    st[ROW.state, STATE.low], st[ROW.state, STATE.high] = FAR, -1
    for p in range(len(seq)):
        f = seq[p]
        st[ROW.form, p], st[ROW.pos, p], st[ROW.order, p] = f, p, p
        st[ROW.state, STATE.time] += a.time[f]
        list_events(a, st, ev, p, f)
    for x in range(len(seq), longest):
        st[ROW.spare, longest - 1 - x] = x
    st[ROW.state, STATE.spares] = longest - len(seq)
    st[ROW.order, len(seq)] = longest  # the end is an execution of nothing
    for p in range(len(seq) + 1):
        st[ROW.usage, p] = a.base_bytes + (a.workspace[seq[p]] if p < len(seq) else 0)
        st[ROW.state, STATE.over] += excess_at(st, p)
    for s in range(num):
        change_lives(a, st, ev, s, 1)
    return st, ev


@kernel
def list_events(a: Arrays, st: Table, ev: Ints, x: int, f: int) -> None:
    """Add the reads and productions of execution x, of form f, to the events of their storages."""
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        ev[st[ROW.base, s] + st[ROW.num_events, s]] = 2 * x
        st[ROW.num_events, s] += 1
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        ev[st[ROW.base, s] + st[ROW.num_events, s]] = 2 * x + 1
        st[ROW.num_events, s] += 1


@kernel
def find_event(st: Table, ev: Ints, s: int, x: int) -> int:
    i = st[ROW.base, s]
    while ev[i] >> 1 != x:
        i += 1
    return int(i)


@kernel
def delete_event(st: Table, ev: Ints, s: int, x: int) -> None:
    first, count = st[ROW.base, s], st[ROW.num_events, s]
    for i in range(find_event(st, ev, s, x), first + count - 1):
        ev[i] = ev[i + 1]
    st[ROW.num_events, s] = count - 1


@kernel
def penalize(over: int, toll: int) -> int:
    """What a position adds to the bytes over the limit when it holds `over` more than the limit."""
    return over + toll if over > 0 else 0


@kernel
def add_life(st: Table, low: int, high: int, amount: int) -> None:
    limit, toll, over = st[ROW.state, STATE.limit], st[ROW.state, STATE.toll], 0
    usage = st[ROW.usage, low : high + 1]
    for i in range(len(usage)):
        was = usage[i] - limit
        now = was + amount
        usage[i] += amount
        over += penalize(now, toll) - penalize(was, toll)
    st[ROW.state, STATE.over] += over


@kernel
def change_lives(a: Arrays, st: Table, ev: Ints, s: int, sign: int) -> None:
    """Add (sign 1) or subtract (-1) the lives of storage s from what positions hold, and count it if it is read too early; sorts its events."""
    first, count = st[ROW.base, s], st[ROW.num_events, s]
    for i in range(first + 1, first + count):
        e, j = ev[i], i
        p = st[ROW.pos, e >> 1]
        while j > first and st[ROW.pos, ev[j - 1] >> 1] > p:
            ev[j] = ev[j - 1]
            j -= 1
        ev[j] = e
    size, pinned = sign * a.size[s], a.pinned[s]
    begin, end = -1, -1
    if a.source[s]:
        begin = 0
    for i in range(first, first + count):
        e = ev[i]
        p = st[ROW.pos, e >> 1]
        if e & 1 == 0:
            if begin < 0:
                st[ROW.state, STATE.bad] += sign
                begin = 0  # as if it had been there from the start: every life then begins at the start or where it is made
            end = max(end, p)
        elif pinned and begin >= 0:
            add_life(st, p, p, size)  # a second copy, for this step alone
        else:
            if begin >= 0 and end >= begin:
                add_life(st, begin, end, size)
            begin = p
            end = st[ROW.state, STATE.length] if pinned else p
    if begin >= 0 and end >= begin:
        add_life(st, begin, end, size)
    if pinned and begin < 0:
        st[ROW.state, STATE.bad] += sign


@kernel
def change_lives_of(a: Arrays, st: Table, ev: Ints, f: int, sign: int) -> None:
    """The same for all that form f reads and makes."""
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        st[ROW.touched, a.in_idx[k]] = sign < 0
        change_lives(a, st, ev, a.in_idx[k], sign)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        st[ROW.touched, a.out_idx[k]] = sign < 0
        change_lives(a, st, ev, a.out_idx[k], sign)


@kernel
def bytes_into(a: Arrays, st: Table, p: int) -> int:
    """Bytes held when position p begins, without storages that are being changed."""
    held = int(st[ROW.usage, p])
    if p < st[ROW.state, STATE.length]:
        f = st[ROW.form, st[ROW.order, p]]
        held -= a.workspace[f]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            if not st[ROW.touched, a.out_idx[k]]:
                held -= a.size[a.out_idx[k]]
    return held


@kernel
def excess_at(st: Table, p: int) -> int:
    return penalize(st[ROW.usage, p] - st[ROW.state, STATE.limit], st[ROW.state, STATE.toll])


@kernel
def close_gap(st: Table, p: int, q: int) -> None:
    """Move what is at p + 1 to q down by one."""
    usage, order = st[ROW.usage, p : q + 1], st[ROW.order, p : q + 1]
    for i in range(len(usage) - 1):
        usage[i] = usage[i + 1]
        order[i] = order[i + 1]
    for i in range(len(usage) - 1):
        st[ROW.pos, order[i]] = p + i


@kernel
def open_gap(st: Table, p: int, q: int) -> None:
    """Move what is at p to q - 1 up by one."""
    usage, order = st[ROW.usage, p : q + 1], st[ROW.order, p : q + 1]
    for i in range(len(usage) - 1, 0, -1):
        usage[i] = usage[i - 1]
        order[i] = order[i - 1]
    for i in range(1, len(usage)):
        st[ROW.pos, order[i]] = p + i


@kernel
def remove(a: Arrays, st: Table, ev: Ints, p: int) -> None:
    """Remove the execution at p."""
    x, n = st[ROW.order, p], st[ROW.state, STATE.length]
    f = st[ROW.form, x]
    change_lives_of(a, st, ev, f, -1)
    st[ROW.state, STATE.over] -= excess_at(st, p)
    close_gap(st, p, n)
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        delete_event(st, ev, a.in_idx[k], x)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        delete_event(st, ev, a.out_idx[k], x)
    st[ROW.state, STATE.length] = n - 1
    st[ROW.state, STATE.time] -= a.time[f]
    st[ROW.spare, st[ROW.state, STATE.spares]] = x
    st[ROW.state, STATE.spares] += 1
    change_lives_of(a, st, ev, f, 1)


@kernel
def has_room(a: Arrays, st: Table, f: int) -> bool:
    room = bool(st[ROW.state, STATE.spares] > 0)
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        room &= st[ROW.num_events, a.in_idx[k]] < st[ROW.room, a.in_idx[k]]
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        room &= st[ROW.num_events, a.out_idx[k]] < st[ROW.room, a.out_idx[k]]
    return room


@kernel
def insert(a: Arrays, st: Table, ev: Ints, p: int, f: int) -> None:
    """Run form f just before the execution at p."""
    n = st[ROW.state, STATE.length]
    change_lives_of(a, st, ev, f, -1)
    held = bytes_into(a, st, p)
    open_gap(st, p, n + 1)
    st[ROW.state, STATE.spares] -= 1
    x = st[ROW.spare, st[ROW.state, STATE.spares]]
    st[ROW.form, x], st[ROW.pos, x], st[ROW.order, p] = f, p, x
    st[ROW.usage, p] = held + a.workspace[f]
    st[ROW.state, STATE.over] += excess_at(st, p)
    st[ROW.state, STATE.length] = n + 1
    st[ROW.state, STATE.time] += a.time[f]
    list_events(a, st, ev, x, f)
    change_lives_of(a, st, ev, f, 1)


@kernel
def sequence_of(st: Table) -> Ints:
    seq = np.empty(st[ROW.state, STATE.length], np.int64)
    for p in range(len(seq)):
        seq[p] = st[ROW.form, st[ROW.order, p]]
    return seq
