"""Planners against exhaustive search: no plan is better than optimal, no bound is above it, no proof is false."""

from __future__ import annotations

from random import Random

import pytest
from tests.oracle.best_plan import best_time_ns
from tests.strategies import PLAIN, Shape, random_costs, random_graph, random_training_graph

from memfit.core.budget import Budget
from memfit.core.outcome import Status
from memfit.planning import plan
from memfit.planning.cuts.program import CutProgram
from memfit.planning.cuts.refine import CutChain
from memfit.planning.model.lower_bounds import find_required
from memfit.planning.problem import Problem

SMALL_FULL = Shape(max_ops=5, max_size_bytes=20, alternatives=True)
INPLACE = Shape(max_ops=6, max_size_bytes=20, views=False, once_only=False, alternatives=True)
VARIANTS = Shape(max_ops=6, max_size_bytes=20, views=False, inplace=False, once_only=False, alternatives=True)
SMALL_PLAIN = Shape(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__ if name != "max_ops"}, max_ops=7)


def _check(seed: int, shape: Shape | None, planner: str) -> tuple[bool, bool]:
    """Whether a plan was found, and whether it was the best one."""
    rng = Random(seed)
    graph = random_graph(rng, shape) if shape else random_training_graph(rng, max_layers=3)
    costs = random_costs(rng, graph, max_levels=0)
    whole = plan(graph, costs, planner="keep_all")
    if whole.plan is None:
        return False, False
    budget = int(whole.plan.timeline.peak_bytes * rng.uniform(0.85, 1.0))
    outcome = plan(graph, costs, budget, planner=planner, time_limit_s=0.5)
    try:
        best = best_time_ns(graph, costs, budget, max_states=30_000)
    except RuntimeError:
        return False, False
    if outcome.status is Status.INFEASIBLE:
        assert best is None, f"seed {seed}: proven infeasible, but there is a plan of {best} ns"
        return False, False
    if best is None:
        assert outcome.plan is None, f"seed {seed}: a plan where there is none"
        return False, False
    assert outcome.lower_bound_ns <= best, f"seed {seed}: bound {outcome.lower_bound_ns} above the optimum {best}"
    if outcome.plan is None:
        return False, False
    found = outcome.plan.timeline.time_ns
    assert found >= best, f"seed {seed}: {found} ns is faster than the best plan, {best} ns"
    if outcome.status is Status.OPTIMAL:
        assert found == best, f"seed {seed}: called optimal, but {best} < {found}"
    return True, found == best


@pytest.mark.parametrize(
    ("shape", "least"), [(None, 0.9), (SMALL_PLAIN, 0.6), (VARIANTS, 0.6), (SMALL_FULL, 0.5)], ids=["training", "plain", "variants", "full"]
)
def test_cut_lp_is_right_on_small_graphs(shape: Shape | None, least: float) -> None:
    results = [_check(seed, shape, "cut_lp") for seed in range(100)]
    found = [exact for ok, exact in results if ok]
    assert len(found) >= 5
    assert sum(found) >= least * len(found), f"only {sum(found)} of {len(found)} plans are the best ones"


@pytest.mark.parametrize("shape", [None, SMALL_PLAIN, VARIANTS, SMALL_FULL], ids=["training", "plain", "variants", "full"])
def test_auto_is_right_on_small_graphs(shape: Shape | None) -> None:
    """With whole cuts, chains of them, other orders and local search: bounds from branch and bound must hold too."""
    results = [_check(seed, shape, "auto") for seed in range(500, 530)]
    found = [exact for ok, exact in results if ok]
    assert len(found) >= 3
    assert sum(found) >= 0.8 * len(found), f"only {sum(found)} of {len(found)} plans are the best ones"


@pytest.mark.parametrize("planner", ["checkmate", "checkmate_rounding", "monet", "cp_sat", "greedy", "sqrt_segments", "drop_cheap"])
def test_baselines_are_never_wrong(planner: str) -> None:
    results = [_check(seed, shape, planner) for seed in range(25) for shape in (None, SMALL_PLAIN)]
    found = [exact for ok, exact in results if ok]
    assert found or planner in ("checkmate_rounding", "drop_cheap")  # weak near the floor, and these graphs are small
    if planner in ("checkmate", "cp_sat"):
        assert sum(found) >= 0.8 * len(found)


def test_chains_of_cuts_bound_every_plan() -> None:
    """Any chain of cuts, with in-place forms and alternative producers, LP and whole: never above the optimum, never without a solution."""
    compared = 0
    for seed in range(150):
        rng = Random(seed)
        graph = random_graph(rng, INPLACE)
        costs = random_costs(rng, graph, max_levels=0)
        whole = plan(graph, costs, planner="keep_all").plan
        if whole is None:
            continue
        budget = int(whole.timeline.peak_bytes * rng.uniform(0.7, 1.0))
        model = Problem(graph=graph, costs=costs, budget=Budget(device_bytes=budget)).model
        required = [s for s in sorted(find_required(model)) if model.producers[s]]
        try:
            best = None if model.partial or not required else best_time_ns(graph, costs, budget, max_states=10_000)
        except RuntimeError:
            continue
        if best is None:
            continue
        rng.shuffle(required)
        chain = CutChain(model, required[0])
        for storage in required[1:4]:
            chain.insert(storage)
        for spans in (True, False):
            program = CutProgram(model, chain.cuts, spans=spans)
            for solution in (program.solve(budget), program.solve_whole(budget, time_limit_s=5)):
                assert solution is not None, f"seed {seed}: nothing through {chain.cuts}, but there is a plan"
                assert solution.bound_ns <= best, f"seed {seed}: bound {solution.bound_ns} above the optimum {best}"
                compared += len(chain.cuts) > 1
    assert compared >= 50
