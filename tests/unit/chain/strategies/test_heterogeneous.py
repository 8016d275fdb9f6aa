from __future__ import annotations

import heapq
import random

import pytest

from memfit.chain import Stage, plan_heterogeneous
from memfit.chain.strategies.heterogeneous import minimum_bytes, stage_costs, stage_graph
from memfit.core import BadInput, InfeasibleBudget, NoPlanFound, Status


def random_stages(rng: random.Random, most: int) -> tuple[Stage, ...]:
    made = []
    for _ in range(rng.randint(1, most)):
        output = rng.randint(0, 6)
        made.append(
            Stage(
                forward_s=rng.randint(0, 5),
                backward_s=rng.randint(0, 9),
                output_bytes=output,
                saved_bytes=output + rng.randint(0, 8),
                gradient_bytes=rng.choice([None, rng.randint(0, 6)]),
                forward_temporary_bytes=rng.randint(0, 3),
                backward_temporary_bytes=rng.randint(0, 3),
            )
        )
    return tuple(made)


def cheapest(stages: tuple[Stage, ...], input_bytes: int, budget: int) -> int | None:
    """Dijkstra over the core graph's own ops and storages: any order, any drops, persistent or not."""
    graph = stage_graph(stages, input_bytes)
    costs = stage_costs(stages, graph)
    size = [s.size_bytes for s in graph.storages]
    start = frozenset(graph.sources)
    best, heap, tick = {start: 0}, [(0, 0, start)], 0
    while heap:
        distance, _, held = heapq.heappop(heap)
        if distance > best[held]:
            continue
        if set(graph.results) <= held:
            return distance
        used = sum(size[s] for s in held)
        after = [(0, held - {s}) for s in held if s != 0]
        for op in graph.ops:
            for variant, form in enumerate(op.forms):
                out = form.outputs[0]
                if set(form.inputs) <= held and out not in held and used + size[out] + costs.workspace(op.id, variant) <= budget:
                    after.append((costs.time_ns(op.id, variant), held | {out}))
        for cost, node in after:
            if distance + cost < best.get(node, 10**18):
                best[node] = distance + cost
                tick += 1
                heapq.heappush(heap, (distance + cost, tick, node))
    return None


def persistent(stages: tuple[Stage, ...], input_bytes: int, budget: int) -> float:
    """The recurrence written out plainly and exactly, byte by byte."""
    inputs = [input_bytes, *(x.output_bytes for x in stages)]
    slopes = [input_bytes, *(x.output_bytes if x.gradient_bytes is None else x.gradient_bytes for x in stages)]

    def solve(m: int, s: int, t: int) -> float:
        x = stages[s]
        fits = x.saved_bytes + slopes[t + 1] + x.forward_temporary_bytes <= m
        fits &= x.saved_bytes + slopes[s] + slopes[s + 1] + x.backward_temporary_bytes <= m
        here = x.forward_s + x.backward_s if fits else float("inf")
        if s == t:
            return here
        options = [here + solve(m - x.saved_bytes, s + 1, t) if fits else here]
        for j in range(s + 1, t + 1):
            peak = max((inputs[i] if i > s else 0) + inputs[i + 1] + stages[i].forward_temporary_bytes for i in range(s, j))
            if peak + slopes[t + 1] <= m:
                options.append(sum(y.forward_s for y in stages[s:j]) + solve(m - inputs[j], j, t) + solve(m, s, j - 1))
        return min(options)

    return solve(budget - input_bytes, 0, len(stages) - 1)


def test_equals_the_recurrence_is_judged_and_bounded_by_exhaustive_search() -> None:
    rng = random.Random(2)
    solved = equal = 0
    for _ in range(220):
        stages, budget, given = random_stages(rng, 4), rng.randint(10, 45), rng.randint(0, 5)
        truth = persistent(stages, given, budget)
        try:
            plan = plan_heterogeneous(stages, budget=budget, input_bytes=given)
        except (InfeasibleBudget, NoPlanFound) as error:
            assert truth == float("inf")
            if isinstance(error, InfeasibleBudget):
                assert cheapest(stages, given, budget) is None
            continue
        assert plan.cost_s == truth
        timeline = plan.judge()
        assert timeline.peak_bytes <= budget
        assert timeline.serial_time_ns == plan.cost_s * 10**9
        best = cheapest(stages, given, budget)
        assert best is not None
        assert plan.lower_bound_s * 10**9 <= best <= plan.cost_s * 10**9
        solved += 1
        equal += best == plan.cost_s * 10**9
    assert solved > 100
    assert equal > 0.9 * solved  # persistent schedules are seldom beaten


def test_more_memory_is_never_slower() -> None:
    stages = random_stages(random.Random(7), 12) + random_stages(random.Random(8), 12)
    least = minimum_bytes(stages, 3)
    costs = []
    for budget in range(least, least + 150, 10):
        try:
            costs.append(plan_heterogeneous(stages, budget=budget, input_bytes=3).cost_s)
        except NoPlanFound:
            costs.append(float("inf"))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == sum(x.forward_s + x.backward_s for x in stages)


def test_large_sizes_on_the_grid_stay_inside() -> None:
    stages = tuple(Stage(forward_s=1 + i % 3, backward_s=2, output_bytes=10**6 + i, saved_bytes=4 * 10**6 + 7 * i) for i in range(30))
    plan = plan_heterogeneous(stages, budget="40MB", input_bytes=10**6)
    assert plan.status is Status.FEASIBLE
    assert plan.judge().peak_bytes <= 40 * 10**6


def test_empty_and_bad_chains() -> None:
    assert plan_heterogeneous((), budget="1kB", input_bytes=5).cost_s == 0
    with pytest.raises(BadInput):
        Stage(forward_s=1, backward_s=1, output_bytes=5, saved_bytes=4)
    with pytest.raises(BadInput):
        Stage(forward_s=-1, backward_s=1, output_bytes=5, saved_bytes=5)
    with pytest.raises(InfeasibleBudget, match="proven minimum"):
        plan_heterogeneous((Stage(forward_s=1, backward_s=1, output_bytes=5, saved_bytes=5),), budget=10, input_bytes=5)
    with pytest.raises(NoPlanFound, match="additions"):
        plan_heterogeneous((Stage(forward_s=1, backward_s=1, output_bytes=5, saved_bytes=5),) * 900, budget=10**6, input_bytes=5)
