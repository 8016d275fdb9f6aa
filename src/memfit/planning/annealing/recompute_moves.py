"""Runs put into a timeline and taken out again together: what a value needs comes with it, what only it needed goes with it.

    remake x before p    x is read at p, and was last needed long before: run its maker at p; of what that reads and is not there, some is kept
                         longer and some is made again as well, and so on; one change, however long the chain is
    strike a run         the run goes, its readers read the value before; what nobody reads any more goes too

One of these undoes the other, so a search that takes both can cross from keeping a value to recomputing a whole chain in one step.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.annealing.move_table import BASE, COUNT, FORM, LIMIT, ORDER, POS, STATE, USAGE, Table, has_room, put_in, take_out
from memfit.planning.model.reduce import Arrays, Ints

MOST = 64
"""Runs that are put in or taken out together at most."""
WHERE_IT_FITS = -1.0
"""Instead of a chance: what there is room for is kept longer, the rest is made again."""


@kernel
def last_before(st: Table, ev: Ints, s: int, p: int) -> int:
    """The last event of storage s before position p, -1 for none."""
    back = -1
    for i in range(st[BASE, s], st[BASE, s] + st[COUNT, s]):
        if st[POS, ev[i] >> 1] >= p:
            break
        back = i
    return back


@kernel
def held_into(a: Arrays, st: Table, ev: Ints, s: int, p: int) -> bool:
    """Whether storage s is there for something at p or later."""
    made = a.source[s]
    for i in range(st[BASE, s], st[BASE, s] + st[COUNT, s]):
        if st[POS, ev[i] >> 1] >= p:
            return bool(made and (a.pinned[s] or not ev[i] & 1))
        made = True
    return bool(made and a.pinned[s])


@kernel
def fits_until(a: Arrays, st: Table, ev: Ints, s: int, p: int) -> bool:
    """Whether there is room to keep storage s from its last event before p until there."""
    back = last_before(st, ev, s, p)
    if back < 0:
        return False
    most = st[STATE, LIMIT] - a.size[s]
    between = st[USAGE, st[POS, ev[back] >> 1] + 1 : p]
    fits = True
    for i in range(len(between)):
        fits &= between[i] <= most
    return fits


@kernel
def plain_maker(a: Arrays, s: int) -> int:
    """A form that can make storage s again, any of several; -1 for none."""
    count = a.prod_ptr[s + 1] - a.prod_ptr[s]
    if count == 0 or a.source[s] or a.pinned[s]:
        return -1
    f = a.prod_idx[a.prod_ptr[s] + (np.random.randint(0, count) if count > 1 else 0)]
    return f if a.replayable[f] and a.take_ptr[f + 1] == a.take_ptr[f] else -1


@kernel
def chain_for(a: Arrays, st: Table, ev: Ints, storage: int, p: int, chance: float, affordable: float, forms: Ints) -> int:
    """Fill in the forms that make `storage` before p; returns how many, 0 where that takes too long or is impossible.

    What they read and is not there is made again with the given chance, and else kept longer.
    """
    forms[0] = plain_maker(a, storage)
    if forms[0] < 0:
        return 0
    count, done, cost = 1, 0, float(a.time[forms[0]])
    while done < count and cost <= affordable:
        f = forms[done]
        done += 1
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if held_into(a, st, ev, s, p):
                continue
            if fits_until(a, st, ev, s, p) if chance < 0 else np.random.random() >= chance:
                continue
            g = plain_maker(a, s)
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
    """Make `storage` before p; returns how many runs that puts in there, 0 where it cannot be done for less than `affordable`."""
    count = chain_for(a, st, ev, storage, p, chance, affordable, log)
    for i in range(1, count):  # forms are numbered so that none reads what a later one makes: the last goes in first
        f, j = log[i], i
        while j > 0 and log[j - 1] < f:
            log[j] = log[j - 1]
            j -= 1
        log[j] = f
    for i in range(count):
        if not has_room(a, st, log[i]):
            unmake(a, st, ev, p, i)
            return 0
        put_in(a, st, ev, p, log[i])
    return count


@kernel
def unmake(a: Arrays, st: Table, ev: Ints, p: int, count: int) -> None:
    for _ in range(count):
        take_out(a, st, ev, p)


@kernel
def unread(a: Arrays, st: Table, ev: Ints, x: int) -> bool:
    """Whether nobody reads what execution x makes, and it need not run."""
    f = st[FORM, x]
    if a.seeded[f] or not a.replayable[f]:
        return False
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        if a.pinned[s]:
            return False
        i = st[BASE, s]
        while ev[i] != 2 * x + 1:
            i += 1
        if i + 1 < st[BASE, s] + st[COUNT, s] and not ev[i + 1] & 1:
            return False
    return True


@kernel
def strike(a: Arrays, st: Table, ev: Ints, p: int, log: Ints) -> int:
    """Take out the run at p, and what nobody reads any more then; `log` has position and form of each; returns how many."""
    waiting = np.empty(4 * MOST, np.int64)
    waiting[0] = st[ORDER, p]
    top, done = 1, 0
    while top > 0 and done < MOST:
        top -= 1
        x = waiting[top]
        f, q = st[FORM, x], st[POS, x]
        if done and not unread(a, st, ev, x):
            continue
        log[2 * done], log[2 * done + 1] = q, f
        done += 1
        take_out(a, st, ev, q)
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            back = last_before(st, ev, a.in_idx[k], q)
            known = back < 0 or not ev[back] & 1 or top == len(waiting)
            for i in range(top):
                known |= waiting[i] == ev[back] >> 1
            if not known:
                waiting[top] = ev[back] >> 1
                top += 1
    return done


@kernel
def unstrike(a: Arrays, st: Table, ev: Ints, count: int, log: Ints) -> None:
    for i in range(count - 1, -1, -1):
        put_in(a, st, ev, log[2 * i], log[2 * i + 1])
