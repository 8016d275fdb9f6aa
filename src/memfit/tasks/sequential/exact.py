"""The optimum of a small general DAG: best-first search over closed sets of done tasks.

    {} ── 3 ──> {a} ── 5 ──> {a,b} ── 5 ──> {a,b,c}        a state is a set closed under "reads from"; the memory held
      └── 4 ──> {b} ── 5 ──┘                                depends on the set alone, not on how it was reached

States leave the queue by the peak needed to reach them, so the first to be complete is optimal, and the peak of the one
at the front is at any moment a lower bound: a search that runs out of its limit still returns that. A ready task that
fits under the peak already paid and holds no more afterwards than before is run at once: whatever order follows, moving
it to the front raises nothing (what its end frees can only grow as others finish). Finding the order is NP-hard; about 25
to 40 tasks are usual.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

import numpy as np

from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.sequential.bit_masks import Masks, make_masks

MAX_STATES = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """`order` is None when no order below `below` was found; `lower_bound_bytes` holds either way. `complete`: a proof."""

    order: Ints | None
    lower_bound_bytes: int
    complete: bool
    num_states: int


def exact_order(graph: TaskGraph, *, below: int | None = None, max_states: int = MAX_STATES, time_limit_s: float = 10.0) -> Searched:
    """The best order with a peak less than `below` (any, without it), searched within the limits."""
    masks, deadline = make_masks(graph), time.monotonic() + time_limit_s
    full = (1 << graph.num_tasks) - 1
    start = (masks.initial_bytes, 0, 0)
    queue: list[tuple[int, int, int]] = [start]  # peak so far, minus the number done, set done
    best = {0: masks.initial_bytes}
    held = {0: masks.initial_bytes}
    came: dict[int, tuple[int, int]] = {}
    closed: set[int] = set()
    while queue:
        peak, count, done = heapq.heappop(queue)
        if done == full:
            return Searched(order=_trace(came, done), lower_bound_bytes=peak, complete=True, num_states=len(closed))
        if done in closed:
            continue
        closed.add(done)
        if len(best) > max_states or (len(closed) % 512 == 0 and time.monotonic() > deadline):
            return Searched(order=None, lower_bound_bytes=peak, complete=False, num_states=len(closed))
        for task, new_peak, new_held in _moves(masks, done, held[done], peak):
            reached = done | (1 << task)
            if (below is None or new_peak < below) and new_peak < best.get(reached, new_peak + 1):
                best[reached], held[reached], came[reached] = new_peak, new_held, (done, task)
                heapq.heappush(queue, (new_peak, count - 1, reached))
    return Searched(order=None, lower_bound_bytes=below or 0, complete=True, num_states=len(closed))


def _moves(masks: Masks, done: int, held: int, peak: int) -> list[tuple[int, int, int]]:
    """Tasks to run next as (task, peak, held afterwards); a single one when it can do no harm."""
    found = []
    for task in range(masks.num_tasks):
        if not done >> task & 1 and masks.before[task] & ~done == 0:
            needed = held + masks.needs[task]
            afterwards = masks.after(done, held, task)
            if needed <= peak and afterwards <= held:
                return [(task, peak, afterwards)]
            found.append((task, max(peak, needed), afterwards))
    return found


def _trace(came: dict[int, tuple[int, int]], done: int) -> Ints:
    order = []
    while done:
        done, task = came[done]
        order.append(task)
    return np.array(order[::-1], np.int64)
