"""Cut refinement: solve a chain of cuts exactly, play the answer, cut again where it does not fit. Near a proof or at one.

    cuts  {c}          ->  plan  ▂▄▆█▆▇▅▂     over budget when d is first made: one cut does not see that moment
    cuts  {c, d}       ->  plan  ▂▄▆▆▆▆▅▂     fits, and takes what the program says: no plan is faster

A program of few cuts relaxes the problem, so its value bounds every plan; the sequence played from it takes exactly that
time, but may hold too much at moments no cut looks at. Each round adds the worst of them as a cut, kept in a chain in which
each must come after the one before. When the sequence fits, bound and plan have met. Near the floor the programs grow faster
than branch and bound can follow: from there on the LPs of longer chains give a better bound, and seeds that repair mends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.planning.cuts.program import CutProgram, CutSolution
from memfit.planning.cuts.reachability import runnable_without
from memfit.planning.cuts.rounding import seeds_from
from memfit.planning.model.fast_judge import INVALID, peak_and_time, usage_of
from memfit.planning.model.lower_bounds import required_storages
from memfit.planning.model.reduce import Flags, Ints, Model
from memfit.planning.search.state import Search

_MOST_CUTS = 20
_MOST_ROWS = 150_000
_CLOSED = 1e-4
"""Gap of a 0-1 program, in parts of the step's time, up to which it counts as solved."""
_NEAR_POINTS = 0.3
"""A gap that is tried to be closed for longer."""
_TINY = 5e-4
"""Share of the budget below which a storage is left open: next to nothing is lost by that, and half of the solver's time is saved."""
_ROUGH = (0.01, 0.005)
"""Shares of the budget below which a storage is small."""
_SETTLE_TRIES, _SETTLE_MISS, _SETTLE_SHARE = 2, 0.002, 0.5
"""How often small storages are settled where large ones are, for how small a miss, and for how long as a share of what that took at most."""
_SMALL_MISS = 0.1
"""A seed over budget by no more than this share is solved for again with that much less."""
SHARES = (0.97, 0.93, 0.88, 0.8)
"""Shares of the budget that each chain's LP is rounded for: where the exact answer does not fit, which one mends well is luck."""
_FINISH_SHARE = 0.3
"""Share of the time limit up to which a gap that is small enough is still tried to be closed."""
_SPARE = 0.2
"""Share of the time that may go into solutions for less than the budget."""
_WORTHWHILE = 1e-4
_PATIENCE, _LP_PATIENCE = 3, 5
"""Rounds without a better bound or plan after which further cuts are not worth their time."""
_IDLE_PRICE = 3e-3
"""Share of all prices below which a cut says next to nothing that the others do not say."""


def refine(search: Search, first: int, *, seconds: float) -> Chain:
    """Solve longer and longer chains of cuts exactly, beginning with `first`, as far as branch and bound can follow."""
    problem, stop = search.problem, search.problem.seconds + seconds
    chain = Chain(problem.model, first)
    stale, before = 0, (0, search.best_time_ns)
    worthwhile = _WORTHWHILE * problem.model.base_time_ns
    spare = _SPARE * seconds
    while stale < _PATIENCE and len(chain.cuts) <= _MOST_CUTS and not search.done and not search.nearly_closed:
        near = search.best is not None and search.gap_points <= max(search.enough_points, _NEAR_POINTS)
        left = min(_FINISH_SHARE * problem.time_limit_s if near else stop, problem.time_limit_s) - problem.seconds
        program = CutProgram(problem.model, chain.cuts) if left > 0 else None
        if program is None or len(program.rows) > _MOST_ROWS:
            break
        if len(chain.cuts) == 1:
            _solve_roughly(search, program, (0.4 if near else 0.1) * left)
            left = min(_FINISH_SHARE * problem.time_limit_s if near else stop, problem.time_limit_s) - problem.seconds
        round_s = left if near else max(0.5 * left, 0.4)
        solution = program.solve_whole(problem.limit_bytes, time_limit_s=round_s, small_bytes=int(_TINY * problem.limit_bytes))
        if solution is None:
            break
        _raise_bound(search, solution)
        began = problem.seconds
        played = _play(search, program, solution, min(0.3 * round_s, spare))
        spare -= problem.seconds - began
        gained = solution.bound_ns > before[0] + worthwhile or search.best_time_ns < before[1] - worthwhile
        stale = 0 if gained or search.best is None else stale + 1
        before = (solution.bound_ns, search.best_time_ns)
        open_still = solution.time_ns - solution.bound_ns > _CLOSED * problem.model.base_time_ns
        if open_still or not chain.cut_again(played, problem.limit_bytes):
            break
    return chain


def _solve_roughly(search: Search, program: CutProgram, seconds: float) -> None:
    """The program with what is small left open: often closed in a moment, where the exact one is not closed at all."""
    limit = search.problem.limit_bytes
    for small in _ROUGH:
        solution = program.solve_whole(limit, time_limit_s=seconds, small_bytes=int(small * limit))
        if solution is None or search.done:
            break
        _raise_bound(search, solution)
        offer_seeds(search, solution, f"storages under {small:.1%} open")
        if search.best is not None and search.gap_points <= _NEAR_POINTS:
            _settle_small(search, program, solution, int(small * limit), _SETTLE_SHARE * seconds)


def _settle_small(search: Search, program: CutProgram, solution: CutSolution, small_bytes: int, seconds: float) -> None:
    """What is large stays as the solution has it, what is small is decided exactly; for a little less where that holds a little too much."""
    limit, share, large = search.problem.limit_bytes, 1.0, program.model.arrays.size >= small_bytes
    low, high = np.zeros(program.num_variables), program.most.copy()
    for numbers, kept in zip(program.keep, solution.keep, strict=True):
        fixed = large & (numbers >= 0)
        low[numbers[fixed]] = high[numbers[fixed]] = np.round(kept[fixed])
    for _ in range(_SETTLE_TRIES):
        if search.done or search.nearly_closed:
            break
        settled = program.solve_whole(int(limit * share), time_limit_s=seconds, low=low, high=high)
        if settled is None:
            break
        _, peak = offer_seeds(search, settled, f"storages under {small_bytes / limit:.1%} settled")
        if not 0 < peak / max(limit, 1) - 1 <= _SETTLE_MISS:
            break
        share *= limit / peak


def lengthen(search: Search, chain: Chain, *, seconds: float) -> None:
    """Raise the bound by the LPs of longer chains yet; cuts that say nothing are left out again, so that the programs stay small."""
    problem, stop = search.problem, search.problem.seconds + seconds
    stale, reached = 0, 0
    while stale < _LP_PATIENCE and len(chain.cuts) <= _MOST_CUTS and not search.done and not search.good_enough:
        left = min(stop - problem.seconds, problem.seconds_left)
        program = CutProgram(problem.model, chain.cuts) if left > 0 else None
        if program is None or len(program.rows) > _MOST_ROWS:
            break
        solution = program.solve(problem.limit_bytes, time_limit_s=left)
        if solution is None:
            break
        _raise_bound(search, solution)
        problem.tell(search.best_time_ns if search.best is not None else None, search.bound_ns, f"{len(chain.cuts)} cuts")
        played, _ = offer_seeds(search, solution, f"{len(program.cuts)} cuts")
        gained = solution.bound_ns > reached + _WORTHWHILE * problem.model.base_time_ns
        stale, reached = (0 if gained else stale + 1), max(reached, solution.bound_ns)
        chain.drop_idle(solution.prices)
        if not chain.cut_again(played, problem.limit_bytes):
            break


def _raise_bound(search: Search, solution: CutSolution) -> None:
    if not search.problem.model.partial:
        search.raise_bound(solution.bound_ns)


def _play(search: Search, program: CutProgram, solution: CutSolution, seconds: float) -> Ints:
    """Play and mend a solution, and those for somewhat less than the budget. Returns the given one as it was played."""
    limit, began, name = search.problem.limit_bytes, search.problem.seconds, f"{len(program.cuts)} cuts"
    played, peak = offer_seeds(search, solution, name)
    share = 1.0
    while 0 < peak / max(limit, 1) - 1 <= _SMALL_MISS and share > 0.9 and search.problem.seconds - began < seconds:
        share *= 0.9998 * limit / peak
        tighter = program.solve_whole(int(limit * share), time_limit_s=0.5 * seconds)
        if tighter is None or search.nearly_closed:
            break
        _, peak = offer_seeds(search, tighter, f"{name} at {share:.1%}")
    for share in SHARES:
        if search.nearly_closed or search.problem.seconds - began > seconds:
            break
        rounded = program.solve(int(limit * share), time_limit_s=seconds)
        if rounded is not None:
            offer_seeds(search, rounded, f"{name} at {share:.0%}")
    return played


def offer_seeds(search: Search, solution: CutSolution, note: str) -> tuple[Ints, int]:
    """Mend and offer each order of the solution; returns the one with the least peak as it was before mending."""
    best: tuple[int, Ints] | None = None
    for seed in seeds_from(search.problem.model, solution, search.rank):
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
    idle: set[int]  # cuts that were in the chain and said nothing

    def __init__(self, model: Model, first: int | None = None) -> None:
        self.model, self.cuts = model, () if first is None else (first,)
        self.required = required_storages(model)
        self.able, self.idle = {}, set()

    def cut_again(self, sequence: Ints, limit_bytes: int) -> bool:
        """Insert the first production before which `sequence` holds most, among those over the limit that have a place."""
        return any(self.insert(storage) for storage in self.fullest(sequence, limit_bytes))

    def fullest(self, sequence: Ints, limit_bytes: int = 0) -> list[int]:
        """First productions of what every plan makes, in order of what `sequence` holds since the one before; those over the limit."""
        usage = usage_of(self.model.arrays, sequence)
        seen: set[int] = set()
        stretches: list[tuple[int, int]] = []
        begin = 0
        for p, f in enumerate(sequence):
            made = (*self.model.outs[f], *(new for new, _ in self.model.takes[f]))
            fresh = [s for s in made if s in self.required and s not in seen]
            seen.update(fresh)
            if fresh:
                stretches.append((int(usage[begin : p + 1].max()), fresh[0]))
                begin = p + 1
        return [storage for held, storage in sorted(stretches, reverse=True) if held > limit_bytes]

    def drop_idle(self, prices: tuple[float, ...]) -> None:
        """Leave out the cuts at which the budget costs nothing: the others' bound stands without them."""
        useful = tuple(cut for cut, price in zip(self.cuts, prices, strict=True) if price > _IDLE_PRICE)
        if useful:
            self.idle.update(set(self.cuts) - set(useful))
            self.cuts = useful

    def insert(self, storage: int) -> bool:
        """Put `storage` in its place in the chain, if it has one. What a cut's own form makes is no later moment, but the same one."""
        makers = set(self.model.producers[storage])
        if storage in self.idle or any(makers & set(self.model.producers[cut]) for cut in self.cuts):
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
