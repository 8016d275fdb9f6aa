"""A step looked at without being run: what `estimate`, `frontier` and `memfit plan` share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.captured import Captured
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome, Status
from memfit.core.units import parse_bytes
from memfit.pipeline.beside import count_held_elsewhere, count_slack
from memfit.pipeline.costs import Costed, cost
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import compile_planner_meanwhile, task_and_call
from memfit.planning import plan as find_plan
from memfit.report.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Studied:
    """A training step ready for planning: captured, with its costs, and what a budget must hold besides (as `fit` counts it).

    `others` are forms of the step that round otherwise, which `fit` tries where the first has no plan; made when asked for.
    """

    captured: Captured
    costs: Costs
    elsewhere_bytes: int
    others: Iterator[Costed]


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
    compile_planner_meanwhile(task)
    with Progress("memfit") as progress, torch.enable_grad():
        progress.update("tracing the model")
        forms = (cost(form, task, progress) for form in Forms(task, call).usual())
        first = next(forms)
        beside_bytes = count_held_elsewhere(task, call, first.captured) + count_slack(first.captured, first.keep_all.timeline.peak_bytes)
        return Studied(captured=first.captured, costs=first.costs, elsewhere_bytes=beside_bytes, others=forms)


def find_smallest_budget(graph: Graph, costs: Costs, *, time_limit_s: float) -> Outcome:
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
