"""What an insertion does, by looking only at the bytes it moves: every candidate of a repair is judged exactly.

    before    s ├──────────────────┤ read at u        inserting [g, maker of s] before u
    after     s ├──┤            g m├                  s is gone from its last event to u, what g reads lives up to u, and the
                                                      first production of s is dropped if nobody reads it any more

A sequence is seen as events: each read and each production of a storage, linked to the one before and the one after. An
insertion changes lives between two neighbouring events only, so it costs as much as the stretches it crosses, not as the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memfit.planning.kernel import kernel
from memfit.planning.model import Arrays, Flags, Floats, Ints
from memfit.planning.polish import events_of

EXTEND_IF_FITS, RECOMPUTE, EXTEND = 0, 1, 2
_GONE = -(2**61)


class Events(NamedTuple):
    """The events of a sequence: `ptr[p]:ptr[p + 1]` are those of position p, reads first; `before` and `after` link those of one storage."""

    seq: Ints
    ptr: Ints
    storage: Ints
    before: Ints
    after: Ints
    head: Ints  # by storage: its first event, -1 for none
    place: Ints
    makes: Flags
    fixed: Flags  # positions that stay whoever reads them: first draws, ops that run once, first productions of results


@kernel
def listed(a: Arrays, seq: Ints) -> Events:
    """The events of a sequence without in-place forms."""
    n = len(seq)
    ptr, storage, before, after = events_of(a, seq)
    place, makes, fixed = np.empty(ptr[n], np.int64), np.zeros(ptr[n], np.bool_), np.zeros(n, np.bool_)
    ran = np.zeros(a.num_ops, np.bool_)
    head = np.full(len(a.size), -1, np.int64)
    for p in range(n):
        f = seq[p]
        fixed[p] = not a.replayable[f] or (a.seeded[f] and not ran[a.op[f]])
        ran[a.op[f]] = True
        first_made = ptr[p] + a.in_ptr[f + 1] - a.in_ptr[f]
        for e in range(ptr[p], ptr[p + 1]):
            place[e] = p
            makes[e] = e >= first_made
            fixed[p] |= makes[e] and a.pinned[storage[e]] and before[e] < 0
            if before[e] < 0:
                head[storage[e]] = e
    return Events(seq, ptr, storage, before, after, head, place, makes, fixed)


@kernel
def read_later(ev: Events, s: int, e: int) -> bool:
    """Whether the value of s alive after its event e (-1: before its first) is read again."""
    on = ev.after[e] if e >= 0 else ev.head[s]
    return bool(on >= 0 and not ev.makes[on])


@kernel
def closure_before(
    a: Arrays,
    ev: Events,
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
    out: Ints,
) -> tuple[int, int]:
    """The forms that make `target` before position u, and their time; -1 if that is impossible or takes more than `most_time`.

    `latest[s]` is the last event of s before u. `known[s]` is 2 * stamp (absent) or 2 * stamp + 1 (there) once looked up.
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
                        for p in range(ev.place[e] + 1, u):
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
        if n >= len(out) or time > most_time:
            return -1, 0
        out[n] = f
        n += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            known[a.out_idx[k]] = 2 * stamp + 1
        top -= 1
    return n, time


class Scratch(NamedTuple):
    """Room to work in: what was changed, to be undone; what the inserted forms make and read."""

    low: Ints
    high: Ints
    amount: Ints  # of a removed position: what it held
    used: Ints
    made: Ints  # by storage: stamp of the insertion that makes it
    begin: Ints
    end: Ints
    kept: Ints  # by storage: stamp of the insertion that keeps it longer
    until: Ints
    removed: Ints  # by position: stamp of the insertion that makes it superfluous
    level: Ints


@kernel
def scratch_for(a: Arrays, n: int) -> Scratch:
    num, room = len(a.size), 4 * len(a.time) + 8
    most = 2048  # more changes than that are not looked at
    return Scratch(
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.zeros(1, np.int64),
        np.full(num, -1, np.int64),
        np.empty(num, np.int64),
        np.empty(num, np.int64),
        np.full(num, -1, np.int64),
        np.empty(num, np.int64),
        np.full(n, -1, np.int64),
        np.zeros(room, np.int64),
    )


@kernel
def shifted(usage: Ints, low: int, high: int, amount: int, limit: int, work: Scratch) -> int:
    """Add `amount` to positions low to high - 1; returns by how much that raises what is over the limit. Noted, to be undone."""
    if low >= high:
        return 0
    i = work.used[0]
    if i < len(work.low):
        work.low[i], work.high[i], work.amount[i] = low, high, amount
    work.used[0] += 1
    if i >= len(work.low):
        return 0
    over = 0
    for p in range(low, high):
        now = usage[p] + amount
        over += max(now - limit, 0) - max(usage[p] - limit, 0)
        usage[p] = now
    return over


@kernel
def undone(usage: Ints, work: Scratch) -> None:
    for i in range(min(work.used[0], len(work.low)) - 1, -1, -1):
        if work.high[i] < 0:
            usage[work.low[i]] = work.amount[i]
        else:
            for p in range(work.low[i], work.high[i]):
                usage[p] -= work.amount[i]
    work.used[0] = 0


@kernel
def unread(a: Arrays, ev: Events, e: int, u: int, work: Scratch, stamp: int) -> bool:
    """Whether the value that event e makes or reads has no reader after e, with the insertion before u in place."""
    s = ev.storage[e]
    on = ev.after[e]
    while on >= 0 and work.removed[ev.place[on]] == stamp:
        on = ev.after[on]
    if on >= 0 and ev.place[on] < u:
        return bool(ev.makes[on])
    if work.kept[s] == stamp:
        return False
    return on < 0 or bool(ev.makes[on]) or work.made[s] == stamp


@kernel
def note_forms(a: Arrays, forms: Ints, start: int, count: int, work: Scratch, stamp: int) -> int:
    """Note what the inserted forms make, from where to where among them, and up to where they read what was there; returns their time."""
    time = 0
    for i in range(count):
        f = forms[start + i]
        time += a.time[f]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if work.made[s] == stamp:
                work.end[s] = i
            elif not a.pinned[s]:
                work.kept[s], work.until[s] = stamp, i
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            work.made[s], work.begin[s], work.end[s] = stamp, i, i
    return time


@kernel
def change_at(level: Ints, count: int, place: int, amount: int) -> None:
    """From the inserted form at `place` on, `amount` more is held."""
    if place < count:
        level[place] += amount


@kernel
def moved(
    a: Arrays, ev: Events, usage: Ints, limit: int, u: int, forms: Ints, start: int, count: int, latest: Ints, work: Scratch, stamp: int
) -> int:
    """Change lives outside the inserted forms, and note in `level` what is held within them; returns the change of what is over."""
    over, level = 0, work.level
    for i in range(count):
        f = forms[start + i]
        change_at(level, count, i, a.workspace[f])
        change_at(level, count, i + 1, -a.workspace[f])
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if work.kept[s] == stamp and work.until[s] == i and not read_later(ev, s, latest[s]):
                over += shifted(usage, ev.place[latest[s]] + 1 if latest[s] >= 0 else 0, u, a.size[s], limit, work)
                change_at(level, count, 0, a.size[s])
                change_at(level, count, i + 1, -a.size[s])
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            if work.begin[s] != i:
                continue
            change_at(level, count, i, a.size[s])
            last = i if a.pinned[s] else work.end[s]
            if not a.pinned[s] and latest[s] >= 0 and read_later(ev, s, latest[s]):  # from here on this one is read
                last = count
                if work.kept[s] != stamp:
                    over += shifted(usage, ev.place[latest[s]] + 1, u, -a.size[s], limit, work)
                    change_at(level, count, 0, -a.size[s])
                else:
                    change_at(level, count, work.until[s] + 1, -a.size[s])
            change_at(level, count, last + 1, -a.size[s])
    return over


@kernel
def effect(
    a: Arrays,
    ev: Events,
    usage: Ints,
    crossing: int,
    limit: int,
    u: int,
    forms: Ints,
    start: int,
    count: int,
    latest: Ints,
    work: Scratch,
    stamp: int,
) -> tuple[int, int]:
    """(change of the bytes over the limit, change of time) by inserting `forms[start:start + count]` before u; `crossing` is held into u."""
    time = note_forms(a, forms, start, count, work, stamp)
    work.level[:count] = 0
    work.level[0] = crossing
    over = moved(a, ev, usage, limit, u, forms, start, count, latest, work, stamp)
    held = 0
    for i in range(count):
        held += work.level[i]
        over += max(held - limit, 0)
    for i in range(count):
        f = forms[start + i]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            e = latest[a.out_idx[k]]
            if e >= 0 and ev.makes[e] and work.removed[ev.place[e]] != stamp:
                less, saved = dropped(a, ev, usage, limit, u, ev.place[e], work, stamp)
                over += less
                time -= saved
    return over, time


@kernel
def dropped(a: Arrays, ev: Events, usage: Ints, limit: int, u: int, first: int, work: Scratch, stamp: int) -> tuple[int, int]:
    """Remove position `first` if nobody reads what it makes any more, and whatever then is read by nobody: (change of over, time saved)."""
    stack = np.empty(len(ev.seq) + 1, np.int64)
    stack[0] = first
    top, over, saved = 1, 0, 0
    while top > 0:
        top -= 1
        p = stack[top]
        if ev.fixed[p] or work.removed[p] == stamp:
            continue
        live = False
        for e in range(ev.ptr[p], ev.ptr[p + 1]):
            live |= ev.makes[e] and not a.pinned[ev.storage[e]] and not unread(a, ev, e, u, work, stamp)
        if live:
            continue
        i = work.used[0]
        if i >= len(work.low):
            return over, saved
        work.low[i], work.high[i], work.amount[i] = p, -1, usage[p]
        work.used[0] += 1
        over -= max(usage[p] - limit, 0)
        usage[p] = _GONE
        saved += a.time[ev.seq[p]]
        work.removed[p] = stamp
        for e in range(ev.ptr[p], ev.ptr[p + 1]):
            s = ev.storage[e]
            if ev.makes[e] or a.pinned[s] or not unread(a, ev, e, u, work, stamp):
                continue
            back = ev.before[e]
            while back >= 0 and work.removed[ev.place[back]] == stamp:
                back = ev.before[back]
            over += shifted(usage, ev.place[back] + 1 if back >= 0 else 0, p, -a.size[s], limit, work)
            if back >= 0 and ev.makes[back] and top < len(stack):
                stack[top] = ev.place[back]
                top += 1
    return over, saved


@kernel
def total_time(a: Arrays) -> int:
    time = 0
    for f in range(len(a.time)):
        time += a.time[f]
    return time


@kernel
def best_insertion(
    a: Arrays,
    seq: Ints,
    usage: Ints,
    plain: Ints,
    limit: int,
    victims: Ints,
    next_use: Ints,
    maker: Ints,
    height: int,
    top: int,
    jitter: Floats,
) -> tuple[int, Ints, int]:
    """Of the `top` most promising insertions that drop a victim until its next use, the one that takes most bytes away per time.

    Promising is much of `height` bytes for little time. `usage` is what is held, `plain` without in-place forms; victims come in the
    order of their next use. Returns (u, forms, change of the bytes over the limit); no forms when nothing helps.
    """
    ev = listed(a, seq)
    work = scratch_for(a, len(seq))
    latest, known = np.full(len(a.size), -1, np.int64), np.full(len(a.size), -1, np.int64)
    stack, forms = np.empty(len(a.time) + 2, np.int64), np.empty(8 * len(seq) + 512, np.int64)
    rows, worth = np.empty((3 * len(victims), 3), np.int64), np.empty(3 * len(victims), np.float64)
    at, filled, total, most_time = 0, 0, 0, total_time(a)
    for i in range(len(victims)):
        at = advanced(ev, at, next_use[i], latest)
        first, second = -1, -1
        for mode in range(3):
            out = forms[total : total + len(work.level)]
            count, time = closure_before(
                a, ev, usage, limit, victims[i], at, maker, mode, latest, known, 3 * i + mode, most_time, stack, out
            )
            if count < 0 or count in (first, second):
                continue
            first, second = second, count
            rows[filled, 0], rows[filled, 1], rows[filled, 2] = at, total, count
            worth[filled] = -jitter[filled] * min(a.size[victims[i]], height) / (time + 1.0)
            filled += 1
            total += count
    chosen = np.sort(np.argsort(worth[:filled])[:top])
    best, best_over, best_score, at = -1, 0, 0.0, 0
    latest[:] = -1
    for i in range(len(chosen)):
        u, start, count = rows[chosen[i]]
        at = advanced(ev, at, u, latest)
        crossing = plain[u] - a.workspace[seq[u]]
        for k in range(a.out_ptr[seq[u]], a.out_ptr[seq[u] + 1]):
            crossing -= a.size[a.out_idx[k]]
        over, time = effect(a, ev, usage, crossing, limit, u, forms, start, count, latest, work, i)
        undone(usage, work)
        score = -over * jitter[len(jitter) - 1 - i] / (max(time, 0) + 1e-3)
        equal = best >= 0 and score == best_score and worth[chosen[i]] <= worth[best]
        if over < 0 and (score > best_score or equal):
            best, best_over, best_score = chosen[i], over, score
    if best < 0:
        return -1, forms[:0], 0
    return rows[best, 0], forms[rows[best, 1] : rows[best, 1] + rows[best, 2]].copy(), best_over


@kernel
def advanced(ev: Events, at: int, u: int, latest: Ints) -> int:
    """Note the last event of each storage before u, given those before `at`; returns u."""
    for e in range(ev.ptr[at], ev.ptr[u]):
        latest[ev.storage[e]] = e
    return u
