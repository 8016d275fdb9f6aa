"""The fast judge: peak, time and bytes per position of a sequence of forms, compiled with numba and cached on disk.

    position   0   1   2   3   4   5          usage[p] = what the device holds while position p runs
    forms      a   b   c   d   b   e
    b's output     ├───┤       ├───┤          two lives: first made at 1 and read at 2, made again at 4 and read at 5

The same rules as `core.simulate`, on the reduced model: a property test holds the two equal. Everything here is a
pure function of arrays; planners call it thousands of times a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Ints

INVALID = -1


@kernel
def measure(a: Arrays, seq: Ints, usage: Ints) -> tuple[int, int]:
    """Fill `usage[:len(seq)]` and return (peak, time); peak is INVALID if a form reads what is not there."""
    n = len(seq)
    num = len(a.size)
    start = np.full(num, -1, np.int64)
    last = np.full(num, -1, np.int64)
    ran = np.zeros(a.num_ops, np.bool_)
    last_draw = -1
    diff = np.zeros(n + 2, np.int64)
    time = 0
    initial = a.base_bytes
    for s in range(num):
        if a.source[s]:
            start[s] = 0
            initial += a.size[s]
    for p in range(n):
        f = seq[p]
        op = a.op[f]
        if ran[op]:
            if not a.replayable[f]:
                return INVALID, 0
        else:
            ran[op] = True
            if a.seeded[f]:
                if op < last_draw:
                    return INVALID, 0
                last_draw = op
        time += a.time[f]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if start[s] < 0:
                return INVALID, 0
            last[s] = p
        diff[p] += a.workspace[f]
        diff[p + 1] -= a.workspace[f]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            if start[s] >= 0:
                if a.pinned[s]:  # a second copy, for this step alone
                    diff[p] += a.size[s]
                    diff[p + 1] -= a.size[s]
                    continue
                diff[start[s]] += a.size[s]
                diff[last[s] + 1] -= a.size[s]
            start[s] = p
            last[s] = p
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            old = a.take_old[k]
            diff[start[old]] += a.size[old]
            diff[p + 1] -= a.size[old]
            start[old] = -1
            new = a.take_new[k]
            if start[new] >= 0:
                if a.pinned[new]:
                    continue
                diff[start[new]] += a.size[new]
                diff[last[new] + 1] -= a.size[new]
            start[new] = p + 1
            last[new] = p
    for s in range(num):
        if start[s] >= 0:
            if a.pinned[s]:
                last[s] = n - 1
            if last[s] >= start[s]:
                diff[start[s]] += a.size[s]
                diff[last[s] + 1] -= a.size[s]
        elif a.pinned[s]:
            return INVALID, 0
    peak = initial
    held = a.base_bytes
    for p in range(n):
        held += diff[p]
        usage[p] = held
        if held > peak:
            peak = held
    return peak, time


@kernel
def drop_dead(a: Arrays, seq: Ints) -> Ints:
    """The sequence without executions nobody reads. First draws, ops that run once and the first run of a result stay."""
    n = len(seq)
    num = len(a.size)
    first = np.full(num, -1, np.int64)
    draw = np.zeros(n, np.bool_)
    ran = np.zeros(a.num_ops, np.bool_)
    for p in range(n):
        f = seq[p]
        draw[p] = a.seeded[f] and not ran[a.op[f]]
        ran[a.op[f]] = True
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            if first[a.out_idx[k]] < 0:
                first[a.out_idx[k]] = p
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            if first[a.take_new[k]] < 0:
                first[a.take_new[k]] = p
    needed = np.zeros(num, np.bool_)
    keep = np.zeros(n, np.bool_)
    for p in range(n - 1, -1, -1):
        f = seq[p]
        live = draw[p] or not a.replayable[f]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            live |= (first[s] == p) if a.pinned[s] else needed[s]
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            s = a.take_new[k]
            live |= (first[s] == p) if a.pinned[s] else needed[s]
        if not live:
            continue
        keep[p] = True
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            needed[a.out_idx[k]] = False
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            needed[a.take_new[k]] = False
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            needed[a.in_idx[k]] = True
    count = 0
    for p in range(n):
        count += keep[p]
    kept = np.empty(count, np.int64)
    count = 0
    for p in range(n):
        if keep[p]:
            kept[count] = seq[p]
            count += 1
    return kept


def peak_and_time(a: Arrays, seq: Ints) -> tuple[int, int]:
    usage = np.empty(len(seq), np.int64)
    peak, time = measure(a, seq, usage)
    return int(peak), int(time)


def usage_of(a: Arrays, seq: Ints) -> Any:
    """Bytes held at each position of a valid sequence."""
    usage = np.empty(len(seq), np.int64)
    measure(a, seq, usage)
    return usage
