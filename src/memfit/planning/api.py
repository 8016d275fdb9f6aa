"""The planners by name, and the functions through which every plan leaves this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module

from memfit.core.budget import Budget
from memfit.core.costs import Costs, check_sums, uniform_costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome
from memfit.offsets.from_schedule import with_layout
from memfit.planning.problem import Listener, Planner, Problem

PLANNERS = {
    "auto": "memfit.planning.search.auto:Portfolio",
    "cut_lp": "memfit.planning.cuts.planner:CutPlanner",
    "offload": "memfit.planning.offload.planner:Offloading",
    "keep_all": "memfit.planning.baselines.keep_all:KeepAll",
    "sqrt_segments": "memfit.planning.baselines.sqrt_segments:SqrtSegments",
    "drop_cheap": "memfit.planning.baselines.drop_cheap:DropCheap",
    "greedy": "memfit.planning.baselines.greedy:Greedy",
    "chain_dp": "memfit.planning.baselines.chain_dp:ChainDp",
    "checkmate": "memfit.planning.baselines.checkmate:Checkmate",
    "checkmate_rounding": "memfit.planning.baselines.checkmate:CheckmateRounding",
    "monet": "memfit.planning.baselines.monet:Monet",
    "cp_sat": "memfit.planning.baselines.cp_sat:CpSat",
}
"""Name -> file and class; the file is imported when the name is asked for."""


def find_planner(planner: str | Planner) -> Planner:
    """A planner by name (`PLANNERS` lists them), or the object itself."""
    if not isinstance(planner, str):
        return planner
    if planner not in PLANNERS:
        raise BadInput(f"unknown planner {planner[:40]!r}: known are {', '.join(PLANNERS)}.")
    module, name = PLANNERS[planner].split(":")
    found: Planner = getattr(import_module(module), name)()
    return found


def plan(
    graph: Graph,
    costs: Costs | None = None,
    budget: Budget | int | str | None = None,
    *,
    planner: str | Planner = "auto",
    time_limit_s: float = 30.0,
    progress: Listener | None = None,
) -> Outcome:
    """Plan what to keep and what to recompute so that the step stays inside `budget`, as fast as can be.

    Without costs every op takes one nanosecond; without a budget anything fits. Every plan has been judged by
    `core.simulate` on the full graph and brings a layout, judged too. `outcome.require_plan()` gives the plan or raises
    what stands in its way.
    """
    if not time_limit_s >= 0:
        raise BadInput(f"a time limit of {time_limit_s} s is not a number of seconds: give 0 or more.")
    limits = Budget() if budget is None else budget if isinstance(budget, Budget) else Budget.parse(budget)
    costs = costs or uniform_costs(graph)
    check_sums(graph, costs)
    problem = Problem(graph=graph, costs=costs, budget=limits, time_limit_s=time_limit_s, progress=progress)
    outcome = find_planner(planner).plan(problem)
    if outcome.plan is None:
        return outcome
    return replace(outcome, plan=with_layout(graph, outcome.plan, problem.costs))


def frontier(
    graph: Graph,
    costs: Costs | None = None,
    *,
    budgets: Sequence[int] = (),
    num_points: int = 12,
    time_limit_s: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[Budget, Outcome], ...]:
    """(budget, outcome) pairs by rising budget, from the proven minimum to keep-all unless `budgets` are given.

    `time_limit_s` is for all points together; `progress` hears how many of them are done.
    """
    from memfit.planning.frontier.search import trace_frontier

    return trace_frontier(graph, costs or uniform_costs(graph), budgets, num_points, time_limit_s, progress)
