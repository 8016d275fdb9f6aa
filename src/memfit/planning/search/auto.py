"""`planner="auto"`: the cut LP first, an answer within a second or two, then improvement until the gap is small or time is up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from memfit.core.outcome import Outcome, Status
from memfit.planning.annealing.runs import explore_annealed
from memfit.planning.baselines.chain_dp import ChainDp
from memfit.planning.baselines.drop_cheap import DropCheap
from memfit.planning.baselines.greedy import Greedy
from memfit.planning.baselines.sqrt_segments import SqrtSegments
from memfit.planning.cuts.infeasibility import explore_dead_ends
from memfit.planning.cuts.planner import (
    LARGE,
    explore_calm,
    explore_chains,
    explore_cuts,
    explore_refined,
    explore_segments,
    explore_simple,
    explore_wide,
    outcome_of,
    wide_bound_ns,
)
from memfit.planning.cuts.refine import lengthen
from memfit.planning.cuts.window_milp import explore_windows
from memfit.planning.jit.warm_up import with_kernels
from memfit.planning.model.precedence import movable_fraction, precedence
from memfit.planning.outcome import judged
from memfit.planning.problem import Planner, Problem
from memfit.planning.search.improve import improve_until
from memfit.planning.search.state import Search

_PLAIN_SHARES = ((0.005, 0.2), (0.002, 0.5), (0.0, 0.85))
"""Share of the time for the step without its operator variants, where it has any: by how much lower, in parts of the step's time, the
bound with variants is."""
_AHEAD = 0.002
"""How much faster, in parts of the step's time, the first plan with variants must be for the one without to be left alone."""
_MOSTLY = 0.5
"""Share from which on what comes after the plain step's plan need not be thorough."""
_FINISH_SHARE = 0.05
"""Share of the time in which a plan whose gap is small enough may still become better."""
_WIDE_SHARE, _WINDOW_SHARE = 0.15, 0.12
"""Shares of the time for chains of cuts at wide ops, and for exact programs over parts of a plan."""
_AMPLE_S = 15.0
"""Time limit from which on there is time for a better bound where a chain of cuts at wide ops has given one."""
_EARLY_SHARE, _FAR_POINTS = 0.12, 1.0
"""With little time, the share of it for a search before cuts are refined, and the gap from which on."""
_HUGE = 30_000
"""Forms from which on nothing is annealed: a run would not get round to every op."""
_LOOSE = 0.8
"""Share of movable ops from which on another order is the first thing to try. Where it then holds less (`Search.rank`) order and recomputation
are searched together: training steps, whose backward follows their forward, can have as many movable ops, but no other order holds less."""
_CUT_SHARE, _PROOF_SHARE, _ANNEAL_SHARE = 0.05, 0.03, 0.9
"""Shares of the time, for an irregular graph, of the first cut's seeds, of a proof that there is no plan where they give none, and of annealing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """`enough_points`: the gap to the proven bound, in points of the plain step's time, at which the search stops.

    `patience`: the share of the time spent without a worthwhile gain at which it stops too; None searches on.
    `reorder` and `max_runs` (how often one op may run) take abilities away, to see what they are worth; the bound stays that of all plans.
    """

    name: str = "auto"
    enough_points: float = 0.3
    seed: int = 0
    patience: float | None = None
    reorder: bool = True
    max_runs: int | None = None

    def plan(self, problem: Problem) -> Outcome:
        whole = judged(problem, planner=self.name, sequence=problem.model.agenda)
        if whole.status is Status.OPTIMAL:  # room for everything: no kernel is compiled for that
            problem.tell(whole.require_plan().timeline.time_ns, whole.lower_bound_ns, "keep all")
            return whole
        problem = with_kernels(problem)
        search = Search(problem, enough_points=self.enough_points, max_runs=self.max_runs)
        try:
            search.offer(np.array(problem.model.agenda, np.int64), "keep all")
            if self.reorder and (problem.model.num_forms >= LARGE or movable_fraction(precedence(problem.model)) > _LOOSE):
                explore_calm(search)
            if search.rank is not None and problem.model.num_forms < _HUGE and self.max_runs is None:
                self._explore_irregular(search)
            else:
                self._explore_regular(search)
        except KeyboardInterrupt:
            problem.tell(search.best_time_ns if search.best is not None else None, search.bound_ns, "stopped: the best plan so far is kept")
        outcome = outcome_of(search, self.name)
        return _by_simpler_means(problem, outcome) if outcome.status is Status.UNKNOWN and self.max_runs is None else outcome

    def _explore_irregular(self, search: Search) -> None:
        """Order and recomputation together, where the order alone does much; the bound last."""
        search.problem = with_kernels(search.problem, ("annealing", "beam"))
        limit_s = search.problem.time_limit_s
        large = search.problem.model.num_forms >= LARGE
        if not large:
            explore_cuts(search, max_cuts=1, seconds=_CUT_SHARE * limit_s)
            explore_dead_ends(search, seconds=_PROOF_SHARE * limit_s)
        explore_annealed(search, seconds=_ANNEAL_SHARE * limit_s, seed=self.seed)
        left_s = _ANNEAL_SHARE * limit_s - search.problem.seconds  # where annealing gave up
        if search.best is not None and left_s > 0:
            improve_until(search, seconds=left_s, seed=self.seed)
        chain = None if large else explore_refined(search, seconds=0.3 * max(search.problem.seconds_left, 0.0))
        if chain is not None:
            lengthen(search, chain, seconds=search.problem.seconds_left)

    def _explore_regular(self, search: Search) -> None:
        """Cuts, then everything that can come of them."""
        problem, limit_s = search.problem, search.problem.time_limit_s
        explore_cuts(search, max_cuts=1, seconds=max(2.0, (0.1 if problem.model.num_forms < LARGE else 0.5) * limit_s))
        hurried = explore_wide(search, seconds=_WIDE_SHARE * limit_s) and limit_s < _AMPLE_S
        variants = any(op.variants for op in problem.graph.ops) and not search.done and not search.nearly_closed
        plain = variants and self._explore_plain(search) >= _MOSTLY
        if self.reorder and (search.bound_ns <= search.floor.time_ns or search.best is None):
            explore_calm(search)  # no cut says that anything must be made twice: it may be a matter of order
        if not plain or search.best is None:  # what these give came with the plain plan
            explore_chains(search, seconds=max(1.0, (0.1 if search.best is None else 0.05) * limit_s))
            explore_simple(search)
        if self.reorder and search.best is None and not search.done and problem.model.num_forms < LARGE:
            explore_dead_ends(search, seconds=_PROOF_SHARE * limit_s)
            search.problem = problem = with_kernels(problem, ("annealing", "beam"))
            explore_annealed(search, seconds=0.1 * limit_s, seed=self.seed)
        if limit_s < _AMPLE_S and not search.done and not search.good_enough and (search.best is None or search.gap_points > _FAR_POINTS):
            improve_until(search, seconds=_EARLY_SHARE * limit_s, seed=self.seed + 50)  # what a search gains it gains at once
        chain = None if hurried else explore_refined(search, seconds=0.2 * limit_s)
        if search.good_enough:
            improve_until(search, seconds=_FINISH_SHARE * limit_s, seed=self.seed, finish=True)
        elif not search.done:
            if not plain:
                explore_segments(search)
            improve_until(search, seconds=0.2 * limit_s, seed=self.seed, patience=self.patience)
            if not search.good_enough and problem.model.num_forms < LARGE:
                explore_windows(search, seconds=_WINDOW_SHARE * limit_s, seed=self.seed)
        if chain is not None:
            lengthen(search, chain, seconds=(0.15 if plain else 0.35) * limit_s)
        elif not hurried:  # too large for chains of cuts
            explore_cuts(search, max_cuts=12, first=1, seconds=max(1.0, 0.6 * limit_s))
        improve_until(search, seed=self.seed + 100, patience=self.patience)

    def _explore_plain(self, search: Search) -> float:
        """The plan without operator variants as a seed: with more to choose from a plan is never slower than without.

        Returns the share of the time it was given: none where its bound says that it is slower than what is known, or its first plan does.
        """
        problem = search.problem
        graph = replace(problem.graph, ops=tuple(replace(op, variants=()) for op in problem.graph.ops), digest="")
        none: tuple[tuple[int, ...], ...] = ((),) * len(graph.ops)
        costs = replace(problem.costs, variant_time_ns=none, variant_workspace_bytes=none, graph_digest=graph.digest)
        plain = Problem(graph=graph, costs=costs, budget=problem.budget)
        bound_ns = wide_bound_ns(plain)
        if bound_ns is None or (search.best is not None and (bound_ns >= search.best_time_ns or _ahead(search, plain))):
            return 0.0
        saved = (bound_ns - (wide_bound_ns(problem) or 0)) / max(problem.model.base_time_ns, 1)
        share = next(share for least, share in _PLAIN_SHARES if saved >= least or least == 0.0)
        seconds = share * max(problem.seconds_left, 0.0)
        found = replace(self, patience=None).plan(replace(plain, time_limit_s=seconds, started_s=perf_counter()))
        if found.plan is not None:
            number = {form: f for f, form in enumerate(problem.model.forms)}
            forms = [number[c.op, c.variant] for c in found.plan.schedule.computes if (c.op, c.variant) in number]
            search.mend(np.array(forms, np.int64), search.makers, "without variants")
        return share


def _ahead(search: Search, plain: Problem) -> bool:
    """Whether the first plan with variants is clearly faster than the first one without."""
    other = Search(replace(plain, time_limit_s=max(0.1 * search.problem.seconds_left, 0.0), started_s=perf_counter()))
    explore_cuts(other, max_cuts=1)
    return other.best is None or other.best_time_ns > search.best_time_ns + _AHEAD * search.problem.model.base_time_ns


def _by_simpler_means(problem: Problem, outcome: Outcome) -> Outcome:
    """Where the search found nothing and proved nothing, a plan by one of the simple planners, if one has it, under the search's bound."""
    simple: tuple[Planner, ...] = (Greedy(), DropCheap(), ChainDp(), SqrtSegments())
    for planner in simple:
        found = planner.plan(problem)
        if found.plan is not None:
            bound = max(outcome.lower_bound_ns, found.lower_bound_ns)
            gap = (found.plan.timeline.time_ns - bound) / bound if bound else None
            floor = max(outcome.lower_bound_bytes, found.lower_bound_bytes)
            return replace(found, lower_bound_ns=bound, lower_bound_bytes=floor, gap_fraction=gap, seconds=problem.seconds)
    return outcome
