"""`planner="cut_lp"`: bound, proof and seeds from the cut LP; just-in-time builder, greedy repair, repeats dropped.

    LP at the peak, at B, 0.97 B, 0.93 B, ...  ->  keep set  ->  just-in-time sequence  ->  repair  ->  drop repeats  ->  best

Solving for somewhat less than the budget leaves room for what the LP does not see: the bytes of recomputation itself.
Further cuts around the peak, and where the best plan so far is tight, raise the bound and give other seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.outcome import Outcome
from memfit.core.units import format_bytes
from memfit.planning.cuts.just_in_time import default_makers
from memfit.planning.cuts.near_peak import cuts_near_peak
from memfit.planning.cuts.program import CutProgram
from memfit.planning.cuts.rounding import seeds_from
from memfit.planning.jit.warm_up import prepare_kernels
from memfit.planning.model.fast_judge import INVALID, peak_and_time
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlanner:
    name: str = "cut_lp"
    max_cuts: int = 12

    def plan(self, problem: Problem) -> Outcome:
        search = Search(prepare_kernels(problem))
        try_cuts(search, max_cuts=self.max_cuts)
        return judge_search(search, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCut:
    """Bound and seeds from the cut at the peak."""

    name: str = "first cut"
    large: bool = False

    def applies(self, search: Search) -> bool:
        return search.is_large == self.large

    def run(self, search: Search, seconds: float) -> None:
        try_cuts(search, max_cuts=1, seconds=seconds)


def judge_search(search: Search, planner: str) -> Outcome:
    """The outcome of a search: its best sequence, judged, or why there is none."""
    return judge_sequence(
        search.problem,
        planner=planner,
        sequence=search.best,
        floor=search.floor,
        lower_bound_ns=search.bound_ns,
        proof=search.proof,
        reason="" if search.best is not None else _say_why_not(search, planner),
    )


def _say_why_not(search: Search, planner: str) -> str:
    closest = f"the closest plan needs {format_bytes(search.closest_peak_bytes)}" if search.closest is not None else "none came close"
    return (
        f"{planner} found no plan inside {format_bytes(search.problem.limit_bytes)} in {search.problem.seconds:.1f} s and no proof "
        f"that there is none (proven minimum {format_bytes(search.floor.bytes)}; {closest}). Allow more time or a larger budget."
    )


def try_cuts(search: Search, *, max_cuts: int, seconds: float = 1e9) -> None:
    """Bounds and seeds from cuts around the peak, until the gap is small or the time is up."""
    model, stop, numbers = search.problem.model, search.problem.seconds + seconds, search.settings.cuts
    agenda, makers = np.array(model.agenda, np.int64), default_makers(model)
    search.consider(agenda, "keep all")
    if search.settled:
        return
    for number, cut in enumerate(cuts_near_peak(model)):
        late = search.done or search.problem.seconds > stop
        if number >= max_cuts or search.settled or search.good_enough or (number and late):
            break
        shares = numbers.more_shares if number else (1.0,) if search.is_large else numbers.shares
        _try_shares(search, CutProgram(model, (cut,)), list(shares), f"cut {number + 1}", stop)
        if number == 0 and search.best is None:
            search.repair(agenda, makers, "repair", seconds=search.settings.repair.seconds)


def _try_shares(search: Search, program: CutProgram, shares: list[float], note: str, stop: float) -> None:
    """Solve for each share of the budget, build and repair. The first seed is made whatever the time: late is better than never.

    What the LP does not see (the bytes of recomputation itself) shows in the seed's peak, so the share at which a seed would just
    fit is guessed from it and tried too: for a large graph that is all the repair there is time for.
    """
    model, limit, numbers = search.problem.model, search.problem.limit_bytes, search.settings.cuts
    guesses = numbers.guesses
    while shares:
        share = shares.pop(0)
        if search.settled or (share < 1.0 and (search.done or search.problem.seconds > stop)):
            break
        solution = program.solve(int(limit * share), time_limit_s=60.0 if share == 1.0 else max(search.problem.seconds_left, 0.1))
        if solution is None:
            if share == 1.0:
                prove_infeasible(search, program)
            break
        if share == 1.0 and not model.partial:
            search.raise_bound(solution.bound_ns)
        peaks = []
        for seed in seeds_from(model, solution, search.rank):
            peaks.append(peak_and_time(model.arrays, seed.sequence)[0])
            if peaks[-1] != INVALID and (not search.is_large or (peaks[-1] - limit) < numbers.near_miss * limit):
                search.repair(seed.sequence, seed.makers, f"{note} at {share:.0%}")
        peak = min((x for x in peaks if x != INVALID), default=limit)
        if search.best is not None and search.gap_points <= numbers.close_points:
            break
        if peak > limit and guesses and search.is_large:
            guesses -= 1
            shares.insert(0, share * min(numbers.guess * limit / peak, numbers.least_step))


def prove_infeasible(search: Search, program: CutProgram) -> None:
    """Turn an LP without a solution into a sentence with the number, if the number really is above the budget."""
    least = 0 if search.problem.model.partial else program.least_bytes()
    if least > search.problem.limit_bytes:
        where = search.problem.model.describe(search.problem.model.producers[program.cuts[0]][0])
        search.proof = (
            f"{format_bytes(search.problem.limit_bytes)} ({search.problem.limit_bytes} bytes) is below the proven minimum "
            f"{format_bytes(least)} ({least} bytes): when {where} first runs, what it needs and what cannot be made again must coexist."
        )
