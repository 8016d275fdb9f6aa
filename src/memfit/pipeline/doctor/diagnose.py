"""The whole examination, in the order of its screen.

task, call ─> step as fit sees it ─> minimum of each form ─> what holds the lowest ─> passes ─> outside ─> smallest plan ─> Diagnosis
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from memfit.capture.inputs import Call
from memfit.core.outcome import Outcome
from memfit.core.plan import Plan
from memfit.pipeline.beside import count_held_elsewhere, count_slack
from memfit.pipeline.costs import TableCosts
from memfit.pipeline.doctor.floors import Lowest, look_at, try_passes
from memfit.pipeline.doctor.held import list_held
from memfit.pipeline.doctor.outside import count_lasting, fewer_rows, frozen_parameters, offloading, other_optimizers
from memfit.pipeline.doctor.step import Seen, see_step
from memfit.pipeline.forms import Forms
from memfit.pipeline.study import find_smallest_budget
from memfit.pipeline.task import Task
from memfit.planning import plan as find_plan
from memfit.report.diagnosis import Diagnosis, PassEffect, Priced, Remedy
from memfit.report.progress import Progress
from memfit.runtime.gradients import count_left

Row = TypeVar("Row", PassEffect, Remedy)
_PLANNED = 2
"""Forms, those with the lowest minimum, for which plans are looked for."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """`keep_outputs` as `fit` takes it; `budget_bytes`: the one that was refused, or is slow."""

    task: Task
    call: Call
    keep_outputs: bool | None = None
    budget_bytes: int | None = None
    time_limit_s: float = 10

    @cached_property
    def costs(self) -> TableCosts:
        return TableCosts(device=self.task.device)


def diagnose(question: Question, progress: Progress) -> Diagnosis:
    """Everything that the screen says. Raises what `fit` would raise where no form of the step can be traced."""
    progress.update("tracing the model")
    seen = see_step(question.task, question.call)
    forms = _forms_of(seen, question.keep_outputs)
    known = _look_at_all(seen, question)
    lowest, whole = known[0], _plain(seen.whole, question)
    progress.update("trying each pass")
    passes = (*_outputs_row(seen, question, whole), *try_passes(forms, question.costs))
    progress.update("looking for the smallest budget")
    beside = _count_beside(question, whole)
    reached, base = _reach(known, question), whole.costed.keep_all
    inside = _plan_inside(known, question, beside)
    reached_bytes = None if reached is None else reached.timeline.peak_bytes
    larger = tuple(_price_larger(known, question, reached, base, beside))
    progress.update("looking at what is outside")
    return Diagnosis(
        minimum_bytes=lowest.bytes + beside,
        form=lowest.costed.name,
        held_at=lowest.floor.where,
        held=list_held(lowest),
        fixed=count_lasting(lowest.costed.captured.graph),
        as_it_is_bytes=whole.bytes + beside,
        passes=tuple(_and_beside(row, beside) for row in passes),
        outside=tuple(_and_beside(row, beside) for row in _list_outside(known, question, reached_bytes)),
        refused=_list_refused(seen),
        reached_bytes=None if reached_bytes is None else reached_bytes + beside,
        reached_overhead_fraction=None if reached is None else _overhead(reached, base),
        keep_all_bytes=base.timeline.peak_bytes + beside,
        larger=larger,
        beside_bytes=beside,
        budget_bytes=question.budget_bytes,
        budget_overhead_fraction=None if inside is None else _overhead(inside, base),
    )


def _forms_of(seen: Seen, keep_outputs: bool | None) -> Forms:
    """The forms with the least memory that `fit` would come to."""
    return seen.whole if keep_outputs or seen.fewer is None else seen.fewer


def _look_at_all(seen: Seen, question: Question) -> list[Lowest]:
    """Every form, the one with the lowest minimum first. Those with all outputs need no less than those without."""
    found = look_at(_forms_of(seen, question.keep_outputs).every(), question.costs)
    return sorted(found, key=lambda form: form.bytes)


def _plain(forms: Forms, question: Question) -> Lowest:
    return look_at([next(forms.usual())], question.costs)[0]


def _outputs_row(seen: Seen, question: Question, whole: Lowest) -> tuple[PassEffect, ...]:
    """What leaving out outputs beside the loss does, before any pass."""
    if seen.fewer is None:
        return ()
    after = _plain(seen.fewer, question).bytes
    note = "not with keep_outputs=True" if question.keep_outputs else "fit does that where needed; rows below are with it"
    return (PassEffect(name="keep_outputs=False", numbers="same bits", before_bytes=whole.bytes, after_bytes=after, note=note),)


def _list_outside(known: list[Lowest], question: Question, reached_bytes: int | None) -> Iterator[Remedy]:
    task, lowest = question.task, known[0]
    yield from fewer_rows(question.call, lowest, lambda call: _minimum_with(call, question))
    yield from other_optimizers(task.optimizer, known, question.costs, "cuda" if task.is_elsewhere else None)
    yield from frozen_parameters(lowest.costed.captured.graph)
    yield from offloading(lowest, reached_bytes, task.allow)


def _and_beside(row: Row, beside: int) -> Row:
    """With what a budget holds besides the step, as all numbers of the screen."""
    changed = row if row.after_bytes is None else replace(row, after_bytes=row.after_bytes + beside)
    return replace(changed, before_bytes=changed.before_bytes + beside) if isinstance(changed, PassEffect) else changed


def _count_beside(question: Question, plain: Lowest) -> int:
    """As `fit` counts it."""
    captured = plain.costed.captured
    peak = plain.costed.keep_all.timeline.peak_bytes
    left = count_left(tuple(question.task.model.parameters()))
    return count_held_elsewhere(question.task, question.call, captured, left) + count_slack(captured, peak)


def _reach(known: list[Lowest], question: Question) -> Plan | None:
    """The plan with the smallest peak that is found in the time."""
    tried = known[:_PLANNED]
    found: list[Outcome] = [
        find_smallest_budget(x.costed.captured.graph, x.costed.costs, time_limit_s=question.time_limit_s / len(tried)) for x in tried
    ]
    plans = [o.plan for o in found if o.plan is not None]
    return min(plans, key=lambda plan: plan.timeline.peak_bytes, default=None)


def _plan_inside(known: list[Lowest], question: Question, beside: int) -> Plan | None:
    """A plan for the budget that was asked about, the fastest that is found."""
    if question.budget_bytes is None:
        return None
    return _fastest(known, max(0, question.budget_bytes - beside), question.time_limit_s / 2)


def _price_larger(known: list[Lowest], question: Question, reached: Plan | None, base: Plan, beside: int) -> Iterator[Priced]:
    """Two budgets on the way from the smallest plan to the plain step, and what they cost."""
    if reached is None:
        return
    low, high = reached.timeline.peak_bytes, base.timeline.peak_bytes
    for limit in (low + (high - low) // 3, low + 2 * (high - low) // 3):
        if low < limit < high:
            found = _fastest(known, limit, question.time_limit_s / 4)
            plans = [reached] if found is None else [found, reached]  # the smallest plan fits here too
            yield Priced(budget_bytes=limit + beside, overhead_fraction=min(_overhead(plan, base) for plan in plans))


def _fastest(known: list[Lowest], limit: int, seconds: float) -> Plan | None:
    """A plan of the form that needs least, or of the one that is fastest with everything kept."""
    able = [x for x in known if x.bytes <= limit]
    if not able:
        return None
    quick = min(able, key=lambda x: x.costed.keep_all.timeline.time_ns)
    tried = [able[0]] if quick is able[0] else [able[0], quick]
    found = [find_plan(x.costed.captured.graph, x.costed.costs, limit, time_limit_s=seconds / len(tried)).plan for x in tried]
    return min((plan for plan in found if plan is not None), key=lambda plan: plan.timeline.time_ns, default=None)


def _minimum_with(call: Call, question: Question) -> int:
    """Of all forms of another call's step."""
    forms = _forms_of(see_step(question.task, call), question.keep_outputs)
    return min(x.bytes for x in look_at(forms.every(), question.costs))


def _overhead(plan: Plan, base: Plan) -> float:
    return plan.timeline.compute_time_ns / max(base.timeline.compute_time_ns, 1) - 1


def _list_refused(seen: Seen) -> tuple[str, ...]:
    if not seen.refusal:
        return ()
    return (f"Dynamo has no graph of the step: {seen.refusal}. Taken instead: memfit's own trace, behind a fingerprint of what it read",)
