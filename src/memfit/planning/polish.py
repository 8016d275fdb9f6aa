"""Deletion polish: drop repeats, dearest first, while the peak stays inside.

A repair never looks back; what it inserted early is often covered by what it inserted later. Removing an execution makes
its readers read the previous value, which then lives longer; if that still fits the execution was for nothing.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from memfit.planning.kernel import kernel
from memfit.planning.model import Arrays, Flags, Ints
from memfit.planning.replay import INVALID, drop_dead, measure


@kernel
def kept_after(a: Arrays, seq: Ints, limit: int, positions: Ints) -> Flags:
    """Try to delete each of `positions` in turn; a deletion stays if the sequence still runs inside the limit."""
    n = len(seq)
    gone = np.zeros(n, np.bool_)
    trial = np.empty(n, np.int64)
    usage = np.empty(n + 1, np.int64)
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
    for p in range(n):
        gone[p] = not gone[p]
    return gone


def delete(a: Arrays, seq: Ints, limit: int, positions: Ints) -> Ints:
    """The sequence without those of `positions` that it can do without."""
    return seq[kept_after(a, seq, limit, positions)]


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


def polish(
    a: Arrays,
    seq: Ints,
    limit: int,
    max_rounds: int = 6,
    deadline_s: float = float("inf"),
    noise: float = 0.0,
    random: np.random.Generator | None = None,
) -> Ints:
    """Delete what can go, dearest first, until nothing can or the clock says so. The sequence must fit, and still fits afterwards.

    With noise "dearest" is only roughly so: what goes first decides what can go at all.
    """
    for _ in range(max_rounds):
        positions = repeats(a, seq)
        worth = a.time[seq[positions]].astype(np.float64)
        if noise and random is not None:
            worth *= np.exp(noise * random.standard_normal(len(worth)))
        order = positions[np.argsort(-worth, kind="stable")]
        shorter = _deleted(a, seq, limit, order, deadline_s)
        if len(shorter) == len(seq):
            break
        seq = shorter
    return seq


def _deleted(a: Arrays, seq: Ints, limit: int, order: Ints, deadline_s: float) -> Ints:
    """One round, in pieces so that a long sequence can stop on time: positions are counted from the round's start."""
    piece = max(64, 2_000_000 // max(len(seq), 1))
    alive = np.arange(len(seq))  # where each position of `current` was at the start of the round
    current = seq
    for start in range(0, len(order), piece):
        if perf_counter() > deadline_s:
            break
        places = np.searchsorted(alive, order[start : start + piece])
        kept = kept_after(a, current, limit, places)
        current, alive = current[kept], alive[kept]
    return drop_dead(a, current)
