"""Which ops of the step wait for which, whatever the order: what orders may change, and how much there is to change.

    a ─> b ─> d        b waits for a, d for b and c; b and c can change places: where much can, another order is the first thing to try
    a ─> c ─> d

Ops that draw random numbers keep their order, and an in-place op follows the other readers of what it overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memfit.planning.model.reduce import Arrays, Ints, Model, flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedence:
    """Which ops of the agenda wait for which, as flat lists by form; `num_readers[s]` readers of storage s are in the agenda."""

    arrays: Arrays
    agenda: Ints
    before: tuple[Ints, Ints]
    after: tuple[Ints, Ints]
    num_readers: Ints


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


def find_precedence(model: Model) -> Precedence:
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
