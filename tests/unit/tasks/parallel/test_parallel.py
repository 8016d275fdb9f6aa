"""Schedules for P processors: always judged by the event simulation, which shares nothing with those who made them."""

from __future__ import annotations

import random

import pytest

from memfit.core import IllegalSchedule, InfeasibleBudget, Status
from memfit.tasks import (
    Run,
    judge_parallel,
    makespan_lower_bound,
    random_dag,
    random_tree,
    recognize_tree,
    schedule,
    task_graph,
    tree_graph,
)
from memfit.tasks.api import run_parallel
from memfit.tasks.graph import TaskGraph
from memfit.tasks.sequential.choose_algorithm import solve

BOUNDED = ("membooking", "memory-aware", "safebooking")
ON_TREES = ("all-to-all", "proportional", "par-subtrees", "par-inner-first", "par-deepest-first", *BOUNDED)


def _random_graph(rng: random.Random, tree: bool) -> TaskGraph:
    size = rng.randint(1, 30)
    edges = (
        [(k, rng.randrange(k + 1, min(k + 6, size))) for k in range(size - 1) if rng.random() < 0.95]
        if tree
        else [(a, b) for a in range(size) for b in range(a + 1, size) if rng.random() < 2 / size]
    )
    return task_graph(
        output_bytes=[rng.randint(0, 60) for _ in range(size)],
        memory_bytes=[rng.randint(0, 30) for _ in range(size)],
        time=[rng.choice((0, 1, 2.5, rng.random())) for _ in range(size)],
        edges=edges,
    )


@pytest.mark.parametrize("seed", range(24))
def test_every_algorithm_is_legal_and_the_bounded_ones_stay_within_memory(seed: int) -> None:
    rng = random.Random(seed)
    graph = _random_graph(rng, tree=seed % 2 == 0)
    tree, solution = recognize_tree(graph), solve(graph, time_limit_s=0.3)
    for processors in (1, 2, 5):
        for factor in (1.0, 1.2, 2.0):
            memory = int(solution.peak_bytes * factor)
            for name in ON_TREES if tree else ("safebooking", "par-inner-first", "par-deepest-first"):
                try:
                    runs = run_parallel(graph, tree, solution, name, processors, memory)
                except InfeasibleBudget:
                    assert name == "memory-aware"  # ends at the best post-order, which may be above the optimum
                    continue
                profile = judge_parallel(graph, runs, processors=processors, memory_bytes=memory if name in BOUNDED else None)
                assert profile.makespan * processors >= graph.time.sum() * (1 - 1e-9)
                assert profile.peak_bytes >= solution.lower_bound_bytes  # one processor holds least


def test_membooking_and_safebooking_use_memory_they_are_given() -> None:
    graph = random_tree(400, seed=3)
    peak = schedule(graph).peak_bytes
    assert peak is not None
    for name in ("membooking", "safebooking"):
        spans = [schedule(graph, processors=8, memory_bytes=int(peak * f), algorithm=name).makespan for f in (1.0, 1.5, 4.0)]
        assert spans[0] > spans[1] > spans[2]  # type: ignore[operator]
        assert spans[2] <= 1.1 * makespan_lower_bound(graph, 8)  # type: ignore[operator]
        assert spans[0] < graph.time.sum()  # some parallelism even at the sequential peak


def test_deep_and_wide_trees_do_not_overflow_the_stack() -> None:
    chain = tree_graph([*range(1, 8_000), -1], [3] * 8_000)
    star = tree_graph([6_000] * 6_000 + [-1], [1] * 6_001)
    for graph, peak in ((chain, 6), (star, 6_001)):
        for algorithm in ("liu", "minmem", "postorder"):
            assert schedule(graph, algorithm=algorithm).peak_bytes == peak
        for algorithm in ("membooking", "memory-aware", "par-subtrees", "proportional", "all-to-all"):
            outcome = schedule(graph, processors=4, memory_bytes=peak * 2, algorithm=algorithm)
            assert outcome.peak_bytes is not None
            assert outcome.peak_bytes <= peak * 2


def test_zero_work_subtrees_and_single_tasks() -> None:
    graph = tree_graph([2, 2, -1], [4, 4, 4], [1, 1, 1], [0, 0, 0])
    for algorithm in ON_TREES:
        outcome = schedule(graph, processors=3, memory_bytes=100, algorithm=algorithm)
        assert outcome.makespan == 0
    assert schedule(task_graph(output_bytes=[], edges=[]), processors=4).order == ()


def test_auto_prefers_the_shorter_and_says_when_nothing_is_shorter() -> None:
    graph = task_graph(output_bytes=[1] * 4, time=[2, 2, 2, 2], edges=[])
    outcome = schedule(graph, processors=2, memory_bytes=4)
    assert (outcome.status, outcome.makespan, outcome.peak_bytes) == (Status.OPTIMAL, 4.0, 4)
    tight = schedule(graph, processors=2, memory_bytes=3)
    assert (tight.status, tight.lower_bound_bytes, tight.order) == (Status.INFEASIBLE, 4, ())


def test_the_list_schedules_of_a_dag_meet_grahams_bound() -> None:
    graph = random_dag(300, seed=1)
    for name in ("par-inner-first", "par-deepest-first"):
        outcome = schedule(graph, processors=4, algorithm=name, time_limit_s=1)
        assert outcome.makespan is not None
        assert outcome.makespan <= (2 - 1 / 4) * outcome.makespan_lower_bound


@pytest.mark.parametrize(
    ("runs", "cause"),
    [
        ([Run(0, 0, 1), Run(1, 0.5, 1.5)], "before 0 has ended"),
        ([Run(0, 0, 1)], "distinct tasks"),
        ([Run(0, 0, 2), Run(1, 2, 3)], "takes 1.0"),
        ([Run(0, 0, 0.5, 2.0), Run(1, 1, 2)], "2.0 processors are in use"),
        ([Run(0, -1, 0), Run(1, 1, 2)], "takes"),
        ([Run(0, 0, 1), Run(1, 1, 2)], "1 more than"),
    ],
)
def test_the_judge_refuses(runs: list[Run], cause: str) -> None:
    graph = tree_graph([1, -1], [3, 3])
    with pytest.raises(IllegalSchedule, match=cause):
        judge_parallel(graph, runs, processors=1, memory_bytes=5)
