"""Greedy repair: make a sequence fit by recomputing idle values later, best bytes per time first.

    usage      ▁▃▅▇█▇▅▃▁         at the highest position q some live values are idle: made before, read again only at u
    value s    ├────q────u       insert the forms that make s again right before u: s is gone at q

What those forms need at u is either still there, or kept longer, or made again as well: three ways are tried. The most
promising insertions are judged exactly; the one that takes most over-budget bytes away per unit of time is kept.
"""

from __future__ import annotations

import numpy as np

from memfit.planning.kernel import kernel
from memfit.planning.model import Arrays, Flags, Ints
from memfit.planning.replay import INVALID, drop_dead, measure

EXTEND_IF_FITS, RECOMPUTE, EXTEND = 0, 1, 2


@kernel
def excess(usage: Ints, n: int, limit: int) -> int:
    """Bytes over the limit, summed over positions."""
    total = 0
    for p in range(n):
        if usage[p] > limit:
            total += usage[p] - limit
    return total


@kernel
def idle_values(a: Arrays, seq: Ints, q: int, maker: Ints, victims: Ints, next_use: Ints) -> int:
    """Fill in the storages alive but idle at position q, with where each is read next; returns how many."""
    num = len(a.size)
    made = np.full(num, -1, np.int64)
    upcoming = np.full(num, -1, np.int64)
    busy = np.zeros(num, np.bool_)
    n = len(seq)
    for p in range(min(q + 1, n)):
        f = seq[p]
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            made[a.take_old[k]] = -1
            made[a.take_new[k]] = p
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            made[a.out_idx[k]] = p
    f = seq[q]
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        busy[a.in_idx[k]] = True
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        busy[a.out_idx[k]] = True
    done = np.zeros(num, np.bool_)
    for p in range(q + 1, n):
        f = seq[p]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if not done[s]:
                done[s] = True
                upcoming[s] = p
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            done[a.out_idx[k]] = True
    count = 0
    for s in range(num):
        if made[s] < 0 or upcoming[s] < 0 or busy[s] or a.size[s] == 0 or a.pinned[s] or a.source[s]:
            continue
        if maker[s] >= 0 and a.replayable[maker[s]]:
            victims[count] = s
            next_use[count] = upcoming[s]
            count += 1
    return count


@kernel
def life_ends(a: Arrays, seq: Ints, u: int, made: Ints, ends: Ints) -> None:
    """For each storage the latest value made before position u: where it was made (-1: none) and its last use so far known."""
    num = len(a.size)
    n = len(seq)
    for s in range(num):
        made[s] = 0 if a.source[s] else -1
        ends[s] = n if a.source[s] else -1
    for p in range(u):
        f = seq[p]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            if not a.source[a.in_idx[k]]:
                ends[a.in_idx[k]] = p
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            made[a.take_old[k]] = -1
            made[a.take_new[k]] = p
            ends[a.take_new[k]] = n if a.pinned[a.take_new[k]] else p
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            if a.pinned[s] and made[s] >= 0:
                continue
            made[s] = p
            ends[s] = n if a.pinned[s] else p
    open_ = np.ones(num, np.bool_)
    for p in range(u, n):
        f = seq[p]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if open_[s] and ends[s] < p:
                ends[s] = p
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            open_[a.out_idx[k]] = False
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            open_[a.take_new[k]] = False


@kernel
def present_at(a: Arrays, usage: Ints, u: int, limit: int, mode: int, made: Ints, ends: Ints, present: Flags) -> None:
    """Which storages the inserted forms may read before u: alive there, or (by mode) kept alive until there."""
    for s in range(len(a.size)):
        present[s] = made[s] >= 0 and ends[s] >= u
        if present[s] or made[s] < 0 or mode == RECOMPUTE:
            continue
        if mode == EXTEND:
            present[s] = True
            continue
        fits = True
        for p in range(ends[s] + 1, u):
            if usage[p] + a.size[s] > limit:
                fits = False
                break
        present[s] = fits


@kernel
def closure(a: Arrays, storage: int, maker: Ints, present: Flags, out: Ints) -> int:
    """The forms that make `storage` from what is present, in order; -1 if that is impossible. Marks what they make."""
    stack = np.empty(len(a.time) + 2, np.int64)
    stack[0] = maker[storage]
    top, n = 1, 0
    while top > 0:
        f = stack[top - 1]
        missing = -1
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            if not present[a.in_idx[k]]:
                missing = a.in_idx[k]
                break
        if missing >= 0:
            g = maker[missing]
            if g < 0 or not a.replayable[g] or top >= len(stack) or n >= len(out):
                return -1
            stack[top] = g
            top += 1
            continue
        if n >= len(out):
            return -1
        out[n] = f
        n += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            present[a.out_idx[k]] = True
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            present[a.take_old[k]] = False
            present[a.take_new[k]] = True
        top -= 1
    return n


@kernel
def insert(seq: Ints, u: int, extra: Ints, count: int) -> Ints:
    longer = np.empty(len(seq) + count, np.int64)
    longer[:u] = seq[:u]
    longer[u : u + count] = extra[:count]
    longer[u + count :] = seq[u:]
    return longer


@kernel
def candidates(
    a: Arrays, seq: Ints, usage: Ints, q: int, limit: int, maker: Ints, noise: float, rows: Ints, scores: Ints, closures: Ints
) -> int:
    """All (victim, mode) insertions that free position q: rows of (storage, u, mode, closure start, closure length)."""
    num = len(a.size)
    victims, next_use = np.empty(num, np.int64), np.empty(num, np.int64)
    count = idle_values(a, seq, q, maker, victims, next_use)
    made, ends = np.empty(num, np.int64), np.empty(num, np.int64)
    present = np.empty(num, np.bool_)
    buffer = np.empty(4 * len(a.time) + 8, np.int64)
    order = np.argsort(next_use[:count])
    at, filled, total = -1, 0, 0
    for i in order:
        s, u = victims[i], next_use[i]
        if u != at:
            life_ends(a, seq, u, made, ends)
            at = u
        lengths = (-1, -1)
        for mode in range(3):
            present_at(a, usage, u, limit, mode, made, ends, present)
            present[s] = False
            length = closure(a, s, maker, present, buffer)
            if length < 0 or length == lengths[0] or length == lengths[1] or total + length > len(closures) or filled == len(rows):
                continue
            lengths = (lengths[1], length)
            time = 0
            for k in range(length):
                closures[total + k] = buffer[k]
                time += a.time[buffer[k]]
            rows[filled, 0], rows[filled, 1], rows[filled, 2] = s, u, mode
            rows[filled, 3], rows[filled, 4] = total, length
            gain = a.size[s] * np.exp(noise * np.random.standard_normal()) if noise > 0 else float(a.size[s])
            scores[filled] = gain / (time + 1.0) * (1 << 20)
            filled += 1
            total += length
    return filled


@kernel
def repair(a: Arrays, seq: Ints, limit: int, maker: Ints, top: int, noise: float, max_steps: int) -> Ints:
    """Insert recomputations until the sequence fits or nothing helps; returns the best sequence reached."""
    usage = np.empty(8 * len(seq) + 64, np.int64)
    trial_usage = np.empty(8 * len(seq) + 64, np.int64)
    rows = np.empty((3 * len(a.size) + 3, 5), np.int64)
    scores = np.empty(len(rows), np.int64)
    closures = np.empty(40 * len(seq) + 64, np.int64)
    peak, time = measure(a, seq, usage)
    if peak == INVALID:
        return seq
    over = excess(usage, len(seq), limit)
    for _ in range(max_steps):
        if over == 0:
            break
        best, best_score, best_over, best_time = seq, -1.0, over, time
        blocked = np.zeros(len(seq), np.bool_)
        for _attempt in range(6):
            q = -1
            for p in range(len(seq)):
                if usage[p] > limit and not blocked[p] and (q < 0 or usage[p] > usage[q]):
                    q = p
            if q < 0:
                break
            filled = candidates(a, seq, usage, q, limit, maker, noise, rows, scores, closures)
            ranked = np.argsort(-scores[:filled])
            for i in ranked[:top]:
                trial = drop_dead(a, insert(seq, rows[i, 1], closures[rows[i, 3] : rows[i, 3] + rows[i, 4]], rows[i, 4]))
                if len(trial) > len(trial_usage):
                    continue
                trial_peak, trial_time = measure(a, trial, trial_usage)
                if trial_peak == INVALID:
                    continue
                trial_over = excess(trial_usage, len(trial), limit)
                if trial_over >= over:
                    continue
                score = (over - trial_over) / (max(trial_time - time, 0) + 1e-3)
                if noise > 0:
                    score *= np.exp(noise * np.random.standard_normal())
                if score > best_score:
                    best, best_score, best_over, best_time = trial, score, trial_over, trial_time
            if best_score >= 0:
                break
            for p in range(max(q - 2, 0), min(q + 3, len(seq))):
                blocked[p] = True
        if best_score < 0:
            break
        seq, over, time = best, best_over, best_time
        measure(a, seq, usage)
    return seq
