"""The exact effect of an insertion, computed from the lives that it changes: so a repair can judge every candidate.

    before    s ├──────────────────┤ read at u        inserting [g, maker of s] before u
    after     s ├──┤            g m├                  s is gone from its last event to u, what g reads lives up to u, and the
                                                      first production of s is dropped if nobody reads it any more

A sequence is seen as events: each read and each production of a storage, linked to the one before and the one after. An
insertion changes lives between two neighbouring events only, so it costs as much as the stretches it crosses, not as the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memfit.jit.kernel import inline_kernel, kernel
from memfit.planning.model.reduce import Arrays, Floats, Ints
from memfit.planning.search.event_table import EVENT, Table, make_events

EXTEND_IF_FITS, RECOMPUTE, EXTEND = 0, 1, 2
_GONE = -(2**61)


@kernel
def is_read_later(ev: Table, s: int, e: int) -> bool:
    """Whether the value of s alive after its event e (-1: before its first) is read again."""
    on = ev[EVENT.after, e] if e >= 0 else ev[EVENT.head, s]
    return bool(on >= 0 and not ev[EVENT.makes, on])


@kernel
def list_closure(
    a: Arrays,
    ev: Table,
    usage: Ints,
    limit: int,
    target: int,
    u: int,
    maker: Ints,
    mode: int,
    latest: Ints,
    known: Ints,
    stamp: int,
    most_time: int,
    stack: Ints,
    forms: Ints,
    start: int,
) -> tuple[int, int]:
    """Write the forms that make `target` before position u from `forms[start]` on; returns how many, and their time.

    -1 if that is impossible or takes more than `most_time`. `latest[s]` is the last event of s before u; `known[s]`
    is 2 * stamp (absent) or 2 * stamp + 1 (there) once looked up.
    """
    stack[0] = maker[target]
    known[target] = 2 * stamp
    top, n, time = 1, 0, 0
    while top > 0:
        f = stack[top - 1]
        missing = -1
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if known[s] < 2 * stamp:
                e = latest[s]
                there = a.source[s] or (a.pinned[s] and e >= 0)
                if not there and e >= 0:
                    there = is_read_later(ev, s, e) or mode == EXTEND
                    if not there and mode == EXTEND_IF_FITS:
                        there = True
                        for p in range(ev[EVENT.place, e] + 1, u):
                            if usage[p] + a.size[s] > limit:
                                there = False
                                break
                known[s] = 2 * stamp + there
            if known[s] == 2 * stamp:
                missing = s
                break
        if missing >= 0:
            g = maker[missing]
            if g < 0 or not a.replayable[g] or top >= len(stack):
                return -1, 0
            stack[top] = g
            top += 1
            continue
        time += a.time[f]
        if n >= max_forms(a) or start + n >= len(forms) or time > most_time:
            return -1, 0
        forms[start + n] = f
        n += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            known[a.out_idx[k]] = 2 * stamp + 1
        top -= 1
    return n, time


class _Work(NamedTuple):
    low: int = 0  # by change to what is held: where it begins
    high: int = 1  # by change: where it ends; -1 for a position that is taken out
    amount: int = 2  # by change: how much; for a position taken out what it held
    used: int = 3  # at 0: how many changes there are
    made: int = 4  # by storage: the stamp of the insertion that makes it
    begin: int = 5  # by storage: the inserted form that makes it
    end: int = 6  # by storage: the last inserted form that reads it
    kept: int = 7  # by storage: the stamp of the insertion that keeps it longer
    until: int = 8  # by storage: the inserted form up to which it is kept
    removed: int = 9  # by position: the stamp of the insertion that leaves it unread
    level: int = 10  # by inserted form: bytes held there


WORK = _Work()
"""Rows of the scratch table."""
_MOST = 2048
"""The most changes that are noted; an insertion with more is not judged exactly."""


@kernel
def make_scratch(a: Arrays, n: int) -> Table:
    """Room to work in, for a sequence of n positions."""
    work = np.empty((11, max(_MOST, len(a.size), n, max_forms(a))), np.int64)
    work[WORK.used, 0] = 0
    for s in range(len(a.size)):
        work[WORK.made, s] = -1
        work[WORK.kept, s] = -1
    for p in range(n):
        work[WORK.removed, p] = -1
    return work


@kernel
def max_forms(a: Arrays) -> int:
    """The most forms of one insertion."""
    return 4 * len(a.time) + 8


@kernel
def add_bytes(usage: Ints, low: int, high: int, amount: int, limit: int, work: Table) -> int:
    """Add `amount` to positions low to high - 1; returns by how much that raises what is over the limit. The change is noted, for `undo`."""
    if low >= high:
        return 0
    i = work[WORK.used, 0]
    if i < _MOST:
        work[WORK.low, i], work[WORK.high, i], work[WORK.amount, i] = low, high, amount
    work[WORK.used, 0] += 1
    if i >= _MOST:
        return 0
    over = 0
    for p in range(low, high):
        now = usage[p] + amount
        over += max(now - limit, 0) - max(usage[p] - limit, 0)
        usage[p] = now
    return over


@kernel
def undo(usage: Ints, work: Table) -> None:
    """Take back all noted changes of `usage`."""
    for i in range(min(work[WORK.used, 0], _MOST) - 1, -1, -1):
        if work[WORK.high, i] < 0:
            usage[work[WORK.low, i]] = work[WORK.amount, i]
        else:
            for p in range(work[WORK.low, i], work[WORK.high, i]):
                usage[p] -= work[WORK.amount, i]
    work[WORK.used, 0] = 0


@kernel
def is_unread(a: Arrays, ev: Table, e: int, u: int, work: Table, stamp: int) -> bool:
    """Whether the value that event e makes or reads has no reader after e, with the insertion before u in place."""
    s = ev[EVENT.storage, e]
    on = ev[EVENT.after, e]
    while on >= 0 and work[WORK.removed, ev[EVENT.place, on]] == stamp:
        on = ev[EVENT.after, on]
    if on >= 0 and ev[EVENT.place, on] < u:
        return bool(ev[EVENT.makes, on])
    if work[WORK.kept, s] == stamp:
        return False
    return on < 0 or bool(ev[EVENT.makes, on]) or work[WORK.made, s] == stamp


@kernel
def note_forms(a: Arrays, forms: Ints, start: int, count: int, work: Table, stamp: int) -> int:
    """Note where among the inserted forms each storage is made and last read, and up to where older values are read; returns the time."""
    time = 0
    for i in range(count):
        f = forms[start + i]
        time += a.time[f]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if work[WORK.made, s] == stamp:
                work[WORK.end, s] = i
            elif not a.pinned[s]:
                work[WORK.kept, s], work[WORK.until, s] = stamp, i
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            work[WORK.made, s], work[WORK.begin, s], work[WORK.end, s] = stamp, i, i
    return time


@kernel
def change_level(work: Table, count: int, place: int, amount: int) -> None:
    """Hold `amount` more from the inserted form at `place` on."""
    if place < count:
        work[WORK.level, place] += amount


@kernel
def change_lives(
    a: Arrays, ev: Table, usage: Ints, limit: int, u: int, forms: Ints, start: int, count: int, latest: Ints, work: Table, stamp: int
) -> int:
    """Change the lives outside the inserted forms and note those within them in row `level`; returns the change of bytes over the limit."""
    over = 0
    for i in range(count):
        f = forms[start + i]
        change_level(work, count, i, a.workspace[f])
        change_level(work, count, i + 1, -a.workspace[f])
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if work[WORK.kept, s] == stamp and work[WORK.until, s] == i and not is_read_later(ev, s, latest[s]):
                over += add_bytes(usage, ev[EVENT.place, latest[s]] + 1 if latest[s] >= 0 else 0, u, a.size[s], limit, work)
                change_level(work, count, 0, a.size[s])
                change_level(work, count, i + 1, -a.size[s])
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            if work[WORK.begin, s] != i:
                continue
            change_level(work, count, i, a.size[s])
            last = i if a.pinned[s] else work[WORK.end, s]
            if not a.pinned[s] and latest[s] >= 0 and is_read_later(ev, s, latest[s]):  # from here on this one is read
                last = count
                if work[WORK.kept, s] != stamp:
                    over += add_bytes(usage, ev[EVENT.place, latest[s]] + 1, u, -a.size[s], limit, work)
                    change_level(work, count, 0, -a.size[s])
                else:
                    change_level(work, count, work[WORK.until, s] + 1, -a.size[s])
            change_level(work, count, last + 1, -a.size[s])
    return over


@kernel
def measure_insertion(
    a: Arrays,
    ev: Table,
    usage: Ints,
    crossing: int,
    limit: int,
    u: int,
    forms: Ints,
    start: int,
    count: int,
    latest: Ints,
    work: Table,
    stamp: int,
) -> tuple[int, int]:
    """(change of the bytes over the limit, change of time) by inserting `forms[start:start + count]` before u; `crossing` is held into u."""
    time = note_forms(a, forms, start, count, work, stamp)
    for i in range(1, count):
        work[WORK.level, i] = 0
    work[WORK.level, 0] = crossing
    over = change_lives(a, ev, usage, limit, u, forms, start, count, latest, work, stamp)
    held = 0
    for i in range(count):
        held += work[WORK.level, i]
        over += max(held - limit, 0)
    for i in range(count):
        f = forms[start + i]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            e = latest[a.out_idx[k]]
            if e >= 0 and ev[EVENT.makes, e] and work[WORK.removed, ev[EVENT.place, e]] != stamp:
                less, saved = drop_unread(a, ev, usage, limit, u, ev[EVENT.place, e], work, stamp)
                over += less
                time -= saved
    return over, time


@kernel
def drop_unread(a: Arrays, ev: Table, usage: Ints, limit: int, u: int, first: int, work: Table, stamp: int) -> tuple[int, int]:
    """Remove position `first` if nobody reads what it makes any more, then all that is unread after that.

    Returns (change of the bytes over the limit, time saved).
    """
    stack = np.empty(ev.shape[1], np.int64)
    stack[0] = first
    top, over, saved = 1, 0, 0
    while top > 0:
        top -= 1
        p = stack[top]
        if ev[EVENT.fixed, p] or work[WORK.removed, p] == stamp:
            continue
        live = False
        for e in range(ev[EVENT.ptr, p], ev[EVENT.ptr, p + 1]):
            live |= ev[EVENT.makes, e] > 0 and not a.pinned[ev[EVENT.storage, e]] and not is_unread(a, ev, e, u, work, stamp)
        if live:
            continue
        i = work[WORK.used, 0]
        if i >= _MOST:
            return over, saved
        work[WORK.low, i], work[WORK.high, i], work[WORK.amount, i] = p, -1, usage[p]
        work[WORK.used, 0] += 1
        over -= max(usage[p] - limit, 0)
        usage[p] = _GONE
        saved += a.time[ev[EVENT.form, p]]
        work[WORK.removed, p] = stamp
        for e in range(ev[EVENT.ptr, p], ev[EVENT.ptr, p + 1]):
            s = ev[EVENT.storage, e]
            if ev[EVENT.makes, e] or a.pinned[s] or not is_unread(a, ev, e, u, work, stamp):
                continue
            back = ev[EVENT.before, e]
            while back >= 0 and work[WORK.removed, ev[EVENT.place, back]] == stamp:
                back = ev[EVENT.before, back]
            over += add_bytes(usage, ev[EVENT.place, back] + 1 if back >= 0 else 0, p, -a.size[s], limit, work)
            if back >= 0 and ev[EVENT.makes, back] and top < len(stack):
                stack[top] = ev[EVENT.place, back]
                top += 1
    return over, saved


@kernel
def sum_times(a: Arrays) -> int:
    time = 0
    for f in range(len(a.time)):
        time += a.time[f]
    return time


@inline_kernel
def find_best_insertion(
    a: Arrays,
    seq: Ints,
    usage: Ints,
    plain: Ints,
    limit: int,
    victims: Ints,
    next_use: Ints,
    chosen: Ints,
    maker: Ints,
    height: int,
    top: int,
    jitter: Floats,
) -> tuple[int, Ints, int]:
    """The best insertion: it drops a chosen victim until its next use, and lowers the bytes over the limit most per unit of time.

    Only the `top` most promising are judged: those that free much of `height` bytes in little time. `usage` is what is held, `plain` the
    same without in-place forms, `chosen` in the order of next uses. Returns (u, forms, change of the bytes over the limit); no forms when
    nothing helps.
    """
    ev, work = make_events(a, seq), make_scratch(a, len(seq))
    latest, known = np.empty(len(a.size), np.int64), np.empty(len(a.size), np.int64)
    for s in range(len(a.size)):
        latest[s], known[s] = -1, -1
    stack, forms = np.empty(len(a.time) + 2, np.int64), np.empty(8 * len(seq) + 512, np.int64)
    rows, worth = np.empty((3 * len(chosen), 3), np.int64), np.empty(3 * len(chosen), np.float64)
    at, filled, total, most_time = 0, 0, 0, sum_times(a)
    for i in range(len(chosen)):
        target = victims[chosen[i]]
        at = advance(ev, at, next_use[chosen[i]], latest)
        first, second = -1, -1
        for mode in range(3):
            count, time = list_closure(
                a, ev, usage, limit, target, at, maker, mode, latest, known, 3 * i + mode, most_time, stack, forms, total
            )
            if count < 0 or count in (first, second):
                continue
            first, second = second, count
            rows[filled, 0], rows[filled, 1], rows[filled, 2] = at, total, count
            worth[filled] = -jitter[filled] * min(a.size[target], height) / (time + 1.0)
            filled += 1
            total += count
    for s in range(len(a.size)):
        latest[s] = -1
    promising = np.zeros(filled, np.bool_)
    order = np.argsort(worth[:filled])
    for i in range(min(top, filled)):
        promising[order[i]] = True
    best, best_over, best_score, at, judged = -1, 0, 0.0, 0, 0
    for row in range(filled):
        if not promising[row]:
            continue
        u, count = rows[row, 0], rows[row, 2]
        at = advance(ev, at, u, latest)
        crossing = plain[u] - a.workspace[seq[u]]
        for k in range(a.out_ptr[seq[u]], a.out_ptr[seq[u] + 1]):
            crossing -= a.size[a.out_idx[k]]
        over, time = measure_insertion(a, ev, usage, crossing, limit, u, forms, rows[row, 1], count, latest, work, judged)
        undo(usage, work)
        score = -over * jitter[len(jitter) - 1 - judged] / (max(time, 0) + 1e-3)
        equal = best >= 0 and score == best_score and worth[row] <= worth[best]
        if over < 0 and (score > best_score or equal):
            best, best_over, best_score = row, over, score
        judged += 1
    if best < 0:
        return -1, forms[:0], 0
    return rows[best, 0], forms[rows[best, 1] : rows[best, 1] + rows[best, 2]].copy(), best_over


@kernel
def advance(ev: Table, at: int, u: int, latest: Ints) -> int:
    """Bring `latest`, the last event of each storage, from position `at` up to position u; returns u."""
    for e in range(ev[EVENT.ptr, at], ev[EVENT.ptr, u]):
        latest[ev[EVENT.storage, e]] = e
    return u
