"""Seeds and bounds from chains of cuts that begin where memory is scarcest: at the peak, and at the ops that need most by themselves.

    plain step      ▂▄▆█▇▅▄▅▆▃       one cut at the peak █ knows nothing of the wide op ▆ near the end, for which
    ops that need most      ▆        room must be left from the peak on

Which forms run at such an op (in place, in parts) is decided together with what is kept for it. Each round plays the answer and
cuts again where it holds too much. Rows that only help a bound are left out, so that branch and bound gets further.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planning.cuts.near_peak import cuts_near_peak
from memfit.planning.cuts.program import CutProgram
from memfit.planning.cuts.refine import CutChain, repair_seeds
from memfit.planning.model.lower_bounds import list_working_sets
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search
from memfit.planning.settings import AutoSettings, WideOpSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WideOps:
    """Chains of cuts at the ops that need most, where these say what one cut does not, and the solver is up to the graph."""

    name: str = "wide ops"

    def applies(self, search: Search) -> bool:
        close = search.best is not None and search.gap_points <= search.settings.wide.gap_points
        return not search.done and not close and not search.is_large

    def run(self, search: Search, seconds: float) -> None:
        problem = search.problem
        cut = next(cuts_near_peak(problem.model), None)
        chain = None if cut is None else cut_wide_ops(problem, cut, search.settings.wide)
        if chain is None or len(chain.cuts) == 1:
            return
        first = CutProgram(problem.model, chain.cuts, spans=False).solve(problem.limit_bytes, time_limit_s=max(0.5 * seconds, 0.5))
        gain = 0 if first is None else first.bound_ns - search.bound_ns
        if search.best is None or gain >= search.settings.wide.gain * problem.model.base_time_ns:
            lengthen_at_wide_ops(search, chain, seconds=seconds)
            search.has_wide_chain = True


def lengthen_at_wide_ops(search: Search, chain: CutChain, *, seconds: float) -> None:
    """Play longer and longer chains of cuts, beginning with this one."""
    problem, numbers, stop = search.problem, search.settings.wide, search.problem.seconds + seconds
    while len(chain.cuts) <= numbers.most_cuts and not search.done and not search.nearly_closed:
        left = min(stop - problem.seconds, problem.seconds_left)
        if left <= 0:
            break
        program = CutProgram(problem.model, chain.cuts, spans=False)
        small, round_s = int(numbers.small * problem.limit_bytes), max(numbers.round_share * left, 0.3)
        solution = program.solve_whole(problem.limit_bytes, time_limit_s=round_s, gap=numbers.gap, small_bytes=small)
        if solution is None:
            break
        if not problem.model.partial:
            search.raise_bound(solution.bound_ns)
        if search.best is not None and solution.time_ns > numbers.lost * search.best_time_ns:
            break
        played, _ = repair_seeds(search, solution, f"{len(chain.cuts)} cuts at wide ops")
        if not sum(chain.cut_again(played, problem.limit_bytes) for _ in range(numbers.added)):
            break


def cut_wide_ops(problem: Problem, first: int, numbers: WideOpSettings) -> CutChain:
    """The chain of the cut `first` and of those at the ops that need most by themselves."""
    chain = CutChain(problem.model, first)
    for need, storage in list_working_sets(problem.model):
        if need < numbers.wide * problem.limit_bytes or len(chain.cuts) > numbers.num_wide:
            break
        chain.insert(storage)
    return chain


def bound_at_wide_ops(problem: Problem, settings: AutoSettings) -> int | None:
    """What the LP of such a chain says (of the first cut alone in a large graph); None where nothing fits, 0 where there is no cut."""
    first = next(cuts_near_peak(problem.model), None)
    if first is None:
        return 0
    cuts = (first,) if problem.model.num_forms >= settings.large_forms else cut_wide_ops(problem, first, settings.wide).cuts
    solution = CutProgram(problem.model, cuts, spans=False).solve(problem.limit_bytes, time_limit_s=10.0)
    return None if solution is None else solution.bound_ns
