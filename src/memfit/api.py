"""The public doors for training: `fit`, `estimate`, `frontier`, `doctor`. What they share, from capture to a step that runs, is in `pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.capture.guards.graph_model import GraphModel
from memfit.capture.guards.watch import Watch
from memfit.core.errors import BadInput, Unsupported
from memfit.core.plan import Plan
from memfit.core.units import parse_bytes
from memfit.pipeline.doctor.diagnose import Question, diagnose
from memfit.pipeline.forms import Forms
from memfit.pipeline.open_sizes import OpenPreparer
from memfit.pipeline.prepare import Preparer
from memfit.pipeline.saved_plan import load_plan
from memfit.pipeline.study import find_smallest_budget, study
from memfit.pipeline.task import DEFAULT_ALLOW, Other, Task, task_and_call
from memfit.planning import plan as find_plan
from memfit.planning.frontier.monotone import plan_curve, share_out, spread_budgets
from memfit.profile.devices import device as find_device
from memfit.profile.roofline import roofline
from memfit.report.diagnosis import Diagnosis
from memfit.report.estimate import Estimate, summarize
from memfit.report.frontier import Frontier, make_frontier
from memfit.report.progress import Progress
from memfit.runtime.arena.planned import installed
from memfit.runtime.check import EVERY_STEP
from memfit.runtime.closed_loop import Stepper
from memfit.runtime.fitted import FittedModule, fit_module
from memfit.runtime.graph_stepper import GraphStepper
from memfit.runtime.guarded import Guarded

if TYPE_CHECKING:
    from memfit.planning import Planner

ENGINES = ("auto", "eager", "inductor")
ALLOWED = ("recompute", "variants", "rounding", "offload")


def fit(
    model: nn.Module,
    example_inputs: Any,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    example_targets: Any = (),
    reserve: int | str = "0",
    engine: str = "auto",
    device: str | None = None,
    allow: Sequence[str] = DEFAULT_ALLOW,
    planner: str | Planner = "auto",
    time_limit_s: float = 30,
    plan: str | Path | Plan | None = None,
    check: bool | str = "auto",
    replay: bool = False,
    keep_outputs: bool | None = None,
    others: Sequence[Any] = (),
) -> FittedModule:
    """A drop-in for `model` whose training step stays inside `budget` bytes of device memory.

    The budget covers parameters, gradients, optimizer state (give `optimizer`), inputs, activations, temporaries and
    library workspaces. With `loss_fn` the loss is planned too: `fitted(*inputs, *targets)` gives the loss. A loss outside
    has temporaries the plan cannot see: leave `reserve` bytes for them. Raises InfeasibleBudget before anything runs.
    `engine`: "eager" runs PyTorch's own kernels, bit for bit those of the plain model; "inductor" compiles the step in regions,
    faster and with other rounding, as torch.compile; "auto" compiles on CUDA when the step is large enough.
    `allow`: "recompute"; "variants", other implementations of ops: those with the same bits wherever they give a faster plan, those that
    only round otherwise where nothing else has a plan; "rounding" compares them all and takes the fastest; "offload" lets values wait in
    pinned host memory, copied beside the ops.
    `check` compares the first step with the plain model: "auto" where that is small and fits, True where it fits, "every step" all
    steps where they fit (slower, to be sure or to find what goes wrong), False none.
    `keep_outputs`: whether a model that returns its loss also produces what it returns beside it (logits, caches). None: where the budget
    holds them; left out, they are computed when somebody reads them.
    `others`: models, or (model, optimizer) pairs, that share the budget with this one: what they hold between their own steps is left free.
    `replay`: from the fifth step of a shape on, forward and backward are replayed from CUDA graphs, without Python between the kernels.
    """
    _check_options(model, engine, allow, check)
    _check_replay(model, replay)
    device_bytes = parse_bytes(budget, what="budget")
    task, example = task_and_call(model, example_inputs, loss_fn, example_targets, optimizer, device, parse_bytes(reserve, what="reserve"))
    task = replace(task, allow=tuple(allow), engine=engine, keep_outputs=keep_outputs, others=tuple(map(Other.of, others)))
    saved = load_plan(plan)
    if saved is not None and any(p.grad is not None for p in model.parameters()):
        raise BadInput("the model's parameters hold gradients already, and a saved plan starts without: call optimizer.zero_grad() first.")

    preparer = Preparer(task=task, budget_bytes=device_bytes, planner=planner, time_limit_s=time_limit_s, saved=saved, replay=replay)

    def stepper_over(graph: GraphModel) -> GraphStepper:
        inner = replace(preparer, task=replace(task, model=graph, loss_fn=None, num_targets=0, keep_outputs=True))
        return GraphStepper(graph, OpenPreparer(preparer, graph) if graph.varying else inner, check=check)

    def leaves_open() -> bool:
        return saved is None and not replay and device is None and not replace(task).compiles

    own = Stepper(model, preparer, loss_fn=loss_fn, num_targets=task.num_targets, check=check, watched=Watch(model, loss_fn))
    guarded = Guarded(own, stepper_over, keep_outputs, leaves_open)
    with torch.enable_grad():
        guarded.prepare(*example.rebuild(example.tensors))
    return fit_module(model, guarded)


def stepper_for(model: nn.Module, options: dict[str, Any]) -> Stepper:
    """The stepper behind the compile backend: options as `fit` takes them, shapes planned as they come."""
    engine = options.get("engine", "auto")
    allow = options.get("allow", DEFAULT_ALLOW)
    _check_engine(engine)
    _check_allow(allow)
    replay = bool(options.get("replay", False))
    _check_replay(model, replay)
    _check_check(options.get("check", "auto"))
    reserve_bytes = parse_bytes(options.get("reserve", 0), what="reserve")
    task = Task(model=model, optimizer=options.get("optimizer"), reserve_bytes=reserve_bytes, engine=engine, allow=tuple(allow))
    preparer = Preparer(
        task=task,
        budget_bytes=parse_bytes(options["budget"], what="budget"),
        planner=options.get("planner", "auto"),
        time_limit_s=float(options.get("time_limit_s", 30)),
        replay=replay,
    )
    return Stepper(model, preparer, loss_fn=None, num_targets=0, check=options.get("check", "auto"))


def estimate(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_targets: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
    device: str | None = None,
    time_limit_s: float = 10,
) -> Estimate:
    """Will it fit? The step's peak without memfit, split by kind, and the smallest budget memfit could reach. Runs nothing.

    Works for a model on the meta device, so for one larger than this machine. `device` names a GPU of the table ("h200").
    """
    task, call = task_and_call(model, example_inputs, loss_fn, example_targets, optimizer, device)
    with Progress("memfit") as progress:
        progress.update("tracing the model")
        forms = [(form.captured, roofline(form.captured, device or "h200")) for form in Forms(task, call).usual()]
        captured, costs = forms[0]
        keep_all = find_plan(captured.graph, costs, None, planner="keep_all").require_plan()
        progress.update("looking for the smallest budget")
        reached = [find_smallest_budget(c.graph, k, time_limit_s=time_limit_s / len(forms)) for c, k in forms]
    smallest = min(reached, key=lambda o: o.require_plan().timeline.peak_bytes)
    summary = summarize(captured.graph, keep_all.schedule, keep_all.timeline)
    base = keep_all.timeline.compute_time_ns
    return replace(
        summary,
        smallest_bytes=smallest.plan.timeline.peak_bytes if smallest.plan else None,
        smallest_overhead_fraction=(smallest.plan.timeline.compute_time_ns - base) / base if smallest.plan and base else None,
        proven_minimum_bytes=min(o.lower_bound_bytes for o in reached),  # a proof must hold for every form of the step
        device=device or "",
        device_bytes=find_device(device).memory_bytes if device else None,
    )


def frontier(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_targets: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
    device: str | None = None,
    num_points: int = 8,
    fractions: Sequence[float] | None = None,
    planner: str | Planner = "auto",
    time_limit_s: float = 60,
) -> Frontier:
    """Memory against time for this training step: the best plan at each of several budgets, to look at and choose from.

    Budgets are spread from the proven minimum to the keep-all peak, or given as `fractions` of that peak. More budget is never
    planned slower, less budget never planned to hold more. `frontier.at("6GiB").plan` goes straight into `fit(..., plan=...)`.
    """
    studied = study(model, example_inputs, loss_fn=loss_fn, example_targets=example_targets, optimizer=optimizer, device=device)
    graph, costs = studied.captured.graph, studied.costs
    keep_all = find_plan(graph, costs, planner="keep_all").require_plan()
    budgets = spread_budgets(graph, costs, num_points) if fractions is None else share_out(keep_all.timeline.peak_bytes, fractions)
    with Progress("memfit") as progress:

        def tell(done: int, total: int) -> None:
            progress.update("planning the frontier", done, total)

        tell(0, len(budgets))
        points = plan_curve(graph, costs, budgets, planner=planner, time_limit_s=time_limit_s, progress=tell)
    return make_frontier(points, keep_all=keep_all, device=costs.device, elsewhere_bytes=studied.elsewhere_bytes)


def doctor(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_targets: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    reserve: int | str = "0",
    device: str | None = None,
    allow: Sequence[str] = DEFAULT_ALLOW,
    keep_outputs: bool | None = None,
    time_limit_s: float = 10,
) -> Diagnosis:
    """Why a budget is refused, or slow, and what would help: `str()` of what it gives is one screen. Runs nothing.

    What holds the minimum, what is fixed, what each pass and each change outside does to the minimum, what was refused, and the smallest
    budget that a plan was found for. Of the eager engine; works for a model on the meta device. Arguments are those of `fit`.
    """
    _check_options(model, "eager", allow, check=True)
    task, call = task_and_call(model, example_inputs, loss_fn, example_targets, optimizer, device, parse_bytes(reserve, what="reserve"))
    question = Question(
        task=replace(task, allow=tuple(allow)),
        call=call,
        keep_outputs=keep_outputs,
        budget_bytes=None if budget is None else parse_bytes(budget, what="budget"),
        time_limit_s=time_limit_s,
    )
    with Progress("memfit") as progress:
        return diagnose(question, progress)


def _check_options(model: Any, engine: str, allow: Sequence[str], check: bool | str) -> None:
    if isinstance(model, FittedModule):
        raise BadInput("this model is fitted already: fit the plain model, with the new budget.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise BadInput(f"the model is wrapped in {type(model).__name__}: fit the plain model, then wrap what fit gives.")
    _check_engine(engine)
    _check_allow(allow)
    _check_check(check)


def _check_check(check: bool | str) -> None:
    if not (isinstance(check, bool) or check in ("auto", EVERY_STEP)):
        raise BadInput(f"check={check!r} is not known: True, False, 'auto' or {EVERY_STEP!r}.")


def _check_replay(model: nn.Module, replay: bool) -> None:
    if not replay:
        return
    devices = sorted({p.device.type for p in model.parameters()})
    if devices != ["cuda"]:
        raise Unsupported(f"replay=True needs a model on a CUDA device, and this one is on {', '.join(devices) or 'none'}: leave it out.")
    if installed() is not None:
        raise Unsupported("CUDA graphs need torch's own allocator: leave out replay=True or memfit.use_planned_arena().")


def _check_allow(allow: Sequence[str]) -> None:
    unknown = [a for a in ([allow] if isinstance(allow, str) else allow) if a not in ALLOWED]
    if unknown or isinstance(allow, str):
        raise BadInput(f"allow={unknown[0] if unknown else allow!r} is not known: give a tuple of {', '.join(ALLOWED)}.")


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is not known: choose one of {', '.join(ENGINES)}.")
