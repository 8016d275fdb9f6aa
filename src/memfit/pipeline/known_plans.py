"""Plans found for some sizes of a step, tried at others: judged in milliseconds, taken if they fit.

    a size ── everything kept fits? ── taken
           ├─ of the plans known, the fastest that fits ── as fast as keeping everything, or one was sought at such a share ── taken
           └─ else a plan is sought, once for each twentieth of the bytes that keeping everything takes

A plan that rounds otherwise than the plain model is tried only where so small a share had no other one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.errors import IllegalSchedule
from memfit.core.graph import Graph
from memfit.core.plan import Plan
from memfit.core.schedule import Schedule
from memfit.core.simulate import simulate
from memfit.pipeline.choice import Choice
from memfit.pipeline.costs import Costed
from memfit.pipeline.forms import Form, FormKey, Forms
from memfit.pipeline.prepare import Chosen, Order, Room
from memfit.pipeline.scaled_costs import Priced, scale_costs
from memfit.pipeline.task import Task

_STEPS = 20  # of the bytes between what the caller holds and what keeping everything takes
_AS_FAST = 1.003  # times the step that keeps everything
_MOST = 24  # plans, and measured sizes of a form


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A schedule, the form of the step that it is for, and whether that rounds otherwise than the plain model."""

    key: FormKey
    rounds: bool
    schedule: Schedule
    planner: str


@dataclass(slots=True)
class KnownPlans:
    """Of one step, in all its sizes."""

    priced: dict[FormKey, list[Priced]] = field(default_factory=dict)
    plans: list[_Found] = field(default_factory=list)
    whole: tuple[FormKey, Schedule] | None = None
    sought: set[int] = field(default_factory=set)  # twentieths
    rounds_up_to: float = -1.0  # the largest share at which only a form that rounds otherwise had a plan

    def remember(self, chosen: Chosen, first: FormKey) -> None:
        """A plan that was sought, and the one that keeps everything."""
        form, share = chosen.choice.form, _share_of(chosen.room.budget, chosen.choice.form.captured.graph, chosen.whole)
        self.whole = first, chosen.whole.schedule
        self.sought.add(int(share * _STEPS))
        found = _Found(key=form.key, rounds=form.rounds, schedule=chosen.choice.plan.schedule, planner=chosen.choice.plan.planner)
        self.plans = [found, *self.plans][:_MOST]
        if form.rounds:
            self.rounds_up_to = max(self.rounds_up_to, share)

    def put_price(self, form: Costed) -> None:
        """What was measured."""
        entry = Priced(graph=form.captured.graph, costs=form.costs)
        self.priced[form.key] = [entry, *self.priced.get(form.key, [])][:_MOST]

    def price(self, form: Form) -> Costed | None:
        """By what was measured at other sizes."""
        costs = scale_costs(form.captured, self.priced.get(form.key, ()))
        return None if costs is None else _with_costs(form, costs)

    def find(self, task: Task, order: Order, forms: Forms) -> Chosen | None:
        """A plan for another size; None where one has to be sought."""
        if self.whole is None:
            return None
        first = self._find_form(forms, self.whole[0])
        whole = None if first is None else judge(first, self.whole[1], "keep_all")
        if first is None or whole is None:
            return None
        room = Room.of(task, order, first.captured, whole)
        if _fits(whole, room.budget):
            return Chosen(choice=Choice(form=first, plan=_within(whole, room.budget)), whole=whole, room=room)
        share = _share_of(room.budget, first.captured.graph, whole)
        best = self._find_fastest(forms, room.budget, rounds="rounding" in task.allow or share <= self.rounds_up_to)
        if best is None:
            return None
        if int(share * _STEPS) not in self.sought and best.time_ns > _AS_FAST * whole.timeline.time_ns:
            return None
        return Chosen(choice=best, whole=whole, room=room)

    def _find_fastest(self, forms: Forms, budget: Budget, *, rounds: bool) -> Choice | None:
        """The fastest of all known plans that fits this size; `rounds`: also of those that round otherwise than the plain model."""
        best: Choice | None = None
        made: dict[FormKey, Costed | None] = {}
        for known in self.plans:
            if known.rounds and not rounds:
                continue
            if known.key not in made:
                made[known.key] = self._find_form(forms, known.key)
            form = made[known.key]
            found = None if form is None else judge(form, known.schedule, known.planner)
            if form is None or found is None or not _fits(found, budget):
                continue
            if best is None or found.timeline.time_ns < best.time_ns:
                best = Choice(form=form, plan=_within(found, budget))
        return best

    def _find_form(self, forms: Forms, key: FormKey) -> Costed | None:
        form = forms.find(key)
        return None if form is None else self.price(form)


def judge(form: Costed, schedule: Schedule, planner: str) -> Plan | None:
    """A schedule of another size on this one's graph; None where that is not legal."""
    try:
        timeline = simulate(form.captured.graph, schedule, form.costs)
    except IllegalSchedule:
        return None
    return Plan(schedule=schedule, timeline=timeline, planner=planner, graph_digest=form.captured.graph.digest)


def _with_costs(form: Form, costs: Costs) -> Costed:
    return Costed(name=form.name, captured=form.captured, costs=costs, rounds=form.rounds, way=form.way)


def _fits(plan: Plan, budget: Budget) -> bool:
    limit = budget.device_bytes
    return limit is None or plan.timeline.peak_bytes <= limit


def _within(plan: Plan, budget: Budget) -> Plan:
    return Plan(schedule=plan.schedule, timeline=plan.timeline, planner=plan.planner, graph_digest=plan.graph_digest, budget=budget)


def _share_of(budget: Budget, graph: Graph, whole: Plan) -> float:
    """Of what the step itself takes, everything kept, the share that the budget has for it."""
    held = sum(graph.storages[s].size_bytes for s in {graph.storage_of(t) for t in graph.sources})
    own = max(1, whole.timeline.peak_bytes - held)
    return max(0, (budget.device_bytes or 0) - held) / own
