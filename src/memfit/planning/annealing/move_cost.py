"""What a change of a timeline would do, found out before it is done: most changes are turned down, and those should cost little.

    x moves from p to q     a value that x reads is held longer or less long, from its event before q on; one that x makes is there later or sooner
                            ┌──────── CHANGE: what each position between holds more or less
    positions   p ─ ─ ─ ─ ─ q         only these are looked at, and with a value that others make again what lies before them

The rule behind it: a value is held at a position exactly when the next thing that happens to it is that somebody reads it (and a result
from when it is first made). So an event that moves only matters between its neighbours.
"""

from __future__ import annotations

from memfit.jit.kernel import kernel
from memfit.planning.annealing.move_table import (
    BASE,
    CHANGE,
    COUNT,
    FAR,
    FORM,
    HIGH,
    LIMIT,
    LOW,
    ORDER,
    OVER,
    POS,
    STATE,
    TOLL,
    USAGE,
    WILL_HOLD,
    Table,
    close_up,
    counted,
    crossing,
    event_of,
    excess_at,
    open_up,
)
from memfit.planning.model.reduce import Arrays, Ints


@kernel
def note(st: Table, low: int, high: int, amount: int) -> None:
    """Positions `low` to `high` will hold `amount` more."""
    if low <= high:
        st[CHANGE, low] += amount
        st[CHANGE, high + 1] -= amount
        st[STATE, LOW] = min(st[STATE, LOW], low)
        st[STATE, HIGH] = max(st[STATE, HIGH], high)


@kernel
def read_next(st: Table, ev: Ints, s: int, i: int) -> int:
    """1 if the event i of storage s is there and a reader's."""
    return 1 - (ev[i] & 1) if i < st[BASE, s] + st[COUNT, s] else 0


@kernel
def later(a: Arrays, st: Table, ev: Ints, s: int, x: int, p: int, q: int) -> int:
    """Note what storage s does when the run x goes from p to after q; what of it is not held there already is returned."""
    i = event_of(st, ev, s, x)
    makes, size, end = ev[i] & 1, a.size[s], st[BASE, s] + st[COUNT, s]
    j, last, first = i + 1, p, 2
    while j < end and st[POS, ev[j] >> 1] <= q:
        if first == 2:
            first = ev[j] & 1
        last = st[POS, ev[j] >> 1]
        j += 1
    follows = read_next(st, ev, s, j)
    if follows == makes:
        note(st, last + 1, q, -size if makes else size)
    if first == 1 - makes:
        note(st, (st[POS, ev[i - 1] >> 1] if i > st[BASE, s] else -1) + 1, p - 1, size if makes else -size)
    return 0 if follows else int(size)


@kernel
def sooner(a: Arrays, st: Table, ev: Ints, s: int, x: int, p: int, q: int) -> int:
    """The same when it goes from p to before q."""
    i = event_of(st, ev, s, x)
    makes, size = ev[i] & 1, a.size[s]
    j, last, first = i - 1, q - 1, 2
    while j >= st[BASE, s] and st[POS, ev[j] >> 1] >= q:
        last = max(last, st[POS, ev[j] >> 1])
        first = ev[j] & 1
        j -= 1
    if read_next(st, ev, s, i + 1) == makes:
        note(st, last + 1, p - 1, size if makes else -size)
    if first == 1 - makes:
        note(st, (st[POS, ev[j] >> 1] if j >= st[BASE, s] else -1) + 1, q - 1, -size if makes else size)
    return int(size) if (first != 0 if makes else first == 1) else 0


@kernel
def result_moves(a: Arrays, st: Table, ev: Ints, s: int, x: int, p: int, q: int) -> int:
    """The same for a result that x makes: it is held from the first time it is made, and a second copy while it is made again."""
    other, size = FAR, a.size[s]
    for i in range(st[BASE, s], st[BASE, s] + st[COUNT, s]):
        if ev[i] & 1 and ev[i] >> 1 != x:
            other = st[POS, ev[i] >> 1]
            break
    if q < p:
        note(st, q, min(other, p - 1), size if other >= q else 0)
        return int(size)
    note(st, p + 1, min(other, q), -size if p < other else 0)
    return 0 if other > q else int(size)


@kernel
def noted_over(st: Table) -> int:
    """How many bytes more are over the limit with what is noted."""
    limit, toll, over, change = st[STATE, LIMIT], st[STATE, TOLL], 0, 0
    low, high = st[STATE, LOW], st[STATE, HIGH]
    for t in range(low, high + 1):
        change += st[CHANGE, t]
        was = st[USAGE, t] - limit
        now = was + change
        over += counted(now, toll) - counted(was, toll)
    return int(over)


@kernel
def clear(st: Table) -> None:
    for t in range(st[STATE, LOW], st[STATE, HIGH] + 2):
        st[CHANGE, t] = 0
    st[STATE, LOW], st[STATE, HIGH] = FAR, -1


@kernel
def freed(st: Table, low: int, high: int, size: int) -> int:
    """How many bytes fewer are over the limit when positions `low` to `high` hold `size` less."""
    limit, toll, over = st[STATE, LIMIT], st[STATE, TOLL], 0
    usage = st[USAGE, low : high + 1]
    for i in range(len(usage)):
        was = usage[i] - limit
        now = was - size
        over += counted(was, toll) - counted(now, toll)
    return over


@kernel
def weigh_strike(a: Arrays, st: Table, ev: Ints, p: int) -> int:
    """How many bytes more are over the limit, at least, without the run at p, something that is made more than once.

    Where that leaves others unread as well, who knows: then as few as can be is the answer.
    """
    x = st[ORDER, p]
    f = st[FORM, x]
    certain = True
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        i = event_of(st, ev, s, x)
        if a.pinned[s] or read_next(st, ev, s, i + 1):
            continue
        first = i == st[BASE, s]
        certain &= first or not ev[i - 1] & 1
        note(st, 0 if first else st[POS, ev[i - 1] >> 1] + 1, p - 1, -a.size[s])
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        i = event_of(st, ev, s, x)
        if a.pinned[s] or i == st[BASE, s]:
            certain = False
        elif read_next(st, ev, s, i + 1):
            note(st, st[POS, ev[i - 1] >> 1] + 1, p - 1, a.size[s])
    over = noted_over(st) - excess_at(st, p) if certain else -FAR
    clear(st)
    return over


@kernel
def weigh_move(a: Arrays, st: Table, ev: Ints, p: int, q: int) -> int:
    """How many bytes more are over the limit when the run at p goes to q, where it may; followed by `do_move` or `clear`."""
    x = st[ORDER, p]
    f = st[FORM, x]
    held = a.workspace[f] + crossing(a, st, q + 1 if q > p else q)
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        if not a.pinned[s]:
            held += later(a, st, ev, s, x, p, q) if q > p else sooner(a, st, ev, s, x, p, q)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        if a.pinned[s]:
            held += result_moves(a, st, ev, s, x, p, q)
        else:
            held += later(a, st, ev, s, x, p, q) if q > p else sooner(a, st, ev, s, x, p, q)
    st[STATE, WILL_HOLD] = held
    return noted_over(st) + int(counted(held - st[STATE, LIMIT], st[STATE, TOLL])) - excess_at(st, p)


@kernel
def do_move(a: Arrays, st: Table, ev: Ints, p: int, q: int, over: int) -> None:
    """What was weighed is done: the run at p goes to q, those between move up or down by one."""
    x = st[ORDER, p]
    f, change = st[FORM, x], 0
    for t in range(st[STATE, LOW], st[STATE, HIGH] + 1):
        change += st[CHANGE, t]
        st[USAGE, t] += change
    clear(st)
    if q > p:
        close_up(st, p, q)
    else:
        open_up(st, q, p)
    st[ORDER, q], st[POS, x], st[USAGE, q] = x, q, st[STATE, WILL_HOLD]
    st[STATE, OVER] += over
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        sift(st, ev, a.in_idx[k], x)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        sift(st, ev, a.out_idx[k], x)


@kernel
def sift(st: Table, ev: Ints, s: int, x: int) -> None:
    """The event of x goes where it belongs among those of storage s."""
    first, end = st[BASE, s], st[BASE, s] + st[COUNT, s]
    i, p = event_of(st, ev, s, x), st[POS, x]
    e = ev[i]
    while i > first and st[POS, ev[i - 1] >> 1] > p:
        ev[i] = ev[i - 1]
        i -= 1
    while i + 1 < end and st[POS, ev[i + 1] >> 1] < p:
        ev[i] = ev[i + 1]
        i += 1
    ev[i] = e
