"""`memfit simulate GRAPH SCHEDULE`: the judge on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, OUTPUT_OPTION, print_json, print_result, wrote
from memfit.core.budget import Budget
from memfit.core.costs import Costs, level_name
from memfit.core.errors import BadInput, IllegalSchedule
from memfit.core.graph import Graph
from memfit.core.io import check_target, load, save
from memfit.core.lifetimes import check_layout, lifetimes
from memfit.core.plan import Layout, Plan, Timeline
from memfit.core.schedule import Compute, Schedule
from memfit.core.simulate import simulate
from memfit.core.units import format_bytes, format_ns, parse_bytes


def command(
    graph: Path = typer.Argument(..., help="A memfit.graph JSON file."),
    schedule: Path = typer.Argument(..., help="A memfit.schedule or memfit.plan JSON file."),
    costs: Path | None = typer.Option(None, "--costs", help="A memfit.costs JSON file; without it every op takes 1 ns."),
    budget: str | None = typer.Option(None, "--budget", help='Device bytes that may be held, e.g. "6GiB".'),
    host_budget: str | None = typer.Option(None, "--host-budget", help="Host bytes that may be held."),
    disk_budget: str | None = typer.Option(None, "--disk-budget", help="Disk bytes that may be held."),
    as_json: bool = JSON_OPTION,
    output: Path | None = OUTPUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Replay SCHEDULE on GRAPH: refuse it if it is illegal, else print its peak, where it is, and its time."""
    limits = Budget(
        device_bytes=None if budget is None else parse_bytes(budget, what="budget"),
        host_bytes=None if host_budget is None else parse_bytes(host_budget, what="host budget"),
        disk_bytes=None if disk_budget is None else parse_bytes(disk_budget, what="disk budget"),
    )
    if output:
        check_target(output, force=force)
    the_graph = cast(Graph, load(graph, Graph))
    the_schedule, layout = _load_schedule(schedule, the_graph)
    the_costs = cast(Costs, load(costs, Costs)) if costs else None
    try:
        timeline = simulate(the_graph, the_schedule, the_costs, limits)
    except IllegalSchedule as refusal:
        if as_json:
            print_json({"status": "ILLEGAL", "step": refusal.step, "cause": refusal.cause})
        raise
    if layout is not None:
        _judge_layout(the_graph, the_schedule, the_costs, layout)
    facts = (the_graph, the_schedule, timeline)
    print_result(_list_fields(*facts), _list_rows(*facts), as_json=as_json)
    if output:
        save(
            Plan(schedule=the_schedule, timeline=timeline, planner="file", graph_digest=the_graph.digest, budget=limits),
            output,
            force=force,
        )
        wrote(output, f"memfit simulate {graph} {output}")


def _load_schedule(path: Path, graph: Graph) -> tuple[Schedule, Layout | None]:
    artifact = load(path)
    if isinstance(artifact, Plan):
        if artifact.graph_digest not in ("", graph.digest):
            raise BadInput(f"{path}: this plan belongs to graph {artifact.graph_digest[:12]}, not to {graph.digest[:12]}: plan this graph.")
        return artifact.schedule, artifact.layout
    if not isinstance(artifact, Schedule):
        raise BadInput(f"{path}: holds a {type(artifact).__name__.lower()}, but a schedule or a plan is expected.")
    return artifact, None


def _judge_layout(graph: Graph, schedule: Schedule, costs: Costs | None, layout: Layout) -> None:
    """A plan's addresses are judged too. Without the plan's costs its workspaces are unknown, and so are some of its buffers."""
    items = lifetimes(graph, schedule, costs)
    if costs is not None or len(items) == len(layout.offsets):
        check_layout(items, layout)


def _peak_op(graph: Graph, schedule: Schedule, timeline: Timeline) -> str:
    if timeline.peak_step < 0:
        return "the start"
    step = schedule.steps[timeline.peak_step]
    if not isinstance(step, Compute):
        return f"step {timeline.peak_step}"
    op = graph.ops[step.op]
    return f"step {timeline.peak_step}, op {op.id} ({op.name}{', ' + op.where if op.where else ''})"


def _list_rows(graph: Graph, schedule: Schedule, timeline: Timeline) -> list[tuple[str, str]]:
    rows = [
        ("steps", f"{len(schedule.steps)} ({len(schedule.computes)} computes, {len(graph.ops)} ops)"),
        ("peak", f"{format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes) at {_peak_op(graph, schedule, timeline)}"),
        ("time", f"{format_ns(timeline.time_ns)} ({format_ns(timeline.serial_time_ns)} without overlap)"),
    ]
    if timeline.peak_step >= 0:
        for kind, row in zip(timeline.kinds, timeline.bytes_by_kind, strict=True):
            if row[timeline.peak_step]:
                rows.append((f"  {kind}", format_bytes(row[timeline.peak_step])))
    rows += [(f"peak on {level_name(k)}", format_bytes(x)) for k, x in enumerate(timeline.level_peak_bytes) if k and x]
    return rows


def _list_fields(graph: Graph, schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    at_peak = (
        {str(k): row[timeline.peak_step] for k, row in zip(timeline.kinds, timeline.bytes_by_kind, strict=True)}
        if timeline.peak_step >= 0
        else {}
    )
    return {
        "status": "LEGAL",
        "num_steps": len(schedule.steps),
        "num_computes": len(schedule.computes),
        "num_ops": len(graph.ops),
        "peak_bytes": timeline.peak_bytes,
        "peak_step": timeline.peak_step,
        "peak_at": _peak_op(graph, schedule, timeline),
        "bytes_by_kind_at_peak": at_peak,
        "time_ns": timeline.time_ns,
        "serial_time_ns": timeline.serial_time_ns,
        "level_peak_bytes": list(timeline.level_peak_bytes),
    }
