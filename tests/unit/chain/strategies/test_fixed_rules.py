"""The plain strategies: what they promise, judged."""

from __future__ import annotations

import math

import pytest

from memfit.chain import (
    PLANNERS,
    Chain,
    StorageLevel,
    disk_chain,
    plan_disk_revolve,
    plan_periodic,
    plan_recompute_all,
    plan_sqrt,
    plan_store_all,
    single_level,
)
from memfit.chain.strategies.fixed_rules import _slots_of_sqrt
from memfit.chain.strategies.periodic import period_of
from memfit.core import BadInput, Status


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 16, 17, 60])
def test_each_keeps_its_promise(num_steps: int) -> None:
    cases = (
        (plan_store_all, num_steps, num_steps),
        (plan_recompute_all, min(1, num_steps), num_steps * (num_steps + 1) // 2),
        (plan_sqrt, _slots_of_sqrt(num_steps), None),
    )
    for planner, slots, forwards in cases:
        plan = planner(single_level(num_steps, slots))
        timeline = plan.judge()
        assert timeline.level_peak_bytes[1] == slots
        assert timeline.serial_time_ns == plan.cost * 10**9
        assert forwards is None or plan.counts().num_forward == forwards
        if slots:
            assert planner(single_level(num_steps, slots - 1)).status is Status.INFEASIBLE


@pytest.mark.parametrize("num_steps", [10, 100, 1_000])
def test_sqrt_needs_two_roots_of_slots_and_two_sweeps(num_steps: int) -> None:
    assert _slots_of_sqrt(num_steps) <= 2 * math.ceil(math.sqrt(num_steps + 1))
    assert plan_sqrt(single_level(num_steps, None)).counts().num_forward < 2 * num_steps


def test_store_all_is_optimal_when_free_and_says_so() -> None:
    assert plan_store_all(single_level(9, None)).status is Status.OPTIMAL
    costly = Chain(num_steps=9, levels=(StorageLevel(slots=None, write_cost=5, read_cost=5),))
    assert plan_store_all(costly).status is Status.FEASIBLE


@pytest.mark.parametrize("memory", [0, 1, 3])
@pytest.mark.parametrize("costs", [(0, 0), (2, 1), (20, 20)])
def test_periodic_is_judged_and_not_better_than_disk_revolve(memory: int, costs: tuple[int, int]) -> None:
    for num_steps in (0, 1, 2, 30, 200):
        chain = disk_chain(num_steps, memory, write_cost=costs[0], read_cost=costs[1], backward_cost=2)
        periodic, optimal = plan_periodic(chain), plan_disk_revolve(chain)
        assert periodic.judge().serial_time_ns == periodic.cost * 10**9
        assert periodic.lower_bound <= optimal.cost <= periodic.cost


def test_periodic_is_asymptotically_good() -> None:
    chain = disk_chain(3_000, 3, write_cost=20, read_cost=10)
    assert plan_periodic(chain).cost <= 1.1 * plan_disk_revolve(chain).cost


def test_periodic_period() -> None:
    assert period_of(3, 2, 2, 1) == 4  # beta(4, 1) = 5 > 4, so t = 1 and the period is beta(3, 1)
    with pytest.raises(BadInput):
        plan_periodic(disk_chain(9, 1, write_cost=1, read_cost=1), period=0)
    free = plan_periodic(disk_chain(9, 1, write_cost=1, read_cost=1, forward_cost=0))
    assert free.counts().writes[1] == 0


def test_wrong_shape_is_refused() -> None:
    for name in ("revolve", "disk-revolve", "periodic"):
        with pytest.raises(BadInput, match="H-Revolve"):
            PLANNERS[name](Chain(num_steps=5, levels=(StorageLevel(slots=2, write_cost=1), StorageLevel(slots=2, write_cost=2))))
