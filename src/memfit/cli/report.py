"""`memfit report PLAN GRAPH`: a plan as text, JSON, picture or page."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import cast

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, print_report, wrote
from memfit.cli.step_argument import COSTS_OPTION, DEVICE_OPTION, RESERVE_OPTION, STEP_ARGUMENT, STEP_OPTIMIZER_OPTION, load_step
from memfit.core.io import check_target, load, write_text
from memfit.core.plan import Plan


def command(
    plan: Path = typer.Argument(..., help="A memfit.plan JSON file."),
    graph: str = STEP_ARGUMENT,
    costs: Path | None = COSTS_OPTION,
    device: str | None = DEVICE_OPTION,
    optimizer: str = STEP_OPTIMIZER_OPTION,
    reserve: str = RESERVE_OPTION,
    png: Path | None = typer.Option(None, "--png", help="Draw memory over time, with the budget line, into this file."),
    html: Path | None = typer.Option(None, "--html", help="Write one self-contained page with picture and tables."),
    as_json: bool = JSON_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Judge PLAN anew on its GRAPH: its peak by kind and storage, what it recomputes, and how it compares with keeping everything."""
    from memfit.planning import plan as find_plan
    from memfit.report.plan import report_plan

    for path in filter(None, (png, html)):
        check_target(path, force=force)
    saved = cast(Plan, load(plan, Plan))
    step = load_step(graph, costs, device=device, optimizer=optimizer, reserve=reserve)
    forms = chain(((step.graph, step.costs),), step.others)
    the_graph, the_costs = next((form for form in forms if form[0].digest == saved.graph_digest), (step.graph, step.costs))
    keep_all = find_plan(the_graph, the_costs, planner="keep_all").require_plan()
    report = report_plan(the_graph, saved, the_costs, keep_all=keep_all)
    print_report(report, as_json=as_json)
    if png:
        write_text(report.png(title=plan.name), png, force=force)
        wrote(png, "" if html else f"memfit report {plan} {graph} --html report.html")
    if html:
        from memfit.report.plan_page import plan_html

        write_text(plan_html(report, title=f"{plan.name} on {Path(graph).name}"), html, force=force)
        wrote(html)
