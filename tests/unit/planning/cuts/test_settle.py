"""Small storages, decided exactly where the large ones are settled: never slower than rounding them, and now and then faster."""

from __future__ import annotations

from random import Random

from memfit.capture.node_link import parse_node_link
from memfit.core.budget import Budget
from memfit.planning.cuts.near_peak import first_program
from memfit.planning.cuts.refine import _settle_small, repair_seeds
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search

_SMALL_BYTES = 20


def _problem(seed: int) -> Problem:
    """Values of different sizes that are read before and after a large one: which are kept meanwhile is a knapsack."""
    rng, num = Random(seed), 40
    sizes = [rng.randint(40, 80) if i < 4 else rng.randint(5, 19) for i in range(num)]
    nodes = [{"id": i, "duration": 20 * size + rng.randint(0, 40), "out_cost": size} for i, size in enumerate(sizes)]
    nodes += [{"id": num + i, "duration": 1, "out_cost": 1} for i in range(num)]
    middle, end = 2 * num, 3 * num + 1
    nodes.append({"id": middle, "duration": 1, "out_cost": 200})
    nodes += [{"id": middle + 1 + i, "duration": 1, "out_cost": 1} for i in range(num)]
    nodes.append({"id": end, "duration": 1, "out_cost": 1})
    links = [(i, num + i) for i in range(num)] + [(num + i, middle) for i in range(num)]
    links += [link for i in range(num) for link in ((i, middle + 1 + i), (middle, middle + 1 + i), (middle + 1 + i, end))]
    graph, costs = parse_node_link({"nodes": nodes, "links": [{"source": a, "target": b} for a, b in links]})
    return Problem(graph=graph, costs=costs, budget=Budget(device_bytes=230 + int(0.6 * sum(sizes))))


def test_small_storages_are_settled_where_large_ones_are() -> None:
    faster = 0
    for seed in range(16):
        times = []
        for settle in (False, True):
            search = Search(_problem(seed), enough_points=0.0)
            limit, program = search.problem.limit_bytes, first_program(search.problem.model)
            assert program is not None
            solution = program.solve_whole(limit, time_limit_s=5.0, small_bytes=_SMALL_BYTES)
            assert solution is not None
            search.raise_bound(solution.bound_ns)
            repair_seeds(search, solution, "open")
            if settle:
                _settle_small(search, program, solution, _SMALL_BYTES, 5.0)
            assert search.best is not None, seed
            assert search.best_time_ns >= search.bound_ns, seed
            times.append(search.best_time_ns)
        assert times[1] <= times[0], seed
        faster += times[1] < times[0]
    assert faster >= 2
