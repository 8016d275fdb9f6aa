"""The public door for training: `fit`, `estimate`, and the one place that strings capture, profile, plan and execute together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call, Inputs
from memfit.capture.lower import CUDA_GRANULARITY
from memfit.capture.step import capture
from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.errors import BadInput
from memfit.core.io import load
from memfit.core.outcome import Outcome
from memfit.core.plan import Plan
from memfit.core.simulate import simulate
from memfit.core.units import parse_bytes
from memfit.execute.codegen import generate
from memfit.execute.fitted import FittedModule, fit_module
from memfit.execute.session import Ready
from memfit.execute.stepper import Stepper
from memfit.planning import plan as find_plan
from memfit.profile.allocations import meter
from memfit.profile.measured import measured
from memfit.profile.roofline import roofline
from memfit.report.progress import Progress

if TYPE_CHECKING:
    from memfit.planning import Planner

ENGINES = ("auto", "eager")
ALLOWED = ("recompute", "variants")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train: a model, how it is called, and what surrounds its step."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None = None
    num_targets: int = 0
    optimizer: torch.optim.Optimizer | None = None
    reserve_bytes: int = 0
    device: str | None = None

    def capture(self, call: Call, *, accumulates: bool = False) -> Captured:
        return capture(
            self.model,
            call,
            loss_fn=self.loss_fn,
            num_targets=self.num_targets,
            optimizer=self.optimizer,
            accumulates=accumulates,
            reserve_bytes=self.reserve_bytes,
        )

    def costs(self, captured: Captured, progress: Progress) -> Costs:
        """Measured on the model's own device, or a roofline for the device that was named."""
        if self.device is not None:
            return roofline(captured, self.device)
        if any(p.device.type == "meta" for p in self.model.parameters()):
            return roofline(captured, "cpu")
        return measured(captured, progress=progress.update)


def fit(
    model: nn.Module,
    example_inputs: Any,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    example_targets: Sequence[Any] = (),
    reserve: int | str = "0",
    engine: str = "auto",
    device: str | None = None,
    allow: Sequence[str] = ("recompute", "variants"),
    planner: str | Planner = "auto",
    time_limit_s: float = 30,
    plan: str | Path | Plan | None = None,
    check: bool | str = "auto",
) -> FittedModule:
    """A drop-in for `model` whose training step stays inside `budget` bytes of device memory.

    The budget covers parameters, gradients, optimizer state (give `optimizer`), inputs, activations, temporaries and
    library workspaces. With `loss_fn` the loss is planned too: `fitted(*inputs, *targets)` gives the loss. A loss outside
    has temporaries the plan cannot see: leave `reserve` bytes for them. Raises InfeasibleBudget before anything runs.
    `check` compares the first step with the plain model: "auto" where that is small and fits, True where it fits, False never.
    """
    _check_options(model, engine, allow, check)
    device_bytes = parse_bytes(budget, what="budget")
    inputs = Inputs.of(example_inputs)
    targets = tuple(example_targets) if isinstance(example_targets, (tuple, list)) else (example_targets,)
    if targets and loss_fn is None:
        raise BadInput("example_targets are given without loss_fn: pass loss_fn=..., or leave the targets out.")
    task = Task(
        model=model,
        loss_fn=loss_fn,
        num_targets=len(targets),
        optimizer=optimizer,
        reserve_bytes=parse_bytes(reserve, what="reserve"),
        device=device,
    )
    saved = load_plan(plan)

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulates: bool, tighter_by: int) -> Ready:
        limit = Budget(device_bytes=max(0, device_bytes - tighter_by))
        given = saved if not tighter_by and not accumulates else None
        return make_ready(
            task, Call.flatten(args, kwargs), limit, accumulates=accumulates, planner=planner, time_limit_s=time_limit_s, plan=given
        )

    stepper = Stepper(model, prepare, loss_fn=loss_fn, num_targets=len(targets), check=check, meter=meter, flatten=Call.flatten)
    with torch.enable_grad():
        stepper.latest, _ = stepper.shape_of((*inputs.args, *targets), inputs.kwargs)
    return fit_module(model, stepper)


def make_ready(
    task: Task,
    call: Call,
    budget: Budget,
    *,
    accumulates: bool = False,
    planner: str | Planner = "auto",
    time_limit_s: float = 30,
    plan: Plan | None = None,
) -> Ready:
    """Capture, profile, plan and generate one call."""
    with Progress("memfit") as progress:
        progress.update("tracing the model")
        captured = task.capture(call, accumulates=accumulates)
        costs = task.costs(captured, progress)
        elsewhere_bytes = held_elsewhere(task, call, captured)
        if budget.device_bytes is not None:
            budget = Budget(device_bytes=max(0, budget.device_bytes - elsewhere_bytes))
        if plan is not None:
            chosen = _replayed(plan, captured, costs, budget)
        else:
            progress.update("planning")
            chosen = plan_captured(captured, costs, budget, planner=planner, time_limit_s=time_limit_s, progress=progress).require_plan()
        free = find_plan(captured.graph, costs, None, planner="keep_all").require_plan()
        return Ready(
            captured=captured,
            plan=chosen,
            program=generate(captured, chosen.schedule),
            keep_all_peak_bytes=free.timeline.peak_bytes,
            base_time_ns=free.timeline.compute_time_ns,
            elsewhere_bytes=elsewhere_bytes,
        )


def held_elsewhere(task: Task, call: Call, captured: Captured) -> int:
    """Device bytes this process holds outside the step: library workspaces that stay (cuBLAS), whatever else the caller keeps."""
    if captured.device.type != "cuda":
        return 0
    state = [t for entry in task.optimizer.state.values() for t in entry.values()] if task.optimizer is not None else []
    gradients = [p.grad for p in task.model.parameters()]
    ours = (*task.model.parameters(), *task.model.buffers(), *call.tensors, *gradients, *state)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in ours if isinstance(t, torch.Tensor) and t.is_cuda}
    rounded = sum(-(-size // CUDA_GRANULARITY) * CUDA_GRANULARITY for size in storages.values())
    return max(0, torch.cuda.memory_allocated(captured.device) - rounded)


def plan_captured(
    captured: Captured, costs: Costs, budget: Budget, *, planner: str | Planner, time_limit_s: float, progress: Progress
) -> Outcome:
    def tell(state: Any) -> None:
        progress.update(f"planning, {state.note}" if state.note else "planning")

    return find_plan(captured.graph, costs, budget, planner=planner, time_limit_s=time_limit_s, progress=tell)


def load_plan(plan: str | Path | Plan | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    return cast(Plan, load(plan, Plan))


def _replayed(plan: Plan, captured: Captured, costs: Costs, budget: Budget) -> Plan:
    """A saved plan, judged anew on this graph: a plan from a stranger is data."""
    if plan.graph_digest != captured.graph.digest:
        raise BadInput(
            f"the plan is for graph {plan.graph_digest[:12]}, this model with these inputs is {captured.graph.digest[:12]}: "
            "another model, other shapes, or another torch version. Plan again with memfit plan, or leave out plan=."
        )
    timeline = simulate(captured.graph, plan.schedule, costs, budget)
    return Plan(schedule=plan.schedule, timeline=timeline, planner=plan.planner, graph_digest=plan.graph_digest, budget=budget)


def _check_options(model: Any, engine: str, allow: Sequence[str], check: bool | str) -> None:
    if not isinstance(model, nn.Module):
        raise BadInput(f"model is a {type(model).__name__}, not an nn.Module.")
    if isinstance(model, FittedModule):
        raise BadInput("this model is fitted already: fit the plain model, with the new budget.")
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is not known: choose one of {', '.join(ENGINES)}.")
    unknown = [a for a in ([allow] if isinstance(allow, str) else allow) if a not in ALLOWED]
    if unknown:
        raise BadInput(f"allow={unknown[0]!r} is not known: choose from {', '.join(ALLOWED)}.")
    if check not in (True, False, "auto"):
        raise BadInput(f"check={check!r} is not known: True, False or 'auto'.")
