"""A beam over the sets of values that must be there, from the end of a step to its beginning.

    end    {results}         run f last:        what f makes need not be there before it, what it reads must
           {.., x, ..}       run g before it:   the same again
    begin  {}                every op has run:  read backwards, the ops that led here are a plan

How a step goes on from a set does not depend on how it came to it. So of two ways to one set the slower is forgotten; and a set from which the
same ops are left to run as from another, but whose way repeats less, comes first. What f makes may still be read by an op that is left: then f
has to run once more, and only that costs time. Sets with equally many ops left are a layer. Of each layer the fastest sets are followed, so many
for each height of memory (else only the fastest would remain, which hold too much to get past the next wide op), ordered by the time they repeat
and what they must repeat yet: each op that is left and does not fit beside what is there makes some of that come later once more. A *deep* beam keeps
places for chains of repeats too, fewer the longer they are: to get past a wide op it can take twenty, and each of them alone looks bad.

Where annealing looks for half a minute without finding one of the few plans near the smallest budget there is, this finds one in seconds; where
there is room, annealing finds better ones. (`dead_ends.py` goes the same way back, from one op, and proves that there is no plan at all.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Flags, Ints, Model

LEVELS = 32
"""Heights of memory, as parts of the limit, for each of which sets are followed."""
_FAN = 32
"""Room for candidates, in times of the sets followed."""
_DEPTHS, _DEEPER = 256, 6
"""Repeats in a row that are followed at most, where they are counted, and room for the sets behind them, in times of those without."""
_FAR = 2**60
_STOPPED = 63
"""Every so many candidates the search looks up whether it is to stop."""

PARENT, FORM, LATE, HELD, KEY, SCORE, DEPTH = 0, 1, 2, 3, 4, 5, 6
"""Of a candidate: the set it comes from and the form that ran, time of repeats so far, bytes, a number for the set, what it is ordered by, and repeats since
an op ran that need not run again."""

Table = Ints  # two-dimensional


class Ways(NamedTuple):
    """What is the same for all sets. Forms are those of the plain step."""

    maker: Ints  # of each storage: the form that makes it, -1 for what is there from the beginning
    before: Flags  # [storage, form]: whether that form must have run before the storage's own maker
    across: Flags  # [form, storage]: whether the storage must have been made before that form runs, and is no part of it
    need: Ints  # bytes that a form holds while it runs
    widest: Ints  # forms by need, the largest first
    weight: Ints  # bytes of a storage in a set: none for what nobody reads, which only must have been made
    cheapest: Ints  # storages by time to make per byte
    once: Flags  # forms that cannot run again
    key: Ints  # random numbers: a set's own is their exclusive or
    end: Flags  # the set at the end
    forms: int


def ways_of(model: Model, plain: Ints) -> Ways:
    a, num = model.arrays, model.num_storages
    maker, read = np.full(num, -1, np.int64), np.zeros(num, np.bool_)
    before, across = np.zeros((num, model.num_forms), np.bool_), np.zeros((model.num_forms, num), np.bool_)
    need, once = np.zeros(model.num_forms, np.int64), ~a.replayable | a.seeded
    for f in plain:
        ins, outs = list(model.ins[f]), list(model.outs[f])
        earlier = np.zeros(model.num_forms, np.bool_)
        before[ins].any(axis=0, out=earlier)
        earlier[maker[ins][maker[ins] >= 0]] = True
        across[f] = (maker >= 0) & earlier[maker] | a.source
        across[f, [*ins, *outs]] = False
        maker[outs], before[outs], read[ins] = f, earlier, True
        need[f] = a.size[list({*ins, *outs})].sum() + a.workspace[f]
        once[f] |= a.pinned[outs].any()
    end = a.pinned & (maker >= 0)
    for f in plain:
        outs = list(model.outs[f])
        if not (read[outs] | a.pinned[outs]).any():
            end[outs[:1]] = True
    weight = np.where(read | a.pinned, a.size, 0)
    price = np.where(maker >= 0, a.time[maker] / np.maximum(weight, 1), np.inf)
    return Ways(
        maker=maker,
        before=before,
        across=across,
        need=need,
        widest=plain[np.argsort(-need[plain], kind="stable")],
        weight=weight,
        cheapest=np.argsort(price, kind="stable"),
        once=once,
        key=np.random.default_rng(0).integers(1, 2**62, num),
        end=end,
        forms=len(plain),
    )


# -- candidates: a heap by score, and a table to find the one for a set ---------------------------------------------------


@kernel
def sift_up(heap: Ints, score: Ints, i: int) -> None:
    x = heap[i]
    while i > 0 and score[heap[(i - 1) >> 1]] > score[x]:
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = x


@kernel
def sift_down(heap: Ints, score: Ints, count: int, i: int) -> None:
    x = heap[i]
    while 2 * i + 1 < count:
        child = 2 * i + 1
        if child + 1 < count and score[heap[child + 1]] < score[heap[child]]:
            child += 1
        if score[heap[child]] >= score[x]:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = x


@kernel
def heaped(heap: Ints, score: Ints, count: int) -> None:
    """All candidates, as a heap."""
    for i in range(count):
        heap[i] = i
    for i in range(count // 2 - 1, -1, -1):
        sift_down(heap, score, count, i)


@kernel
def push(heap: Ints, score: Ints, count: int, c: int) -> int:
    """One candidate more; how many there are then."""
    heap[count] = c
    sift_up(heap, score, count)
    return count + 1


@kernel
def place_of(table: Ints, front: Table, key: int) -> int:
    """Where the table has, or would have, the candidate for the set with this number; it holds candidates from 1 on."""
    mask = len(table) - 1
    i = (key ^ (key >> 29)) & mask
    while table[i] and front[KEY, table[i] - 1] != key:
        i = (i + 1) & mask
    return int(i)


# -- one set --------------------------------------------------------------------------------------------------------------


@kernel
def row_of(a: Arrays, parent: Flags, f: int, row: Flags) -> None:
    """The set before form f ran, from the one after."""
    row[:] = parent
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        row[a.out_idx[k]] = False
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        row[a.in_idx[k]] = True


@kernel
def list_members(w: Ways, row: Flags, members: Ints, left: Flags) -> int:
    """Fill in the storages of a set, the cheapest to make per byte first, and which forms run before their makers; how many."""
    count = 0
    left[:] = False
    for s in w.cheapest:
        if row[s]:
            members[count] = s
            count += 1
            left |= w.before[s]
    return count


@kernel
def must_repeat(a: Arrays, w: Ways, row: Flags, left: Flags, members: Ints, held: int, limit: int) -> int:
    """Time, at least, of what is made again for an op that is left and does not fit beside the set; far too much if it cannot fit."""
    most = 0
    for f in w.widest:
        over = a.base_bytes + w.need[f] - limit
        if over + held <= 0:
            break
        runs = left[f]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            runs |= row[a.out_idx[k]]
        if not runs:
            continue
        for s in members:
            over += w.weight[s] if w.across[f, s] else 0
        time = 0
        for s in members:
            if over <= 0:
                break
            if w.across[f, s] and w.weight[s] > 0 and w.maker[s] >= 0 and not w.once[w.maker[s]]:
                part = min(w.weight[s], over)
                time += int(a.time[w.maker[s]] * (part / w.weight[s]))
                over -= part
        if over > 0:
            return _FAR
        most = max(most, time)
    return most


@kernel
def step_back(a: Arrays, w: Ways, row: Flags, f: int, held: int, key: int) -> tuple[int, int, int]:
    """When f runs last: bytes of the set before it and its number, and bytes while it runs."""
    working = a.base_bytes + a.workspace[f]
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        working += a.size[s]
        if row[s]:
            held -= w.weight[s]
            key ^= w.key[s]
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        if not row[s]:
            held += w.weight[s]
            key ^= w.key[s]
    return held, key, working + held


# -- the search -----------------------------------------------------------------------------------------------------------


@kernel
def add(front: Table, table: Ints, count: int, parent: int, f: int, late: int, held: int, key: int, score: int, depth: int) -> bool:
    """A candidate more, if the set is new or was reached by repeating more."""
    at = place_of(table, front, key)
    if count >= front.shape[1] or (table[at] and front[LATE, table[at] - 1] <= late):
        return False
    front[PARENT, count], front[FORM, count], front[LATE, count] = parent, f, late
    front[HELD, count], front[KEY, count], front[SCORE, count] = held, key, score
    front[DEPTH, count] = depth
    table[at] = count + 1
    return True


@kernel
def way_back(history: Table, front: Table, count: int) -> Ints:
    """The forms that led to the fastest of the candidates, in the order in which they run."""
    best = 0
    for c in range(count):
        if front[LATE, c] < front[LATE, best]:
            best = c
    sequence, length = np.empty(history.shape[1] + 1, np.int64), 0
    parent, f = front[PARENT, best], front[FORM, best]
    while parent >= 0:
        sequence[length] = f
        length += 1
        parent, f = history[0, parent], history[1, parent]
    return sequence[:length]


@kernel
def beam(
    a: Arrays, w: Ways, limit: int, most_ns: int, per_level: int, lean_ns: float, deep: bool, tie_ns: int, seed: int, stop: Ints
) -> Ints:
    """A plan that repeats less than `most_ns`, or nothing.

    `per_level` sets are followed for each height, and if `deep` for each length of a chain of repeats a share of that. `lean_ns` is the price of a byte,
    and up to `tie_ns` is added by chance.
    """
    np.random.seed(seed)
    room, num = per_level * LEVELS * _FAN, len(w.maker)
    fronts, counts = np.empty((2, 7, room), np.int64), np.zeros(2, np.int64)
    slots = 4
    while slots < 2 * room:
        slots *= 2
    tables, heap = np.zeros((2, slots), np.int64), np.empty(room, np.int64)
    rows, begins = np.empty((2, per_level * (LEVELS + 1) * _DEEPER, num), np.bool_), np.zeros(2, np.int64)
    history, known, looked = np.empty((2, 1024), np.int64), 0, -1
    members, left, followed = np.empty(num, np.int64), np.empty(w.before.shape[1], np.bool_), np.empty((_DEPTHS, LEVELS + 1), np.int64)
    start = 0
    for s in range(num):
        start += w.weight[s] if w.end[s] else 0
    add(fronts[0], tables[0], 0, -1, -1, 0, start, 0, 0, 0)
    counts[0] = 1
    for layer in range(w.forms):
        now, then = layer & 1, 1 - (layer & 1)
        front, table = fronts[now], tables[now]
        tables[then], counts[then], followed[:] = 0, 0, 0
        begins[now], waiting = known, counts[now]
        heaped(heap, front[SCORE], waiting)
        while waiting > 0:
            looked += 1
            if looked & _STOPPED == 0 and stop[0]:
                return history[0, :0]
            c = heap[0]
            waiting -= 1
            heap[0] = heap[waiting]
            sift_down(heap, front[SCORE], waiting, 0)
            late, held, key = front[LATE, c], front[HELD, c], front[KEY, c]
            level = min(held * LEVELS // max(limit, 1), LEVELS)
            depth = front[DEPTH, c]
            full = followed[depth, level] >= max(per_level // (1 + depth), 1) or known - begins[now] == rows.shape[1]
            if full or table[place_of(table, front, key)] != c + 1:
                continue
            row, parent = rows[now, known - begins[now]], front[PARENT, c]
            if parent < 0:
                row[:] = w.end
            else:
                side = now if parent >= begins[now] else then
                row_of(a, rows[side, parent - begins[side]], front[FORM, c], row)
            count = list_members(w, row, members, left)
            ahead = late + must_repeat(a, w, row, left, members[:count], held, limit)
            if ahead >= most_ns:
                continue
            score = ahead + int(lean_ns * held)
            if score > front[SCORE, c] + tie_ns:  # not its turn yet
                front[SCORE, c] = score
                waiting = push(heap, front[SCORE], waiting, c)
                continue
            if known == history.shape[1]:
                history = np.concatenate((history, np.empty_like(history)), axis=1)
            history[0, known], history[1, known] = parent, front[FORM, c]
            followed[depth, level] += 1
            for i in range(count):
                f = w.maker[members[i]]
                if f < 0 or (left[f] and (w.once[f] or depth + 1 == _DEPTHS)):
                    continue
                after, number, working = step_back(a, w, row, f, held, key)
                again = late + a.time[f] if left[f] else late
                if working > limit or again >= most_ns:
                    continue
                to = now if left[f] else then
                score = max(again, ahead) + int(lean_ns * after + tie_ns * np.random.random())
                if add(fronts[to], tables[to], counts[to], known, f, again, after, number, score, depth + 1 if deep and left[f] else 0):
                    counts[to] += 1
                    if left[f]:
                        waiting = push(heap, front[SCORE], waiting, counts[to] - 1)
            known += 1
        if counts[then] == 0:
            return history[0, :0]
    last = w.forms & 1
    return way_back(history, fronts[last], counts[last])
