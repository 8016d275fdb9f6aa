"""Which plans of other sizes serve a size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.inputs import Call
from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.core.schedule import Schedule
from memfit.pipeline.choice import Choice
from memfit.pipeline.costs import Costed
from memfit.pipeline.forms import Forms
from memfit.pipeline.known_plans import KnownPlans, judge
from memfit.pipeline.prepare import Chosen, Order, Room
from memfit.pipeline.task import Task
from memfit.planning import plan as find_plan


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


TASK = Task(model=Deep())


def forms_at(rows: int) -> Forms:
    return Forms(TASK, Call.flatten((torch.ones(rows, 8),), {}))


def costed(forms: Forms, **details: Any) -> Costed:
    form = forms.find(("as it is", 0))
    assert form is not None
    return Costed(name=form.name, captured=form.captured, costs=uniform_costs(form.captured.graph, time_ns=1000), **details)


def whole_bytes(rows: int) -> int:
    return costed(forms_at(rows)).keep_all.timeline.peak_bytes


def held_bytes(rows: int) -> int:
    graph = costed(forms_at(rows)).captured.graph
    return sum(graph.storages[s].size_bytes for s in {graph.storage_of(t) for t in graph.sources})


def order(limit: int) -> Order:
    call = Call.flatten((torch.ones(2, 8),), {})
    return Order(call=call, accumulates=False, budget=Budget(device_bytes=limit), aside_bytes=0, held_bytes=0, saved=None)


def known_at(rows: int, limit: int, **details: Any) -> KnownPlans:
    """A plan sought for this size and limit, and what it costs there."""
    form = costed(forms_at(rows), **details)
    known, budget = KnownPlans(), Budget(device_bytes=limit)
    known.put_price(form)
    found = find_plan(form.captured.graph, form.costs, budget, time_limit_s=2).require_plan()
    room = Room(budget=budget, elsewhere_bytes=0, margin_bytes=0)
    known.remember(Chosen(choice=Choice(form=form, plan=found), whole=form.keep_all, room=room), form.key)
    return known


def middle(rows: int, share: float) -> int:
    """A limit that has this share of what the step itself takes."""
    held = held_bytes(rows)
    return held + int((whole_bytes(rows) - held) * share)


def test_everything_is_kept_where_that_fits() -> None:
    known = known_at(1000, middle(1000, 0.7))
    chosen = known.find(TASK, order(whole_bytes(900)), forms_at(900))
    assert chosen is not None
    assert chosen.choice.plan.planner == "keep_all"
    assert chosen.choice.plan.timeline == chosen.whole.timeline
    assert chosen.choice.plan.graph_digest == chosen.choice.form.captured.graph.digest
    assert known.find(TASK, order(whole_bytes(900) - 1), forms_at(900)) is None  # nothing was sought at such a share


def test_a_plan_sought_at_such_a_share_serves_other_sizes() -> None:
    known = known_at(1000, middle(1000, 0.71))
    limit = middle(940, 0.74)
    chosen = known.find(TASK, order(limit), forms_at(940))
    assert chosen is not None
    assert chosen.choice.plan.timeline.peak_bytes <= limit < chosen.whole.timeline.peak_bytes
    assert chosen.choice.plan.schedule == known.plans[0].schedule
    assert chosen.choice.plan.budget == Budget(device_bytes=limit)


def test_a_plan_that_does_not_fit_serves_nobody() -> None:
    known = known_at(1000, middle(1000, 0.71))
    assert known.find(TASK, order(held_bytes(990) + 1000), forms_at(990)) is None


def test_a_plan_that_rounds_otherwise_serves_only_where_there_was_no_other() -> None:
    known = known_at(1000, middle(1000, 0.71), rounds=True)
    assert known.find(TASK, order(middle(940, 0.74)), forms_at(940)) is None
    assert known.find(TASK, order(middle(990, 0.705)), forms_at(990)) is not None
    freely = replace(TASK, allow=("recompute", "rounding"))
    assert known.find(freely, order(middle(940, 0.74)), forms_at(940)) is not None


def test_without_a_price_a_plan_is_sought() -> None:
    known = known_at(300, whole_bytes(300))
    assert known.find(TASK, order(2**40), forms_at(310)) is not None
    assert known.find(TASK, order(2**40), forms_at(900)) is None
    assert KnownPlans().find(TASK, order(2**40), forms_at(310)) is None


@pytest.mark.parametrize("steps", [1, 5])
def test_what_is_no_legal_schedule_is_not_taken(steps: int) -> None:
    form = costed(forms_at(10))
    assert judge(form, form.keep_all.schedule, "keep_all") is not None
    assert judge(form, Schedule(steps=form.keep_all.schedule.steps[steps:]), "keep_all") is None
