"""Dead ends against exhaustive search: what is proven impossible is, and where one result is all there is nothing else is left unproven."""

from __future__ import annotations

from random import Random

from tests.oracle.best_plan import best_time_ns
from tests.strategies import PLAIN, Shape, random_costs, random_graph

from memfit.capture.node_link import parse_node_link
from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.outcome import Status
from memfit.planning import plan
from memfit.planning.cuts.infeasibility import go_back
from memfit.planning.model.fast_judge import peak_and_time
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search

SMALL = Shape(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__ if name != "max_ops"}, max_ops=7)
VARIANTS = Shape(max_ops=6, max_size_bytes=20, views=False, inplace=False, once_only=False, alternatives=True)


def _proven(graph: Graph, costs: Costs, budget: int) -> bool | None:
    """Whether dead ends prove it; None where the floor does so already."""
    search = Search(Problem(graph=graph, costs=costs, budget=Budget(device_bytes=budget)))
    if search.proof:
        return None
    go_back(search, seconds=5.0)
    if search.best is not None:
        assert not search.proof
        assert peak_and_time(search.problem.model.arrays, search.best)[0] <= budget
        assert set(search.problem.model.agenda) <= set(map(int, search.best))
    return bool(search.proof)


def test_what_is_proven_is_so() -> None:
    proofs = 0
    for seed in range(300):
        rng = Random(seed)
        graph = random_graph(rng, SMALL if seed % 2 else VARIANTS)
        costs = random_costs(rng, graph, max_levels=0)
        whole = plan(graph, costs, planner="keep_all").plan
        if whole is None:
            continue
        budget = int(whole.timeline.peak_bytes * rng.uniform(0.6, 1.0))
        if _proven(graph, costs, budget):
            proofs += 1
            assert best_time_ns(graph, costs, budget, max_states=10**6) is None, f"seed {seed}: there is a plan"
    assert proofs >= 2


def _one_result(rng: Random, num_nodes: int) -> tuple[Graph, Costs]:
    links = {(rng.randrange(v), v) for v in range(1, num_nodes) for _ in range(2)}
    read = {a for a, _ in links}
    links |= {(v, num_nodes - 1) for v in range(num_nodes - 1) if v not in read}
    nodes = [{"id": v, "duration": 1, "out_cost": rng.randint(1, 9)} for v in range(num_nodes)]
    return parse_node_link({"nodes": nodes, "links": [{"source": a, "target": b} for a, b in sorted(links)]})


def test_where_one_result_needs_everything_the_answer_is_complete() -> None:
    """Both ways: a budget is proven too small exactly where exhaustive search finds no plan, and elsewhere a way back is one."""
    seen = {True: 0, False: 0}
    for seed in range(120):
        graph, costs = _one_result(Random(seed), 9)
        peak = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
        for budget in range(peak // 2, peak):
            proven = _proven(graph, costs, budget)
            if proven is not None:
                try:
                    fits = best_time_ns(graph, costs, budget, max_states=20_000) is not None
                except RuntimeError:
                    continue
                assert proven != fits, f"seed {seed} at {budget}"
                seen[proven] += 1
                break
    assert min(seen.values()) >= 5, seen


def test_a_way_back_from_the_only_result_is_a_plan() -> None:
    found = 0
    for seed in range(40):
        graph, costs = _one_result(Random(seed), 12)
        peak = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
        search = Search(Problem(graph=graph, costs=costs, budget=Budget(device_bytes=int(0.8 * peak))))
        go_back(search, seconds=5.0)
        assert bool(search.proof) != (search.best is not None), seed
        found += search.best is not None
    assert found >= 5


def test_auto_says_so() -> None:
    graph, costs = _one_result(Random(3), 9)
    peak = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
    outcomes = [plan(graph, costs, budget, time_limit_s=0.3) for budget in range(peak // 2, peak)]
    assert {outcome.status for outcome in outcomes} <= {Status.INFEASIBLE, Status.OPTIMAL, Status.FEASIBLE}
