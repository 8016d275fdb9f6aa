"""Orders of the step that hold less: greedy list scheduling from either end, with noise, best of many.

    forward:   of all ops that can run now, the one that frees most and allocates least goes next
    backward:  the same from the end: of all ops whose readers are placed, the one that adds least goes before them

Recomputing costs time; another order costs none. Training steps leave little room (forward fixes backward), graphs with
parallel branches a lot. Ops that draw random numbers keep their order, and an in-place op follows the other readers of
what it overwrites.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memfit.planning.model import Ints, Model
from memfit.planning.replay import INVALID, peak_and_time

_SAMPLE = 64
"""Of more ready ops than this a sample is looked at: wide graphs would take quadratic time."""


def low_peak_orders(model: Model, *, tries: int = 24, keep: int = 4, seed: int = 0) -> list[Ints]:
    """Distinct orders of the agenda, lowest peak first, the given one included."""
    graph = _Precedence(model)
    random = np.random.default_rng(seed)
    found: dict[bytes, tuple[int, Ints]] = {}
    orders = [np.array(model.agenda, np.int64)]
    for number in range(tries):
        noise = 0.0 if number < 2 else float(random.uniform(0.05, 0.6))
        orders.append(graph.greedy(backward=number % 2 == 1, noise=noise, random=random))
    for order in orders:
        peak, _ = peak_and_time(model.arrays, order)
        if peak != INVALID:
            found.setdefault(order.tobytes(), (peak, order))
    return [order for _, order in sorted(found.values(), key=lambda item: item[0])[:keep]]


class _Precedence:
    def __init__(self, model: Model) -> None:
        self.model = model
        a = model.arrays
        self.size = [int(x) for x in a.size]
        self.before: dict[int, set[int]] = {f: set() for f in model.agenda}
        self.after: dict[int, set[int]] = {f: set() for f in model.agenda}
        self.maker = {s: f for f in reversed(model.agenda) for s in (*model.outs[f], *(new for new, _ in model.takes[f]))}
        self.readers: dict[int, list[int]] = {}
        for f in model.agenda:
            for s in model.ins[f]:
                self.readers.setdefault(s, []).append(f)
                if s in self.maker:
                    self._edge(self.maker[s], f)
        for f in model.agenda:
            for _, old in model.takes[f]:
                for g in self.readers.get(old, []):
                    self._edge(g, f)
        fixed = [f for f in model.agenda if a.seeded[f] or not a.replayable[f]]
        for earlier, later in pairwise(fixed):
            self._edge(earlier, later)

    def _edge(self, earlier: int, later: int) -> None:
        if earlier != later:
            self.before[later].add(earlier)
            self.after[earlier].add(later)

    def greedy(self, *, backward: bool, noise: float, random: np.random.Generator) -> Ints:
        """One order. `weight` is what placing an op adds to what is held; the least goes first, noise permitting."""
        waits = {f: len(self.after[f] if backward else self.before[f]) for f in self.model.agenda}
        follow = self.before if backward else self.after
        ready = [f for f in self.model.agenda if not waits[f]]
        left = {s: len(readers) for s, readers in self.readers.items()}
        live: set[int] = set()
        order: list[int] = []
        while ready:
            looked_at = range(len(ready)) if len(ready) <= _SAMPLE else random.integers(0, len(ready), _SAMPLE)
            weights = np.array([self._added(ready[i], left, live, backward) for i in looked_at], np.float64)
            if noise:
                spread = float(np.abs(weights).mean()) + 1.0
                weights += noise * spread * random.standard_normal(len(weights))
            f = ready.pop(int(looked_at[int(np.argmin(weights))]))
            order.append(f)
            for s in self.model.ins[f]:
                left[s] -= 1
                live.add(s)
            for g in follow[f]:
                waits[g] -= 1
                if not waits[g]:
                    ready.append(g)
        return np.array(order[::-1] if backward else order, np.int64)

    def _added(self, f: int, left: dict[int, int], live: set[int], backward: bool) -> int:
        made = sum(self.size[s] for s in self.model.outs[f])
        if backward:  # from the end: inputs nobody later reads begin to live, outputs end
            return sum(self.size[s] for s in self.model.ins[f] if s not in live) - made
        kept = sum(self.size[s] for s in self.model.outs[f] if self.readers.get(s))
        return kept - sum(self.size[s] for s in self.model.ins[f] if left[s] == 1)
