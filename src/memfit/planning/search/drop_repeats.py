"""Deletion polish: drop repeats, dearest first, while the peak stays inside.

A repair never looks back; what it inserted early is often covered by what it inserted later. Removing an execution makes
its readers read the previous value, which then lives longer; if that still fits the execution was for nothing.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.fast_judge import INVALID, drop_dead, measure
from memfit.planning.model.inplace_forms import NONE, overwrite
from memfit.planning.model.reduce import Arrays, Flags, Ints
from memfit.planning.search.event_table import EVENT, Table, make_events


@kernel
def add_bytes(usage: Ints, low: int, high: int, size: int, limit: int) -> bool:
    """Add `size` to positions low to high - 1; whether all of them are inside the limit afterwards."""
    fits = True
    for p in range(low, high):
        usage[p] += size
        fits &= usage[p] <= limit
    return fits


@kernel
def change_usage(a: Arrays, p: int, limit: int, usage: Ints, ev: Table, sign: int) -> bool:
    """Change `usage` as if position p were deleted (sign 1) or put back (sign -1); whether the rest then runs inside the limit.

    A read that was the last of its value shortens that value's life. A value that was made here is read from its previous
    production instead, which then lives up to here; a result is made by its next production instead.
    """
    fits = True
    for e in range(ev[EVENT.ptr, p], ev[EVENT.ptr, p + 1]):
        s, back, on = ev[EVENT.storage, e], ev[EVENT.before, e], ev[EVENT.after, e]
        size = sign * a.size[s]
        begin = ev[EVENT.place, back] + 1 if back >= 0 else 0
        if not ev[EVENT.makes, e]:
            if not a.pinned[s] and (on < 0 or ev[EVENT.makes, on]):
                add_bytes(usage, begin, p, -size, limit)
        elif a.pinned[s]:
            earlier = back
            while earlier >= 0 and not ev[EVENT.makes, earlier]:
                earlier = ev[EVENT.before, earlier]
            if earlier < 0:
                if on < 0 or not ev[EVENT.makes, on]:
                    fits = False
                else:
                    add_bytes(usage, p, ev[EVENT.place, on] + 1, -size, limit)
    for e in range(ev[EVENT.ptr, p], ev[EVENT.ptr, p + 1]):
        s, back, on = ev[EVENT.storage, e], ev[EVENT.before, e], ev[EVENT.after, e]
        if ev[EVENT.makes, e] and not a.pinned[s] and on >= 0 and not ev[EVENT.makes, on]:
            if back < 0 and not a.source[s]:
                fits = False
            else:
                begin = ev[EVENT.place, back] + 1 if back >= 0 else 0
                fits &= add_bytes(usage, begin, p, sign * a.size[s], limit)
    return fits


@kernel
def try_deletions(a: Arrays, seq: Ints, limit: int, positions: Ints, inplace: Ints) -> Flags:
    """Try to delete each of `positions` in turn; a deletion stays if the sequence still runs inside the limit.

    Only the bytes that a deletion moves are looked at again. Overwriting has more rules than that: a sequence that does it is judged
    as a whole each time. The first run of an op that draws random numbers, or runs only once, stays.
    """
    n = len(seq)
    usage = np.empty(n + 1, np.int64)
    peak, _ = measure(a, seq, usage)
    for p in range(n):
        f = seq[p]
        if a.take_ptr[f + 1] > a.take_ptr[f]:
            return judge_deletions(a, seq, limit, positions, inplace)
    if peak == INVALID or peak > limit:
        return judge_deletions(a, seq, limit, positions, inplace)
    ev = make_events(a, seq)
    kept, again, ran = np.ones(n, np.bool_), np.zeros(n, np.bool_), np.zeros(a.num_ops, np.bool_)
    for p in range(n):
        again[p] = ran[a.op[seq[p]]]
        ran[a.op[seq[p]]] = True
    for i in range(len(positions)):
        p = positions[i]
        f = seq[p]
        if not kept[p] or (not again[p] and (a.seeded[f] or not a.replayable[f])):
            continue
        held, usage[p] = usage[p], -(2**61)
        if change_usage(a, p, limit, usage, ev, 1):
            kept[p] = False
            for e in range(ev[EVENT.ptr, p], ev[EVENT.ptr, p + 1]):
                if ev[EVENT.before, e] >= 0:
                    ev[EVENT.after, ev[EVENT.before, e]] = ev[EVENT.after, e]
                if ev[EVENT.after, e] >= 0:
                    ev[EVENT.before, ev[EVENT.after, e]] = ev[EVENT.before, e]
        else:
            change_usage(a, p, limit, usage, ev, -1)
            usage[p] = held
    return kept


@kernel
def judge_deletions(a: Arrays, seq: Ints, limit: int, positions: Ints, inplace: Ints) -> Flags:
    """The same for any sequence, each deletion judged from the start, with in-place forms put in where they are legal."""
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
        peak, _ = measure(a, overwrite(a, trial[:m], inplace) if len(inplace) else trial[:m], usage)
        if peak == INVALID or peak > limit:
            gone[positions[i]] = False
    for p in range(n):
        gone[p] = not gone[p]
    return gone


def delete(a: Arrays, seq: Ints, limit: int, positions: Ints, inplace: Ints = NONE) -> Ints:
    """The sequence without those of `positions` that it can do without."""
    return seq[try_deletions(a, seq, limit, positions, inplace)]


def find_repeats(a: Arrays, seq: Ints) -> Ints:
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
    inplace: Ints = NONE,
) -> Ints:
    """Delete what can go, dearest first, until nothing can or the clock says so. The sequence must fit, and still fits afterwards.

    With `inplace` (the in-place form of each plain one) a plain sequence fits if it does with in-place forms put in.
    With noise "dearest" is only roughly so: what goes first decides what can go at all.
    """
    for _ in range(max_rounds):
        positions = find_repeats(a, seq)
        worth = a.time[seq[positions]].astype(np.float64)
        if noise and random is not None:
            worth *= np.exp(noise * random.standard_normal(len(worth)))
        order = positions[np.argsort(-worth, kind="stable")]
        shorter = _delete_round(a, seq, limit, order, deadline_s, inplace)
        if len(shorter) == len(seq):
            break
        seq = shorter
    return seq


def _delete_round(a: Arrays, seq: Ints, limit: int, order: Ints, deadline_s: float, inplace: Ints) -> Ints:
    """One round, in pieces so that a long sequence can stop on time: positions are counted from the round's start."""
    piece = max(64, 2_000_000 // max(len(seq), 1))
    alive = np.arange(len(seq))  # where each position of `current` was at the start of the round
    current = seq
    for start in range(0, len(order), piece):
        if perf_counter() > deadline_s:
            break
        places = np.searchsorted(alive, order[start : start + piece])
        kept = try_deletions(a, current, limit, places, inplace)
        current, alive = current[kept], alive[kept]
    return drop_dead(a, current)
