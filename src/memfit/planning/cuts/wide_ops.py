"""Seeds and bounds from chains of cuts that begin where memory is scarcest: at the peak, and at the ops that need most by themselves.

    plain step      ▂▄▆█▇▅▄▅▆▃       one cut at the peak █ knows nothing of the wide op ▆ near the end, for which
    ops that need most      ▆        room must be left from the peak on

Which forms run at such an op (in place, in parts) is decided together with what is kept for it. Each round plays the answer and
cuts again where it holds too much. Rows that only help a bound are left out, so that branch and bound gets further.
"""

from __future__ import annotations

from memfit.planning.cuts.program import CutProgram
from memfit.planning.cuts.refine import Chain, offer_seeds
from memfit.planning.model.lower_bounds import working_sets
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search

SMALL = 0.002
"""Share of the budget below which it is not decided whether a storage is kept or not: the program may keep half of it."""
_WIDE = 0.4
"""Share of the budget that an op needs by itself to be a cut from the beginning."""
_WIDEST = 4
_ADDED = 2
"""Cuts added in a round."""
_MOST_CUTS = 14
_GAP = 1e-3
_ROUND = 0.4
_LOST = 1.02
"""How much slower than the best plan a program's answer may be: beyond, branch and bound has lost its way."""


def explore_stages(search: Search, chain: Chain, *, seconds: float) -> None:
    """Play longer and longer chains of cuts, beginning with this one."""
    problem, stop = search.problem, search.problem.seconds + seconds
    while len(chain.cuts) <= _MOST_CUTS and not search.done and not search.nearly_closed:
        left = min(stop - problem.seconds, problem.seconds_left)
        if left <= 0:
            break
        program = CutProgram(problem.model, chain.cuts, spans=False)
        small = int(SMALL * problem.limit_bytes)
        solution = program.solve_whole(problem.limit_bytes, time_limit_s=max(_ROUND * left, 0.3), gap=_GAP, small_bytes=small)
        if solution is None:
            break
        if not problem.model.partial:
            search.raise_bound(solution.bound_ns)
        if search.best is not None and solution.time_ns > _LOST * search.best_time_ns:
            break
        played, _ = offer_seeds(search, solution, f"{len(chain.cuts)} cuts at wide ops")
        if not sum(chain.cut_again(played, problem.limit_bytes) for _ in range(_ADDED)):
            break


def widest(problem: Problem, first: int) -> Chain:
    """The chain of `first` and the ops that need most by themselves."""
    chain = Chain(problem.model, first)
    for need, storage in working_sets(problem.model):
        if need < _WIDE * problem.limit_bytes or len(chain.cuts) > _WIDEST:
            break
        chain.insert(storage)
    return chain
