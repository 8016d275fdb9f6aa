"""Cut refinement: solve a chain of cuts exactly, play the answer, cut again where it does not fit. Near a proof or at one.

    cuts  {c}          ->  plan  ▂▄▆█▆▇▅▂     over budget when d is first made: one cut does not see that moment
    cuts  {c, d}       ->  plan  ▂▄▆▆▆▆▅▂     fits, and takes what the program says: no plan is faster

A program of few cuts relaxes the problem, so its value bounds every plan; the sequence played from it takes exactly that
time, but may hold too much at moments no cut looks at. Each round adds the worst of them as a cut, kept in a chain in which
each must come after the one before. When the sequence fits, bound and plan have met. Near the floor the programs grow faster
than branch and bound can follow: from there on the LPs of longer chains give a better bound, and seeds to repair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.planning.cuts.near_peak import cuts_near_peak
from memfit.planning.cuts.program import CutProgram, CutSolution
from memfit.planning.cuts.reachability import find_runnable_without
from memfit.planning.cuts.rounding import seeds_from
from memfit.planning.model.fast_judge import INVALID, peak_and_time, usage_of
from memfit.planning.model.lower_bounds import find_required
from memfit.planning.model.reduce import Flags, Ints, Model
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactCuts:
    """Chains of cuts solved exactly, from the cut whose LP says most; leaves the last chain in the search."""

    name: str = "exact cuts"

    def applies(self, search: Search) -> bool:
        return not search.is_hurried and not search.is_large and not search.done and not search.nearly_closed

    def run(self, search: Search, seconds: float) -> None:
        problem, numbers, stop = search.problem, search.settings.exact, search.problem.seconds + seconds
        bounds: list[tuple[int, int, int]] = []
        for number, cut in enumerate(cuts_near_peak(problem.model)):
            close = search.best is not None and search.gap_points <= numbers.close_points
            late = number and problem.seconds > stop - (1 - numbers.choose_share) * seconds
            if number >= (1 if close else numbers.looked_at) or late:
                break
            solution = CutProgram(problem.model, (cut,)).solve(problem.limit_bytes, time_limit_s=max(problem.seconds_left, 0.1))
            if solution is not None:
                bounds.append((solution.bound_ns, -number, cut))
        if bounds:
            if not problem.model.partial:
                search.raise_bound(max(bounds)[0])
            search.chain = refine(search, max(bounds)[-1], seconds=stop - problem.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongerChains:
    """A better bound, and further seeds, from the LPs of chains longer than those solved exactly."""

    name: str = "longer chains"
    began_without_variants: bool = False

    def applies(self, search: Search) -> bool:
        return search.chain is not None and search.began_without_variants == self.began_without_variants

    def run(self, search: Search, seconds: float) -> None:
        assert search.chain is not None
        lengthen(search, search.chain, seconds=seconds)


def refine(search: Search, first: int, *, seconds: float) -> CutChain:
    """Solve longer and longer chains of cuts exactly, beginning with `first`, as far as branch and bound can follow."""
    problem, numbers, stop = search.problem, search.settings.exact, search.problem.seconds + seconds
    chain = CutChain(problem.model, first)
    stale, before = 0, (0, search.best_time_ns)
    worthwhile = numbers.worthwhile * problem.model.base_time_ns
    spare = numbers.spare_share * seconds
    while stale < numbers.patience and len(chain.cuts) <= numbers.most_cuts and not search.done and not search.nearly_closed:
        near = search.best is not None and search.gap_points <= max(search.enough_points, numbers.near_points)
        left = _time_left(search, stop, near)
        program = CutProgram(problem.model, chain.cuts) if left > 0 else None
        if program is None or len(program.rows) > numbers.most_rows:
            break
        if len(chain.cuts) == 1:
            _solve_roughly(search, program, (0.4 if near else 0.1) * left)
            left = _time_left(search, stop, near)
        round_s = left if near else max(0.5 * left, 0.4)
        solution = program.solve_whole(problem.limit_bytes, time_limit_s=round_s, small_bytes=int(numbers.tiny * problem.limit_bytes))
        if solution is None:
            break
        _raise_bound(search, solution)
        began = problem.seconds
        played = _play(search, program, solution, min(0.3 * round_s, spare))
        spare -= problem.seconds - began
        gained = solution.bound_ns > before[0] + worthwhile or search.best_time_ns < before[1] - worthwhile
        stale = 0 if gained or search.best is None else stale + 1
        before = (solution.bound_ns, search.best_time_ns)
        open_still = solution.time_ns - solution.bound_ns > numbers.closed * problem.model.base_time_ns
        if open_still or not chain.cut_again(played, problem.limit_bytes):
            break
    return chain


def _time_left(search: Search, stop: float, near: bool) -> float:
    """Until the stage must stop; a gap that is nearly closed is worth more time."""
    limit_s = search.problem.time_limit_s
    return min(search.settings.exact.near_share * limit_s if near else stop, limit_s) - search.problem.seconds


def _solve_roughly(search: Search, program: CutProgram, seconds: float) -> None:
    """The program with what is small left open: often closed in a moment, where the exact one is not closed at all."""
    limit, numbers = search.problem.limit_bytes, search.settings.exact
    for small in numbers.rough:
        solution = program.solve_whole(limit, time_limit_s=seconds, small_bytes=int(small * limit))
        if solution is None or search.done:
            break
        _raise_bound(search, solution)
        repair_seeds(search, solution, f"storages under {small:.1%} open")
        if search.best is not None and search.gap_points <= numbers.near_points:
            _settle_small(search, program, solution, int(small * limit), numbers.settle_share * seconds)


def _settle_small(search: Search, program: CutProgram, solution: CutSolution, small_bytes: int, seconds: float) -> None:
    """What is large stays as the solution has it, what is small is decided exactly; for a little less where that holds a little too much."""
    limit, share, large = search.problem.limit_bytes, 1.0, program.model.arrays.size >= small_bytes
    low, high = np.zeros(program.num_variables), program.most.copy()
    for numbers, kept in zip(program.keep, solution.keep, strict=True):
        fixed = large & (numbers >= 0)
        low[numbers[fixed]] = high[numbers[fixed]] = np.round(kept[fixed])
    for _ in range(search.settings.exact.settle_tries):
        if search.done or search.nearly_closed:
            break
        settled = program.solve_whole(int(limit * share), time_limit_s=seconds, low=low, high=high)
        if settled is None:
            break
        _, peak = repair_seeds(search, settled, f"storages under {small_bytes / limit:.1%} settled")
        if not 0 < peak / max(limit, 1) - 1 <= search.settings.exact.settle_miss:
            break
        share *= limit / peak


def lengthen(search: Search, chain: CutChain, *, seconds: float) -> None:
    """Raise the bound by the LPs of longer chains yet; cuts that say nothing are left out again, so that the programs stay small."""
    problem, numbers, stop = search.problem, search.settings.exact, search.problem.seconds + seconds
    stale, reached = 0, 0
    while stale < numbers.lp_patience and len(chain.cuts) <= numbers.most_cuts and not search.done and not search.good_enough:
        left = min(stop - problem.seconds, problem.seconds_left)
        program = CutProgram(problem.model, chain.cuts) if left > 0 else None
        if program is None or len(program.rows) > numbers.most_rows:
            break
        solution = program.solve(problem.limit_bytes, time_limit_s=left)
        if solution is None:
            break
        _raise_bound(search, solution)
        problem.tell(search.best_time_ns if search.best is not None else None, search.bound_ns, f"{len(chain.cuts)} cuts")
        played, _ = repair_seeds(search, solution, f"{len(program.cuts)} cuts")
        gained = solution.bound_ns > reached + numbers.worthwhile * problem.model.base_time_ns
        stale, reached = (0 if gained else stale + 1), max(reached, solution.bound_ns)
        chain.drop_idle(solution.prices, numbers.idle_price)
        if not chain.cut_again(played, problem.limit_bytes):
            break


def _raise_bound(search: Search, solution: CutSolution) -> None:
    if not search.problem.model.partial:
        search.raise_bound(solution.bound_ns)


def _play(search: Search, program: CutProgram, solution: CutSolution, seconds: float) -> Ints:
    """Play and repair a solution, and those for somewhat less than the budget. Returns the given one as it was played."""
    limit, began, name = search.problem.limit_bytes, search.problem.seconds, f"{len(program.cuts)} cuts"
    played, peak = repair_seeds(search, solution, name)
    share = 1.0
    while 0 < peak / max(limit, 1) - 1 <= search.settings.exact.small_miss and share > 0.9 and search.problem.seconds - began < seconds:
        share *= 0.9998 * limit / peak
        tighter = program.solve_whole(int(limit * share), time_limit_s=0.5 * seconds)
        if tighter is None or search.nearly_closed:
            break
        _, peak = repair_seeds(search, tighter, f"{name} at {share:.1%}")
    for share in search.settings.exact.shares:
        if search.nearly_closed or search.problem.seconds - began > seconds:
            break
        rounded = program.solve(int(limit * share), time_limit_s=seconds)
        if rounded is not None:
            repair_seeds(search, rounded, f"{name} at {share:.0%}")
    return played


def repair_seeds(search: Search, solution: CutSolution, note: str) -> tuple[Ints, int]:
    """Repair each order of the solution; returns the one with the least peak as it was before, with that peak."""
    best: tuple[int, Ints] | None = None
    for seed in seeds_from(search.problem.model, solution, search.rank):
        peak, _ = peak_and_time(search.problem.model.arrays, seed.sequence)
        if peak != INVALID and (best is None or peak < best[0]):
            best = (peak, seed.sequence)
        search.repair(seed.sequence, seed.makers, note)
    return (np.array(search.problem.model.agenda, np.int64), 2**62) if best is None else (best[1], best[0])


@dataclass(slots=True, init=False)
class CutChain:
    """Storages every plan makes, each impossible before the one before it."""

    model: Model
    cuts: tuple[int, ...]
    required: set[int]
    able: dict[int, Flags]
    idle: set[int]  # cuts that were in the chain and said nothing

    def __init__(self, model: Model, first: int | None = None) -> None:
        self.model, self.cuts = model, () if first is None else (first,)
        self.required = find_required(model)
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

    def drop_idle(self, prices: tuple[float, ...], least: float) -> None:
        """Leave out the cuts at which the budget costs nothing: the others' bound stands without them."""
        useful = tuple(cut for cut, price in zip(self.cuts, prices, strict=True) if price > least)
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
            self.able[earlier] = find_runnable_without(self.model, earlier)
        return not self.able[earlier][list(self.model.producers[later])].any()
