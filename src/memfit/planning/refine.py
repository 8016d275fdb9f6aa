"""Cut refinement: solve a chain of cuts exactly, play the answer, cut again where it does not fit. Near a proof or at one.

    cuts  {c}          ->  plan  ▂▄▆█▆▇▅▂     over budget when d is first made: one cut does not see that moment
    cuts  {c, d}       ->  plan  ▂▄▆▆▆▆▅▂     fits, and takes what the program says: no plan is faster

A program of few cuts relaxes the problem, so its value bounds every plan; the sequence played from it takes exactly that
time, but may hold too much at moments no cut looks at. Each round adds the worst of them as a cut, kept in a chain in which
each must come after the one before. When the sequence fits, bound and plan have met. Near the floor the programs grow faster
than the solver: then what it has is a better bound and a seed closer to the budget than one cut's, and repair does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.planning.cut_lp import CutProgram, CutSolution, runnable_without
from memfit.planning.floor import required_storages
from memfit.planning.model import Flags, Ints, Model
from memfit.planning.replay import INVALID, peak_and_time, usage_of
from memfit.planning.search import Search
from memfit.planning.seeds import seeds_from

_MOST_CUTS = 10
_MOST_ROWS = 90_000
_SMALL_MISS = 0.1
"""A seed over budget by no more than this share is solved for again with that much less."""
_WORTHWHILE_POINTS = 0.01
_PATIENCE = 3
"""Rounds without a better bound or plan after which further cuts are not worth their time."""


def refine(search: Search, first: int, *, seconds: float) -> None:
    """Raise the bound and offer plans from longer and longer chains of cuts, beginning with `first`."""
    problem, stop = search.problem, search.problem.seconds + seconds
    chain = Chain(problem.model, first)
    stale, before = 0, search.gap_points
    while stale < _PATIENCE and len(chain.cuts) <= _MOST_CUTS:
        left = min(stop - problem.seconds, problem.seconds_left)
        program = CutProgram(problem.model, chain.cuts)
        if search.done or search.nearly_closed or left <= 0 or len(program.rows) > _MOST_ROWS:
            break
        played = _round(search, program, min(left, max(0.25 * seconds, 0.5)))
        if played is None:
            break
        stale = 0 if search.best is None or search.gap_points < before - _WORTHWHILE_POINTS else stale + 1
        before = search.gap_points
        if not chain.cut_again(played, problem.limit_bytes):
            break


def _round(search: Search, program: CutProgram, seconds: float) -> Ints | None:
    """Solve, play and mend; where the sequence misses the budget by little also for that much less. Returns what was first played."""
    limit = search.problem.limit_bytes
    solution = program.solve_whole(limit, time_limit_s=seconds)
    if solution is None:
        return None
    if not search.problem.model.partial:
        search.raise_bound(solution.bound_ns)
    played, peak = _offer(search, solution, f"{len(program.cuts)} cuts")
    share = 1.0
    for _ in range(3):
        miss = peak / max(limit, 1) - 1
        if not 0 < miss <= _SMALL_MISS or search.nearly_closed or search.problem.seconds_left <= 0:
            break
        share *= 0.9998 / (1 + miss)
        tighter = program.solve_whole(int(limit * share), time_limit_s=0.5 * seconds)
        if tighter is None:
            break
        _, peak = _offer(search, tighter, f"{len(program.cuts)} cuts at {share:.1%}")
    return played


def _offer(search: Search, solution: CutSolution, note: str) -> tuple[Ints, int]:
    """Mend and offer each order of the solution; returns the one with the least peak as it was before mending."""
    best: tuple[int, Ints] | None = None
    for seed in seeds_from(search.problem.model, solution):
        peak, _ = peak_and_time(search.problem.model.arrays, seed.sequence)
        if peak != INVALID and (best is None or peak < best[0]):
            best = (peak, seed.sequence)
        search.mend(seed.sequence, seed.makers, note)
    return (np.array(search.problem.model.agenda, np.int64), 2**62) if best is None else (best[1], best[0])


@dataclass(slots=True, init=False)
class Chain:
    """Storages every plan makes, each impossible before the one before it."""

    model: Model
    cuts: tuple[int, ...]
    required: set[int]
    able: dict[int, Flags]

    def __init__(self, model: Model, first: int) -> None:
        self.model, self.cuts = model, (first,)
        self.required = required_storages(model)
        self.able = {}

    def cut_again(self, sequence: Ints, limit_bytes: int) -> bool:
        """Insert the first production before which `sequence` holds most, among those over the limit that have a place."""
        usage = usage_of(self.model.arrays, sequence)
        seen: set[int] = set()
        stretches: list[tuple[int, int]] = []
        begin = 0
        for p, f in enumerate(sequence):
            fresh = [s for s in self.model.outs[f] if s in self.required and s not in seen]
            seen.update(fresh)
            if fresh:
                stretches.append((int(usage[begin : p + 1].max()), fresh[0]))
                begin = p + 1
        for held, storage in sorted(stretches, reverse=True):
            if held <= limit_bytes:
                return False
            if self._insert(storage):
                return True
        return False

    def _insert(self, storage: int) -> bool:
        if storage in self.cuts:
            return False
        earlier = sum(self._after(storage, cut) for cut in self.cuts)
        if earlier + sum(self._after(cut, storage) for cut in self.cuts) < len(self.cuts):
            return False
        self.cuts = (*self.cuts[:earlier], storage, *self.cuts[earlier:])
        return True

    def _after(self, later: int, earlier: int) -> bool:
        """Whether `later` cannot be made before `earlier` has been."""
        if earlier not in self.able:
            self.able[earlier] = runnable_without(self.model, earlier)
        return not self.able[earlier][list(self.model.producers[later])].any()
