"""What an insertion does, by looking only at the bytes it moves: every candidate of a repair is judged exactly.

    before    s ├──────────────────┤ read at u        inserting [g, maker of s] before u
    after     s ├──┤            g m├                  s is gone from its last event to u, what g reads lives up to u, and the
                                                      first production of s is dropped if nobody reads it any more

A sequence is seen as events: each read and each production of a storage, linked to the one before and the one after. An
insertion changes lives between two neighbouring events only, so it costs as much as the stretches it crosses, not as the step.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import inline_kernel, kernel
from memfit.planning.model.reduce import Arrays, Floats, Ints
from memfit.planning.search.event_table import AFTER, BEFORE, FIXED, FORM, HEAD, MAKES, PLACE, PTR, STORAGE, Table, listed

EXTEND_IF_FITS, RECOMPUTE, EXTEND = 0, 1, 2
_GONE = -(2**61)


@kernel
def read_later(ev: Table, s: int, e: int) -> bool:
    """Whether the value of s alive after its event e (-1: before its first) is read again."""
    on = ev[AFTER, e] if e >= 0 else ev[HEAD, s]
    return bool(on >= 0 and not ev[MAKES, on])


@kernel
def closure_before(
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
                    there = read_later(ev, s, e) or mode == EXTEND
                    if not there and mode == EXTEND_IF_FITS:
                        there = True
                        for p in range(ev[PLACE, e] + 1, u):
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
        if n >= longest(a) or start + n >= len(forms) or time > most_time:
            return -1, 0
        forms[start + n] = f
        n += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            known[a.out_idx[k]] = 2 * stamp + 1
        top -= 1
    return n, time


LOW, HIGH, AMOUNT, USED = 0, 1, 2, 3
"""Changes to what is held, to be undone: from where to where (-1: a removed position), how much (what it held); at 0, how many."""
MADE, BEGIN, END, KEPT, UNTIL = 4, 5, 6, 7, 8
"""By storage: the stamp of the insertion that makes it, and from which of the inserted forms to which; of the one that keeps it, and how long."""
REMOVED, LEVEL = 9, 10
"""By position: the stamp of the insertion that makes it superfluous. By inserted form: what is held there."""
_MOST = 2048
"""More changes than that are not looked at."""


@kernel
def scratch_for(a: Arrays, n: int) -> Table:
    """Room to work in, for a sequence of n positions."""
    work = np.empty((11, max(_MOST, len(a.size), n, longest(a))), np.int64)
    work[USED, 0] = 0
    for s in range(len(a.size)):
        work[MADE, s] = -1
        work[KEPT, s] = -1
    for p in range(n):
        work[REMOVED, p] = -1
    return work


@kernel
def longest(a: Arrays) -> int:
    """Insertions of more forms are not looked at."""
    return 4 * len(a.time) + 8


@kernel
def shifted(usage: Ints, low: int, high: int, amount: int, limit: int, work: Table) -> int:
    """Add `amount` to positions low to high - 1; returns by how much that raises what is over the limit. Noted, to be undone."""
    if low >= high:
        return 0
    i = work[USED, 0]
    if i < _MOST:
        work[LOW, i], work[HIGH, i], work[AMOUNT, i] = low, high, amount
    work[USED, 0] += 1
    if i >= _MOST:
        return 0
    over = 0
    for p in range(low, high):
        now = usage[p] + amount
        over += max(now - limit, 0) - max(usage[p] - limit, 0)
        usage[p] = now
    return over


@kernel
def undone(usage: Ints, work: Table) -> None:
    for i in range(min(work[USED, 0], _MOST) - 1, -1, -1):
        if work[HIGH, i] < 0:
            usage[work[LOW, i]] = work[AMOUNT, i]
        else:
            for p in range(work[LOW, i], work[HIGH, i]):
                usage[p] -= work[AMOUNT, i]
    work[USED, 0] = 0


@kernel
def unread(a: Arrays, ev: Table, e: int, u: int, work: Table, stamp: int) -> bool:
    """Whether the value that event e makes or reads has no reader after e, with the insertion before u in place."""
    s = ev[STORAGE, e]
    on = ev[AFTER, e]
    while on >= 0 and work[REMOVED, ev[PLACE, on]] == stamp:
        on = ev[AFTER, on]
    if on >= 0 and ev[PLACE, on] < u:
        return bool(ev[MAKES, on])
    if work[KEPT, s] == stamp:
        return False
    return on < 0 or bool(ev[MAKES, on]) or work[MADE, s] == stamp


@kernel
def note_forms(a: Arrays, forms: Ints, start: int, count: int, work: Table, stamp: int) -> int:
    """Note what the inserted forms make, from where to where among them, and up to where they read what was there; returns their time."""
    time = 0
    for i in range(count):
        f = forms[start + i]
        time += a.time[f]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if work[MADE, s] == stamp:
                work[END, s] = i
            elif not a.pinned[s]:
                work[KEPT, s], work[UNTIL, s] = stamp, i
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            work[MADE, s], work[BEGIN, s], work[END, s] = stamp, i, i
    return time


@kernel
def change_at(work: Table, count: int, place: int, amount: int) -> None:
    """From the inserted form at `place` on, `amount` more is held."""
    if place < count:
        work[LEVEL, place] += amount


@kernel
def moved(
    a: Arrays, ev: Table, usage: Ints, limit: int, u: int, forms: Ints, start: int, count: int, latest: Ints, work: Table, stamp: int
) -> int:
    """Change lives outside the inserted forms, and note in `level` what is held within them; returns the change of what is over."""
    over = 0
    for i in range(count):
        f = forms[start + i]
        change_at(work, count, i, a.workspace[f])
        change_at(work, count, i + 1, -a.workspace[f])
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if work[KEPT, s] == stamp and work[UNTIL, s] == i and not read_later(ev, s, latest[s]):
                over += shifted(usage, ev[PLACE, latest[s]] + 1 if latest[s] >= 0 else 0, u, a.size[s], limit, work)
                change_at(work, count, 0, a.size[s])
                change_at(work, count, i + 1, -a.size[s])
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            if work[BEGIN, s] != i:
                continue
            change_at(work, count, i, a.size[s])
            last = i if a.pinned[s] else work[END, s]
            if not a.pinned[s] and latest[s] >= 0 and read_later(ev, s, latest[s]):  # from here on this one is read
                last = count
                if work[KEPT, s] != stamp:
                    over += shifted(usage, ev[PLACE, latest[s]] + 1, u, -a.size[s], limit, work)
                    change_at(work, count, 0, -a.size[s])
                else:
                    change_at(work, count, work[UNTIL, s] + 1, -a.size[s])
            change_at(work, count, last + 1, -a.size[s])
    return over


@kernel
def effect(
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
        work[LEVEL, i] = 0
    work[LEVEL, 0] = crossing
    over = moved(a, ev, usage, limit, u, forms, start, count, latest, work, stamp)
    held = 0
    for i in range(count):
        held += work[LEVEL, i]
        over += max(held - limit, 0)
    for i in range(count):
        f = forms[start + i]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            e = latest[a.out_idx[k]]
            if e >= 0 and ev[MAKES, e] and work[REMOVED, ev[PLACE, e]] != stamp:
                less, saved = dropped(a, ev, usage, limit, u, ev[PLACE, e], work, stamp)
                over += less
                time -= saved
    return over, time


@kernel
def dropped(a: Arrays, ev: Table, usage: Ints, limit: int, u: int, first: int, work: Table, stamp: int) -> tuple[int, int]:
    """Remove position `first` if nobody reads what it makes any more, and whatever then is read by nobody: (change of over, time saved)."""
    stack = np.empty(ev.shape[1], np.int64)
    stack[0] = first
    top, over, saved = 1, 0, 0
    while top > 0:
        top -= 1
        p = stack[top]
        if ev[FIXED, p] or work[REMOVED, p] == stamp:
            continue
        live = False
        for e in range(ev[PTR, p], ev[PTR, p + 1]):
            live |= ev[MAKES, e] > 0 and not a.pinned[ev[STORAGE, e]] and not unread(a, ev, e, u, work, stamp)
        if live:
            continue
        i = work[USED, 0]
        if i >= _MOST:
            return over, saved
        work[LOW, i], work[HIGH, i], work[AMOUNT, i] = p, -1, usage[p]
        work[USED, 0] += 1
        over -= max(usage[p] - limit, 0)
        usage[p] = _GONE
        saved += a.time[ev[FORM, p]]
        work[REMOVED, p] = stamp
        for e in range(ev[PTR, p], ev[PTR, p + 1]):
            s = ev[STORAGE, e]
            if ev[MAKES, e] or a.pinned[s] or not unread(a, ev, e, u, work, stamp):
                continue
            back = ev[BEFORE, e]
            while back >= 0 and work[REMOVED, ev[PLACE, back]] == stamp:
                back = ev[BEFORE, back]
            over += shifted(usage, ev[PLACE, back] + 1 if back >= 0 else 0, p, -a.size[s], limit, work)
            if back >= 0 and ev[MAKES, back] and top < len(stack):
                stack[top] = ev[PLACE, back]
                top += 1
    return over, saved


@kernel
def total_time(a: Arrays) -> int:
    time = 0
    for f in range(len(a.time)):
        time += a.time[f]
    return time


@inline_kernel
def best_insertion(
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
    """Of the `top` most promising insertions that drop a chosen victim until its next use, the one that takes most bytes away per time.

    Promising is much of `height` bytes for little time. `usage` is what is held, `plain` without in-place forms; `chosen` is in the
    order of next uses. Returns (u, forms, change of the bytes over the limit); no forms when nothing helps.
    """
    ev, work = listed(a, seq), scratch_for(a, len(seq))
    latest, known = np.empty(len(a.size), np.int64), np.empty(len(a.size), np.int64)
    for s in range(len(a.size)):
        latest[s], known[s] = -1, -1
    stack, forms = np.empty(len(a.time) + 2, np.int64), np.empty(8 * len(seq) + 512, np.int64)
    rows, worth = np.empty((3 * len(chosen), 3), np.int64), np.empty(3 * len(chosen), np.float64)
    at, filled, total, most_time = 0, 0, 0, total_time(a)
    for i in range(len(chosen)):
        target = victims[chosen[i]]
        at = advanced(ev, at, next_use[chosen[i]], latest)
        first, second = -1, -1
        for mode in range(3):
            count, time = closure_before(
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
        at = advanced(ev, at, u, latest)
        crossing = plain[u] - a.workspace[seq[u]]
        for k in range(a.out_ptr[seq[u]], a.out_ptr[seq[u] + 1]):
            crossing -= a.size[a.out_idx[k]]
        over, time = effect(a, ev, usage, crossing, limit, u, forms, rows[row, 1], count, latest, work, judged)
        undone(usage, work)
        score = -over * jitter[len(jitter) - 1 - judged] / (max(time, 0) + 1e-3)
        equal = best >= 0 and score == best_score and worth[row] <= worth[best]
        if over < 0 and (score > best_score or equal):
            best, best_over, best_score = row, over, score
        judged += 1
    if best < 0:
        return -1, forms[:0], 0
    return rows[best, 0], forms[rows[best, 1] : rows[best, 1] + rows[best, 2]].copy(), best_over


@kernel
def advanced(ev: Table, at: int, u: int, latest: Ints) -> int:
    """Note the last event of each storage before u, given those before `at`; returns u."""
    for e in range(ev[PTR, at], ev[PTR, u]):
        latest[ev[STORAGE, e]] = e
    return u
