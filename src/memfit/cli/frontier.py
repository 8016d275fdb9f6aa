"""`memfit frontier FILE.py:FACTORY`: memory against time, as a table, JSON or a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, OUTPUT_OPTION, print_report, wrote
from memfit.cli.step_argument import (
    COSTS_OPTION,
    DEVICE_OPTION,
    RESERVE_OPTION,
    STEP_ARGUMENT,
    STEP_OPTIMIZER_OPTION,
    TrainingStep,
    load_step,
)
from memfit.core.errors import BadInput
from memfit.core.io import check_target, write_text
from memfit.core.units import exact_bytes

if TYPE_CHECKING:
    from memfit.report.frontier import Frontier


def command(
    step: str = STEP_ARGUMENT,
    costs: Path | None = COSTS_OPTION,
    device: str | None = DEVICE_OPTION,
    optimizer: str = STEP_OPTIMIZER_OPTION,
    reserve: str = RESERVE_OPTION,
    points: int = typer.Option(8, "--points", min=1, max=1000, help="Budgets, evenly from the proven minimum to the keep-all peak."),
    fractions: str | None = typer.Option(None, "--fractions", help='Budgets as fractions of the keep-all peak instead, e.g. "0.4,0.6,1".'),
    planner: str = typer.Option("auto", "--planner", help="Which planner; an unknown name lists them."),
    time_limit: float = typer.Option(60.0, "--time-limit", min=0.0, help="Seconds for all points together."),
    png: Path | None = typer.Option(None, "--png", help="Draw the curve into this file."),
    as_json: bool = JSON_OPTION,
    output: Path | None = OUTPUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """The fastest plan known at each of several budgets: more budget is never slower, less budget never holds more."""
    for path in filter(None, (png, output)):
        check_target(path, force=force)
    shares = None if fractions is None else _parse_fractions(fractions)
    found = _find(load_step(step, costs, device=device, optimizer=optimizer, reserve=reserve), points, shares, planner, time_limit)
    print_report(found, as_json=as_json)
    best = next((p.budget_bytes for p in found.points if p.plan is not None), found.keep_all_peak_bytes)
    following = f"memfit plan {step} --budget {exact_bytes(best)} -o plan.json"
    if png:
        write_text(found.png(title=step), png, force=force)
        wrote(png, following)
    if output:
        write_text(json.dumps(found.as_data(), indent=1) + "\n", output, force=force)
        wrote(output, following)


def _parse_fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f'fractions {text[:40]!r} cannot be read: give numbers separated by commas, such as "0.4,0.6,1".') from None


def _find(step: TrainingStep, num_points: int, fractions: tuple[float, ...] | None, planner: str, time_limit_s: float) -> Frontier:
    from memfit.planning import plan
    from memfit.planning.frontier.monotone import plan_curve, share_out, spread_budgets
    from memfit.report.frontier import make_frontier
    from memfit.report.progress import Progress

    graph, costs = step.graph, step.costs
    keep_all = plan(graph, costs, planner="keep_all").require_plan()
    budgets = spread_budgets(graph, costs, num_points) if fractions is None else share_out(keep_all.timeline.peak_bytes, fractions)
    with Progress("memfit") as progress:

        def tell(done: int, total: int) -> None:
            progress.update("planning the frontier", done, total)

        points = plan_curve(graph, costs, budgets, planner=planner, time_limit_s=time_limit_s, progress=tell)
    return make_frontier(points, keep_all=keep_all, device=costs.device, elsewhere_bytes=step.elsewhere_bytes)
