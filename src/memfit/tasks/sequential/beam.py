"""Beam search over closed sets: after every step keep the few most promising sets of done tasks.

    width 3     {} -> {a} {b} {c} -> {ab} {ac} {bc} -> ...        states are ranked by the peak paid, then by what they hold

The same states as `exact.py`, cut to a fixed width: linear in the number of tasks, no proof.
"""

from __future__ import annotations

import time

import numpy as np

from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.sequential.bit_masks import make_masks

_State = tuple[int, int, int, tuple[int, ...], object]  # peak, held, done, ready tasks, trace as nested pairs


def beam_order(graph: TaskGraph, *, width: int = 32, time_limit_s: float = 10.0) -> tuple[Ints, int] | None:
    """An order and its peak, or None when time ran out before the last task."""
    masks, deadline = make_masks(graph), time.monotonic() + time_limit_s
    first = tuple(t for t in range(graph.num_tasks) if not masks.before[t])
    states: list[_State] = [(masks.initial_bytes, masks.initial_bytes, 0, first, None)]
    for _ in range(graph.num_tasks):
        if time.monotonic() > deadline:
            return None
        reached: dict[int, _State] = {}
        for peak, held, done, ready, trace in states:
            for task in ready:
                now = done | (1 << task)
                new_peak, new_held = max(peak, held + masks.needs[task]), masks.after(done, held, task)
                known = reached.get(now)
                if known is None or new_peak < known[0]:
                    freed = tuple(s for s in masks.successors[task] if masks.before[s] & ~now == 0)
                    reached[now] = (new_peak, new_held, now, tuple(t for t in ready if t != task) + freed, (trace, task))
        states = sorted(reached.values(), key=lambda s: (s[0], s[1]))[:width]
    if not states:
        return None
    order: list[int] = []
    link = states[0][4]
    while isinstance(link, tuple):
        order.append(link[1])
        link = link[0]
    return np.array(order[::-1], np.int64), states[0][0]
