"""Thousands of small trees and graphs: every algorithm that claims the optimum against exhaustive search."""

from __future__ import annotations

import random

import pytest
from tests.oracle.exhaustive_tasks import Plain, all_dags, all_trees, least_io_of_order, least_peak

from memfit.core import InfeasibleBudget, Status
from memfit.tasks import (
    beam_order,
    best_postorder,
    exact_order,
    greedy_order,
    improve_order,
    judge_order,
    judge_spill,
    liu_order,
    minmem_order,
    out_tree_order,
    peak_lower_bound,
    recognize_out_tree,
    recognize_tree,
    schedule,
    series_parallel_order,
    spill_plan,
    task_graph,
)
from memfit.tasks.graph import TaskGraph
from memfit.tasks.sequential.series_parallel import series_parallel_order as sp_order


def _build(plain: Plain) -> TaskGraph:
    return task_graph(
        output_bytes=plain.output,
        memory_bytes=plain.memory,
        edges=[(a, b) for a, b, _ in plain.edges],
        edge_bytes=[own for _, _, own in plain.edges],
    )


def _sizes(rng: random.Random, count: int, top: int) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, rng.randint(0, top), rng.randint(0, top))) for _ in range(count))


def _random_tree(rng: random.Random, size: int) -> Plain:
    edges = tuple((k, rng.randrange(k + 1, size), 0) for k in range(size - 1) if rng.random() < 0.93)
    return Plain(_sizes(rng, size, 12), _sizes(rng, size, 6), edges)


def test_all_trees_of_five_nodes_and_thousands_of_larger_ones() -> None:
    rng = random.Random(5)
    cases = [
        Plain(_sizes(rng, 5, 9), _sizes(rng, 5, 4), tuple((k, up, 0) for k, up in enumerate(parents) if up >= 0))
        for parents in all_trees(5)
    ]
    cases += [_random_tree(rng, rng.randint(1, 8)) for _ in range(1500)]
    for plain in cases:
        graph, best = _build(plain), least_peak(plain)
        tree = recognize_tree(graph)
        assert tree is not None
        for order, peak in (liu_order(tree), minmem_order(tree)):
            assert peak == best == judge_order(graph, order).peak_bytes, plain
        order, peak = best_postorder(tree)
        assert peak == judge_order(graph, order).peak_bytes >= best
        assert peak_lower_bound(graph) <= best


def test_all_dags_of_four_tasks_and_thousands_of_larger_ones() -> None:
    rng = random.Random(7)
    cases = [Plain(_sizes(rng, 4, 9), _sizes(rng, 4, 4), tuple((a, b, 0) for a, b in edges)) for edges in all_dags(4) for _ in range(8)]
    for _ in range(1200):
        size, density = rng.randint(2, 8), rng.choice((0.15, 0.3, 0.5))
        own = rng.random() < 0.3
        edges = tuple((a, b, rng.randint(0, 6) if own else 0) for a in range(size) for b in range(a + 1, size) if rng.random() < density)
        cases.append(Plain(_sizes(rng, size, 12), _sizes(rng, size, 6), edges))
    for number, plain in enumerate(cases):
        graph, best = _build(plain), least_peak(plain)
        found = exact_order(graph)
        assert found.complete
        assert found.order is not None
        assert found.lower_bound_bytes == best == judge_order(graph, found.order).peak_bytes, plain
        assert peak_lower_bound(graph) <= best, plain
        order, peak = greedy_order(graph)
        assert judge_order(graph, order).peak_bytes == peak >= best
        special = series_parallel_order(graph)
        assert special is None or special[1] == best == judge_order(graph, special[0]).peak_bytes, plain
        if number % 5 == 0:
            _check_heuristics(graph, best)


def _check_heuristics(graph: TaskGraph, best: int) -> None:
    beam = beam_order(graph)
    assert beam is not None
    assert judge_order(graph, beam[0]).peak_bytes == beam[1] >= best
    better, peak = improve_order(graph, beam[0], stop_at=best, time_limit_s=0.02)
    assert best <= judge_order(graph, better).peak_bytes == peak <= beam[1]
    outcome = schedule(graph)
    assert outcome.status is Status.OPTIMAL
    assert outcome.peak_bytes == outcome.lower_bound_bytes == best


def test_out_trees_by_reversal_and_series_parallel_graphs() -> None:
    rng = random.Random(11)
    for _ in range(600):
        size = rng.randint(1, 8)
        edges = tuple((rng.randrange(k), k, rng.randint(0, 9)) for k in range(1, size) if rng.random() < 0.93)
        plain = Plain((0,) * size, _sizes(rng, size, 5), edges)
        graph, best = _build(plain), least_peak(plain)
        mirror = recognize_out_tree(graph)
        assert mirror is not None
        order, peak = out_tree_order(mirror)
        assert peak == best == judge_order(graph, order).peak_bytes, plain
    for _ in range(600):
        plain = _random_series_parallel(rng, rng.randint(2, 9))
        graph, best = _build(plain), least_peak(plain)
        found = sp_order(graph)
        assert found is not None, plain
        assert found[1] == best == judge_order(graph, found[0]).peak_bytes, plain


def _random_series_parallel(rng: random.Random, size: int) -> Plain:
    edges = [(0, 1)]
    for task in range(2, size):
        at = rng.randrange(len(edges))
        a, b = edges[at]
        if rng.random() < 0.5:
            edges[at] = (a, task)
        else:
            edges.append((a, task))
        edges.append((task, b))
    last = tuple(rng.randint(0, 6) if t == 1 else 0 for t in range(size))  # the sink's output stays
    return Plain(last, _sizes(rng, size, 5), tuple((a, b, rng.randint(0, 9)) for a, b in edges))


def test_spilling_writes_the_least_for_its_order() -> None:
    rng = random.Random(13)
    checked = 0
    while checked < 250:
        size = rng.randint(2, 6)
        edges = tuple((a, b, 0) for a in range(size) for b in range(a + 1, size) if rng.random() < 0.4)
        plain = Plain(tuple(rng.randint(0, 4) for _ in range(size)), tuple(rng.randint(0, 2) for _ in range(size)), edges)
        graph = _build(plain)
        order = graph.topological_order.tolist()
        memory = int(graph.need_bytes.max()) + rng.randint(0, 2)
        if memory >= judge_order(graph, order).peak_bytes:
            continue
        plan = spill_plan(graph, order, memory)
        assert judge_spill(graph, plan, memory_bytes=memory) == plan.written_bytes
        assert plan.written_bytes == least_io_of_order(plain, order, memory), plain
        whole = spill_plan(graph, order, memory, divisible=False)
        assert judge_spill(graph, whole, memory_bytes=memory) == whole.written_bytes >= plan.written_bytes
        checked += 1


def test_spilling_cannot_help_a_task_that_does_not_fit() -> None:
    graph = task_graph(output_bytes=[5, 5, 1], edges=[(0, 2), (1, 2)])
    with pytest.raises(InfeasibleBudget, match="11 bytes"):
        spill_plan(graph, [0, 1, 2], 10)
