"""The cost of moving one execution, computed before the move is done: most moves are rejected, so this must be cheap.

    x moves from p to q     what x reads is held for a longer or shorter time, what x makes exists later or sooner
                            ┌──────── row `change`: how much more or less each position between will hold
    positions   p ─ ─ ─ ─ ─ q         only these are visited, and those back to the neighbouring event of a value made several times

The rule behind it: a value is held at a position exactly when its next event is a read (a result: from when it is first made on). So
moving an event changes what is held only between the neighbours of that event.
"""

from __future__ import annotations

from memfit.jit.kernel import kernel
from memfit.planning.annealing.move_table import FAR, ROW, STATE, Table, bytes_into, close_gap, excess_at, find_event, open_gap, penalize
from memfit.planning.model.reduce import Arrays, Ints


@kernel
def note(st: Table, low: int, high: int, amount: int) -> None:
    """Positions `low` to `high` will hold `amount` more."""
    if low <= high:
        st[ROW.change, low] += amount
        st[ROW.change, high + 1] -= amount
        st[ROW.state, STATE.low] = min(st[ROW.state, STATE.low], low)
        st[ROW.state, STATE.high] = max(st[ROW.state, STATE.high], high)


@kernel
def is_read_next(st: Table, ev: Ints, s: int, i: int) -> int:
    """1 if storage s has an event i and that is a read, else 0."""
    return 1 - (ev[i] & 1) if i < st[ROW.base, s] + st[ROW.num_events, s] else 0


@kernel
def note_later(a: Arrays, st: Table, ev: Ints, s: int, x: int, p: int, q: int) -> int:
    """Note how the lives of storage s change when execution x moves from p to after q; returns the bytes of s that x will hold there beyond
    what is held already."""
    i = find_event(st, ev, s, x)
    makes, size, end = ev[i] & 1, a.size[s], st[ROW.base, s] + st[ROW.num_events, s]
    j, last, first = i + 1, p, 2
    while j < end and st[ROW.pos, ev[j] >> 1] <= q:
        if first == 2:
            first = ev[j] & 1
        last = st[ROW.pos, ev[j] >> 1]
        j += 1
    follows = is_read_next(st, ev, s, j)
    if follows == makes:
        note(st, last + 1, q, -size if makes else size)
    if first == 1 - makes:
        note(st, (st[ROW.pos, ev[i - 1] >> 1] if i > st[ROW.base, s] else -1) + 1, p - 1, size if makes else -size)
    return 0 if follows else int(size)


@kernel
def note_sooner(a: Arrays, st: Table, ev: Ints, s: int, x: int, p: int, q: int) -> int:
    """The same when x moves from p to before q."""
    i = find_event(st, ev, s, x)
    makes, size = ev[i] & 1, a.size[s]
    j, last, first = i - 1, q - 1, 2
    while j >= st[ROW.base, s] and st[ROW.pos, ev[j] >> 1] >= q:
        last = max(last, st[ROW.pos, ev[j] >> 1])
        first = ev[j] & 1
        j -= 1
    if is_read_next(st, ev, s, i + 1) == makes:
        note(st, last + 1, p - 1, size if makes else -size)
    if first == 1 - makes:
        note(st, (st[ROW.pos, ev[j] >> 1] if j >= st[ROW.base, s] else -1) + 1, q - 1, -size if makes else size)
    return int(size) if (first != 0 if makes else first == 1) else 0


@kernel
def note_result(a: Arrays, st: Table, ev: Ints, s: int, x: int, p: int, q: int) -> int:
    """The same for a result that x makes: it is held from its first production on, and twice while it is made again."""
    other, size = FAR, a.size[s]
    for i in range(st[ROW.base, s], st[ROW.base, s] + st[ROW.num_events, s]):
        if ev[i] & 1 and ev[i] >> 1 != x:
            other = st[ROW.pos, ev[i] >> 1]
            break
    if q < p:
        note(st, q, min(other, p - 1), size if other >= q else 0)
        return int(size)
    note(st, p + 1, min(other, q), -size if p < other else 0)
    return 0 if other > q else int(size)


@kernel
def sum_noted(st: Table) -> int:
    """The change of the bytes over the limit by all that is noted."""
    limit, toll, over, change = st[ROW.state, STATE.limit], st[ROW.state, STATE.toll], 0, 0
    low, high = st[ROW.state, STATE.low], st[ROW.state, STATE.high]
    for t in range(low, high + 1):
        change += st[ROW.change, t]
        was = st[ROW.usage, t] - limit
        now = was + change
        over += penalize(now, toll) - penalize(was, toll)
    return int(over)


@kernel
def clear_notes(st: Table) -> None:
    """Forget what is noted: the move is not done."""
    for t in range(st[ROW.state, STATE.low], st[ROW.state, STATE.high] + 2):
        st[ROW.change, t] = 0
    st[ROW.state, STATE.low], st[ROW.state, STATE.high] = FAR, -1


@kernel
def measure_relief(st: Table, low: int, high: int, size: int) -> int:
    """By how much the bytes over the limit fall when positions `low` to `high` hold `size` less."""
    limit, toll, over = st[ROW.state, STATE.limit], st[ROW.state, STATE.toll], 0
    usage = st[ROW.usage, low : high + 1]
    for i in range(len(usage)):
        was = usage[i] - limit
        now = was - size
        over += penalize(was, toll) - penalize(now, toll)
    return over


@kernel
def weigh_deletion(a: Arrays, st: Table, ev: Ints, p: int) -> int:
    """A lower bound on the change of the bytes over the limit when the execution at p is deleted; its value is made more than once.

    Where the deletion leaves other executions unread too, nothing is known and the answer is `-FAR`.
    """
    x = st[ROW.order, p]
    f = st[ROW.form, x]
    certain = True
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        i = find_event(st, ev, s, x)
        if a.pinned[s] or is_read_next(st, ev, s, i + 1):
            continue
        first = i == st[ROW.base, s]
        certain &= first or not ev[i - 1] & 1
        note(st, 0 if first else st[ROW.pos, ev[i - 1] >> 1] + 1, p - 1, -a.size[s])
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        i = find_event(st, ev, s, x)
        if a.pinned[s] or i == st[ROW.base, s]:
            certain = False
        elif is_read_next(st, ev, s, i + 1):
            note(st, st[ROW.pos, ev[i - 1] >> 1] + 1, p - 1, a.size[s])
    over = sum_noted(st) - excess_at(st, p) if certain else -FAR
    clear_notes(st)
    return over


@kernel
def weigh_move(a: Arrays, st: Table, ev: Ints, p: int, q: int) -> int:
    """The change of the bytes over the limit when the execution at p moves to q, a place it may have. `do_move` or `clear_notes` must follow."""
    x = st[ROW.order, p]
    f = st[ROW.form, x]
    held = a.workspace[f] + bytes_into(a, st, q + 1 if q > p else q)
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        if not a.pinned[s]:
            held += note_later(a, st, ev, s, x, p, q) if q > p else note_sooner(a, st, ev, s, x, p, q)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        if a.pinned[s]:
            held += note_result(a, st, ev, s, x, p, q)
        else:
            held += note_later(a, st, ev, s, x, p, q) if q > p else note_sooner(a, st, ev, s, x, p, q)
    st[ROW.state, STATE.will_hold] = held
    return sum_noted(st) + int(penalize(held - st[ROW.state, STATE.limit], st[ROW.state, STATE.toll])) - excess_at(st, p)


@kernel
def do_move(a: Arrays, st: Table, ev: Ints, p: int, q: int, over: int) -> None:
    """Do the move that was just weighed: the execution at p goes to q, those between move up or down by one."""
    x = st[ROW.order, p]
    f, change = st[ROW.form, x], 0
    for t in range(st[ROW.state, STATE.low], st[ROW.state, STATE.high] + 1):
        change += st[ROW.change, t]
        st[ROW.usage, t] += change
    clear_notes(st)
    if q > p:
        close_gap(st, p, q)
    else:
        open_gap(st, q, p)
    st[ROW.order, q], st[ROW.pos, x], st[ROW.usage, q] = x, q, st[ROW.state, STATE.will_hold]
    st[ROW.state, STATE.over] += over
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        sift_event(st, ev, a.in_idx[k], x)
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        sift_event(st, ev, a.out_idx[k], x)


@kernel
def sift_event(st: Table, ev: Ints, s: int, x: int) -> None:
    """Put the event of x in its place among those of storage s, ordered by position."""
    first, end = st[ROW.base, s], st[ROW.base, s] + st[ROW.num_events, s]
    i, p = find_event(st, ev, s, x), st[ROW.pos, x]
    e = ev[i]
    while i > first and st[ROW.pos, ev[i - 1] >> 1] > p:
        ev[i] = ev[i - 1]
        i -= 1
    while i + 1 < end and st[ROW.pos, ev[i + 1] >> 1] < p:
        ev[i] = ev[i + 1]
        i += 1
    ev[i] = e
