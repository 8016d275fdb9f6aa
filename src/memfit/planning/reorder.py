"""Orders of the step that hold less: greedy list scheduling from either end, with random tastes, best of many.

    forward:   of all ops that can run now, the one that frees most and allocates least goes next
    backward:  the same from the end: of all ops whose readers are placed, the one that adds least goes before them

Recomputing costs time; another order costs none. Training steps leave little room (forward fixes backward), graphs with
parallel branches a lot. Each try has its own taste: how much noise, how much what an op makes weighs beside what it frees,
and how much it is preferred to go on where the last op left off (depth first). Ops that draw random numbers keep their
order, and an in-place op follows the other readers of what it overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import numpy as np

from memfit.planning.kernel import kernel
from memfit.planning.model import Arrays, Ints, Model, flatten
from memfit.planning.replay import INVALID, peak_and_time

_SAMPLE = 64
"""Of more ready ops than this a sample is looked at: wide graphs would take quadratic time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedence:
    """Which ops of the agenda wait for which, as flat lists by form; `num_readers[s]` readers of storage s are in the agenda."""

    arrays: Arrays
    agenda: Ints
    before: tuple[Ints, Ints]
    after: tuple[Ints, Ints]
    num_readers: Ints


def low_peak_orders(model: Model, *, tries: int = 24, keep: int = 4, seed: int = 0, seconds: float = 1e9) -> list[Ints]:
    """Distinct orders of the agenda, lowest peak first, the given one included; as many tries as the seconds allow, two at least."""
    graph = precedence(model)
    random = np.random.default_rng(seed)
    found: dict[bytes, tuple[int, Ints]] = {}
    stop = perf_counter() + seconds
    for number in range(-1, tries):
        if number >= 2 and perf_counter() > stop:
            break
        order = graph.agenda if number < 0 else _try(graph, number, random)
        peak, _ = peak_and_time(model.arrays, order)
        if peak != INVALID:
            found.setdefault(order.tobytes(), (peak, order))
        if len(found) > 4 * keep:
            found = dict(sorted(found.items(), key=lambda item: item[1][0])[:keep])
    return [order for _, order in sorted(found.values(), key=lambda item: item[0])[:keep]]


def _try(graph: Precedence, number: int, random: np.random.Generator) -> Ints:
    plain = number < 2
    noise = 0.0 if plain else float(random.uniform(0.0, 0.6))
    made_weight = 0.0 if plain else float(random.choice([0.0, 0.0, 0.3, 1.0]))
    depth_weight = 0.0 if plain else float(random.choice([0.0, 0.5, 2.0]))
    ahead, behind = (graph.before, graph.after) if number % 2 else (graph.after, graph.before)
    order = greedy_order(
        graph.arrays,
        graph.agenda,
        ahead[0],
        ahead[1],
        behind[0],
        graph.num_readers,
        bool(number % 2),
        noise,
        made_weight,
        depth_weight,
        int(random.integers(2**31)),
    )
    return np.asarray(order)


def movable_fraction(graph: Precedence) -> float:
    """The share of ops that could change places with a neighbour: little where forward fixes backward, nearly all in a random graph."""
    if not len(graph.agenda):
        return 0.0
    place = np.full(len(graph.arrays.time), -1, np.int64)
    place[graph.agenda] = np.arange(len(graph.agenda))
    movable = 0
    for f in graph.agenda:
        earlier, later = (place[idx[ptr[f] : ptr[f + 1]]] for ptr, idx in (graph.before, graph.after))
        movable += int(later.min(initial=len(graph.agenda))) - int(earlier.max(initial=-1)) > 2
    return movable / len(graph.agenda)


def precedence(model: Model) -> Precedence:
    before: dict[int, set[int]] = {f: set() for f in model.agenda}
    maker = {s: f for f in reversed(model.agenda) for s in (*model.outs[f], *(new for new, _ in model.takes[f]))}
    readers: dict[int, list[int]] = {}
    for f in model.agenda:
        for s in model.ins[f]:
            readers.setdefault(s, []).append(f)
            if s in maker:
                before[f].add(maker[s])
    for f in model.agenda:
        for _, old in model.takes[f]:
            before[f].update(readers.get(old, []))
    fixed = [f for f in model.agenda if model.arrays.seeded[f] or not model.arrays.replayable[f]]
    for earlier, later in pairwise(fixed):
        before[later].add(earlier)
    after: dict[int, list[int]] = {f: [] for f in model.agenda}
    for f, earlier_forms in before.items():
        earlier_forms.discard(f)
        for g in sorted(earlier_forms):
            after[g].append(f)
    return Precedence(
        arrays=model.arrays,
        agenda=np.array(model.agenda, np.int64),
        before=flatten(tuple(tuple(sorted(before.get(f, ()))) for f in range(model.num_forms))),
        after=flatten(tuple(tuple(after.get(f, ())) for f in range(model.num_forms))),
        num_readers=np.array([len(readers.get(s, ())) for s in range(model.num_storages)], np.int64),
    )


@kernel
def added_bytes(a: Arrays, f: int, left: Ints, live: Ints, backward: bool, made_weight: float) -> float:
    """What placing form f adds to what is held. `left` counts unplaced readers, `live` is 1 for what later ops wait for."""
    change, made = 0.0, 0.0
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        s = a.out_idx[k]
        made += a.size[s]
        if backward:
            change -= a.size[s] * live[s]
        elif left[s] > 0 or a.pinned[s]:
            change += a.size[s]
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        if backward:
            change += a.size[s] * (1 - live[s])
        elif left[s] == 1 and not a.pinned[s]:
            change -= a.size[s]
    return change + made_weight * made


@kernel
def greedy_order(
    a: Arrays,
    agenda: Ints,
    ahead_ptr: Ints,
    ahead_idx: Ints,
    behind_ptr: Ints,
    num_readers: Ints,
    backward: bool,
    noise: float,
    made_weight: float,
    depth_weight: float,
    seed: int,
) -> Ints:
    """One order: the ready op that adds least goes next; `ahead` are the ops that wait for an op, in the direction of travel."""
    np.random.seed(seed)
    n = len(agenda)
    waits = np.zeros(len(a.time), np.int64)
    since = np.zeros(len(a.time), np.int64)
    ready = np.empty(n, np.int64)
    count = 0
    scale = 1.0
    for i in range(n):
        f = agenda[n - 1 - i] if backward else agenda[i]
        waits[f] = behind_ptr[f + 1] - behind_ptr[f]
        if waits[f] == 0:
            ready[count] = f
            count += 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            scale += a.size[a.out_idx[k]] / n
    left = num_readers.copy()
    live = np.zeros(len(a.size), np.int64)
    for s in range(len(a.size)):
        live[s] = a.pinned[s]
    order = np.empty(n, np.int64)
    placed = 0
    while count > 0:
        best, best_weight = 0, np.inf
        looks = min(count, _SAMPLE)
        for j in range(looks):
            i = j if count <= _SAMPLE else np.random.randint(0, count)
            f = ready[i]
            weight = added_bytes(a, f, left, live, backward, made_weight)
            if noise > 0:
                weight += noise * scale * np.random.standard_normal()
            weight += depth_weight * scale * (placed - since[f]) / (placed + 1.0)
            if weight < best_weight:
                best, best_weight = i, weight
        f = ready[best]
        ready[best] = ready[count - 1]
        count -= 1
        order[n - 1 - placed if backward else placed] = f
        placed += 1
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            left[a.in_idx[k]] -= 1
            live[a.in_idx[k]] = 1
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            if backward:
                live[a.out_idx[k]] = 0
        for k in range(ahead_ptr[f], ahead_ptr[f + 1]):
            g = ahead_idx[k]
            waits[g] -= 1
            if waits[g] == 0:
                ready[count] = g
                since[g] = placed
                count += 1
    return order[n - placed :] if backward else order[:placed]
