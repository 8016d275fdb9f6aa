"""One call of a model made ready to run: captured, costed, planned and generated. What every training door goes through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call, Inputs
from memfit.capture.lower.storages import granularity_of, round_up
from memfit.compilers.inductor import compile_pieces, helper_processes
from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.errors import BadInput, InfeasibleBudget, Unsupported
from memfit.core.graph import Graph
from memfit.core.io import load
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Plan
from memfit.core.simulate import simulate
from memfit.core.units import format_bytes, parse_bytes
from memfit.offsets import tight_layout
from memfit.pipeline.choice import FormSearch, PlanSettings
from memfit.pipeline.task import Task
from memfit.planning import plan as find_plan
from memfit.planning.jit.warm_up import start_compiling
from memfit.profile.cache import default_folder
from memfit.report.progress import Progress
from memfit.runtime.arena.planned import BLOCK_BYTES, StepArena, installed
from memfit.runtime.autograd_step import Ready
from memfit.runtime.codegen import generate
from memfit.torch_private.tensors import storage_key

if TYPE_CHECKING:
    from memfit.planning import Planner


def make_ready(
    task: Task,
    call: Call,
    budget: Budget,
    *,
    accumulates: bool = False,
    planner: str | Planner = "auto",
    time_limit_s: float = 30,
    plan: Plan | None = None,
    aside_bytes: int = 0,
) -> Ready:
    """Capture, profile, plan and generate one call; `aside_bytes` of the budget are left for whoever runs it.

    What "auto" cannot compile runs on PyTorch's own kernels, and so does a saved plan that was made for them.
    """
    if plan is not None and task.engine == "auto" and task.compiles:
        eager = replace(task, engine="eager")
        if any(c.graph.digest == plan.graph_digest for c in eager.offers(call, accumulates=accumulates)):
            task = eager
    try:
        return _make_ready(task, call, budget, accumulates, planner, time_limit_s, plan, aside_bytes)
    except Unsupported as error:
        if task.engine != "auto" or not task.compiles:
            raise
        ready = _make_ready(replace(task, engine="eager"), call, budget, accumulates, planner, time_limit_s, plan, aside_bytes)
        return replace(ready, note=f"runs on the eager engine: {error}")


@helper_processes()
def _make_ready(
    task: Task,
    call: Call,
    budget: Budget,
    accumulates: bool,
    planner: str | Planner,
    time_limit_s: float,
    plan: Plan | None,
    aside_bytes: int,
) -> Ready:
    with Progress("memfit") as progress:
        if plan is None and budget.device_bytes is not None:
            _compile_planner_meanwhile(task)
        progress.update("tracing the model")
        forms = task.offers(call, accumulates=accumulates)
        offers = (task.costed(c, progress) for c in forms)
        first = next(offers)
        elsewhere_bytes = held_elsewhere(task, call, first[0])
        whole = find_plan(first[0].graph, first[1], None, planner="keep_all").require_plan()
        margin_bytes = allocator_slack(first[0], whole.timeline.peak_bytes) + aside_bytes
        given, beside_bytes = budget, elsewhere_bytes + margin_bytes
        if given.device_bytes is not None:
            budget = Budget(device_bytes=max(0, given.device_bytes - beside_bytes))
        every = chain((first,), offers)
        if plan is not None:
            rare = (task.costed(c, progress) for c in chain(*forms.in_slices(), forms.by_convolutions()))
            captured, costs, chosen = _replayed(plan, chain(every, rare), budget)
        else:
            progress.update("planning")
            compare_all = "rounding" in task.allow or first[0].compiled
            settings = PlanSettings(
                planner=planner,
                time_limit_s=time_limit_s,
                compare_all=compare_all,
                offload="offload" in task.allow,
                memory=default_folder() / "plans",
            )
            search = FormSearch(task=task, forms=forms, budget=budget, settings=settings, progress=progress)
            try:
                captured, costs, chosen = search.best(every, whole)
            except InfeasibleBudget as refusal:
                raise _counting_all(refusal, given, beside_bytes) from None
        compile_pieces((captured.call(s.op, s.variant).target for s in chosen.schedule.computes), progress.update)
        task.leave_mark(call)
        return Ready(
            captured=captured,
            costs=costs,
            plan=chosen,
            program=generate(captured, chosen.schedule),
            keep_all_peak_bytes=whole.timeline.peak_bytes,
            base_time_ns=whole.timeline.compute_time_ns,
            elsewhere_bytes=elsewhere_bytes,
            margin_bytes=margin_bytes,
            arena=planned_arena(captured.device),
        )


def _counting_all(refusal: InfeasibleBudget, given: Budget, beside_bytes: int) -> InfeasibleBudget:
    """A refusal in the user's own terms: what a budget has to hold besides the step is counted in the least one to ask for."""
    if not beside_bytes or given.device_bytes is None or refusal.minimum_bytes is None:
        return refusal
    least_bytes = refusal.minimum_bytes + beside_bytes
    besides = f"{format_bytes(beside_bytes)} of the budget of {format_bytes(given.device_bytes)} are held outside the step or left to the allocator"
    return InfeasibleBudget(
        f"{besides}; {refusal} Counting both, the budget must be at least {least_bytes} bytes.", minimum_bytes=least_bytes
    )


def _compile_planner_meanwhile(task: Task) -> None:
    """On a machine that never planned; not where ops are timed on the cores that would compile."""
    if task.device is not None or all(p.device.type != "cpu" for p in task.model.parameters()):
        start_compiling()


def planned_arena(device: torch.device) -> StepArena | None:
    """Where a step's allocations will lie, if the process asked for it with `use_planned_arena`."""
    allocator = installed()
    if allocator is None or device.type != "cuda":
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    return StepArena(allocator, index, partial(tight_layout, alignment_bytes=BLOCK_BYTES, gap_fraction=0.0))


def allocator_slack(captured: Captured, peak_bytes: int) -> int:
    """Bytes to leave on CUDA: blocks of the caching allocator carry up to 1 MiB each that nobody asked for, differently every step.

    Measured on the H200 over eight models: 0.0 to 0.5 % of the peak. A larger miss is left to the closed loop.
    """
    return max(2 * 2**20, peak_bytes // 200) if captured.device.type == "cuda" else 0


_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")


def held_elsewhere(task: Task, call: Call, captured: Captured) -> int:
    """Device bytes this process holds outside the step: library workspaces that stay (cuBLAS), whatever else the caller keeps."""
    if captured.device.type != "cuda":
        return 0
    if any(op.name.startswith(_PRODUCTS) for op in captured.graph.ops):  # with the first of them cuBLAS takes its workspace, and keeps it
        torch.mm(*(torch.ones(16, 16, device=captured.device) for _ in range(2)))
    state = [t for entry in task.optimizer.state.values() for t in entry.values()] if task.optimizer is not None else []
    gradients = [p.grad for p in task.model.parameters()]
    ours = (*task.model.parameters(), *task.model.buffers(), *call.tensors, *gradients, *state)
    storages = {storage_key(t): t.untyped_storage().nbytes() for t in ours if isinstance(t, torch.Tensor) and t.is_cuda}
    rounded = sum(round_up(size, granularity_of(captured.device)) for size in storages.values())
    return max(0, torch.cuda.memory_allocated(captured.device) - rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Studied:
    """A training step ready for planning: captured, with its costs, and what a budget must hold besides (as `fit` counts it).

    `others` are forms of the step that round otherwise, which `fit` tries where the first has no plan; made when asked for.
    """

    captured: Captured
    costs: Costs
    elsewhere_bytes: int
    others: Iterator[tuple[Captured, Costs]]


def study(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_targets: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
    device: str | None = None,
    reserve: int | str = "0",
) -> Studied:
    """Capture and cost a step as `fit` does, without planning it: a plan made for `captured.graph` is one that `fit` accepts."""
    reserve_bytes = parse_bytes(reserve, what="reserve")
    task, call = task_and_call(model, example_inputs, loss_fn, example_targets, optimizer, device, reserve_bytes)
    _compile_planner_meanwhile(task)
    with Progress("memfit") as progress, torch.enable_grad():
        progress.update("tracing the model")
        offers = (task.costed(c, progress) for c in task.offers(call))
        captured, costs = next(offers)
        whole = find_plan(captured.graph, costs, None, planner="keep_all").require_plan()
        elsewhere_bytes = held_elsewhere(task, call, captured) + allocator_slack(captured, whole.timeline.peak_bytes)
        return Studied(captured=captured, costs=costs, elsewhere_bytes=elsewhere_bytes, others=offers)


def smallest_budget(graph: Graph, costs: Costs, *, time_limit_s: float) -> Outcome:
    """The plan with the smallest peak that bisection finds in the time, and the proven minimum."""
    begin = time.perf_counter()
    best = find_plan(graph, costs, None, planner="keep_all")
    low = find_plan(graph, costs, 0, time_limit_s=1).lower_bound_bytes
    high = best.require_plan().timeline.peak_bytes
    proven = low
    while high - low > max(high // 100, 1) and time.perf_counter() - begin < time_limit_s:
        middle = (low + high) // 2
        outcome = find_plan(graph, costs, middle, time_limit_s=max(0.5, time_limit_s / 10))
        proven = max(
            proven, outcome.lower_bound_bytes if outcome.status is not Status.INFEASIBLE else max(middle + 1, outcome.lower_bound_bytes)
        )
        if outcome.plan is not None:
            best, high = outcome, outcome.plan.timeline.peak_bytes
        else:
            low = middle
    return replace(best, lower_bound_bytes=min(proven, high))


def task_and_call(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    example_targets: Any,
    optimizer: Any,
    device: str | None,
    reserve: int = 0,
) -> tuple[Task, Call]:
    """What fit, estimate and frontier share: the arguments checked and put together."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"model is a {type(model).__name__}, not an nn.Module.")
    inputs = Inputs.of(example_inputs)
    targets = tuple(example_targets) if isinstance(example_targets, (tuple, list)) else (example_targets,)
    if targets and loss_fn is None:
        raise BadInput("example_targets are given without loss_fn: pass loss_fn=..., or leave the targets out.")
    task = Task(model=model, loss_fn=loss_fn, num_targets=len(targets), optimizer=optimizer, reserve_bytes=reserve, device=device)
    return task, Call.flatten((*inputs.args, *targets), inputs.kwargs)


def load_plan(plan: str | Path | Plan | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    return cast(Plan, load(plan, Plan))


def _replayed(plan: Plan, offers: Iterable[tuple[Captured, Costs]], budget: Budget) -> tuple[Captured, Costs, Plan]:
    """A saved plan, judged anew on this graph with this device's costs: a plan from a stranger is data."""
    seen = ""
    for captured, costs in offers:
        seen = seen or captured.graph.digest
        if plan.graph_digest == captured.graph.digest:
            return captured, costs, _judged_here(plan, captured, costs, budget)
    raise BadInput(
        f"the plan is for graph {plan.graph_digest[:12]}, this model with these inputs is {seen[:12]}: another model, other shapes, other allow=, "
        "another optimizer or loss, another torch version or another kind of device. Plan again with memfit plan, or leave out plan=."
    )


def _judged_here(plan: Plan, captured: Captured, costs: Costs, budget: Budget) -> Plan:
    timeline = simulate(captured.graph, plan.schedule, costs)
    limit = budget.device_bytes
    if limit is not None and timeline.peak_bytes > limit:
        raise BadInput(
            f"the plan holds {format_bytes(timeline.peak_bytes)} on this device ({costs.device}; {format_bytes(plan.timeline.peak_bytes)} where it was "
            f"made), and {format_bytes(limit)} are left of the budget: its ops need other workspaces here, or it was made for a larger budget. "
            "Plan again with memfit plan, or give a larger budget."
        )
    return Plan(schedule=plan.schedule, timeline=timeline, planner=plan.planner, graph_digest=plan.graph_digest, budget=budget)
