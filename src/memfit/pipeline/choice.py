"""Which form of a step is run, and by which plan: forms are looked at in turn, and the fastest plan found for any of them is taken.

forms   as it is ── with choices ── loss fused ──┬─ a plan that is not slow: taken
                                                 └─ none, or a slow one: the widest block in slices, then convolutions in slices
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import __version__
from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.core.errors import InfeasibleBudget, NoPlanFound
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Plan
from memfit.passes.table import Use
from memfit.pipeline.costs import Costed
from memfit.pipeline.forms import Form
from memfit.planning import find_planner
from memfit.planning import plan as find_plan
from memfit.planning.offload.planner import Offloading
from memfit.planning.plan_cache import CachedPlanner
from memfit.planning.search.auto import Portfolio
from memfit.report.progress import Progress

if TYPE_CHECKING:
    from memfit.planning import Planner

_COMPARED = 2  # the step as it is, and with choices that give the same bits
_FIRST_LOOK = 0.15  # of the time: for each form, before the rest goes to the best of them
_CLOSE = 0.003  # of the step's time: nearer to its bound a plan is not worth more of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How to look for a plan. `compare_all`: try every form and take the fastest, instead of the first two and then the first that has a plan.

    `offload`: values may wait on the host, where that gives a faster plan or the only one.
    `memory`: the folder where plans found before are looked for first, and new ones are left.
    """

    planner: str | Planner = "auto"
    time_limit_s: float = 30
    compare_all: bool = False
    offload: bool = False
    memory: Path | None = None

    def searching(self, stage: str) -> Planner:
        """The planner for somebody who waits for their first step."""
        return self._remembering(self._chosen(), stage)

    def offloading(self, without: Outcome) -> Planner:
        """Beside a plan that is known; in the same time again."""
        return self._remembering(Offloading(planner=self._chosen(), without=without), "with offload")

    def _chosen(self) -> Planner:
        return Portfolio(patience=0.5) if self.planner == "auto" else find_planner(self.planner)

    def _remembering(self, planner: Planner, stage: str) -> Planner:
        """Planners chosen by name are: of a planner somebody wrote nobody knows what its answers depend on."""
        label = f"memfit {__version__}, {self.time_limit_s} s, {stage}"
        return (
            planner
            if self.memory is None or not isinstance(self.planner, str)
            else CachedPlanner(planner=planner, folder=self.memory, label=label)
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A form of a step and a plan for it."""

    form: Costed
    plan: Plan

    @property
    def time_ns(self) -> int:
        return self.plan.timeline.time_ns

    @property
    def note(self) -> str:
        """For the report of a step on PyTorch's own kernels, of which one expects the plain model's bits."""
        if not self.form.rounds or self.form.captured.compiled:
            return ""
        return (
            f'form "{self.form.name}": rounded otherwise than the plain model, in bf16 and fp16 by a percent or two of a gradient; a larger '
            'budget or allow=("recompute",) keeps its bits'
        )


def choose_plan(forms: Iterable[Costed], budget: Budget, settings: PlanSettings, progress: Progress) -> Choice:
    """A first look at the first two forms, else at all until one has a plan, or at all; then the time that is left for the fastest.
    The only one has all the time.

    A plan that repeats nothing ends the search. Without any the weakest refusal: a proof must hold for all.
    """
    tried: list[tuple[Costed, Outcome]] = []

    def look(form: Costed, seconds: float, planner: Planner) -> Plan | None:
        outcome = plan_form(form, budget, planner=planner, time_limit_s=seconds, progress=progress)
        tried.append((form, outcome))
        return outcome.plan

    def find_fastest() -> tuple[Costed, Outcome] | None:
        return min((entry for entry in tried if entry[1].plan is not None), key=_plan_time, default=None)

    def list_undecided() -> list[tuple[Costed, Outcome]]:
        return [entry for entry in tried if entry[1].status is not Status.INFEASIBLE]

    for form, is_only in _one_or_more(forms, budget, settings):
        stage = "all of it" if is_only else "a first look"
        found = look(form, (1.0 if is_only else _FIRST_LOOK) * settings.time_limit_s, settings.searching(stage))
        enough = len(tried) >= _COMPARED and not settings.compare_all and find_fastest() is not None
        if enough or (found is not None and not has_repeats(found)):
            break
    best, more = find_fastest(), settings.searching("what is left of it")
    again = list_undecided() if best is None else [best]
    for number, (form, before) in enumerate(again):
        spent_s = sum(outcome.seconds for _, outcome in tried)  # of planning: compiling a form is not
        seconds = (settings.time_limit_s - spent_s) / (len(again) - number)
        if _is_worth_more(before, settings) and seconds > 0 and look(form, seconds, more) is not None:
            break
    if settings.offload and tried:
        form, before = find_fastest() or min(tried, key=lambda entry: entry[1].lower_bound_bytes)
        look(form, settings.time_limit_s, settings.offloading(before))
    if (best := find_fastest()) is not None:
        return Choice(form=best[0], plan=best[1].require_plan())
    open_ones = list_undecided()
    weakest = open_ones[-1][1] if open_ones else min((o for _, o in tried), key=lambda o: o.lower_bound_bytes)
    weakest.require_plan()
    raise AssertionError("an outcome without a plan raises")


def _one_or_more(forms: Iterable[Costed], budget: Budget, settings: PlanSettings) -> Iterator[tuple[Costed, bool]]:
    """Each form, and whether it is the only one. A second is not made for a step that fits as it is: that may take a minute of compiling."""
    rest = iter(forms)
    first = next(rest)
    limit = budget.device_bytes
    fits = limit is None or first.keep_all.timeline.peak_bytes <= limit
    known = [] if fits or not settings.compare_all else list(rest)
    yield first, settings.compare_all and not fits and not known
    yield from ((form, False) for form in chain(known, rest))


def _plan_time(entry: tuple[Costed, Outcome]) -> int:
    return entry[1].require_plan().timeline.time_ns


def _is_worth_more(outcome: Outcome, settings: PlanSettings) -> bool:
    """Whether a planner given more time may find a faster plan than at first sight: `auto`, and others that used up what they had."""
    gap = outcome.gap_fraction
    if outcome.plan is not None and (not has_repeats(outcome.plan) or (gap is not None and gap <= _CLOSE)):
        return False
    return settings.planner == "auto" or outcome.seconds >= _FIRST_LOOK * settings.time_limit_s


_SLOW = 1.08  # times the step that keeps everything: from there on the widest block in slices may be faster, though it always runs twice
_BARE_S = 1.0
_SETTLED = 1.02  # times the step in slices that keeps everything: a longer block in slices takes longer by itself


@dataclass(slots=True, kw_only=True)
class FormSearch:
    """For the best plan of a step in all its forms: the usual ones, and where they have none or a slow one those that hold less.

    `cost` prices a form, which may take compiling and measuring.
    """

    cost: Callable[[Form], Costed]
    budget: Budget
    settings: PlanSettings
    progress: Progress
    refusals: list[InfeasibleBudget | NoPlanFound] = field(default_factory=list)

    def choose(self, usual: Iterable[Costed], slower: Iterable[tuple[Use, Iterable[Form]]], whole: Plan) -> Choice:
        """`whole` keeps everything. Without a plan the weakest refusal: a proof must hold for all forms."""
        found = self._attempt(usual)
        for use, forms in slower:
            if found and (use is Use.LAST_RESORT or min(c.time_ns for c in found) <= _SLOW * whole.timeline.time_ns):
                break
            found += self._attempt_slower(forms, whole)
        if not found:
            raise min(self.refusals, key=lambda refusal: refusal.minimum_bytes or 0 if isinstance(refusal, InfeasibleBudget) else -1)
        return min(found, key=lambda choice: choice.time_ns)

    def _attempt(self, forms: Iterable[Costed]) -> list[Choice]:
        try:
            return [choose_plan(forms, self.budget, self.settings, self.progress)]
        except (InfeasibleBudget, NoPlanFound) as refusal:
            self.refusals.append(refusal)
            return []

    def _attempt_slower(self, forms: Iterable[Form], whole: Plan) -> Iterator[Choice]:
        """Plans for the ways of one pass (longer and longer blocks in slices), until one is not slow or repeats next to nothing besides. A
        form that cannot fit even in no workspace is not compiled."""
        for form in forms:
            graph = form.captured.graph
            bare = find_plan(graph, uniform_costs(graph), self.budget, time_limit_s=_BARE_S)
            if bare.status is Status.INFEASIBLE:
                self.refusals.append(InfeasibleBudget(bare.reason, minimum_bytes=bare.lower_bound_bytes))
                continue
            costed = self.cost(form)
            for choice in self._attempt([costed]):
                yield choice
                if choice.time_ns <= max(_SETTLED * costed.keep_all.timeline.time_ns, _SLOW * whole.timeline.time_ns):
                    return


def has_repeats(plan: Plan) -> bool:
    """Whether a plan computes anything twice."""
    ops = [step.op for step in plan.schedule.computes]
    return len(set(ops)) < len(ops)


def plan_form(form: Costed, budget: Budget, *, planner: str | Planner, time_limit_s: float, progress: Progress) -> Outcome:
    def tell(state: Any) -> None:
        progress.update(f"planning, {state.note}" if state.note else "planning")

    return find_plan(form.captured.graph, form.costs, budget, planner=planner, time_limit_s=time_limit_s, progress=tell)
