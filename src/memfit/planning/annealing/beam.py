"""A beam over the sets of values that must be there, from the end of a step to its beginning.

    end    {results}         run f last:        what f makes need not be there before it, what it reads must
           {.., x, ..}       run g before it:   the same again
    begin  {}                every op has run:  read backwards, the ops that led here are a plan

What can come before a set does not depend on what comes after it, so of two paths to one set only the faster is kept. When f runs last but
an op that is left still reads what f makes, f must run once more: only such repeats cost time. Sets with equally many ops left form a layer.

- In each layer the beam follows the fastest sets, a fixed number for each level of memory held. Without the levels only the fastest sets
  would survive, and those hold too much to get past the next op with a large working set.
- Sets are ordered by the time of their repeats so far plus a lower bound on those still to come: an op that is left and does not fit
  beside the set forces some of the set to be made again.
- A *deep* beam reserves places for several repeats in a row, fewer the longer they are: passing a wide op can take many, each of which
  looks bad alone.

Near the smallest budget this finds plans that annealing misses; with more room annealing finds better ones. `cuts/infeasibility.py` walks
back in the same way from a single op, to prove that there is no plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Flags, Ints, Model

LEVELS = 32
"""Levels of memory, as equal parts of the limit; the beam follows some sets of each."""
_FAN = 32
"""Room for candidates, as a multiple of the sets followed."""
_DEPTHS, _DEEPER = 256, 6
"""A deep beam follows fewer repeats in a row than the first number; the second is the room for its sets, as a multiple of the others."""
_FAR = 2**60
_STOPPED = 63
"""The search checks whether to stop once in this many candidates, plus one."""


class _Candidate(NamedTuple):
    parent: int = 0  # the set it comes from
    form: int = 1  # the form that ran
    late: int = 2  # time of repeats so far
    held: int = 3  # bytes
    key: int = 4  # a number for the set
    score: int = 5  # what candidates are ordered by
    depth: int = 6  # repeats since an op ran that need not run again


CANDIDATE = _Candidate()
"""Rows of the table of candidates."""

Table = Ints  # two-dimensional


class BeamTables(NamedTuple):
    """What the search knows about the step, the same for all sets. Forms are those of the plain step."""

    maker: Ints  # of each storage: the form that makes it, -1 for what is there from the beginning
    before: Flags  # [storage, form]: whether the form must run before the storage's maker
    across: Flags  # [form, storage]: whether the storage is made before the form runs, and is neither its input nor its output
    need: Ints  # bytes that a form holds while it runs
    widest: Ints  # forms by need, the largest first
    weight: Ints  # bytes of a storage in a set: none for what nobody reads, which only must have been made
    cheapest: Ints  # storages by time to make per byte
    once: Flags  # forms that cannot run again
    key: Ints  # random numbers: a set's own is their exclusive or
    end: Flags  # the set at the end
    forms: int


def make_beam_tables(model: Model, plain: Ints) -> BeamTables:
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
    return BeamTables(
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
def heapify(heap: Ints, score: Ints, count: int) -> None:
    """Fill `heap` with all candidates, the least score on top."""
    for i in range(count):
        heap[i] = i
    for i in range(count // 2 - 1, -1, -1):
        sift_down(heap, score, count, i)


@kernel
def push_candidate(heap: Ints, score: Ints, count: int, c: int) -> int:
    """Add a candidate to the heap; returns how many it holds."""
    heap[count] = c
    sift_up(heap, score, count)
    return count + 1


@kernel
def find_slot(table: Ints, front: Table, key: int) -> int:
    """The slot of the hash table for the set with this key. A slot holds a candidate's number plus 1, or 0 when empty."""
    mask = len(table) - 1
    i = (key ^ (key >> 29)) & mask
    while table[i] and front[CANDIDATE.key, table[i] - 1] != key:
        i = (i + 1) & mask
    return int(i)


# -- one set --------------------------------------------------------------------------------------------------------------


@kernel
def fill_row(a: Arrays, parent: Flags, f: int, row: Flags) -> None:
    """Fill `row` with the set before form f runs; `parent` is the set after it."""
    row[:] = parent
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        row[a.out_idx[k]] = False
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        row[a.in_idx[k]] = True


@kernel
def list_members(w: BeamTables, row: Flags, members: Ints, left: Flags) -> int:
    """List the storages of a set, cheapest to make per byte first, and mark in `left` the forms that run before their makers; returns how many."""
    count = 0
    left[:] = False
    for s in w.cheapest:
        if row[s]:
            members[count] = s
            count += 1
            left |= w.before[s]
    return count


@kernel
def bound_repeats(a: Arrays, w: BeamTables, row: Flags, left: Flags, members: Ints, held: int, limit: int) -> int:
    """A lower bound on the time of repeats still to come: for each op that is left and does not fit beside the set, the cheapest part of
    the set to make again. `_FAR` if the op cannot fit at all."""
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
def weigh_predecessor(a: Arrays, w: BeamTables, row: Flags, f: int, held: int, key: int) -> tuple[int, int, int]:
    """For the set before f runs: its bytes, its key, and the bytes held while f runs."""
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
def add_candidate(
    front: Table, table: Ints, count: int, parent: int, f: int, late: int, held: int, key: int, score: int, depth: int
) -> bool:
    """Add a candidate if its set is new, or was reached before with more repeats; whether it was added."""
    at = find_slot(table, front, key)
    if count >= front.shape[1] or (table[at] and front[CANDIDATE.late, table[at] - 1] <= late):
        return False
    front[CANDIDATE.parent, count], front[CANDIDATE.form, count], front[CANDIDATE.late, count] = parent, f, late
    front[CANDIDATE.held, count], front[CANDIDATE.key, count], front[CANDIDATE.score, count] = held, key, score
    front[CANDIDATE.depth, count] = depth
    table[at] = count + 1
    return True


@kernel
def trace_back(history: Table, front: Table, count: int) -> Ints:
    """The forms that lead to the fastest candidate, in the order in which they run."""
    best = 0
    for c in range(count):
        if front[CANDIDATE.late, c] < front[CANDIDATE.late, best]:
            best = c
    sequence, length = np.empty(history.shape[1] + 1, np.int64), 0
    parent, f = front[CANDIDATE.parent, best], front[CANDIDATE.form, best]
    while parent >= 0:
        sequence[length] = f
        length += 1
        parent, f = history[0, parent], history[1, parent]
    return sequence[:length]


@kernel
def search_beam(
    a: Arrays, w: BeamTables, limit: int, most_ns: int, per_level: int, lean_ns: float, deep: bool, tie_ns: int, seed: int, stop: Ints
) -> Ints:
    """A plan whose repeats take less than `most_ns`; an empty sequence if none is found.

    The beam follows `per_level` sets for each level of memory; if `deep`, fewer of them behind 1, 2, ... repeats in a row. `lean_ns` is the
    price of a byte held, and ties are broken by a random time up to `tie_ns`.
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
    add_candidate(fronts[0], tables[0], 0, -1, -1, 0, start, 0, 0, 0)
    counts[0] = 1
    for layer in range(w.forms):
        now, then = layer & 1, 1 - (layer & 1)
        front, table = fronts[now], tables[now]
        tables[then], counts[then], followed[:] = 0, 0, 0
        begins[now], waiting = known, counts[now]
        heapify(heap, front[CANDIDATE.score], waiting)
        while waiting > 0:
            looked += 1
            if looked & _STOPPED == 0 and stop[0]:
                return history[0, :0]
            c = heap[0]
            waiting -= 1
            heap[0] = heap[waiting]
            sift_down(heap, front[CANDIDATE.score], waiting, 0)
            late, held, key = front[CANDIDATE.late, c], front[CANDIDATE.held, c], front[CANDIDATE.key, c]
            level = min(held * LEVELS // max(limit, 1), LEVELS)
            depth = front[CANDIDATE.depth, c]
            full = followed[depth, level] >= max(per_level // (1 + depth), 1) or known - begins[now] == rows.shape[1]
            if full or table[find_slot(table, front, key)] != c + 1:
                continue
            row, parent = rows[now, known - begins[now]], front[CANDIDATE.parent, c]
            if parent < 0:
                row[:] = w.end
            else:
                side = now if parent >= begins[now] else then
                fill_row(a, rows[side, parent - begins[side]], front[CANDIDATE.form, c], row)
            count = list_members(w, row, members, left)
            ahead = late + bound_repeats(a, w, row, left, members[:count], held, limit)
            if ahead >= most_ns:
                continue
            score = ahead + int(lean_ns * held)
            if score > front[CANDIDATE.score, c] + tie_ns:  # not its turn yet
                front[CANDIDATE.score, c] = score
                waiting = push_candidate(heap, front[CANDIDATE.score], waiting, c)
                continue
            if known == history.shape[1]:
                history = np.concatenate((history, np.empty_like(history)), axis=1)
            history[0, known], history[1, known] = parent, front[CANDIDATE.form, c]
            followed[depth, level] += 1
            for i in range(count):
                f = w.maker[members[i]]
                if f < 0 or (left[f] and (w.once[f] or depth + 1 == _DEPTHS)):
                    continue
                after, number, working = weigh_predecessor(a, w, row, f, held, key)
                again = late + a.time[f] if left[f] else late
                if working > limit or again >= most_ns:
                    continue
                to = now if left[f] else then
                score = max(again, ahead) + int(lean_ns * after + tie_ns * np.random.random())
                if add_candidate(
                    fronts[to], tables[to], counts[to], known, f, again, after, number, score, depth + 1 if deep and left[f] else 0
                ):
                    counts[to] += 1
                    if left[f]:
                        waiting = push_candidate(heap, front[CANDIDATE.score], waiting, counts[to] - 1)
            known += 1
        if counts[then] == 0:
            return history[0, :0]
    last = w.forms & 1
    return trace_back(history, fronts[last], counts[last])
