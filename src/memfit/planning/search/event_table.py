"""A sequence as events: each read and each production of a storage, linked to the one before it and the one after it.

    forms      a      b      c        row STORAGE    x  y │ y  z │ y  z  w      what each event reads or makes
    reads      x      y      y, z     row BEFORE     .  . │ 1  . │ 2  3  .      the event of the same storage before it
    makes      y      z      w        row MAKES      0  1 │ 0  1 │ 0  0  1      0: it reads, 1: it makes

What a change does to lives lies between two neighbouring events, so polish and repair look there and nowhere else.
All rows are one array: the time to compile a kernel follows the number of arrays that it is given.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Ints

Table = Ints
"""Rows of different lengths in one array."""

FORM, PTR, FIXED = 0, 1, 2
"""By position: its form; its first event (those up to the next position's are its own, reads first); whether it stays whoever reads what it
makes (first draws, ops that run once, first productions of results)."""
STORAGE, BEFORE, AFTER, PLACE, MAKES = 3, 4, 5, 6, 7
"""By event: its storage; the events of that storage before and after it, -1 for none; its position; whether it makes the storage."""
HEAD, LATEST = 8, 9
"""By storage: its first and its last event, -1 for none."""


@kernel
def listed(a: Arrays, seq: Ints) -> Table:
    """The events of a sequence without in-place forms."""
    total = 0
    for p in range(len(seq)):
        total += a.in_ptr[seq[p] + 1] - a.in_ptr[seq[p]] + a.out_ptr[seq[p] + 1] - a.out_ptr[seq[p]]
    ev = np.empty((10, max(total, len(seq) + 1, len(a.size))), np.int64)
    for s in range(len(a.size)):
        ev[HEAD, s] = -1
        ev[LATEST, s] = -1
    ran = np.zeros(a.num_ops, np.bool_)
    e = 0
    for p in range(len(seq)):
        f = seq[p]
        ev[FORM, p], ev[PTR, p] = f, e
        fixed = not a.replayable[f] or (a.seeded[f] and not ran[a.op[f]])
        ran[a.op[f]] = True
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            ev[STORAGE, e], ev[MAKES, e] = a.in_idx[k], 0
            e += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            ev[STORAGE, e], ev[MAKES, e] = a.out_idx[k], 1
            e += 1
        for i in range(ev[PTR, p], e):
            s = ev[STORAGE, i]
            back = ev[LATEST, s]
            ev[BEFORE, i], ev[AFTER, i], ev[PLACE, i], ev[LATEST, s] = back, -1, p, i
            if back >= 0:
                ev[AFTER, back] = i
            else:
                ev[HEAD, s] = i
                fixed |= ev[MAKES, i] > 0 and a.pinned[s]
        ev[FIXED, p] = fixed
    ev[PTR, len(seq)] = e
    return ev
