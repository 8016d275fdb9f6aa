"""`planner="cut_lp"`: bound, proof and seeds from the cut LP; just-in-time builder, greedy repair, deletion polish.

    LP at the peak, at B, 0.97 B, 0.93 B, ...  ->  keep set  ->  just-in-time sequence  ->  repair  ->  polish  ->  best

Solving for somewhat less than the budget leaves room for what the LP does not see: the bytes of recomputation itself.
Further cuts around the peak, and where the best plan so far is tight, raise the bound and give other seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.core.outcome import Outcome
from memfit.core.units import format_bytes
from memfit.planning.baselines.chain_dp import chain_sequences
from memfit.planning.baselines.drop_cheap import DropCheap
from memfit.planning.baselines.greedy import Greedy
from memfit.planning.baselines.sqrt_segments import SqrtSegments, bytes_made, segments_sequence
from memfit.planning.cuts.just_in_time import default_makers, turning_point
from memfit.planning.cuts.milestones import explore_milestones
from memfit.planning.cuts.program import CutProgram
from memfit.planning.cuts.refine import Chain, refine
from memfit.planning.cuts.rounding import seeds_from
from memfit.planning.cuts.wide_ops import explore_stages, widest
from memfit.planning.jit.warm_up import with_kernels
from memfit.planning.model.fast_judge import INVALID, peak_and_time, usage_of
from memfit.planning.model.lower_bounds import required_storages
from memfit.planning.model.precedence import precedence
from memfit.planning.model.reduce import Ints, Model
from memfit.planning.outcome import judged
from memfit.planning.problem import Problem
from memfit.planning.search.reorder import calmed
from memfit.planning.search.state import Search

SHARES = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7, 0.6)
"""Shares of the budget the LP is solved for."""
_HELPS = 0.1
"""Share of what lies between peak and floor that another order must take away to be started from."""
_LOOKED_AT = 8
"""Cuts whose LP is solved before one is chosen to be refined."""
_CLOSE_POINTS = 0.05
"""A gap so small that the first cut will do."""
_WIDE_POINTS = 1.0
"""A gap up to which cuts are best added one by one, each solved exactly."""
_WIDE_GAIN = 0.002
"""How much more, in parts of the step's time, the LP of a chain of cuts at wide ops must say."""
_GREEDY_SHARE = 0.05
"""Of the time left, for the greedy planner as a seed: in a narrow budget it thrashes, a quarter of the time was spent on that and nothing found."""
LARGE = 3000
"""Forms from which on seeds are found by guessing the share rather than by repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlanner:
    name: str = "cut_lp"
    max_cuts: int = 12

    def plan(self, problem: Problem) -> Outcome:
        search = Search(with_kernels(problem))
        explore_cuts(search, max_cuts=self.max_cuts)
        return outcome_of(search, self.name)


def outcome_of(search: Search, planner: str) -> Outcome:
    return judged(
        search.problem,
        planner=planner,
        sequence=search.best,
        floor=search.floor,
        lower_bound_ns=search.bound_ns,
        proof=search.proof,
        reason="" if search.best is not None else _why_not(search, planner),
    )


def _why_not(search: Search, planner: str) -> str:
    closest = f"the closest plan needs {format_bytes(search.closest_peak_bytes)}" if search.closest is not None else "none came close"
    return (
        f"{planner} found no plan inside {format_bytes(search.problem.limit_bytes)} in {search.problem.seconds:.1f} s and no proof "
        f"that there is none (proven minimum {format_bytes(search.floor.bytes)}; {closest}). Allow more time or a larger budget."
    )


def explore_cuts(search: Search, *, max_cuts: int, first: int = 0, seconds: float = 1e9) -> None:
    """Bounds and seeds from cuts around the peak, `first` of them left out, until the gap is small or the time is up."""
    model, stop = search.problem.model, search.problem.seconds + seconds
    agenda = np.array(model.agenda, np.int64)
    makers = default_makers(model)
    search.offer(agenda, "keep all")
    if search.settled:
        return
    for number, cut in enumerate(cuts_near_peak(model, agenda)):
        late = search.done or search.problem.seconds > stop
        if number >= max_cuts or search.settled or search.good_enough or (number and late):
            break
        if number < first:
            continue
        program = CutProgram(model, (cut,))
        shares = list(SHARES if number == 0 and model.num_forms < LARGE else (1.0, 0.93) if number else (1.0,))
        _seeds_of(search, program, shares, f"cut {number + 1}", stop)
        if number == 0 and search.best is None:
            search.mend(agenda, makers, "repair", seconds=20.0)


def _seeds_of(search: Search, program: CutProgram, shares: list[float], note: str, stop: float) -> None:
    """Solve for each share of the budget, build and mend. The first seed is made whatever the time: late is better than never.

    What the LP does not see (the bytes of recomputation itself) shows in the seed's peak, so the share at which a seed would just
    fit is guessed from it and tried too: for a large graph that is all the repair there is time for.
    """
    model, limit = search.problem.model, search.problem.limit_bytes
    guesses = 4
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
            if peaks[-1] != INVALID and (model.num_forms < LARGE or (peaks[-1] - limit) < 0.01 * limit):
                search.mend(seed.sequence, seed.makers, f"{note} at {share:.0%}", seconds=_patience_s(model))
        peak = min((x for x in peaks if x != INVALID), default=limit)
        fits = peak <= limit
        if search.best is not None and search.gap_points <= 0.02:
            break
        if not fits and guesses and model.num_forms >= LARGE:
            guesses -= 1
            shares.insert(0, share * min(0.995 * limit / peak, 0.99))


def explore_chains(search: Search, *, seconds: float) -> None:
    """Seeds of the first cut that keep milestones of what would come back link by link."""
    if search.done or search.good_enough:
        return
    program = first_program(search.problem.model)
    if program is not None:
        explore_milestones(search, program, seconds=seconds)


def explore_wide(search: Search, *, seconds: float) -> bool:
    """Chains of cuts at the ops that need most, where these say what one cut does not, and the solver is up to the graph; whether so."""
    problem = search.problem
    if search.done or (search.best is not None and search.gap_points <= _WIDE_POINTS):
        return False
    chain = _wide_chain(problem)
    if chain is None or len(chain.cuts) == 1:
        return False
    first = CutProgram(problem.model, chain.cuts, spans=False).solve(problem.limit_bytes, time_limit_s=max(0.5 * seconds, 0.5))
    gain = 0 if first is None else first.bound_ns - search.bound_ns
    if search.best is not None and gain < _WIDE_GAIN * problem.model.base_time_ns:
        return False
    explore_stages(search, chain, seconds=seconds)
    return True


def wide_bound_ns(problem: Problem) -> int | None:
    """What the LP of the first cut and of those at the widest ops says, quickly; None where nothing fits, 0 where there is no cut."""
    chain = _wide_chain(problem)
    program = first_program(problem.model) if chain is None else CutProgram(problem.model, chain.cuts, spans=False)
    if program is None:
        return 0
    solution = program.solve(problem.limit_bytes, time_limit_s=10.0)
    return None if solution is None else solution.bound_ns


def _wide_chain(problem: Problem) -> Chain | None:
    """The first cut and those at the ops that need most; None where the graph is too large for several cuts, or has no cut."""
    first = next(cuts_near_peak(problem.model, np.array(problem.model.agenda, np.int64)), None)
    return None if first is None or problem.model.num_forms >= LARGE else widest(problem, first)


def explore_refined(search: Search, *, seconds: float) -> Chain | None:
    """Chains of cuts solved exactly, for graphs the solver is up to, from the cut whose LP says most; returns the last chain."""
    problem, stop = search.problem, search.problem.seconds + seconds
    if problem.model.num_forms >= LARGE or search.done or search.nearly_closed:
        return None
    bounds: list[tuple[int, int, int]] = []
    for number, cut in enumerate(cuts_near_peak(problem.model, np.array(problem.model.agenda, np.int64))):
        if number >= (1 if search.best is not None and search.gap_points <= _CLOSE_POINTS else _LOOKED_AT) or (
            number and problem.seconds > stop - 0.7 * seconds
        ):
            break
        solution = CutProgram(problem.model, (cut,)).solve(problem.limit_bytes, time_limit_s=max(problem.seconds_left, 0.1))
        if solution is not None:
            bounds.append((solution.bound_ns, -number, cut))
    if not bounds:
        return None
    if not problem.model.partial:
        search.raise_bound(max(bounds)[0])
    return refine(search, max(bounds)[-1], seconds=stop - problem.seconds)


def explore_simple(search: Search) -> None:
    """What the simple planners give, mended and polished: auto is never worse than they are."""
    for planner in (DropCheap(), SqrtSegments(), Greedy(time_share=_GREEDY_SHARE)):
        if search.done or search.good_enough or search.problem.model.num_forms > LARGE:
            break
        sequence = planner.sequence(search.problem)
        if sequence is not None:
            search.mend(sequence, search.makers, planner.name, seconds=_patience_s(search.problem.model))


def explore_calm(search: Search) -> None:
    """The step's own order, calmed for a moment: where that fits nothing is faster, and where it helps other seeds start from it."""
    problem = search.problem
    agenda = np.array(problem.model.agenda, np.int64)
    search.offer(agenda, "keep all")
    if search.settled or search.good_enough or search.rank is not None or not len(agenda):
        return
    peak, _ = peak_and_time(problem.model.arrays, agenda)
    order = calmed(precedence(problem.model), agenda, problem.limit_bytes, seconds=max(0.1, 0.03 * problem.time_limit_s))
    search.offer(order, "another order")
    lower, _ = peak_and_time(problem.model.arrays, order)
    if lower != INVALID and lower < peak - _HELPS * (peak - search.floor.bytes):
        search.rank = np.zeros(problem.model.num_forms, np.int64)
        search.rank[order] = np.arange(len(order))


def explore_segments(search: Search) -> None:
    """Checkpoint segments and the chain's plans as seeds: near the floor they are closer to what is needed than one keep set at the peak."""
    model = search.problem.model
    usage = usage_of(model.arrays, np.array(model.agenda, np.int64))
    turn = turning_point(model, usage)
    weights = bytes_made(model, turn)
    for num_segments in (6, 10, 16, 24, 32, 48):
        if search.done or num_segments > turn:
            break
        sequence = segments_sequence(model, turn, weights, num_segments)
        search.mend(sequence, search.makers, f"{num_segments} segments", seconds=_patience_s(model))
    for share, sequence in chain_sequences(model, search.problem.limit_bytes):
        if search.done:
            break
        search.mend(sequence, search.makers, f"chain at {share:.0%}", seconds=_patience_s(model))


def _patience_s(model: Model) -> float:
    """How long one seed may be repaired, and polished: little for large graphs, whose next seed is likely better."""
    return 20.0 if model.num_forms < LARGE else 3.0


def prove_infeasible(search: Search, program: CutProgram) -> None:
    """Turn an LP without a solution into a sentence with the number, if the number really is above the budget."""
    least = 0 if search.problem.model.partial else program.least_bytes()
    if least > search.problem.limit_bytes:
        where = search.problem.model.describe(search.problem.model.producers[program.cuts[0]][0])
        search.proof = (
            f"{format_bytes(search.problem.limit_bytes)} ({search.problem.limit_bytes} bytes) is below the proven minimum "
            f"{format_bytes(least)} ({least} bytes): when {where} first runs, what it needs and what cannot be made again must coexist."
        )


def first_program(model: Model) -> CutProgram | None:
    """The program of the cut where the plain step holds most; None where there is no cut."""
    cut = next(cuts_near_peak(model, np.array(model.agenda, np.int64)), None)
    return None if cut is None else CutProgram(model, (cut,))


def cuts_near_peak(model: Model, sequence: Ints) -> Iterator[int]:
    """Storages every plan must make, in order of how much is held when `sequence` makes them, no two the same."""
    usage = usage_of(model.arrays, sequence)
    required = required_storages(model)
    seen: set[int] = set()
    for p in np.argsort(-usage, kind="stable"):
        for s in model.outs[sequence[p]]:
            if s in required and s not in seen and model.arrays.size[s] >= 0:
                seen.add(s)
                yield s
                break
