"""`memfit schedule GRAPH`: the order of a task graph that needs least memory, on one processor or on many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, OUTPUT_OPTION, print_result, show_status, wrote
from memfit.core.errors import BadInput
from memfit.core.io import check_target, write_text
from memfit.core.units import format_bytes, format_percent, parse_bytes, simplify_number


def command(
    graph: Path = typer.Argument(..., help="A task graph: our JSON, DOT, networkx node-link JSON, or a memfit.graph file."),
    processors: int = typer.Option(1, "--processors", "-p", help="How many processors run tasks at the same time."),
    memory: str | None = typer.Option(
        None, "--memory", "-m", help='Bytes that may be held at once, e.g. "8GiB"; without it the least is sought.'
    ),
    algorithm: str = typer.Option(
        "auto",
        "--algorithm",
        "-a",
        help="auto; liu, minmem, postorder, out-tree, series-parallel, exact, cpsat, greedy, beam, local-search on one processor; "
        "membooking, safebooking, par-subtrees, par-inner-first, par-deepest-first, all-to-all, proportional, memory-aware on several.",
    ),
    spill: bool = typer.Option(
        False, "--spill", help="When memory is short, write outputs out and read them back; prints the spill schedule."
    ),
    time_limit: float = typer.Option(10.0, "--time-limit", help="Seconds to spend on a graph for which no theorem gives the optimum."),
    seed: int = typer.Option(0, "--seed", help="Of the local search and CP-SAT."),
    png: Path | None = typer.Option(None, "--png", help="Draw a Gantt chart and memory over time into this PNG file."),
    as_json: bool = JSON_OPTION,
    output: Path | None = OUTPUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Order the tasks of GRAPH so that they hold the least memory, or schedule them on several processors within a memory."""
    from memfit.tasks.api import ALGORITHMS, schedule
    from memfit.tasks.trees.read_files import read_tasks

    if algorithm not in ALGORITHMS:
        raise BadInput(f"--algorithm {algorithm[:40]!r} is unknown: choose one of {', '.join(ALGORITHMS)}.")
    if not time_limit > 0:
        raise BadInput(f"--time-limit {time_limit} is not a time: give a number of seconds above 0.")
    limit = None if memory is None else parse_bytes(memory, what="memory")
    for path in filter(None, (output, png)):
        check_target(path, force=force)
    with show_status(f"reading {graph}") as update:
        tasks = read_tasks(graph)
        update(f"ordering {tasks.num_tasks} tasks")
        outcome = schedule(
            tasks, processors=processors, memory_bytes=limit, algorithm=algorithm, spill=spill, time_limit_s=time_limit, seed=seed,
            progress=lambda what: update(f"{what}, {tasks.num_tasks} tasks"),
        )  # fmt: skip
    _finish(graph, tasks, outcome, as_json=as_json, output=output, png=png, force=force)


def _finish(graph: Path, tasks: Any, outcome: Any, *, as_json: bool, output: Path | None, png: Path | None, force: bool) -> None:
    """Print and write; a memory that is too small still prints its data, then exits with 3 (proven) or 4."""
    data = _list_fields(tasks, outcome)
    print_result(data, _list_rows(tasks, outcome), as_json=as_json)
    outcome.require_order()
    if output is not None:
        write_text(json.dumps(data) + "\n", output, force=force)
        wrote(output, f"memfit schedule {graph} --png schedule.png")
    if png is not None:
        write_text(_picture(tasks, outcome, graph.name), png, force=force)
        wrote(png)


def _list_fields(tasks: Any, outcome: Any) -> dict[str, Any]:
    from memfit.tasks.timeline import list_runs

    data: dict[str, Any] = {
        "status": str(outcome.status),
        "algorithm": outcome.algorithm,
        "processors": outcome.processors,
        "memory_bytes": outcome.memory_bytes,
        "peak_bytes": outcome.peak_bytes,
        "lower_bound_bytes": outcome.lower_bound_bytes,
        "makespan": None if outcome.makespan is None else simplify_number(outcome.makespan),
        "makespan_lower_bound": simplify_number(outcome.makespan_lower_bound),
        "order": [tasks.names[t] for t in outcome.order],
        "seconds": outcome.seconds,
        "reason": outcome.reason,
    }
    data["start_times"] = [simplify_number(r.start) for r in list_runs(tasks, outcome)]
    if outcome.runs:
        data["schedule"] = [
            {
                "task": tasks.names[r.task],
                "start": simplify_number(r.start),
                "stop": simplify_number(r.stop),
                "processors": simplify_number(r.processors),
            }
            for r in outcome.runs
        ]
    if outcome.spill is not None:
        data["io_bytes"] = outcome.spill.written_bytes
        data["read_bytes"] = outcome.spill.read_bytes
        data["spills"] = [
            {
                "before": tasks.names[outcome.order[t.step]],
                "output_of": _owner(tasks, t.item),
                "bytes": t.size_bytes,
                "move": "out" if t.out else "in",
            }
            for t in outcome.spill.transfers
        ]
    return data


def _owner(tasks: Any, item: int) -> Any:
    producer = int(tasks.item_producer[item])
    return tasks.names[producer] if producer >= 0 else None


def _list_rows(tasks: Any, outcome: Any) -> list[tuple[str, str]]:
    rows = [
        ("tasks", f"{tasks.num_tasks} ({len(tasks.edges)} edges)"),
        ("algorithm", outcome.algorithm),
        ("status", f"{outcome.status}: {outcome.reason}"),
    ]
    if outcome.peak_bytes is not None:
        gap = outcome.peak_bytes / outcome.lower_bound_bytes - 1 if outcome.lower_bound_bytes else 0.0
        rows.append(("peak", f"{format_bytes(outcome.peak_bytes)} ({outcome.peak_bytes} bytes)"))
        rows.append(
            ("lower bound", f"{format_bytes(outcome.lower_bound_bytes)} ({outcome.lower_bound_bytes} bytes), gap {format_percent(gap)}")
        )
    else:
        rows.append(("lower bound", f"{format_bytes(outcome.lower_bound_bytes)} ({outcome.lower_bound_bytes} bytes)"))
    if outcome.makespan is not None:
        rows.append(
            (
                "makespan",
                f"{simplify_number(outcome.makespan)} on {outcome.processors} (at least {simplify_number(outcome.makespan_lower_bound)})",
            )
        )
    if outcome.spill is not None:
        rows.append(("written", f"{format_bytes(outcome.spill.written_bytes)} in {sum(t.out for t in outcome.spill.transfers)} transfers"))
        rows.append(("read back", format_bytes(outcome.spill.read_bytes)))
    names = [str(tasks.names[t]) for t in outcome.order[:12]]
    if names:
        rows.append(("order", " ".join(names) + (f" ... ({len(outcome.order)} tasks; --json for all)" if len(outcome.order) > 12 else "")))
    rows.append(("seconds", f"{outcome.seconds:.3f}"))
    return rows


def _picture(tasks: Any, outcome: Any, name: str) -> bytes:
    from memfit.report.gantt import Bar, Gantt, gantt_png
    from memfit.tasks.timeline import list_runs, memory_over_time

    runs = list_runs(tasks, outcome)
    times, held = memory_over_time(tasks, outcome)
    title = f"{name}: {outcome.algorithm}, {outcome.processors} processors, peak {format_bytes(outcome.peak_bytes)}, {outcome.status}"
    return gantt_png(
        Gantt(
            bars=[Bar(str(tasks.names[r.task]), r.start, r.stop, r.processors) for r in runs],
            processors=outcome.processors if outcome.runs else 1,
            times=times,
            bytes_held=held,
            makespan=max((r.stop for r in runs), default=0.0),
            limit_bytes=outcome.memory_bytes,
            lower_bound_bytes=outcome.lower_bound_bytes,
            title=title,
        )
    )
