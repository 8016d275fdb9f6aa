"""The planners that are always available: each judged plan stays inside, none is faster than the step itself."""

from __future__ import annotations

from random import Random
from time import perf_counter

import pytest
from tests.small import training_chain
from tests.strategies import random_costs, random_training_graph

import memfit
from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.core.errors import BadInput, InfeasibleBudget, NoPlanFound
from memfit.core.outcome import Status
from memfit.core.schedule import Compute
from memfit.core.simulate import simulate
from memfit.planning import PLANNERS, plan
from memfit.planning.baselines.greedy import Greedy
from memfit.planning.baselines.sqrt_segments import SqrtSegments
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.planning.problem import Problem

SIMPLE = ("keep_all", "sqrt_segments", "drop_cheap", "greedy", "chain_dp")


@pytest.mark.parametrize("planner", SIMPLE)
def test_a_plan_without_a_limit_is_the_step_itself(planner: str) -> None:
    graph = training_chain()
    outcome = plan(graph, planner=planner)
    assert outcome.status is Status.OPTIMAL
    assert sorted(c.op for c in outcome.require_plan().schedule.computes) == list(range(len(graph.ops)))


@pytest.mark.parametrize("planner", ["sqrt_segments", "greedy", "chain_dp"])
def test_half_the_memory_of_a_chain(planner: str) -> None:
    graph = training_chain()
    whole = plan(graph, planner="keep_all").require_plan().timeline
    outcome = plan(graph, budget=whole.peak_bytes // 2, planner=planner)
    found = outcome.require_plan()
    assert found.timeline.peak_bytes <= whole.peak_bytes // 2
    assert whole.time_ns < found.timeline.time_ns <= 1.5 * whole.time_ns  # one extra forward at most
    assert simulate(graph, found.schedule, None, found.budget).time_ns == found.timeline.time_ns


def test_square_root_of_the_memory() -> None:
    """k segments of n / k: about 2 sqrt(n) activations instead of n, for one more forward."""
    graph = training_chain(100)
    found = plan(graph, budget=100 * 26, planner=SqrtSegments(num_segments=10)).require_plan()
    assert found.timeline.time_ns <= 300


@pytest.mark.parametrize("planner", SIMPLE)
def test_plans_stay_inside_on_random_training_graphs(planner: str) -> None:
    found = 0
    for seed in range(60):
        rng = Random(seed)
        graph = random_training_graph(rng, max_layers=6)
        costs = random_costs(rng, graph, max_levels=0)
        whole = plan(graph, costs, planner="keep_all").require_plan().timeline
        budget = int(whole.peak_bytes * rng.uniform(0.85, 1.1))
        outcome = plan(graph, costs, budget, planner=planner)
        if outcome.plan is None:
            assert outcome.status in (Status.INFEASIBLE, Status.UNKNOWN)
            assert outcome.status is Status.UNKNOWN or outcome.lower_bound_bytes > budget
            continue
        found += 1
        assert outcome.plan.timeline.peak_bytes <= budget
        assert outcome.plan.timeline.time_ns >= outcome.lower_bound_ns >= whole.time_ns
    assert found > 5


def test_infeasible_says_why_and_where() -> None:
    graph = training_chain()
    outcome = plan(graph, budget=350, planner="keep_all")
    assert outcome.status is Status.INFEASIBLE
    with pytest.raises(InfeasibleBudget, match="proven minimum") as caught:
        outcome.require_plan()
    assert caught.value.minimum_bytes == 400
    assert "backward" in str(caught.value)


def test_gave_up_is_not_infeasible() -> None:
    outcome = plan(training_chain(), budget=500, planner="keep_all")
    assert outcome.status is Status.UNKNOWN
    with pytest.raises(NoPlanFound, match="500 B"):
        outcome.require_plan()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BadInput, match="known are auto"):
        plan(training_chain(), planner="banana")
    with pytest.raises(BadInput, match="budget"):
        plan(training_chain(), budget="banana")
    with pytest.raises(BadInput, match="time limit"):
        plan(training_chain(), time_limit_s=float("nan"))


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_every_planner_takes_the_empty_step(planner: str) -> None:
    empty = memfit.Graph(ops=(), tensors=(), storages=(), sources=(), results=())
    outcome = plan(empty, budget=0, planner=planner, time_limit_s=1)
    assert outcome.status is Status.OPTIMAL
    assert outcome.require_plan().schedule.steps == ()


def test_views_are_made_again_after_a_recomputation() -> None:
    """relu -> view -> use, dropped, recomputed: the view must be re-emitted before the second use."""
    storages = tuple(memfit.Storage(id=i, size_bytes=8) for i in range(4))
    tensors = tuple(memfit.Tensor(id=i, storage=s) for i, s in enumerate((0, 1, 1, 2, 3)))
    ops = (
        memfit.Op(id=0, name="relu", inputs=(0,), outputs=(1,)),
        memfit.Op(id=1, name="view", inputs=(1,), outputs=(2,)),
        memfit.Op(id=2, name="first", inputs=(2,), outputs=(3,)),
        memfit.Op(id=3, name="second", inputs=(2, 3), outputs=(4,)),
    )
    graph = memfit.Graph(ops=ops, tensors=tensors, storages=storages, sources=(0,), results=(0, 4))
    schedule = schedule_from_ops(graph, [(0, 0), (2, 0), (0, 0), (3, 0)])
    assert [s.op for s in schedule.steps if isinstance(s, Compute)] == [0, 1, 2, 0, 1, 3]
    assert simulate(graph, schedule).peak_bytes == 32


def test_greedy_keeps_to_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a seed for `auto` it may thrash: it is asked to stop after a share of the time left, a second at least."""
    deadlines: list[float] = []

    def never(self: object, deadline_s: float) -> None:
        deadlines.append(deadline_s - perf_counter())

    monkeypatch.setattr("memfit.planning.baselines.greedy._Player.play", never)
    graph = memfit.Graph(ops=(), tensors=(), storages=(), sources=(), results=())
    for share, limit_s in ((1.0, 40.0), (0.05, 40.0), (0.05, 3.0)):
        assert (
            Greedy(time_share=share).sequence(Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(), time_limit_s=limit_s))
            is None
        )
    assert deadlines == pytest.approx([40.0, 2.0, 1.0], abs=0.5)
