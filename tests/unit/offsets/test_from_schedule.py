"""A schedule's layout: judged, aligned, close to the maximum load, and readable by an engine."""

from __future__ import annotations

from random import Random

import pytest
from tests.strategies import random_costs, random_graph, random_schedule, random_training_graph

from memfit.core.errors import BadInput
from memfit.core.lifetimes import check_layout, lifetimes, max_load
from memfit.core.plan import Layout
from memfit.offsets import allocations, layout_of, layout_plan, with_layout
from memfit.planning import plan


@pytest.mark.parametrize("align", [1, 16])
def test_random_schedules_get_a_legal_layout(align: int) -> None:
    random = Random(align)
    for _ in range(120):
        graph = random_graph(random)
        costs = random_costs(random, graph)
        schedule = random_schedule(random, graph, costs)
        layout = layout_plan(graph, schedule, costs, time_limit_s=0.05, alignment_bytes=align)
        items = lifetimes(graph, schedule, costs)
        check_layout(items, layout)
        assert layout.height_bytes >= max_load(items)
        assert all(offset % align == 0 for offset in layout.offsets)
        assert layout.height_bytes % align == 0


def test_with_time_the_layout_reaches_the_load_of_training_steps() -> None:
    random = Random(1)
    for _ in range(20):
        graph = random_training_graph(random)
        outcome = plan(graph, planner="keep_all").require_plan()
        items = lifetimes(graph, outcome.schedule)
        assert layout_plan(graph, outcome.schedule, time_limit_s=2.0).height_bytes <= 1.05 * max_load(items)


def test_an_engine_gets_its_allocations_in_order() -> None:
    graph = random_training_graph(Random(2))
    planned = with_layout(graph, plan(graph, planner="keep_all").require_plan())
    listed = allocations(graph, planned)
    items = lifetimes(graph, planned.schedule)
    assert [a.index for a in listed] == list(range(len(items)))
    assert [a.start for a in listed] == sorted(a.start for a in listed)
    assert planned.layout is not None
    assert all(a.offset + a.size_bytes <= planned.layout.height_bytes for a in listed)
    for i, a in enumerate(listed):
        for b in listed[:i]:
            if a.size_bytes and b.size_bytes and a.start < b.stop and b.start < a.stop:
                assert a.offset >= b.offset + b.size_bytes or b.offset >= a.offset + a.size_bytes


def test_a_plan_without_or_with_a_foreign_layout_is_refused() -> None:
    from dataclasses import replace

    graph = random_training_graph(Random(3))
    planned = plan(graph, planner="keep_all").require_plan()
    with pytest.raises(BadInput, match="no layout"):
        allocations(graph, replace(planned, layout=None))
    with pytest.raises(BadInput, match="another schedule"):
        allocations(graph, replace(planned, layout=Layout(offsets=(0,) * 999, height_bytes=10)))


def test_nothing_and_bad_alignment() -> None:
    assert layout_of([]) == Layout(offsets=(), height_bytes=0)
    with pytest.raises(BadInput, match="alignment 0"):
        layout_of([], alignment_bytes=0)
