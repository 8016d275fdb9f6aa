"""A saved plan for a step: found among its forms, and judged anew. A plan from a stranger is data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from memfit.core.budget import Budget
from memfit.core.errors import BadInput
from memfit.core.io import load
from memfit.core.plan import Plan
from memfit.core.simulate import simulate
from memfit.core.units import format_bytes
from memfit.pipeline.choice import Choice
from memfit.pipeline.costs import Costed


def load_plan(plan: str | Path | Plan | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    return cast(Plan, load(plan, Plan))


def match_plan(plan: Plan, forms: Iterable[Costed], budget: Budget) -> Choice:
    """The form that the plan is for, and the plan with this device's costs.

    The graph of a compiled form is known only with its costs: forms of ops that never pay are left out of it.
    """
    seen = ""
    for form in forms:
        seen = seen or form.captured.graph.digest
        if plan.graph_digest == form.captured.graph.digest:
            return Choice(form=form, plan=_judge_here(plan, form, budget))
    raise BadInput(
        f"the plan is for graph {plan.graph_digest[:12]}, this model with these inputs is {seen[:12]}: another model, other shapes, other allow=, "
        "another optimizer or loss, another torch version or another kind of device. Plan again with memfit plan, or leave out plan=."
    )


def _judge_here(plan: Plan, form: Costed, budget: Budget) -> Plan:
    captured, costs = form.captured, form.costs
    timeline = simulate(captured.graph, plan.schedule, costs)
    limit = budget.device_bytes
    if limit is not None and timeline.peak_bytes > limit:
        raise BadInput(
            f"the plan holds {format_bytes(timeline.peak_bytes)} on this device ({costs.device}; {format_bytes(plan.timeline.peak_bytes)} where it was "
            f"made), and {format_bytes(limit)} are left of the budget: its ops need other workspaces here, or it was made for a larger budget. "
            "Plan again with memfit plan, or give a larger budget."
        )
    return Plan(schedule=plan.schedule, timeline=timeline, planner=plan.planner, graph_digest=plan.graph_digest, budget=budget)
