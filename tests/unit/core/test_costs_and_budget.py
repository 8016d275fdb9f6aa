"""Costs, memory levels and budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.small import chain, graph_of, op

from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level, check_costs, level_name, uniform_costs
from memfit.core.errors import BadInput
from memfit.core.graph import Variant


def test_copies_cost_latency_and_bandwidth() -> None:
    level = Level(write_bytes_per_s=1e9, read_bytes_per_s=2e9, write_latency_ns=5, read_latency_ns=7)
    assert level.write_ns(100) == 105
    assert level.read_ns(100) == 57
    assert Level().write_ns(10**12) == 0
    assert Level(write_bytes_per_s=1e-9).write_ns(2**63) > 0


def test_level_names() -> None:
    assert [level_name(k) for k in range(4)] == ["device", "host", "disk", "level 3"]


def test_costs_per_form() -> None:
    graph = graph_of([1, 1], [op(0, [0], [1], variants=(Variant(name="v", inputs=(0,), outputs=(1,)),))])
    costs = Costs(op_time_ns=(3,), workspace_bytes=(5,), variant_time_ns=((30,),), variant_workspace_bytes=((0,),))
    check_costs(graph, costs)
    assert (costs.time_ns(0), costs.time_ns(0, 1)) == (3, 30)
    assert (costs.workspace(0), costs.workspace(0, 1)) == (5, 0)
    assert uniform_costs(graph, time_ns=4).time_ns(0, 1) == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"op_time_ns": (-1,)},
        {"workspace_bytes": (-1,)},
        {"variant_time_ns": ((0, -3),)},
        {"variant_workspace_bytes": ((-3,),)},
        {"levels": (Level(write_bytes_per_s=-1.0),)},
        {"levels": (Level(read_bytes_per_s=float("nan")),)},
        {"levels": (Level(read_bytes_per_s=float("inf")),)},
        {"levels": (Level(read_bytes_per_s=5e-324),)},
        {"levels": (Level(write_bytes_per_s=10**400),)},
        {"levels": (Level(write_latency_ns=-1),)},
        {"levels": (Level(read_latency_ns=2**63),)},
    ],
    ids=str,
)
def test_impossible_costs_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        replace(Costs(op_time_ns=(1,), workspace_bytes=(0,)), **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"graph_digest": "f" * 64}, "belong to graph ffffffffffff"),
        ({"op_time_ns": (1, 2, 3)}, "the graph has 2 ops"),
        ({"workspace_bytes": (1,)}, "the graph has 2 ops"),
        ({"variant_time_ns": ((), (1,))}, "1 entries for op 1, which has 0 variants"),
        ({"variant_workspace_bytes": ((),)}, "covers 1 ops"),
        ({"variant_workspace_bytes": ((), (), ())}, "covers 3 ops"),
    ],
)
def test_costs_of_another_graph_are_refused(change: dict[str, object], complaint: str) -> None:
    graph = chain(2)
    with pytest.raises(BadInput, match=complaint):
        check_costs(graph, replace(uniform_costs(graph), **change))  # type: ignore[arg-type]


def test_budgets() -> None:
    budget = Budget.parse("6GiB", "1 GB", 17)
    assert budget == Budget(device_bytes=6 * 2**30, host_bytes=10**9, disk_bytes=17)
    assert budget.limits == (6 * 2**30, 10**9, 17)
    assert Budget(deeper_bytes=(5,)).limit(3) == 5
    assert Budget().limit(7) is None
    assert Budget().limit(-1) is None
    assert Budget.parse("0") == Budget(device_bytes=0)


@pytest.mark.parametrize("bad", [-1, "6GiB", 1.5, True])
def test_impossible_budgets_are_refused(bad: object) -> None:
    with pytest.raises(BadInput, match="level 1"):
        Budget(host_bytes=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["banana", "-1", "", None])
def test_unreadable_budgets_are_refused(bad: str) -> None:
    with pytest.raises(BadInput, match="budget"):
        Budget.parse(bad)
