"""A sequence as events: each read and each production of a storage, linked to the one before it and the one after it.

    forms      a      b      c        row storage    x  y │ y  z │ y  z  w      what each event reads or makes
    reads      x      y      y, z     row before     .  . │ 1  . │ 2  3  .      the event of the same storage before it
    makes      y      z      w        row makes      0  1 │ 0  1 │ 0  0  1      0: it reads, 1: it makes

What a change does to lives lies between two neighbouring events, so polish and repair look there and nowhere else.
All rows are one array: the time to compile a kernel follows the number of arrays that it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Ints

Table = Ints
"""Rows of different lengths in one array."""


class _Rows(NamedTuple):
    form: int = 0  # by position: its form
    ptr: int = 1  # by position: its first event; those up to the next position's are its own, reads first
    fixed: int = 2  # by position: it stays, whoever reads what it makes (first draws, ops that run once, first productions of results)
    storage: int = 3  # by event
    before: int = 4  # by event: the event of the same storage before it, -1 for none
    after: int = 5  # by event: the one after it, -1 for none
    place: int = 6  # by event: its position
    makes: int = 7  # by event: whether it makes the storage
    head: int = 8  # by storage: its first event, -1 for none
    latest: int = 9  # by storage: its last event, -1 for none


EVENT = _Rows()
"""Rows of the table: `events[EVENT.storage, e]`."""


@kernel
def make_events(a: Arrays, seq: Ints) -> Table:
    """The events of a sequence without in-place forms."""
    total = 0
    for p in range(len(seq)):
        total += a.in_ptr[seq[p] + 1] - a.in_ptr[seq[p]] + a.out_ptr[seq[p] + 1] - a.out_ptr[seq[p]]
    ev = np.empty((10, max(total, len(seq) + 1, len(a.size))), np.int64)
    for s in range(len(a.size)):
        ev[EVENT.head, s] = -1
        ev[EVENT.latest, s] = -1
    ran = np.zeros(a.num_ops, np.bool_)
    e = 0
    for p in range(len(seq)):
        f = seq[p]
        ev[EVENT.form, p], ev[EVENT.ptr, p] = f, e
        fixed = not a.replayable[f] or (a.seeded[f] and not ran[a.op[f]])
        ran[a.op[f]] = True
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            ev[EVENT.storage, e], ev[EVENT.makes, e] = a.in_idx[k], 0
            e += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            ev[EVENT.storage, e], ev[EVENT.makes, e] = a.out_idx[k], 1
            e += 1
        for i in range(ev[EVENT.ptr, p], e):
            s = ev[EVENT.storage, i]
            back = ev[EVENT.latest, s]
            ev[EVENT.before, i], ev[EVENT.after, i], ev[EVENT.place, i], ev[EVENT.latest, s] = back, -1, p, i
            if back >= 0:
                ev[EVENT.after, back] = i
            else:
                ev[EVENT.head, s] = i
                fixed |= ev[EVENT.makes, i] > 0 and a.pinned[s]
        ev[EVENT.fixed, p] = fixed
    ev[EVENT.ptr, len(seq)] = e
    return ev
