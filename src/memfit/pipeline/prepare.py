"""One call of a model made ready to run: what every training door goes through.

Task, Call ─> forms ─> costs ─> choice ─> compiled ─> Ready
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from memfit import __version__
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor import compile_pieces, compiled_start
from memfit.core.budget import Budget
from memfit.core.cache_folder import cache_folder
from memfit.core.errors import InfeasibleBudget, NoPlanFound, Unsupported
from memfit.core.plan import Plan
from memfit.offsets import tight_layout
from memfit.pipeline.beside import count_all, count_held_elsewhere, count_slack, name_doctor
from memfit.pipeline.choice import Choice, FormSearch, PlanSettings
from memfit.pipeline.costs import Costed, cost
from memfit.pipeline.forms import Form, Forms
from memfit.pipeline.saved_plan import match_plan
from memfit.pipeline.task import Task, compile_planner_meanwhile
from memfit.report.progress import Progress
from memfit.runtime.arena.planned import BLOCK_BYTES, StepArena, installed
from memfit.runtime.autograd_step import Ready
from memfit.runtime.codegen import generate
from memfit.runtime.cuda_graphs import Recorder, cuda_graphs_for
from memfit.runtime.traced_layouts import TracedLayouts

if TYPE_CHECKING:
    from memfit.planning import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparer:
    """Makes calls of one task ready to run inside a budget. `saved` is a plan made before; `replay`: steps are recorded in CUDA graphs."""

    task: Task
    budget_bytes: int
    planner: str | Planner = "auto"
    time_limit_s: float = 30
    saved: Plan | None = None
    replay: bool = False

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call.flatten(args, kwargs)

    @property
    def recorder(self) -> Callable[[Ready], Recorder] | None:
        """What records steps; None where they are called."""
        return cuda_graphs_for if self.replay else None

    def plan_for(self, call: Call, *, accumulates: bool, tighter_by: int, held_bytes: int = 0) -> Ready:
        """Everything from the call to code that runs, `tighter_by` bytes below the budget, of which `held_bytes` are taken. What "auto"
        cannot compile runs on PyTorch's own kernels, and so does a saved plan that was made for them."""
        order = self.order(call, accumulates=accumulates, tighter_by=tighter_by, held_bytes=held_bytes)
        task, saved = self.task, order.saved
        eager = replace(task, engine="eager")
        if (
            saved is not None
            and task.engine == "auto"
            and task.compiles
            and _has_form_for(saved, Forms(eager, call, accumulates=accumulates))
        ):
            task = eager
        try:
            return self._make_ready(task, order)
        except Unsupported as error:
            if task.engine != "auto" or not task.compiles:
                raise
            ready = self._make_ready(eager, order)
            return replace(ready, notes=(f"runs on the eager engine: {error}", *ready.notes))

    def order(self, call: Call, *, accumulates: bool, tighter_by: int, held_bytes: int) -> Order:
        """What `plan_for` is asked for."""
        return Order(
            call=call,
            accumulates=accumulates,
            budget=Budget(device_bytes=max(0, self.budget_bytes - tighter_by)),
            aside_bytes=sum(t.nbytes for t in call.tensors) if self.replay else 0,  # a replay reads copies of its inputs
            held_bytes=held_bytes,
            saved=self.saved if not tighter_by and not accumulates else None,
        )

    def _make_ready(self, task: Task, order: Order) -> Ready:
        """With all outputs; where no plan holds them, without those beside the loss."""
        forms = Forms(task, order.call, accumulates=order.accumulates)
        try:
            return self._make_ready_of(task, order, forms)
        except (InfeasibleBudget, NoPlanFound):
            if task.keep_outputs is not None or not forms.plain.has_outputs_beside_the_loss:
                raise
        fewer = replace(task, keep_outputs=False)
        return self._make_ready_of(fewer, order, Forms(fewer, order.call, accumulates=order.accumulates))

    def _make_ready_of(self, task: Task, order: Order, forms: Forms) -> Ready:
        with Progress("memfit") as progress, _helped(task, order.call):
            chosen = self.choose(task, order, forms, progress)
            captured, plan = chosen.choice.form.captured, chosen.choice.plan
            compile_pieces((captured.call(s.op, s.variant).target for s in plan.schedule.computes), progress.update)
        ready = chosen.ready()
        return replace(ready, notes=(*ready.notes, forms.note)) if forms.note else ready

    def choose(self, task: Task, order: Order, forms: Forms, progress: Progress, price: Price | None = None) -> Chosen:
        """A form of the step and a plan for it, in what the budget has for the step alone. `price` says what forms cost, where that is not
        measured."""
        if order.saved is None:
            compile_planner_meanwhile(task)
        progress.update("tracing the model")
        price_of: Price = price or (lambda form: cost(form, task, progress))
        costed = map(price_of, forms.usual())
        first = next(costed)
        room = Room.of(task, order, first.captured, first.keep_all)
        budget = room.budget
        if order.saved is not None:
            choice = match_plan(order.saved, chain((first,), costed, _cost_slower(forms, task, progress)), budget)
        else:
            progress.update("planning")
            search = FormSearch(cost=price_of, budget=budget, settings=self._settings(task, first), progress=progress)
            try:
                choice = search.choose(chain((first,), costed), forms.slower(), first.keep_all)
            except InfeasibleBudget as refusal:
                raise name_doctor(count_all(refusal, order.budget, room.beside_bytes)) from None
            except NoPlanFound as refusal:
                raise name_doctor(refusal) from None
        return Chosen(choice=choice, whole=first.keep_all, room=room)

    def _settings(self, task: Task, first: Costed) -> PlanSettings:
        return PlanSettings(
            planner=self.planner,
            time_limit_s=self.time_limit_s,
            compare_all="rounding" in task.allow or first.captured.compiled,
            offload="offload" in task.allow,
            memory=cache_folder("plans"),
        )


Price = Callable[[Form], Costed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One call to make ready; `aside_bytes` of the budget are left for whoever runs it, `held_bytes` are held for it already."""

    call: Call
    accumulates: bool
    budget: Budget
    aside_bytes: int
    held_bytes: int
    saved: Plan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The bytes of a budget: `budget` is the step's own, the others are held outside it or left to the allocator."""

    budget: Budget
    elsewhere_bytes: int
    margin_bytes: int

    @property
    def beside_bytes(self) -> int:
        return self.elsewhere_bytes + self.margin_bytes

    @classmethod
    def of(cls, task: Task, order: Order, captured: Captured, whole: Plan) -> Room:
        elsewhere_bytes = count_held_elsewhere(task, order.call, captured, order.held_bytes)
        margin_bytes = count_slack(captured, whole.timeline.peak_bytes) + order.aside_bytes
        budget = Budget(device_bytes=max(0, (order.budget.device_bytes or 0) - elsewhere_bytes - margin_bytes))
        return cls(budget=budget, elsewhere_bytes=elsewhere_bytes, margin_bytes=margin_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is run, beside the plan that keeps everything, `whole`, and the bytes of the budget that are not the step's."""

    choice: Choice
    whole: Plan
    room: Room

    def ready(self) -> Ready:
        """Made executable; what has to be compiled is."""
        captured, plan, note = self.choice.form.captured, self.choice.plan, self.choice.note
        layouts = TracedLayouts(captured)
        return Ready(
            captured=captured,
            costs=self.choice.form.costs,
            plan=plan,
            program=generate(captured, plan.schedule, layouts),
            layouts=layouts,
            keep_all_peak_bytes=self.whole.timeline.peak_bytes,
            base_time_ns=self.whole.timeline.compute_time_ns,
            elsewhere_bytes=self.room.elsewhere_bytes,
            margin_bytes=self.room.margin_bytes,
            arena=_make_arena(captured.device),
            notes=(note,) if note else (),
        )


def _helped(task: Task, call: Call) -> AbstractContextManager[None]:
    """With helper processes that compile, woken before the step is traced."""
    about = (__version__, task.allow, type(task.optimizer), getattr(task.loss_fn, "__name__", ""))
    return compiled_start(task.model, call.tensors, about) if task.compiles else nullcontext()


def _has_form_for(plan: Plan, forms: Forms) -> bool:
    return any(form.captured.graph.digest == plan.graph_digest for form in forms.usual())


def _cost_slower(forms: Forms, task: Task, progress: Progress) -> Iterator[Costed]:
    for _, group in forms.slower():
        yield from (cost(form, task, progress) for form in group)


def _make_arena(device: torch.device) -> StepArena | None:
    """Where a step's allocations will lie, if the process asked for it with `use_planned_arena`."""
    allocator = installed()
    if allocator is None or device.type != "cuda":
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    return StepArena(allocator, index, partial(tight_layout, alignment_bytes=BLOCK_BYTES, gap_fraction=0.0))
