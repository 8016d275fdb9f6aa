"""The plan without operator variants as a seed: with more to choose from a plan is never slower than without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from memfit.planning.cuts.planner import try_cuts
from memfit.planning.cuts.wide_ops import bound_at_wide_ops
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutVariants:
    """Plans the step without its variants, for the longer the less the bound says that these save; not at all where it cannot win."""

    name: str = "without variants"

    def applies(self, search: Search) -> bool:
        variants = search.planner is not None and any(op.variants for op in search.problem.graph.ops)
        return variants and not search.done and not search.nearly_closed

    def run(self, search: Search, seconds: float) -> None:
        assert search.planner is not None
        problem, settings = search.problem, search.settings
        plain = drop_variants(problem)
        bound_ns = bound_at_wide_ops(plain, settings)
        if bound_ns is None or (search.best is not None and (bound_ns >= search.best_time_ns or _is_ahead(search, plain))):
            return
        saved = (bound_ns - (bound_at_wide_ops(problem, settings) or 0)) / max(problem.model.base_time_ns, 1)
        share = next(share for least, share in settings.variants.shares if saved >= least or least == 0.0)
        limit_s = share * max(problem.seconds_left, 0.0)
        found = search.planner.plan(replace(plain, time_limit_s=limit_s, started_s=perf_counter()))
        if found.plan is not None:
            number = {form: f for f, form in enumerate(problem.model.forms)}
            forms = [number[c.op, c.variant] for c in found.plan.schedule.computes if (c.op, c.variant) in number]
            search.repair(np.array(forms, np.int64), search.makers, self.name, seconds=settings.repair.seconds)
        search.began_without_variants = share >= settings.variants.mostly_share


def drop_variants(problem: Problem) -> Problem:
    """The same step, each op only as it is written."""
    graph = replace(problem.graph, ops=tuple(replace(op, variants=()) for op in problem.graph.ops), digest="")
    none: tuple[tuple[int, ...], ...] = ((),) * len(graph.ops)
    costs = replace(problem.costs, variant_time_ns=none, variant_workspace_bytes=none, graph_digest=graph.digest)
    return Problem(graph=graph, costs=costs, budget=problem.budget)


def _is_ahead(search: Search, plain: Problem) -> bool:
    """Whether the first plan with variants is clearly faster than the first one without."""
    numbers, seconds_left = search.settings.variants, search.problem.seconds_left
    other = Search(replace(plain, time_limit_s=max(numbers.first_share * seconds_left, 0.0), started_s=perf_counter()), search.settings)
    try_cuts(other, max_cuts=1)
    return other.best is None or other.best_time_ns > search.best_time_ns + numbers.ahead * search.problem.model.base_time_ns
