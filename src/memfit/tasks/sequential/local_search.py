"""Local search on an order: move one task, or the cone that feeds it, to another legal place while the peak falls.

    a b c D e f   ->   a D b c e f        only moves that touch the peak can help: a task that runs at or before it is
          ↑                               delayed past it, or one that frees memory is brought before it

Accepts a move when (peak, bytes above 97 % of it) falls, so it can walk along plateaus; anytime, no proof.
"""

from __future__ import annotations

import random
import time

import numpy as np

from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.judge import judge_order


def improve_order(graph: TaskGraph, order: Ints, *, stop_at: int = 0, time_limit_s: float = 2.0, seed: int = 0) -> tuple[Ints, int]:
    """The best order found from `order` and its peak; stops early at a peak of `stop_at`, which the caller has proven least."""
    rng, deadline = random.Random(seed), time.monotonic() + time_limit_s
    current = order.tolist()
    score = _score(graph, current)
    best, best_peak = current, score[0]
    idle = 0
    while best_peak > stop_at and time.monotonic() < deadline and idle < 40 * len(current) + 200:
        moved = _move(graph, current, score[2], rng)
        new = _score(graph, moved)
        idle += 1
        if new[:2] <= score[:2] or (idle % 997 == 0 and new[0] <= best_peak * 1.05):
            if new[:2] < score[:2]:
                idle = 0
            current, score = moved, new
            if score[0] < best_peak:
                best, best_peak = current, score[0]
    return np.array(best, np.int64), best_peak


def _score(graph: TaskGraph, order: list[int]) -> tuple[int, int, int]:
    profile = judge_order(graph, order)
    high = profile.bytes_at_step - int(0.97 * profile.peak_bytes)
    return profile.peak_bytes, int(high[high > 0].sum()), profile.peak_step


def _move(graph: TaskGraph, order: list[int], peak_step: int, rng: random.Random) -> list[int]:
    """Take a task from around the peak as far forward or backward as its readers and sources let it, or part of the way."""
    n = len(order)
    where = {task: k for k, task in enumerate(order)}
    if rng.random() < 0.5:  # delay something that runs up to the peak
        at = rng.randrange(0, min(peak_step + 1, n)) if rng.random() < 0.5 else max(0, peak_step - int(rng.expovariate(0.3)))
        task = order[at]
        limit = min((where[s] for s in graph.successors.of(task)), default=n) - 1
        target = rng.randint(at, limit) if rng.random() < 0.5 else limit
    else:  # bring something that runs later before the peak
        at = rng.randrange(min(peak_step, n - 1), n)
        task = order[at]
        limit = max((where[p] for p in graph.predecessors.of(task)), default=-1) + 1
        target = rng.randint(limit, at) if rng.random() < 0.5 else limit
    moved = order[:at] + order[at + 1 :]
    moved.insert(target, task)
    return moved
