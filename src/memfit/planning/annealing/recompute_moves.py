"""Moves that add and delete recomputation: what a value needs comes with it, and what only it needed goes with it.

    remake x before p        x is read at p: run its maker just before p. What the maker reads and is no longer there is either kept
                             longer or made again as well, and so on: one move, however many executions it inserts
    delete an execution      its readers use the value from before; executions that nobody reads any more are deleted too

Each of the two undoes the other, so one move leads from keeping a value to recomputing all that it depends on, and back.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.annealing.move_table import ROW, STATE, Table, has_room, insert, remove
from memfit.planning.model.reduce import Arrays, Ints

MOST = 64
"""The most executions that one move inserts or deletes."""
WHERE_IT_FITS = -1.0
"""In place of a probability: keep longer what there is room for, make the rest again."""


@kernel
def last_event_before(st: Table, ev: Ints, s: int, p: int) -> int:
    """The last event of storage s before position p, -1 for none."""
    back = -1
    for i in range(st[ROW.base, s], st[ROW.base, s] + st[ROW.num_events, s]):
        if st[ROW.pos, ev[i] >> 1] >= p:
            break
        back = i
    return back


@kernel
def is_held_into(a: Arrays, st: Table, ev: Ints, s: int, p: int) -> bool:
    """Whether storage s is held at p for a later read anyway."""
    made = a.source[s]
    for i in range(st[ROW.base, s], st[ROW.base, s] + st[ROW.num_events, s]):
        if st[ROW.pos, ev[i] >> 1] >= p:
            return bool(made and (a.pinned[s] or not ev[i] & 1))
        made = True
    return bool(made and a.pinned[s])


@kernel
def fits_until(a: Arrays, st: Table, ev: Ints, s: int, p: int) -> bool:
    """Whether storage s can be kept from its last event before p until p, inside the limit."""
    back = last_event_before(st, ev, s, p)
    if back < 0:
        return False
    most = st[ROW.state, STATE.limit] - a.size[s]
    between = st[ROW.usage, st[ROW.pos, ev[back] >> 1] + 1 : p]
    fits = True
    for i in range(len(between)):
        fits &= between[i] <= most
    return fits


@kernel
def pick_maker(a: Arrays, s: int) -> int:
    """A random form among those that make storage s, if it may run again; else -1."""
    count = a.prod_ptr[s + 1] - a.prod_ptr[s]
    if count == 0 or a.source[s] or a.pinned[s]:
        return -1
    f = a.prod_idx[a.prod_ptr[s] + (np.random.randint(0, count) if count > 1 else 0)]
    return f if a.replayable[f] and a.take_ptr[f + 1] == a.take_ptr[f] else -1


@kernel
def list_closure(a: Arrays, st: Table, ev: Ints, storage: int, p: int, chance: float, affordable: float, forms: Ints) -> int:
    """Fill `forms` with those that make `storage` just before p; returns how many, 0 if that is impossible or takes more than `affordable`.

    An input that is not held at p is made again with probability `chance`, and kept longer otherwise.
    """
    forms[0] = pick_maker(a, storage)
    if forms[0] < 0:
        return 0
    count, done, cost = 1, 0, float(a.time[forms[0]])
    while done < count and cost <= affordable:
        f = forms[done]
        done += 1
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if is_held_into(a, st, ev, s, p):
                continue
            if fits_until(a, st, ev, s, p) if chance < 0 else np.random.random() >= chance:
                continue
            g = pick_maker(a, s)
            known = g < 0
            for i in range(count):
                known |= forms[i] == g
            if known:
                continue
            if count == MOST:
                return 0
            forms[count] = g
            cost += a.time[g]
            count += 1
    return count if cost <= affordable else 0


@kernel
def remake(a: Arrays, st: Table, ev: Ints, storage: int, p: int, chance: float, affordable: float, log: Ints) -> int:
    """Make `storage` just before p; returns how many executions that inserts, 0 if it takes more than `affordable` or there is no room."""
    count = list_closure(a, st, ev, storage, p, chance, affordable, log)
    for i in range(1, count):  # a form never reads what a later-numbered one makes: insert the highest number first
        f, j = log[i], i
        while j > 0 and log[j - 1] < f:
            log[j] = log[j - 1]
            j -= 1
        log[j] = f
    for i in range(count):
        if not has_room(a, st, log[i]):
            unmake(a, st, ev, p, i)
            return 0
        insert(a, st, ev, p, log[i])
    return count


@kernel
def unmake(a: Arrays, st: Table, ev: Ints, p: int, count: int) -> None:
    """Undo `remake`."""
    for _ in range(count):
        remove(a, st, ev, p)


@kernel
def is_unread(a: Arrays, st: Table, ev: Ints, x: int) -> bool:
    """Whether nobody reads what execution x makes, and it may be left out."""
    f = st[ROW.form, x]
    if a.seeded[f] or not a.replayable[f]:
        return False
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        if a.pinned[s]:
            return False
        i = st[ROW.base, s]
        while ev[i] != 2 * x + 1:
            i += 1
        if i + 1 < st[ROW.base, s] + st[ROW.num_events, s] and not ev[i + 1] & 1:
            return False
    return True


@kernel
def delete(a: Arrays, st: Table, ev: Ints, p: int, log: Ints) -> int:
    """Delete the execution at p and those that nobody reads any more; returns how many. `log` has the position and form of each."""
    waiting = np.empty(4 * MOST, np.int64)
    waiting[0] = st[ROW.order, p]
    top, done = 1, 0
    while top > 0 and done < MOST:
        top -= 1
        x = waiting[top]
        f, q = st[ROW.form, x], st[ROW.pos, x]
        if done and not is_unread(a, st, ev, x):
            continue
        log[2 * done], log[2 * done + 1] = q, f
        done += 1
        remove(a, st, ev, q)
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            back = last_event_before(st, ev, a.in_idx[k], q)
            known = back < 0 or not ev[back] & 1 or top == len(waiting)
            for i in range(top):
                known |= waiting[i] == ev[back] >> 1
            if not known:
                waiting[top] = ev[back] >> 1
                top += 1
    return done


@kernel
def undelete(a: Arrays, st: Table, ev: Ints, count: int, log: Ints) -> None:
    """Undo `delete`."""
    for i in range(count - 1, -1, -1):
        insert(a, st, ev, log[2 * i], log[2 * i + 1])
