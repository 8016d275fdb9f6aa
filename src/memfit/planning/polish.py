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
def without(seq: Ints, position: int) -> Ints:
    shorter = np.empty(len(seq) - 1, np.int64)
    shorter[:position] = seq[:position]
    shorter[position:] = seq[position + 1 :]
    return shorter


@kernel
def polish(a: Arrays, seq: Ints, limit: int, max_rounds: int) -> Ints:
    """Delete what can go. The sequence must fit; it still fits afterwards and takes no longer."""
    usage = np.empty(len(seq) + 1, np.int64)
    for _ in range(max_rounds):
        ran = np.zeros(len(a.time), np.bool_)
        again = np.zeros(len(seq), np.bool_)
        makers = a.prod_ptr[1:] - a.prod_ptr[:-1]
        for p in range(len(seq)):
            f = seq[p]
            again[p] = ran[f]
            ran[f] = True
            for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
                again[p] |= makers[a.out_idx[k]] > 1
        positions = np.flatnonzero(again)
        order = positions[np.argsort(-a.time[seq[positions]])]
        removed = np.zeros(len(seq), np.bool_)
        changed = False
        current = seq
        for p in order:
            at = p - np.sum(removed[:p])
            trial = without(current, at)
            peak, _ = measure(a, trial, usage)
            if peak != INVALID and peak <= limit:
                current = trial
                removed[p] = True
                changed = True
        if not changed:
            break
        seq = drop_dead(a, current)
    return seq
