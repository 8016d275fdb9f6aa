"""The oracle itself, held against permutations, against random schedules and against known formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import comb
from random import Random

import pytest
from tests import strategies as some
from tests.oracle.exhaustive import minimum_budget, minimum_peak, minimum_time
from tests.small import chain, graph_of, op

from memfit.core.budget import Budget
from memfit.core.costs import Costs, uniform_costs
from memfit.core.errors import IllegalSchedule, InfeasibleBudget
from memfit.core.graph import Graph, Op, Storage, Tensor, Variant
from memfit.core.schedule import Compute, Free, Schedule, Step
from memfit.core.simulate import simulate


def _freed_early(graph: Graph, order: tuple[int, ...]) -> Schedule:
    """The order with every storage freed after its last reader; storages overwritten in place go by themselves."""
    overwritten = {graph.storage_of(old) for o in graph.ops for _, old in o.inplace_of}
    kept = {graph.storage_of(t) for t in graph.results} | overwritten
    last = {graph.storage_of(t): -1 for t in graph.sources}
    for position, i in enumerate(order):
        for t in (*graph.ops[i].inputs, *graph.ops[i].outputs):
            last[graph.storage_of(t)] = position
    steps: list[Step] = [Free(s) for s, at in last.items() if at == -1 and s not in kept]
    for position, i in enumerate(order):
        steps.append(Compute(i))
        steps += [Free(s) for s, at in last.items() if at == position and s not in kept]
    return Schedule(steps=tuple(steps))


@pytest.mark.parametrize("seed", range(60))
def test_minimum_peak_is_the_best_of_all_permutations(seed: int) -> None:
    rng = Random(seed)
    shape = replace(some.PLAIN, max_ops=5) if seed % 2 else some.Shape(max_ops=5, variants=False)
    graph = some.random_graph(rng, shape)
    costs = some.random_costs(rng, graph)
    peaks = []
    for order in permutations(range(len(graph.ops))):
        try:
            peaks.append(simulate(graph, _freed_early(graph, order), costs).peak_bytes)
        except IllegalSchedule:
            continue
    peak, schedule = minimum_peak(graph, costs)
    assert sorted(s.op for s in schedule.computes) == list(range(len(graph.ops)))
    assert peak == min(peaks)


@pytest.mark.parametrize("seed", range(60))
def test_no_random_schedule_beats_the_oracle(seed: int) -> None:
    rng = Random(1000 + seed)
    graph = some.random_graph(rng, some.Shape(max_ops=5)) if seed % 3 else some.random_training_graph(rng, max_layers=2)
    costs = some.random_costs(rng, graph, max_levels=0)
    least, leanest = minimum_budget(graph, costs)
    assert simulate(graph, leanest, costs, Budget(device_bytes=least)).peak_bytes == least
    best = {}
    for budget in (least, least + 10, least + 40, 10**6):
        best[budget] = minimum_time(graph, costs, budget)[0]
    assert list(best.values()) == sorted(best.values(), reverse=True), "more budget is never slower"
    for _ in range(40):
        seen = simulate(graph, some.random_schedule(rng, graph, costs, max_steps=15), costs)
        assert seen.peak_bytes >= least
        for budget, time_ns in best.items():
            assert seen.peak_bytes > budget or seen.time_ns >= time_ns
    if least:
        with pytest.raises(InfeasibleBudget):
            minimum_time(graph, costs, least - 1)


@pytest.mark.parametrize("seed", range(30))
def test_choices_only_help(seed: int) -> None:
    rng = Random(seed)
    graph = some.random_graph(rng, some.Shape(max_ops=4))
    costs = some.random_costs(rng, graph, max_levels=0)
    once, _ = minimum_peak(graph, costs)
    chosen, _ = minimum_peak(graph, costs, variants=True)
    again, _ = minimum_budget(graph, costs, variants=False)
    free, _ = minimum_budget(graph, costs)
    assert free <= again <= once
    assert free <= chosen <= once
    assert minimum_time(graph, costs, once)[0] <= minimum_time(graph, costs, once, variants=False)[0]


def _revolve_graph(steps: int) -> Graph:
    """A chain to reverse: F_i makes x_{i+1} from x_i (or in its place), B_i reads x_i, last first. Gradients weigh nothing."""
    storages = [Storage(id=i, size_bytes=1) for i in range(steps)]
    storages += [Storage(id=steps + i, size_bytes=0) for i in range(steps)]
    ops = []
    for i in range(steps - 1):
        inplace = Variant(name="in place", inputs=(i,), outputs=(i + 1,), inplace_of=((i + 1, i),))
        ops.append(Op(id=i, name=f"F{i}", inputs=(i,), outputs=(i + 1,), variants=(inplace,)))
    for k, i in enumerate(reversed(range(steps))):
        incoming = (steps + k - 1,) if k else ()
        ops.append(Op(id=len(ops), name=f"B{i}", inputs=(i, *incoming), outputs=(steps + k,)))
    tensors = tuple(Tensor(id=i, storage=i) for i in range(2 * steps))
    return Graph(ops=tuple(ops), tensors=tensors, storages=tuple(storages), sources=(0,), results=(2 * steps - 1,))


def _revolve_forwards(steps: int, slots: int) -> int:
    """t(l, c) = r l - beta(c + 1, r - 1), r least with beta(c, r) >= l (Griewank and Walther 2000)."""
    r = next(r for r in range(steps + 1) if comb(slots + r, slots) >= steps)
    return r * steps - comb(slots + 1 + r - 1, r - 1) if r else 0


@pytest.mark.parametrize("steps", range(1, 7))
def test_revolve_is_found_by_search(steps: int) -> None:
    """c checkpoint slots and a working buffer are c + 1 bytes: the search finds Griewank's number of forward steps."""
    graph = _revolve_graph(steps)
    forwards = [1] * (steps - 1)
    times = (*forwards, *([0] * steps))
    forms = tuple((1,) * len(o.variants) for o in graph.ops)
    costs = Costs(
        op_time_ns=times,
        workspace_bytes=(0,) * len(times),
        variant_time_ns=forms,
        variant_workspace_bytes=tuple((0,) * len(f) for f in forms),
    )
    for slots in range(1, steps + 1):
        assert minimum_time(graph, costs, slots + 1)[0] == _revolve_forwards(steps, slots)


def test_a_chain_needs_two_values_and_a_tree_its_best_order() -> None:
    assert minimum_peak(chain(5))[0] == 20
    # two branches: 0 -> 1 (big, then small 2), 0 -> 3; 4 reads both ends: the big one goes first
    ops = [op(0, [0], [1]), op(1, [1], [2]), op(2, [0], [3]), op(3, [2, 3], [4])]
    assert minimum_peak(graph_of([0, 9, 1, 5, 1], ops, results=[4]))[0] == 10


def test_recomputation_trades_time_for_bytes() -> None:
    """x0 -> a -> b -> c and d reads a and c: keeping a costs 4 bytes beside b and c, making it again 7 ns."""
    ops = [op(0, [0], [1]), op(1, [1], [2]), op(2, [2], [3]), op(3, [1, 3], [4])]
    graph = graph_of([0, 4, 9, 9, 1], ops, results=[4])
    costs = Costs(op_time_ns=(7, 1, 1, 1), workspace_bytes=(0,) * 4)
    assert minimum_time(graph, costs, 22)[0] == 10
    assert minimum_time(graph, costs, 21)[0] == 17
    assert minimum_budget(graph, costs)[0] == 18
    with pytest.raises(InfeasibleBudget, match="at most 17 bytes"):
        minimum_time(graph, costs, 17)


def test_once_only_and_seeded_ops_are_respected() -> None:
    ops = [op(0, [0], [1]), op(1, [1], [2]), op(2, [2], [3]), op(3, [1, 3], [4])]
    graph = graph_of([0, 4, 9, 9, 1], [replace(ops[0], replayable=False), *ops[1:]], results=[4])
    assert minimum_budget(graph)[0] == 22
    drawn = graph_of([0, 1, 9, 1], [op(0, [0], [1], seeded=True), op(1, [0], [2], seeded=True), op(2, [2], [3])], results=[1, 3])
    assert [s.op for s in minimum_time(drawn)[1].computes] == [0, 1, 2]


def test_unlimited_time_is_the_cheapest_way_to_the_results() -> None:
    graph = chain(4)
    assert minimum_time(graph, uniform_costs(graph, time_ns=3)) == (12, Schedule(steps=tuple(Compute(i) for i in range(4))))


def test_large_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 12 ops"):
        minimum_peak(chain(13))
