"""Sizes and times up to the largest sums there may be: planners stay right, and what is beyond is refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.strategies import random_costs, random_training_graph

from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level, uniform_costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph, Op, Storage, Tensor
from memfit.core.simulate import simulate
from memfit.core.units import MAX_SUM
from memfit.planning import plan
from memfit.tasks.graph import task_graph

PLANNERS = ("auto", "cut_lp", "greedy", "drop_cheap", "sqrt_segments", "chain_dp", "offload")
LARGEST = MAX_SUM - 1


def _scale(values: Sequence[int], total: int) -> list[int]:
    whole = sum(values)
    return [v * total // whole if whole else v for v in values]


def _largest(rng: Random) -> tuple[Graph, Costs]:
    """A training step whose times add up to the most there may be, and whose bytes with a workspace do."""
    graph = random_training_graph(rng, max_layers=10)
    costs = random_costs(rng, graph)
    sizes = _scale([s.size_bytes for s in graph.storages], LARGEST // 2)
    storages = tuple(replace(s, size_bytes=size) for s, size in zip(graph.storages, sizes, strict=True))
    workspaces = _scale(costs.workspace_bytes, LARGEST // 2)
    scaled = Costs(op_time_ns=tuple(_scale(costs.op_time_ns, LARGEST)), workspace_bytes=tuple(workspaces))
    return replace(graph, storages=storages, digest=""), scaled


@pytest.mark.parametrize("seed", range(8))
def test_planners_at_the_largest_sums(seed: int) -> None:
    graph, costs = _largest(Random(seed))
    whole = plan(graph, costs, planner="keep_all").require_plan()
    for share in (0.95, 0.7):
        budget = int(whole.timeline.peak_bytes * share)
        for name in PLANNERS:
            outcome = plan(graph, costs, budget, planner=name, time_limit_s=0.5)
            assert outcome.lower_bound_ns >= 0
            assert outcome.lower_bound_bytes >= 0
            if outcome.plan is not None:
                judged = simulate(graph, outcome.plan.schedule, costs, Budget(device_bytes=budget))
                assert judged.time_ns == outcome.plan.timeline.time_ns >= outcome.lower_bound_ns


@pytest.mark.parametrize("budget", [2**62, 2**63 - 1, 2**63, 10**30])
def test_a_budget_beyond_all_sums_holds_everything(budget: int) -> None:
    graph, costs = _largest(Random(1))
    found = plan(graph, costs, Budget(device_bytes=budget), time_limit_s=1).require_plan()
    assert found.timeline.time_ns == sum(costs.op_time_ns)


def _pair(first_bytes: int, second_bytes: int) -> Graph:
    ops = (Op(id=0, name="a", inputs=(), outputs=(0,)), Op(id=1, name="b", inputs=(0,), outputs=(1,)))
    storages = (Storage(id=0, size_bytes=first_bytes), Storage(id=1, size_bytes=second_bytes))
    tensors = (Tensor(id=0, storage=0), Tensor(id=1, storage=1))
    return Graph(ops=ops, tensors=tensors, storages=storages, sources=(), results=(1,))


REFUSED: dict[str, Any] = {
    "sizes": lambda: _pair(MAX_SUM - 1, 1),
    "one time": lambda: Costs(op_time_ns=(MAX_SUM,), workspace_bytes=(0,)),
    "one workspace": lambda: Costs(op_time_ns=(1,), workspace_bytes=(MAX_SUM,)),
    "a latency": lambda: Costs(op_time_ns=(1,), workspace_bytes=(0,), levels=(Level(read_latency_ns=MAX_SUM),)),
    "times": lambda: plan(_pair(1, 1), Costs(op_time_ns=(MAX_SUM - 1, 1), workspace_bytes=(0, 0)), 8),
    "bytes and a workspace": lambda: plan(_pair(LARGEST // 2, 1), Costs(op_time_ns=(1, 1), workspace_bytes=(0, LARGEST // 2 + 1)), 8),
    "copies": lambda: plan(
        _pair(2**50, 1), replace(uniform_costs(_pair(2**50, 1)), levels=(Level(write_bytes_per_s=1e-9, read_bytes_per_s=1.0),)), 8
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_add_up_is_refused(what: str) -> None:
    with pytest.raises(BadInput, match=r"2\*\*62.*check|2\*\*62"):
        REFUSED[what]()


def test_tasks_that_do_not_add_up_are_refused() -> None:
    for field, value in (("time", 1e308), ("memory_bytes", 2**61), ("output_bytes", 2**61)):
        numbers: dict[str, Any] = {"time": [1.0] * 3, "memory_bytes": [1] * 3, "output_bytes": [1] * 3} | {field: [value] * 3}
        with pytest.raises(BadInput, match="unit"):
            task_graph(edges=[(0, 1), (1, 2)], **numbers)
