"""Outcomes turn into plans or into the right exception; steps and schedules are plain values."""

from __future__ import annotations

import pytest
from tests.small import chain

from memfit.core.errors import InfeasibleBudget, NoPlanFound
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Plan
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule
from memfit.core.simulate import simulate


def test_a_plan_is_handed_out() -> None:
    schedule = Schedule(steps=(Compute(0),))
    plan = Plan(schedule=schedule, timeline=simulate(chain(1), schedule), planner="x", graph_digest=chain(1).digest)
    assert Outcome(status=Status.FEASIBLE, plan=plan).require_plan() is plan


def test_infeasible_carries_its_proof() -> None:
    with pytest.raises(InfeasibleBudget, match="below 7") as caught:
        Outcome(status=Status.INFEASIBLE, lower_bound_bytes=7, reason="6 is below 7").require_plan()
    assert caught.value.minimum_bytes == 7


def test_unknown_is_not_infeasible() -> None:
    with pytest.raises(NoPlanFound, match="allow more time"):
        Outcome(status=Status.UNKNOWN).require_plan()


def test_every_status_has_its_sentence() -> None:
    assert len({status.sentence for status in Status}) == 4


def test_schedules_are_values_and_list_their_computes() -> None:
    schedule = Schedule(steps=(Compute(1), Free(0), Offload(1), Reload(1), Compute(0, 2)))
    assert schedule.computes == (Compute(1, 0), Compute(0, 2))
    assert schedule == Schedule(steps=(Compute(1, 0), Free(0, 0), Offload(1, 1), Reload(1, 1), Compute(0, 2)))
    assert hash(schedule) == hash(Schedule(steps=schedule.steps))
