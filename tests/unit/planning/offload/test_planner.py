"""Offload beside recomputation: never slower than without, legal by the judge, hidden where the link has time, a rescue where nothing else fits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from tests.small import graph_of, op, training_chain
from tests.strategies import FULL, random_costs, random_graph, random_training_graph

from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level, uniform_costs
from memfit.core.graph import Graph, Variant
from memfit.core.outcome import Outcome, Status
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule
from memfit.core.simulate import simulate
from memfit.planning import Problem, plan
from memfit.planning.offload.graph import OffloadGraph, find_waitable
from memfit.planning.offload.overlap import measure_waits, overlap_copies
from memfit.planning.offload.planner import Offloading
from memfit.planning.search.auto import Portfolio


def linked(graph: Graph, *, op_ns: int, copy_ns: int, size_bytes: int = 100) -> Costs:
    """Every op takes `op_ns`, every copy of a storage `copy_ns`."""
    bandwidth = size_bytes * 1e9 / copy_ns
    return replace(uniform_costs(graph, time_ns=op_ns), levels=(Level(write_bytes_per_s=bandwidth, read_bytes_per_s=bandwidth),))


def planned(graph: Graph, costs: Costs, budget_bytes: int, seconds: float = 3.0) -> tuple[Outcome, Outcome]:
    """Without offload, and with it."""
    without = plan(graph, costs, budget_bytes, time_limit_s=seconds)
    problem = Problem(graph=graph, costs=costs, budget=Budget(device_bytes=budget_bytes), time_limit_s=seconds)
    return without, Offloading(planner=Portfolio(), without=without).plan(problem)


def test_a_link_as_fast_as_the_ops_hides_its_copies() -> None:
    graph = training_chain(24)
    costs = linked(graph, op_ns=1000, copy_ns=1000)
    whole = plan(graph, costs, planner="keep_all").require_plan().timeline
    without, found = planned(graph, costs, whole.peak_bytes // 2)
    assert found.plan is not None
    assert without.plan is not None
    assert found.plan.timeline.time_ns < without.plan.timeline.time_ns
    assert found.plan.timeline.peak_bytes <= whole.peak_bytes // 2
    assert {type(s) for s in found.plan.schedule.steps} == {Compute, Free, Offload, Reload}
    assert simulate(graph, found.plan.schedule, costs, found.plan.budget) == found.plan.timeline
    assert (
        sum(measure_waits(Problem(graph=graph, costs=costs, budget=found.plan.budget), found.plan.schedule).values())
        <= 0.02 * whole.time_ns
    )
    assert found.lower_bound_ns <= found.plan.timeline.time_ns


def test_a_slow_link_is_left_alone() -> None:
    graph = training_chain(24)
    costs = linked(graph, op_ns=1000, copy_ns=10**6)
    without, found = planned(graph, costs, plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes // 2)
    assert found.plan == without.plan


def test_values_that_cannot_be_made_again_can_wait_on_the_host() -> None:
    """Nothing here may run twice, so without offload nothing fits."""
    chain = training_chain(16)
    graph = replace(chain, ops=tuple(replace(o, replayable=False) for o in chain.ops), digest="")
    costs = linked(graph, op_ns=1000, copy_ns=500)
    without, found = planned(graph, costs, int(0.7 * plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes))
    assert without.plan is None
    assert found.plan is not None


def test_a_proof_for_plans_without_offload_is_not_one_with_it() -> None:
    """Too slow a link to help, but a host all the same: only what some op needs at once rules a budget out."""
    chain = training_chain(16)
    graph = replace(chain, ops=tuple(replace(o, replayable=False) for o in chain.ops), digest="")
    costs = linked(graph, op_ns=1000, copy_ns=10**9)
    whole = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
    without, found = planned(graph, costs, whole // 2, seconds=1.0)
    assert without.status is Status.INFEASIBLE
    assert found.status is Status.UNKNOWN
    assert "without it" in found.reason
    assert planned(graph, costs, 100, seconds=1.0)[1].status is Status.INFEASIBLE


def test_without_a_link_or_a_budget_the_answer_is_the_other_planner_s() -> None:
    graph = training_chain(8)
    assert plan(graph, None, 500, planner="offload").require_plan().planner == "auto"
    assert plan(graph, planner="offload").require_plan().planner == "auto"


@pytest.mark.parametrize("seed", range(12))
def test_never_slower_and_always_legal_on_random_steps(seed: int) -> None:
    rng = Random(seed)
    graph = random_training_graph(rng, max_layers=10)
    costs = replace(
        random_costs(rng, graph, max_levels=0), levels=(Level(write_bytes_per_s=rng.choice([1e9, 5e9, 3e10]), read_bytes_per_s=5e9),)
    )
    peak = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
    without, found = planned(graph, costs, int(rng.uniform(0.4, 0.95) * peak), seconds=0.5)
    if without.plan is not None:
        assert found.plan is not None
        assert found.plan.timeline.time_ns <= without.plan.timeline.time_ns
    if found.plan is not None:
        timeline = simulate(graph, found.plan.schedule, costs, found.plan.budget)
        assert timeline.time_ns == found.plan.timeline.time_ns


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_of_the_graph_with_fetches_is_a_plan_of_the_step(seed: int) -> None:
    """Views, in-place forms, variants and alternative producers included."""
    rng = Random(seed)
    graph = random_graph(rng, FULL)
    costs = replace(random_costs(rng, graph, max_levels=0), levels=(Level(read_bytes_per_s=1e9),))
    storages = sorted(find_waitable(graph))[:3]
    readers = {s: [o.id for o in graph.ops if any(graph.storage_of(t) == s for t in o.inputs)][-1:] for s in storages}
    offers = OffloadGraph(graph, costs, readers, {})
    outcome = plan(offers.graph, offers.costs, planner="keep_all")
    schedule = offers.translate(outcome.require_plan().schedule)
    problem = Problem(graph=graph, costs=costs, budget=Budget(device_bytes=2**40))
    assert simulate(graph, overlap_copies(problem, schedule), costs).time_ns <= simulate(graph, schedule, costs).time_ns


def test_what_is_overwritten_after_it_was_sent_comes_back_for_its_other_reader() -> None:
    """f1 writes x2 over x1, which f3 reads too: possible only because x1 is on the host."""
    over = Variant(name="over", inputs=(1,), outputs=(2,), inplace_of=((2, 1),))
    ops = [op(0, [0], [1]), op(1, [1], [2], variants=(over,)), op(2, [2], [3]), op(3, [3, 1], [4])]
    graph = graph_of([10] * 5, ops, results=[0, 4])
    costs = linked(graph, op_ns=100, copy_ns=100, size_bytes=10)
    costs = replace(costs, variant_time_ns=((), (100,), (), ()), variant_workspace_bytes=((), (0,), (), ()))
    offers = OffloadGraph(graph, costs, {1: [3]}, {})
    number = {o.name: o.id for o in offers.graph.ops}
    steps = [Compute(number["f0"]), Compute(number["memfit.send"]), Compute(number["memfit.fetch"]), Compute(number["f1"], 1)]
    steps += [Compute(number["f2"]), Compute(number["f3"])]
    found = offers.translate(Schedule(steps=tuple(steps)))
    assert found.steps[:4] == (Compute(0), Offload(1), Compute(1, 1), Reload(1))
    simulate(graph, found, costs)


def test_copies_are_spread_as_far_as_memory_allows() -> None:
    """x1 waits on the host while f1, f2 and f3 run; each copy takes as long as one op."""
    graph = graph_of(
        [10, 10, 10, 20, 10, 10], [op(0, [0], [1]), op(1, [1], [2]), op(2, [2], [3]), op(3, [3], [4]), op(4, [1, 4], [5])], results=[0, 5]
    )
    costs = linked(graph, op_ns=100, copy_ns=100, size_bytes=10)
    tight = Schedule(
        steps=(
            Compute(0),
            Offload(1),
            Compute(1),
            Free(1),
            Compute(2),
            Free(2),
            Compute(3),
            Free(3),
            Reload(1),
            Compute(4),
            Free(1),
            Free(4),
        )
    )
    assert simulate(graph, tight, costs).time_ns == 600
    roomy = overlap_copies(Problem(graph=graph, costs=costs, budget=Budget(device_bytes=50)), tight)
    assert simulate(graph, roomy, costs, Budget(device_bytes=50)).time_ns == 500
    assert roomy.steps.index(Reload(1)) < roomy.steps.index(Compute(3))
    narrow = overlap_copies(Problem(graph=graph, costs=costs, budget=Budget(device_bytes=40)), tight)
    assert simulate(graph, narrow, costs, Budget(device_bytes=40)).time_ns == 600


def test_a_value_that_is_never_fetched_is_not_sent() -> None:
    """A planner may hold a value that it meant to fetch: the copy would only take the link's time."""
    graph = training_chain(8)
    costs = linked(graph, op_ns=1000, copy_ns=1000)
    whole = plan(graph, costs, planner="keep_all").require_plan()
    problem = Problem(graph=graph, costs=costs, budget=Budget(device_bytes=2 * whole.timeline.peak_bytes))
    first = whole.schedule.steps[0]
    assert isinstance(first, Compute)
    sent = graph.storage_of(graph.ops[first.op].outputs[0])
    steps = (first, Offload(sent, 1), *whole.schedule.steps[1:])
    assert overlap_copies(problem, Schedule(steps=steps)).steps == whole.schedule.steps
