"""Deletion polish: drop repeats, dearest first, while the peak stays inside.

A repair never looks back; what it inserted early is often covered by what it inserted later. Removing an execution makes
its readers read the previous value, which then lives longer; if that still fits the execution was for nothing.
"""

from __future__ import annotations

import numpy as np

from memfit.planning.kernel import kernel
from memfit.planning.model import Arrays, Ints
from memfit.planning.replay import INVALID, drop_dead, measure


@kernel
def delete(a: Arrays, seq: Ints, limit: int, positions: Ints) -> Ints:
    """Try to delete each of `positions` in turn; a deletion stays if the sequence still runs inside the limit."""
    n = len(seq)
    gone = np.zeros(n, np.bool_)
    trial = np.empty(n, np.int64)
    usage = np.empty(n + 1, np.int64)
    count = n
    for i in range(len(positions)):
        gone[positions[i]] = True
        m = 0
        for p in range(n):
            if not gone[p]:
                trial[m] = seq[p]
                m += 1
        peak, _ = measure(a, trial[:m], usage)
        if peak == INVALID or peak > limit:
            gone[positions[i]] = False
        else:
            count = m
    kept = np.empty(count, np.int64)
    m = 0
    for p in range(n):
        if not gone[p]:
            kept[m] = seq[p]
            m += 1
    return kept


def repeats(a: Arrays, seq: Ints) -> Ints:
    """Positions that may be superfluous: an op that ran before, or one of several makers of the same storage."""
    _, first = np.unique(seq, return_index=True)
    again = np.ones(len(seq), np.bool_)
    again[first] = False
    shared = np.diff(a.prod_ptr) > 1
    if shared.any():
        per_form = np.array([bool(shared[a.out_idx[a.out_ptr[f] : a.out_ptr[f + 1]]].any()) for f in range(len(a.time))])
        again |= per_form[seq]
    return np.flatnonzero(again)


def polish(a: Arrays, seq: Ints, limit: int, max_rounds: int = 6) -> Ints:
    """Delete what can go, dearest first. The sequence must fit; it still fits afterwards and takes no longer."""
    for _ in range(max_rounds):
        positions = repeats(a, seq)
        order = positions[np.argsort(-a.time[seq[positions]], kind="stable")]
        shorter = drop_dead(a, delete(a, seq, limit, order))
        if len(shorter) == len(seq):
            break
        seq = shorter
    return seq
