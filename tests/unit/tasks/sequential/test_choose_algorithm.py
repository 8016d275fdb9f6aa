"""One processor: the lecture's figures, the choice of algorithms, the judge, and graphs meant to break them."""

from __future__ import annotations

import numpy as np
import pytest

from memfit.core import BadInput, IllegalSchedule, Status
from memfit.tasks import (
    best_postorder,
    cpsat_order,
    exact_order,
    forced_live_bound,
    forest_bound,
    from_training_graph,
    greedy_order,
    harpoon,
    judge_order,
    liu_order,
    peak_lower_bound,
    random_dag,
    random_series_parallel,
    random_tree,
    recognize_tree,
    schedule,
    series_parallel_order,
    task_graph,
    tree_graph,
)
from memfit.tasks.graph import COMPILE_FROM
from memfit.tasks.sequential.liu import _liu


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_harpoon_has_the_peaks_of_the_lecture(levels: int) -> None:
    large, small, branches = 3000, 2, 3
    tree = recognize_tree(harpoon(branches=branches, levels=levels, large=large, small=small))
    assert tree is not None
    assert best_postorder(tree)[1] == large + small + levels * (branches - 1) * large // branches
    assert liu_order(tree)[1] == large + small + levels * (branches - 1) * small


def test_compiled_and_plain_kernels_agree() -> None:
    graph = random_tree(COMPILE_FROM // 2, seed=9)
    tree = recognize_tree(graph)
    assert tree is not None
    order, peak = liu_order(tree)
    compiled = np.empty(tree.num_nodes, np.int64)
    again = _liu.compiled(tree.postorder, tree.children.counts, tree.children_bytes, tree.memory_bytes, tree.output_bytes, compiled)
    assert again == peak
    assert compiled.tolist() == order.tolist()
    large = random_tree(3 * COMPILE_FROM, seed=9)
    assert judge_order(large, liu_order(recognize_tree(large))[0]).peak_bytes == schedule(large, algorithm="minmem").peak_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "algorithm"),
    [
        (random_tree(200), "liu"),
        (task_graph(output_bytes=[1, 2, 3], edges=[]), "liu"),
        (task_graph(output_bytes=[0, 0, 0], edges=[(0, 1), (0, 2)], edge_bytes=[4, 5]), "out-tree"),
        (random_series_parallel(150, seed=2), "series-parallel"),
    ],
)
def test_auto_picks_the_theorem_and_proves(graph, algorithm: str) -> None:  # type: ignore[no-untyped-def]
    outcome = schedule(graph)
    assert (outcome.status, outcome.algorithm) == (Status.OPTIMAL, algorithm)
    assert outcome.peak_bytes == outcome.lower_bound_bytes


def test_a_shared_output_is_counted_once_and_one_without_reader_stays() -> None:
    graph = task_graph(output_bytes=[10, 1, 1, 1], edges=[(0, 1), (0, 2)])  # task 3 is read by nobody
    assert judge_order(graph, [0, 1, 2, 3]).bytes_at_step.tolist() == [10, 11, 12, 3]
    assert judge_order(graph, [3, 0, 1, 2]).bytes_at_step.tolist() == [1, 11, 12, 13]
    assert schedule(graph).peak_bytes == 12


def test_a_search_that_runs_out_still_gives_a_bound() -> None:
    graph = random_dag(60, seed=4)
    cut = exact_order(graph, max_states=300)
    assert not cut.complete
    _, peak = greedy_order(graph)
    assert int(graph.memory_bytes.min()) <= cut.lower_bound_bytes <= peak
    assert exact_order(graph, below=1).complete


def test_bounds_see_what_must_live() -> None:
    # 0 feeds 1 and 3, 1 -> 2 -> 3: while 2 runs, the output of 0 must be there
    graph = task_graph(output_bytes=[10, 1, 5, 1], memory_bytes=[0, 0, 20, 0], edges=[(0, 1), (0, 3), (1, 2), (2, 3)])
    assert forced_live_bound(graph) == 36 == schedule(graph).peak_bytes
    wide = task_graph(output_bytes=[1] * 9, edges=[(k, 8) for k in range(8)])
    assert forest_bound(wide) == 9 == peak_lower_bound(wide)


def test_cpsat_agrees_with_the_search() -> None:
    pytest.importorskip("ortools")
    for seed in range(3):
        graph = random_dag(11, seed=seed)
        order, peak = greedy_order(graph)
        best = exact_order(graph).lower_bound_bytes
        found = cpsat_order(graph, order, peak, 0, time_limit_s=10)
        assert found.lower_bound_bytes <= best
        if found.order is not None:
            assert judge_order(graph, found.order).peak_bytes >= best
            assert found.lower_bound_bytes == judge_order(graph, found.order).peak_bytes == best


@pytest.mark.parametrize("algorithm", ["exact", "greedy", "beam", "local-search"])
def test_named_algorithms_report_their_bound(algorithm: str) -> None:
    graph = random_dag(40, seed=8)
    outcome = schedule(graph, algorithm=algorithm, time_limit_s=1)
    assert outcome.peak_bytes is not None
    assert outcome.lower_bound_bytes <= outcome.peak_bytes
    assert judge_order(graph, outcome.order).peak_bytes == outcome.peak_bytes


def test_memory_too_small_is_proven_or_admitted_or_spilled() -> None:
    graph = harpoon(branches=3, levels=2, large=300, small=2)
    least = schedule(graph).peak_bytes
    assert least is not None
    assert schedule(graph, memory_bytes=least).status is Status.OPTIMAL
    refused = schedule(graph, memory_bytes=least - 1)
    assert (refused.status, refused.lower_bound_bytes, refused.order) == (Status.INFEASIBLE, least, ())
    spilled = schedule(graph, memory_bytes=least - 1, spill=True)
    assert spilled.spill is not None
    assert spilled.spill.written_bytes > 0
    assert spilled.peak_bytes is not None
    assert spilled.peak_bytes < least
    hard = random_dag(200, seed=3)
    found = schedule(hard, time_limit_s=0.3)
    if found.status is Status.FEASIBLE:
        assert found.peak_bytes is not None
        assert schedule(hard, memory_bytes=found.lower_bound_bytes, time_limit_s=0.3).status in (Status.UNKNOWN, Status.OPTIMAL)


def test_not_series_parallel_is_said() -> None:
    crossed = [(0, 2), (0, 3), (1, 2), (1, 3)]
    graph = task_graph(output_bytes=[0] * 4, edges=crossed, edge_bytes=[1, 2, 3, 4])
    assert series_parallel_order(graph) is None
    for algorithm in ("series-parallel", "out-tree", "liu"):
        with pytest.raises(BadInput, match="choose auto"):
            schedule(graph, algorithm=algorithm)


def test_bad_graphs_are_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="cycle through task"):
        task_graph(output_bytes=[1, 1, 1], edges=[(0, 1), (1, 2), (2, 1)])
    with pytest.raises(BadInput, match="itself"):
        task_graph(output_bytes=[1], edges=[(0, 0)])
    with pytest.raises(BadInput, match="names task 5"):
        task_graph(output_bytes=[1], edges=[(0, 5)])
    with pytest.raises(BadInput, match="at least 0"):
        task_graph(output_bytes=[-1], edges=[])
    with pytest.raises(BadInput, match="finite"):
        task_graph(output_bytes=[1], time=[float("nan")], edges=[])
    with pytest.raises(BadInput, match=r"2\*\*61"):
        task_graph(output_bytes=[2**62, 2**62], edges=[])
    with pytest.raises(BadInput, match="one per task"):
        task_graph(output_bytes=[1], time=[1, 2], edges=[])
    with pytest.raises(BadInput, match="parents are positions"):
        tree_graph([7, -1], [1, 1])
    with pytest.raises(BadInput, match="cycle"):
        tree_graph([1, 0], [1, 1])
    with pytest.raises(BadInput, match="unknown"):
        schedule(task_graph(output_bytes=[1], edges=[]), algorithm="magic")
    with pytest.raises(BadInput, match="at least 1"):
        schedule(task_graph(output_bytes=[1], edges=[]), processors=0)


@pytest.mark.parametrize("order", [[0, 1], [1, 0, 2], [0, 1, 1], [0, 1, 7]])
def test_the_judge_refuses_orders(order: list[int]) -> None:
    with pytest.raises(IllegalSchedule):
        judge_order(tree_graph([1, 2, -1], [1, 1, 1]), order)


def test_empty_and_zero_sized_graphs() -> None:
    empty = schedule(task_graph(output_bytes=[], edges=[]))
    assert (empty.status, empty.peak_bytes, empty.order) == (Status.OPTIMAL, 0, ())
    nothing = schedule(task_graph(output_bytes=[0, 0, 0], edges=[(0, 1), (0, 2), (1, 2)]))
    assert (nothing.status, nothing.peak_bytes) == (Status.OPTIMAL, 0)


def test_a_training_step_can_be_reordered() -> None:

    from memfit import Compute, Free, Graph, Op, Schedule, Storage, Tensor, simulate

    graph = Graph(
        storages=tuple(Storage(id=k, size_bytes=s) for k, s in enumerate((4, 10, 1, 10, 1, 2))),
        tensors=tuple(Tensor(id=k, storage=k) for k in range(6)),
        ops=(
            Op(id=0, name="big", inputs=(0,), outputs=(1,)),
            Op(id=1, name="big", inputs=(0,), outputs=(3,)),
            Op(id=2, name="small", inputs=(1,), outputs=(2,)),
            Op(id=3, name="small", inputs=(3,), outputs=(4,)),
            Op(id=4, name="join", inputs=(2, 4), outputs=(5,)),
        ),
        sources=(0,),
        results=(5,),
    )
    outcome = schedule(from_training_graph(graph))
    assert outcome.status is Status.OPTIMAL
    steps = []
    for op in outcome.order:
        steps.append(Compute(op))
        steps += [Free(0)] if op == max((0, 1), key=outcome.order.index) else []
        steps += [Free(graph.storage_of(t)) for t in graph.ops[op].inputs if t != 0]
    assert simulate(graph, Schedule(steps=tuple(steps))).peak_bytes == outcome.peak_bytes == 15
