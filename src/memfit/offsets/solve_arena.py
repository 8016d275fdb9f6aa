"""One arena from start to finish: bound, greedy orders, then exact search or local search, until proven or out of time.

    lower bound ──> time partitions ──> greedy orders ──┬── few enough ──> exact search at the bound, then between
                                     (done if at target) └── too many ──> local search over insertion orders

Where in the flow: `api.pack` calls this once per arena, `from_schedule.layout_plan` once per schedule.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from memfit.offsets.exact.race import decide
from memfit.offsets.exact.search import Verdict
from memfit.offsets.exact.time_sections import num_meetings
from memfit.offsets.greedy import greedy_orders, make_windows, place_in_order
from memfit.offsets.local_search import improve_order
from memfit.offsets.problem import Ints, Problem, height_of, lower_bound, select, time_partitions

MAX_EXACT_BUFFERS = 3_000
MAX_EXACT_MEETINGS = 3_000_000
_LARGE_GAP_FRACTION = 0.005  # a large problem this close to its bound is left alone: one more try costs seconds
_LARGE_SECONDS = 5.0
_ASK_SHARE = 0.5  # of the time that is left, for each exact question
_LOCAL_SHARE = 0.2
_QUICK_ROUNDS = 300  # of local search where no exact search is wanted: some milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """`bound` is proven; `height` is at most the capacity if there was one and the search was lucky."""

    offsets: Ints
    height: int
    bound: int
    method: str
    nodes: int = 0


def solve(
    problem: Problem,
    *,
    capacity: int | None = None,
    deadline: float,
    search: bool = True,
    num_threads: int | None = None,
    seed: int = 0,
) -> Solution:
    """Pack one arena. With a capacity the first packing inside it is good enough; without, lower is better."""
    bound = lower_bound(problem)
    target = bound if capacity is None else capacity
    parts = [_Part.of(problem, chosen, target, deadline) for chosen in time_partitions(problem)] if problem.num_buffers else []
    for part in parts:
        bound = max(bound, part.solution.bound)
    hard = sorted((p for p in parts if p.solution.height > target >= p.solution.bound), key=lambda p: p.problem.num_buffers)
    for position, part in enumerate(hard):  # the small ones first: what they leave of their time goes to the others
        until = time.monotonic() + (deadline - time.monotonic()) / (len(hard) - position)
        part.solution = part.improve(target, until, minimise=capacity is None, search=search, num_threads=num_threads, seed=seed)
        bound = max(bound, part.solution.bound)
    offsets = np.zeros(problem.num_buffers, np.int64)
    for part in parts:
        offsets[part.chosen] = part.solution.offsets
    return Solution(
        offsets=offsets,
        height=height_of(problem, offsets),
        bound=bound,
        method=max((p.solution for p in parts), key=lambda s: s.height).method if parts else "empty",
        nodes=sum(p.solution.nodes for p in parts),
    )


@dataclass(slots=True)
class _Part:
    """A time partition, the best packing of it so far, and the greedy order that packing came from."""

    chosen: Ints
    problem: Problem
    is_small: bool
    solution: Solution
    order: Ints

    @staticmethod
    def of(whole: Problem, chosen: Ints, target: int, deadline: float) -> _Part:
        problem = select(whole, chosen)
        is_small = problem.num_buffers <= MAX_EXACT_BUFFERS and num_meetings(problem) <= MAX_EXACT_MEETINGS
        solution, order = _pack_greedily(problem, target, lower_bound(problem), deadline, is_small)
        return _Part(chosen, problem, is_small, solution, order)

    def improve(self, target: int, deadline: float, *, minimise: bool, search: bool, num_threads: int | None, seed: int) -> Solution:
        if not search:
            if not self.is_small:
                return self.solution
            return _search_locally(self.problem, self.order, self.solution, target, deadline, seed, _QUICK_ROUNDS)
        if not self.is_small:
            return _improve_large(self.problem, self.order, self.solution, target, deadline, minimise, seed)
        if not minimise:
            return _ask(self.problem, self.solution, target, deadline, num_threads, seed)
        return _minimise(self.problem, self.order, self.solution, target, deadline, num_threads, seed)


def _pack_greedily(part: Problem, target: int, bound: int, deadline: float, is_small: bool) -> tuple[Solution, Ints]:
    windows = make_windows(part)
    tried = list(greedy_orders(part))
    if not is_small:  # every try takes long, and lifetimes are what large programs are made of
        tried.sort(key=lambda named: named[0] != "greedy by lifetime")
    best: tuple[Solution, Ints] | None = None
    for method, order in tried:
        offsets = place_in_order(part, windows, order)
        height = height_of(part, offsets)
        if best is None or height < best[0].height:
            best = Solution(offsets=offsets, height=height, bound=bound, method=method), order
        close_enough = target if is_small else max(target, int(bound * (1 + _LARGE_GAP_FRACTION)))
        if best[0].height <= close_enough or (not is_small and time.monotonic() > deadline):
            break
    assert best is not None
    return best


def _improve_large(part: Problem, order: Ints, best: Solution, target: int, deadline: float, minimise: bool, seed: int) -> Solution:
    goal = max(target, int(best.bound * (1 + _LARGE_GAP_FRACTION))) if minimise else target
    if best.height <= goal:
        return best
    until = min(deadline, time.monotonic() + _LARGE_SECONDS) if minimise else deadline
    return _search_locally(part, order, best, goal, until, seed)


def _search_locally(
    part: Problem, order: Ints, best: Solution, target: int, deadline: float, seed: int, max_rounds: int = 10**9
) -> Solution:
    windows = make_windows(part)
    _, offsets = improve_order(part, windows, order, target=target, deadline=deadline, seed=seed, max_rounds=max_rounds)
    height = height_of(part, offsets)
    if height >= best.height:
        return best
    return Solution(offsets=offsets, height=height, bound=best.bound, method="local search", nodes=best.nodes)


def _ask(part: Problem, best: Solution, target: int, deadline: float, num_threads: int | None, seed: int) -> Solution:
    """One exact question; a proof of impossibility raises the bound above the target."""
    decision = decide(part, target, deadline=deadline, num_threads=num_threads, seed=seed)
    nodes = best.nodes + decision.nodes
    if decision.offsets is not None:
        height = height_of(part, decision.offsets)
        return Solution(offsets=decision.offsets, height=height, bound=best.bound, method="exact search", nodes=nodes)
    bound = target + _find_unit(part) if decision.verdict is Verdict.IMPOSSIBLE else best.bound
    return Solution(offsets=best.offsets, height=best.height, bound=min(bound, best.height), method=best.method, nodes=nodes)


def _find_unit(part: Problem) -> int:
    """Every height of a packing that rests on the ground is a multiple of this."""
    if (part.fixed >= 0).any():
        return 1
    return int(np.gcd.reduce(np.concatenate([part.size, part.alignment[part.alignment > 1]])))


def _minimise(part: Problem, order: Ints, best: Solution, target: int, deadline: float, num_threads: int | None, seed: int) -> Solution:
    """Ask at the target first; then between what is proven and what is found, nearer to what is found each time it stays open."""
    unit, asked, has_polished = _find_unit(part), target, False
    while best.height > max(best.bound, target) and asked < best.height and time.monotonic() < deadline:
        until = time.monotonic() + _ASK_SHARE * (deadline - time.monotonic())
        before = best
        best = _ask(part, best, asked, until, num_threads, seed)
        is_open = best.height == before.height and best.bound == before.bound
        if is_open and not has_polished:
            best = _search_locally(part, order, best, target, time.monotonic() + _LOCAL_SHARE * (deadline - time.monotonic()), seed)
            has_polished = True
        low = asked if is_open else max(best.bound, target)
        asked = low if best.bound > before.bound else low + max(unit, (best.height - low) // 2 // unit * unit)
    return best
