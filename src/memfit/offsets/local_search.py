"""Local search over insertion orders: what sticks out at the top is inserted earlier next time.

    order      c a d b e   ──greedy──>  height 11, b on top
    neighbour  b c a d e   ──greedy──>  height 10: kept        (equal is kept too, so plateaus are crossed)

Where in the flow: after the greedy orders, for problems too large for the exact search, or beside it when no capacity is
given. Every order gives a legal packing, so there is nothing to repair. The idea is that of TelaMalloc's and of
Imanishi and Xu's (2011) searches over permutations for dynamic storage allocation.
"""

from __future__ import annotations

import time

import numpy as np

from memfit.offsets.greedy import Windows, place_in_order
from memfit.offsets.problem import Ints, Problem, height_of


def improve_order(
    problem: Problem, windows: Windows, order: Ints, *, target: int, deadline: float, max_rounds: int = 10**9, seed: int = 0
) -> tuple[Ints, Ints]:
    """The best order found and its offsets; stops at `target` bytes, at the deadline or after `max_rounds`."""
    random = np.random.default_rng(seed)
    best = order
    offsets = place_in_order(problem, windows, best)
    score = _score(problem, offsets, target)
    for _ in range(max_rounds):
        if score[0] <= target or time.monotonic() > deadline:
            break
        neighbour = _promote(problem, best, offsets, random)
        trial = place_in_order(problem, windows, neighbour)
        trial_score = _score(problem, trial, target)
        if trial_score <= score:
            best, offsets, score = neighbour, trial, trial_score
    return best, offsets


def _score(problem: Problem, offsets: Ints, target: int) -> tuple[int, float]:
    """Height first; among equals, the less byte-time above the target the better."""
    above = np.maximum(offsets + problem.size - target, 0)
    return height_of(problem, offsets), float((above * problem.life.astype(np.float64)).sum())


def _promote(problem: Problem, order: Ints, offsets: Ints, random: np.random.Generator) -> Ints:
    """Move one of the topmost buffers, or one that meets it, to an earlier place."""
    tops = offsets + problem.size
    highest = random.choice(np.nonzero(tops == tops.max())[0])
    chosen = highest
    if random.random() < 0.5:
        meets = np.nonzero((problem.start < problem.stop[highest]) & (problem.stop > problem.start[highest]))[0]
        chosen = random.choice(meets)
    place = int(np.nonzero(order == chosen)[0][0])
    rest = np.delete(order, place)
    earlier = int(random.integers(0, place + 1)) if place else int(random.integers(0, len(order)))
    return np.insert(rest, earlier, chosen)
