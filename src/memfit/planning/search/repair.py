"""Greedy repair: make a sequence fit by recomputing idle values later, best bytes per time first.

    usage      ▁▃▅▇█▇▅▃▁         at the highest position q some live values are idle: made before, read again only at u
    value s    ├────q────u       insert the forms that make s again right before u: s is gone at q

What those forms need at u is either still there, or kept longer, or made again as well: three ways are tried. The most
promising insertions are judged exactly; the one that takes most over-budget bytes away per unit of time is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.fast_judge import INVALID, drop_dead, measure
from memfit.planning.model.inplace_forms import NONE
from memfit.planning.model.reduce import Arrays, Floats, Ints
from memfit.planning.search.insertion_kernel import EXTEND, RECOMPUTE
from memfit.planning.search.repair_kernel import NEVER, find_idle, insert_forms, repair, sum_excess


@kernel
def list_lives(a: Arrays, seq: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """All values of every storage in the order they are made: (ptr, begin, last use, position at which it is overwritten or n)."""
    num, n = len(a.size), len(seq)
    ptr = np.zeros(num + 1, np.int64)
    for s in range(num):
        ptr[s + 1] = a.source[s]
    for p in range(n):
        f = seq[p]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            ptr[a.out_idx[k] + 1] += 1
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            ptr[a.take_new[k] + 1] += 1
    for s in range(num):
        ptr[s + 1] += ptr[s]
    begin, end, gone = np.empty(ptr[num], np.int64), np.empty(ptr[num], np.int64), np.full(ptr[num], n, np.int64)
    at = np.empty(num, np.int64)
    for s in range(num):
        at[s] = ptr[s] - 1
        if a.source[s]:
            at[s] += 1
            begin[at[s]] = -1
            end[at[s]] = n
    for p in range(n):
        f = seq[p]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if at[s] >= ptr[s] and end[at[s]] < n:
                end[at[s]] = p
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            old, new = a.take_old[k], a.take_new[k]
            if at[old] >= ptr[old]:
                gone[at[old]] = p
            at[new] += 1
            begin[at[new]] = p
            end[at[new]] = n if a.pinned[new] else p
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            at[s] += 1
            begin[at[s]] = p
            end[at[s]] = n if a.pinned[s] else p
    return ptr, begin, end, gone


@kernel
def is_present(a: Arrays, s: int, above: Ints, u: int, limit: int, mode: int, ptr: Ints, begin: Ints, end: Ints, gone: Ints) -> bool:
    """Whether forms inserted before u may read storage s: it is alive there, or (by mode) kept alive until there.

    `above[p]` is the most held from p to u.
    """
    i = ptr[s + 1] - 1
    while i >= ptr[s] and begin[i] >= u:
        i -= 1
    if i < ptr[s] or gone[i] < u:
        return False
    if end[i] >= u or mode == EXTEND:
        return True
    return mode != RECOMPUTE and above[end[i] + 1] + a.size[s] <= limit


@kernel
def list_closure(
    a: Arrays,
    storage: int,
    maker: Ints,
    above: Ints,
    u: int,
    limit: int,
    mode: int,
    lives: tuple[Ints, Ints, Ints, Ints],
    known: Ints,
    stamp: int,
    out: Ints,
) -> int:
    """The forms that make `storage` before position u, in order; -1 if that is impossible.

    `known[s]` is 2 * stamp (absent) or 2 * stamp + 1 (present) once looked up: what is never asked for costs nothing.
    """
    stack = np.empty(len(a.time) + 2, np.int64)
    stack[0] = maker[storage]
    known[storage] = 2 * stamp
    top, n = 1, 0
    while top > 0:
        f = stack[top - 1]
        missing = -1
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if known[s] < 2 * stamp:
                known[s] = 2 * stamp + is_present(a, s, above, u, limit, mode, lives[0], lives[1], lives[2], lives[3])
            if known[s] == 2 * stamp:
                missing = s
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
            known[a.out_idx[k]] = 2 * stamp + 1
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            known[a.take_old[k]] = 2 * stamp
            known[a.take_new[k]] = 2 * stamp + 1
        top -= 1
    return n


@kernel
def list_insertions(
    a: Arrays, seq: Ints, usage: Ints, limit: int, maker: Ints, victims: Ints, next_use: Ints, rows: Ints, times: Ints, forms: Ints
) -> int:
    """The insertions that drop each victim until its next use, by each mode: rows of (storage, u, start, length) in `forms`."""
    num = len(a.size)
    lives = list_lives(a, seq)
    above = np.zeros(len(seq) + 2, np.int64)
    known = np.full(num, -1, np.int64)
    buffer = np.empty(4 * len(a.time) + 8, np.int64)
    at, filled, total, stamp = -1, 0, 0, 0
    for i in range(len(victims)):
        s, u = victims[i], next_use[i]
        if u != at:
            above[u] = 0
            for p in range(u - 1, -1, -1):
                above[p] = max(above[p + 1], usage[p])
            at = u
        first, second = -1, -1
        for mode in range(3):
            stamp += 1
            length = list_closure(a, s, maker, above, u, limit, mode, lives, known, stamp, buffer)
            if length < 0 or length in (first, second) or total + length > len(forms) or filled == len(rows):
                continue
            first, second = second, length
            times[filled] = 0
            for k in range(length):
                forms[total + k] = buffer[k]
                times[filled] += a.time[buffer[k]]
            rows[filled, 0], rows[filled, 1], rows[filled, 2], rows[filled, 3] = s, u, total, length
            filled += 1
            total += length
    return filled


@kernel
def judge_insertions(a: Arrays, seq: Ints, limit: int, rows: Ints, order: Ints, forms: Ints, over: Ints, time: Ints) -> None:
    """For each insertion in `order` what is over the limit afterwards, and the time; impossible ones are infinitely over."""
    usage = np.empty(len(seq) + 4 * len(a.time) + 8, np.int64)
    for i in range(len(order)):
        row = order[i]
        trial = drop_dead(a, insert_forms(seq, rows[row, 1], forms, rows[row, 2], rows[row, 3]))
        peak, time[i] = measure(a, trial, usage)
        over[i] = NEVER if peak == INVALID else sum_excess(usage, len(trial), limit)


@dataclass(slots=True)
class Repairer:
    """`top` insertions are judged exactly, of `wide` idle values looked at; `noise` makes a search out of a greedy rule.

    `bold` also values bytes beyond those over the limit: fewer insertions, which now and then cost more time.

    With `inplace` sequences are plain, and fit if they do with in-place forms put in. For a sequence that overwrites by itself each
    insertion is judged from the start.
    """

    arrays: Arrays
    limit: int
    maker: Ints
    top: int = 24
    wide: int = 96
    noise: float = 0.0
    bold: bool = True
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    inplace: Ints = field(default_factory=lambda: NONE)

    def run(self, seq: Ints, max_steps: int, deadline_s: float = float("inf")) -> Ints:
        """Insert recomputations until the sequence fits, nothing helps, or time is up; returns the best sequence reached."""
        if not len(seq) or (self.arrays.take_ptr[seq + 1] > self.arrays.take_ptr[seq]).any():
            return self.run_judging(seq, max_steps, deadline_s)
        piece, more = max(2_000_000 // (len(seq) + 1) ** 2, 1) if deadline_s < float("inf") else max_steps, True
        while more and max_steps > 0:
            seed, steps = int(self.random.integers(2**31)), min(piece, max_steps)
            seq, more = repair(
                self.arrays, seq, self.limit, self.maker, self.top, self.wide, self.noise, self.bold, self.inplace, steps, seed
            )
            max_steps -= steps
            if perf_counter() > deadline_s:
                break
        return np.asarray(seq)

    def run_judging(self, seq: Ints, max_steps: int, deadline_s: float = float("inf")) -> Ints:
        """The same for any sequence, each insertion judged from the start."""
        before, least = seq, NEVER
        for _ in range(max_steps + 1):
            usage, time = self._measure(seq)
            over = NEVER if usage is None else int(np.maximum(usage - self.limit, 0).sum())
            if over >= least:
                return before
            before, least = seq, over
            if usage is None or over == 0 or perf_counter() > deadline_s:
                break
            better = self._insert_once(seq, usage, over, time)
            if better is None:
                break
            seq = better
        return before

    def _measure(self, seq: Ints) -> tuple[Ints | None, int]:
        usage = np.empty(len(seq), np.int64)
        peak, time = measure(self.arrays, seq, usage)
        return (None if peak == INVALID else usage), int(time)

    def _insert_once(self, seq: Ints, usage: Ints, over: int, time: int) -> Ints | None:
        heights = usage.copy()
        for _ in range(6):  # the highest position first; where nothing helps, the next one
            q = int(np.argmax(heights))
            if heights[q] <= self.limit:
                return None
            better = self._insert_best(seq, usage, q, over, time)
            if better is not None:
                return better
            heights[max(q - 2, 0) : q + 3] = 0
        return None

    def _find_idle(self, seq: Ints, q: int) -> tuple[Ints, Ints]:
        """The idle values worth looking at, and where each is read next, in that order."""
        a = self.arrays
        victims, next_use = np.empty(len(a.size), np.int64), np.empty(len(a.size), np.int64)
        count = find_idle(a, seq, q, self.maker, victims, next_use)
        victims, next_use = victims[:count], next_use[:count]
        chosen = np.argsort(-self._draw_jitter(count) * a.size[victims] / (a.time[self.maker[victims]] + 1.0))[: self.wide]
        chosen = chosen[np.argsort(next_use[chosen], kind="stable")]
        return victims[chosen], next_use[chosen]

    def _insert_best(self, seq: Ints, usage: Ints, q: int, over: int, time: int) -> Ints | None:
        a = self.arrays
        victims, next_use = self._find_idle(seq, q)
        if not len(victims):
            return None
        rows, times = np.empty((3 * len(victims), 4), np.int64), np.empty(3 * len(victims), np.int64)
        forms = np.empty(40 * len(seq) + 64, np.int64)
        filled = list_insertions(a, seq, usage, self.limit, self.maker, victims, next_use, rows, times, forms)
        if not filled:
            return None
        order = np.argsort(-self._draw_jitter(filled) * a.size[rows[:filled, 0]] / (times[:filled] + 1.0))[: self.top]
        after, takes = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
        judge_insertions(a, seq, self.limit, rows, order, forms, after, takes)
        score = self._draw_jitter(len(order)) * (over - after) / (np.maximum(takes - time, 0) + 1e-3)
        best = int(np.argmax(score))
        if after[best] >= over:
            return None
        row = rows[order[best]]
        return drop_dead(a, insert_forms(seq, int(row[1]), forms, int(row[2]), int(row[3])))

    def _draw_jitter(self, count: int) -> Floats:
        return np.exp(self.noise * self.random.standard_normal(count)) if self.noise else np.ones(count)
