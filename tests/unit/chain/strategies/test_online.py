from __future__ import annotations

import pytest

from memfit.chain import OnlineCheckpoints, plan_online, single_level
from memfit.chain.strategies.revolve import beta, num_forwards
from memfit.core import BadInput, Status


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_judged_and_optimal_up_to_beta_two(slots: int) -> None:
    for num_steps in range(beta(slots, 2) + 12):
        plan = plan_online(single_level(num_steps, slots))
        assert plan.judge().serial_time_ns == plan.cost * 10**9
        if num_steps <= beta(slots, 2):
            assert plan.status is Status.OPTIMAL


@pytest.mark.parametrize(("slots", "worst"), [(2, 1.15), (3, 1.07), (5, 1.05), (10, 1.03)])
def test_never_far_from_knowing_the_length(slots: int, worst: float) -> None:
    run = OnlineCheckpoints(slots)
    for num_steps in range(1, 1_500):
        run.advance()
        assert run.num_forwards_if_ended() <= worst * num_forwards(num_steps + 1, slots)


def test_choice_matches_trying_every_set() -> None:
    """The O(slots) update against pricing every candidate set from scratch."""

    def price(kept: list[int], end: int, slots: int) -> int:
        stops = [*kept[1:], end]
        return sum(num_forwards(b - a, slots - i) for i, (a, b) in enumerate(zip(kept, stops, strict=True)))

    slots = 4
    run = OnlineCheckpoints(slots)
    for step in range(120):
        before = list(run.kept)
        run.advance()
        if len(before) == slots:
            choices = [before, *([*before[:k], *before[k + 1 :], step] for k in range(1, slots))]
            assert price(run.kept, step + 1, slots) == min(price(c, step + 1, slots) for c in choices)


def test_slots_are_respected_and_needed() -> None:
    run = OnlineCheckpoints(3)
    for _ in range(50):
        run.advance()
        assert len(run.kept) <= 3
        assert run.kept[0] == 0
    with pytest.raises(BadInput):
        OnlineCheckpoints(0)
    assert plan_online(single_level(3, 0)).status is Status.INFEASIBLE
