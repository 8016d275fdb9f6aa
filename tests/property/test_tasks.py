"""Laws that orders and schedules obey whatever the graph: renaming, scaling, more memory, fewer edges."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.tasks import (
    best_postorder,
    judge_order,
    judge_parallel,
    liu_order,
    minmem_order,
    peak_lower_bound,
    recognize_tree,
    schedule,
    spill_plan,
    task_graph,
)
from memfit.tasks.graph import TaskGraph


@st.composite
def graphs(draw: st.DrawFn, *, trees: bool = False) -> TaskGraph:
    size = draw(st.integers(1, 12))
    sizes = st.lists(st.integers(0, 20), min_size=size, max_size=size)
    if trees:
        ups = [draw(st.integers(k + 1, size)) for k in range(size)]
        edges = [(k, up) for k, up in enumerate(ups) if up < size]
    else:
        pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
        edges = draw(st.lists(st.sampled_from(pairs), max_size=20)) if pairs else []
    return task_graph(output_bytes=draw(sizes), memory_bytes=draw(sizes), time=draw(sizes), edges=edges)


@given(graphs(trees=True))
def test_liu_equals_minmem_and_is_never_above_a_post_order(graph: TaskGraph) -> None:
    tree = recognize_tree(graph)
    assert tree is not None
    (order, peak), (other, same) = liu_order(tree), minmem_order(tree)
    assert peak == same == judge_order(graph, order).peak_bytes == judge_order(graph, other).peak_bytes
    assert peak <= best_postorder(tree)[1]
    assert peak_lower_bound(graph) <= peak


@given(graphs(), st.randoms(use_true_random=False), st.integers(2, 5))
@settings(deadline=None, max_examples=60)
def test_renaming_changes_nothing_and_scaling_scales(graph: TaskGraph, rng: object, factor: int) -> None:
    best = schedule(graph)
    new = np.arange(graph.num_tasks)
    rng.shuffle(new)  # type: ignore[attr-defined]
    output, memory = np.empty_like(graph.memory_bytes), np.empty_like(graph.memory_bytes)
    output[new], memory[new] = factor * graph.output_bytes, factor * graph.memory_bytes
    renamed = task_graph(output_bytes=output, memory_bytes=memory, edges=new[graph.edges])
    assert schedule(renamed).peak_bytes == factor * (best.peak_bytes or 0)


@given(graphs(), st.integers(1, 5), st.floats(1.0, 3.0))
@settings(deadline=None, max_examples=60)
def test_parallel_schedules_stay_inside_and_more_memory_is_never_refused(graph: TaskGraph, processors: int, factor: float) -> None:
    least = schedule(graph).peak_bytes or 0
    memory = int(least * factor)
    outcome = schedule(graph, processors=processors, memory_bytes=memory)
    profile = judge_parallel(graph, outcome.runs or (), processors=processors, memory_bytes=memory) if outcome.runs else None
    assert profile is None or profile.peak_bytes == outcome.peak_bytes
    assert (outcome.makespan or 0) >= outcome.makespan_lower_bound * (1 - 1e-9)


@given(graphs())
@settings(deadline=None)
def test_spilling_falls_with_memory_and_ends_at_the_peak(graph: TaskGraph) -> None:
    order = graph.topological_order
    peak, need = judge_order(graph, order).peak_bytes, int(graph.need_bytes.max())
    written = [spill_plan(graph, order, m).written_bytes for m in sorted({need, (need + peak) // 2, peak}) if m >= need]
    assert written == sorted(written, reverse=True)
    assert spill_plan(graph, order, max(peak, need)).written_bytes == 0
