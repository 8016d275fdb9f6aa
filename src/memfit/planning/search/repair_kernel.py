"""Steps of repair in one compiled loop, for sequences of plain forms: a search repairs hundreds of times a second.

    while something is over the limit:   the highest position  ->  what is idle there  ->  the best insertion  ->  drop executions nobody reads

In-place forms are put in to see what is held (`inplace_forms.py`), and nowhere else.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import inline_kernel, kernel
from memfit.planning.model.fast_judge import INVALID, drop_dead, measure
from memfit.planning.model.inplace_forms import overwrite
from memfit.planning.model.reduce import Arrays, Floats, Ints
from memfit.planning.search.insertion_kernel import find_best_insertion

NEVER = 2**62
_HEIGHTS = 6
"""Positions tried in one step: the highest first, and where nothing helps the next one."""


@kernel
def sum_excess(usage: Ints, n: int, limit: int) -> int:
    """Bytes over the limit, summed over positions."""
    total = 0
    for p in range(n):
        if usage[p] > limit:
            total += usage[p] - limit
    return total


@kernel
def find_idle(a: Arrays, seq: Ints, q: int, maker: Ints, victims: Ints, next_use: Ints) -> int:
    """List the storages that position q holds without using them, and where each is read next; returns how many."""
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
def insert_forms(seq: Ints, u: int, forms: Ints, start: int, count: int) -> Ints:
    longer = np.empty(len(seq) + count, np.int64)
    for p in range(u):
        longer[p] = seq[p]
    for k in range(count):
        longer[u + k] = forms[start + k]
    for p in range(u, len(seq)):
        longer[p + count] = seq[p]
    return longer


@kernel
def draw_jitter(count: int, noise: float) -> Floats:
    factors = np.ones(count)
    if noise > 0:
        for i in range(count):
            factors[i] = np.exp(noise * np.random.standard_normal())
    return factors


@kernel
def sort_by(items: Ints, key: Ints) -> None:
    """In place and stable, for a few items: a sort that is quicker for many takes two seconds to compile."""
    for i in range(1, len(items)):
        item, j = items[i], i
        while j > 0 and key[items[j - 1]] > key[item]:
            items[j] = items[j - 1]
            j -= 1
        items[j] = item


@kernel
def fill_usage(a: Arrays, seq: Ints, inplace: Ints, usage: Ints) -> bool:
    """Fill `usage` with the bytes held at each position, with in-place forms put in; whether the sequence can run."""
    peak, _ = measure(a, overwrite(a, seq, inplace) if len(inplace) else seq, usage)
    return bool(peak != INVALID)


@inline_kernel
def insert_for(
    a: Arrays, seq: Ints, usage: Ints, limit: int, q: int, maker: Ints, top: int, wide: int, noise: float, bold: bool, inplace: Ints
) -> Ints:
    """The sequence after the best insertion for position q; empty when nothing helps there. `bold` also values bytes
    beyond those over the limit."""
    victims, next_use = np.empty(len(a.size), np.int64), np.empty(len(a.size), np.int64)
    count = find_idle(a, seq, q, maker, victims, next_use)
    if count == 0:
        return seq[:0]
    height = NEVER if bold else int(usage[q]) - limit
    worth = draw_jitter(count, noise)
    for i in range(count):
        worth[i] *= -min(a.size[victims[i]], height) / (a.time[maker[victims[i]]] + 1.0)
    chosen = np.argsort(worth)[:wide]
    sort_by(chosen, next_use)
    plain = usage
    if len(inplace):
        plain = np.empty(len(seq), np.int64)
        measure(a, seq, plain)
    u, forms, _ = find_best_insertion(
        a, seq, usage, plain, limit, victims, next_use, chosen, maker, height, top, draw_jitter(3 * len(chosen), noise)
    )
    return drop_dead(a, insert_forms(seq, u, forms, 0, len(forms))) if len(forms) else seq[:0]


@kernel
def repair(
    a: Arrays, seq: Ints, limit: int, maker: Ints, top: int, wide: int, noise: float, bold: bool, inplace: Ints, steps: int, seed: int
) -> tuple[Ints, bool]:
    """Do up to `steps` insertions, each of which lowers the bytes over the limit; returns also whether more is to be done."""
    np.random.seed(seed)
    best, least = seq, NEVER
    for step in range(steps + 1):
        usage = np.empty(len(seq), np.int64)
        over = sum_excess(usage, len(seq), limit) if fill_usage(a, seq, inplace, usage) else NEVER
        if over >= least:
            return best, False
        best, least = seq, over
        if over == 0 or step == steps:
            return best, over > 0
        heights = usage.copy()
        better = seq[:0]
        for _ in range(_HEIGHTS):
            q = int(np.argmax(heights))
            if heights[q] <= limit:
                break
            better = insert_for(a, seq, usage, limit, q, maker, top, wide, noise, bold, inplace)
            if len(better):
                break
            for p in range(max(q - 2, 0), min(q + 3, len(heights))):
                heights[p] = 0
        if not len(better):
            return best, False
        seq = better
    return best, False
