"""`memfit plan FILE --budget 6GiB`: the planner on the command line, for models and for graphs from files."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, OUTPUT_OPTION, print_columns, print_json, print_result, show_status, wrote
from memfit.cli.step_argument import (
    COSTS_OPTION,
    DEVICE_OPTION,
    RESERVE_OPTION,
    STEP_ARGUMENT,
    STEP_OPTIMIZER_OPTION,
    TrainingStep,
    load_forms,
    load_step,
    names_a_model,
)
from memfit.core.budget import Budget
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.io import Artifact, check_target, save
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Timeline
from memfit.core.units import format_bytes, format_ns, format_percent

if TYPE_CHECKING:
    from memfit.planning.problem import Progress


def command(
    file: str = STEP_ARGUMENT,
    costs: Path | None = COSTS_OPTION,
    budget: str | None = typer.Option(None, "--budget", help='Device bytes the step may hold, e.g. "6GiB".'),
    budget_fraction: float | None = typer.Option(None, "--budget-fraction", help="The budget as a fraction of the keep-all peak."),
    device: str | None = DEVICE_OPTION,
    optimizer: str = STEP_OPTIMIZER_OPTION,
    reserve: str = RESERVE_OPTION,
    planner: str = typer.Option("auto", "--planner", help="Which planner; an unknown name lists them."),
    time_limit: float = typer.Option(30.0, "--time-limit", help="Seconds after which the best plan so far is given."),
    save_graph: Path | None = typer.Option(None, "--save-graph", help="Also write the step's graph (memfit.graph)."),
    save_costs: Path | None = typer.Option(None, "--save-costs", help="Also write the costs planned with (memfit.costs)."),
    passes: bool = typer.Option(
        False, "--passes", help="Of a model: list what rewrites the step, where and how many bytes that spares, and plan nothing."
    ),
    engine: str = typer.Option("eager", "--engine", help="Whose passes --passes lists: eager or inductor."),
    as_json: bool = JSON_OPTION,
    output: Path | None = OUTPUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Plan what the step keeps and recomputes so that it stays inside a budget. Ctrl-C keeps the best plan so far."""
    from memfit.planning import plan

    if passes:
        _show_passes(file, engine, optimizer, as_json=as_json)
        return
    if (budget is None) == (budget_fraction is None):
        raise typer.BadParameter("give --budget or --budget-fraction, one of them.")
    for path in filter(None, (output, save_graph, save_costs)):
        check_target(path, force=force)
    step = load_step(file, costs, device=device, optimizer=optimizer, reserve=reserve)
    whole = plan(step.graph, step.costs, planner="keep_all").require_plan().timeline
    asked = Budget.parse(budget) if budget is not None else _share(whole.peak_bytes + step.elsewhere_bytes, cast(float, budget_fraction))
    limit = Budget(device_bytes=max(0, (asked.device_bytes or 0) - step.elsewhere_bytes))
    step, outcome = _first_plan(step, limit, planner, time_limit)
    print_result(_list_fields(outcome, planner, whole, limit), _list_rows(outcome, step.graph, whole, limit), as_json=as_json)
    for target, artifact in ((save_graph, step.graph), (save_costs, step.costs)):
        if target:
            save(cast(Artifact, artifact), target, force=force)
            wrote(target)
    outcome.require_plan()
    if output:
        save(replace(outcome.require_plan(), budget=asked), output, force=force)  # as `fit` is given it: that takes off the rest again
        wrote(output, _next(file, output, step, save_graph, optimizer))


def _show_passes(file: str, engine: str, optimizer: str, *, as_json: bool) -> None:
    """A row for each pass of the engine, in the order in which they run."""
    from memfit.passes.table import PIPELINE

    if engine not in PIPELINE:
        raise BadInput(f"--engine {engine!r} is not known: choose one of {', '.join(PIPELINE)}.")
    if not names_a_model(file):
        raise BadInput(f"{file}: passes rewrite a model's step; give FILE.py:FACTORY.")
    from memfit.pipeline.pass_report import report_passes

    rows = report_passes(load_forms(file, optimizer, engine))
    found = [
        {
            "pass": row.slot.rewrite.name,
            "use": row.slot.use.value,
            "numbers": row.slot.rewrite.numbers.value,
            "places": row.places,
            "saved_bytes": row.saved_bytes,
        }
        for row in rows
    ]
    if as_json:
        print_json({"engine": engine, "passes": found})
        return
    cells = [
        (f"{r['pass']}", f"{r['use']}", f"{r['numbers']}", f"{r['places']}", format_bytes(row.saved_bytes))
        for r, row in zip(found, rows, strict=True)
    ]
    print_columns([("pass", "runs", "numbers", "places", "saves up to"), *cells])


def _first_plan(step: TrainingStep, limit: Budget, planner: str, time_limit_s: float) -> tuple[TrainingStep, Outcome]:
    """A plan for the first form of the step that has one, as `fit` does; without any the weakest refusal: a proof must hold for all."""
    from memfit.planning import plan

    tried: list[tuple[TrainingStep, Outcome]] = []
    with show_status("planning ...") as update:
        for graph, costs in chain(((step.graph, step.costs),), step.others):
            outcome = plan(graph, costs, limit, planner=planner, time_limit_s=time_limit_s, progress=lambda p: update(_describe(p)))
            tried.append((replace(step, graph=graph, costs=costs), outcome))
            if outcome.plan is not None:
                return tried[-1]
    undecided = [pair for pair in tried if pair[1].status is not Status.INFEASIBLE]
    return undecided[-1] if undecided else min(tried, key=lambda pair: pair[1].lower_bound_bytes)


def _next(file: str, output: Path, step: TrainingStep, save_graph: Path | None, optimizer: str) -> str:
    """What to do with the plan."""
    if step.is_model:
        return f"memfit run {file} --plan {output}" + (f" --optimizer {optimizer}" if optimizer != "adamw" else "")
    if step.costs.device == "file" and save_graph is None:
        return ""
    return f"memfit simulate {save_graph or file} {output}"


def _share(peak_bytes: int, fraction: float) -> Budget:
    if not 0 <= fraction <= 1e6:
        raise BadInput(f"--budget-fraction {fraction} is not a fraction of the keep-all peak: give a number from 0 up, such as 0.8.")
    return Budget(device_bytes=int(peak_bytes * fraction))


def _describe(p: Progress) -> str:
    """How far the planner is, in one line: best plan, bound and seconds."""
    best = "no plan yet" if p.best_time_ns is None else f"overhead {format_percent(p.best_time_ns / max(p.base_time_ns, 1) - 1)}"
    bound = format_percent(p.lower_bound_ns / max(p.base_time_ns, 1) - 1)
    return f"planning: {best}, bound {bound}, {p.seconds:.0f} s ({p.note})"


def _list_rows(outcome: Outcome, graph: Graph, whole: Timeline, limit: Budget) -> list[tuple[str, str]]:
    found = outcome.plan
    if found is None:
        return []
    timeline = found.timeline
    base = max(whole.time_ns, 1)
    return [
        ("status", f"{outcome.status} ({outcome.status.sentence})"),
        ("planner", found.planner),
        (
            "peak",
            f"{format_bytes(timeline.peak_bytes)} of {format_bytes(limit.device_bytes or 0)} (keep-all {format_bytes(whole.peak_bytes)})",
        ),
        ("time", f"{format_ns(timeline.time_ns)}, {format_percent(timeline.time_ns / base - 1)} over keep-all"),
        ("bound", f"{format_ns(outcome.lower_bound_ns)}, {format_percent(outcome.lower_bound_ns / base - 1)}: no plan inside is faster"),
        ("gap", "unknown" if outcome.gap_fraction is None else format_percent(outcome.gap_fraction)),
        ("computes", f"{len(found.schedule.computes)} of {len(graph.ops)} ops"),
        ("seconds", f"{outcome.seconds:.2f}"),
    ]


def _list_fields(outcome: Outcome, planner: str, whole: Timeline, limit: Budget) -> dict[str, object]:
    timeline = outcome.plan.timeline if outcome.plan else None
    return {
        "status": str(outcome.status),
        "planner": outcome.plan.planner if outcome.plan else planner,
        "overhead_fraction": timeline.time_ns / max(whole.time_ns, 1) - 1 if timeline else None,
        "peak_bytes": timeline.peak_bytes if timeline else None,
        "budget_bytes": limit.device_bytes,
        "lower_bound_time": outcome.lower_bound_ns,
        "gap": outcome.gap_fraction,
        "seconds": outcome.seconds,
        "time": timeline.time_ns if timeline else None,
        "keep_all_time": whole.time_ns,
        "keep_all_peak_bytes": whole.peak_bytes,
        "lower_bound_bytes": outcome.lower_bound_bytes,
        "reason": outcome.reason,
    }
