"""`memfit demo`: the whole idea in seconds: train a network in every memory mode and see what each one holds."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, print_json, wrote
from memfit.core.errors import BadInput
from memfit.core.io import check_target, write_text
from memfit.core.units import format_bytes, format_ns, format_percent

if TYPE_CHECKING:
    from memfit.core.costs import Costs
    from memfit.core.graph import Graph
    from memfit.core.plan import Layout, Plan
    from memfit.core.schedule import Schedule
    from memfit.tape.examples.demo import Demo
    from memfit.tape.program import Program

DEFAULT_PICTURE = Path("out/memfit-demo.png")


class Engine(StrEnum):
    auto = "auto"
    numpy = "numpy"
    torch = "torch"


def command(
    engine: Engine = typer.Option(Engine.auto, "--engine", help="What runs the plans; auto takes the best engine installed."),
    depths: str = typer.Option("10,30,100", "--depths", help="Depths for the picture, separated by commas."),
    steps: int = typer.Option(40, "--steps", min=1, help="Training steps in every mode."),
    output: Path | None = typer.Option(None, "-o", "--output", help=f"Write the picture (PNG) here instead of {DEFAULT_PICTURE}."),
    as_json: bool = JSON_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Train small networks inside a budget and show what each scheme holds: with torch a GPT and a ResNet, with NumPy every memory mode."""
    if engine is Engine.torch or (engine is Engine.auto and find_spec("torch") is not None):
        _run_torch(output, as_json=as_json, force=force)
        return
    numbers = _parse_depths(depths)
    if output is not None and output.exists() and not force:
        raise BadInput(f"{output} exists: choose another file or add --force.")
    demo = _run_numpy(numbers, steps)
    if as_json:
        print_json(_list_fields(demo))
    else:
        _print(demo)
    _write_picture(demo, output or DEFAULT_PICTURE)


def _run_torch(output: Path | None, *, as_json: bool, force: bool) -> None:
    from memfit.cli.torch_demo import run_demo
    from memfit.report.progress import Progress
    from memfit.report.timeline import timeline_png

    path = output or DEFAULT_PICTURE
    if output is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    check_target(path, force=force or output is None)
    with Progress("demo") as progress:
        rows, panels = run_demo(progress.update)
    if as_json:
        print_json({"engine": "torch", "models": [asdict(row) | {"inside": row.inside} for row in rows]})
    else:
        table = [["model", "plain PyTorch", "budget", "measured", "predicted", "time", "gradients"]]
        for row in rows:
            peaks = (row.plain_peak_bytes, row.budget_bytes, row.fitted_peak_bytes, row.predicted_peak_bytes)
            ratio = f"{row.fitted_ms:.0f} ms ({row.fitted_ms / row.plain_ms:.2f}x)"
            table.append([row.name, *map(format_bytes, peaks), ratio, "identical" if row.identical else row.check])
        _table(table)
        typer.echo(
            "\nPeaks cover the whole step: parameters, gradients, AdamW's state and temporaries, activations. Measured by counting every allocation."
        )
    write_text(timeline_png(panels), path, force=True)
    wrote(path, "memfit run FILE.py:FACTORY --budget 6GiB")
    if not all(row.inside and row.identical for row in rows):
        raise typer.Exit(1)


def _parse_depths(text: str) -> tuple[int, ...]:
    try:
        depths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise BadInput(f'depths {text[:40]!r} cannot be read: give whole numbers separated by commas, such as "10,100".') from None
    if depths[0] < 2 or depths[-1] > 2_000:
        raise BadInput(f"depths reach from {depths[0]} to {depths[-1]}: between 2 and 2000 the demo stays a demo.")
    return depths


def _run_numpy(depths: tuple[int, ...], steps: int) -> Demo:
    from memfit.report.progress import Progress
    from memfit.tape.examples.demo import run_demo

    with Progress("demo") as progress:
        return run_demo(
            {"sqrt": _plan_sqrt, "planned": _plan_within_sqrt},
            {"sqrt": _plan_sqrt},
            place=_place,
            depths=depths,
            steps=steps,
            say=progress.update,
        )


def _place(graph: Graph, schedule: Schedule, costs: Costs) -> Layout:
    """Planned offsets; NumPy wants float64 at multiples of 8."""
    from memfit.offsets.from_schedule import layout_plan

    return layout_plan(graph, schedule, costs, time_limit_s=0.0, alignment_bytes=8)  # greedy orders only


def _plan_sqrt(program: Program, depth: int) -> Plan:
    """Checkpointing with √n segments."""
    from memfit.planning import plan
    from memfit.planning.baselines.sqrt_segments import SqrtSegments

    return plan(program.graph, program.costs, planner=SqrtSegments(num_segments=isqrt(depth))).require_plan()


def _plan_within_sqrt(program: Program, depth: int) -> Plan | None:
    """memfit's own planner, in exactly the bytes that √n segments take."""
    from memfit.planning import plan

    budget = _plan_sqrt(program, depth).timeline.peak_bytes
    return plan(program.graph, program.costs, budget, planner="auto", time_limit_s=3.0).plan


def _print(demo: Demo) -> None:
    typer.echo(f"{demo.network}; parameters and inputs take {format_bytes(demo.sources_bytes)}\n")
    naive = demo.modes[0]
    rows = [["mode", "peak", "of naive", "predicted = measured", "recomputed ops", "time per step", "same numbers"]]
    for row in demo.modes:
        share = format_percent(row.measured_bytes / naive.measured_bytes)
        exact = "to the byte" if row.exact else f"NO: predicted {row.predicted_bytes} B"
        recomputed = f"{row.num_recomputed} of {row.num_ops} ({format_percent(row.recomputed_fraction)} of the time)"
        same = "bitwise" if row.same_numbers else "NO"
        rows.append([row.name, format_bytes(row.measured_bytes), share, exact, recomputed, format_ns(row.time_ns), same])
    one = demo.inference
    rows.append(["inference", format_bytes(one.measured_bytes), "", "to the byte" if one.exact else "NO", "", format_ns(one.time_ns), ""])
    _table(rows)
    first, last = demo.trained[0].losses[0], demo.trained[0].losses[-1]
    agree = "the same in every mode" if demo.same_losses else "DIFFERENT between modes"
    accuracy = format_percent(demo.trained[0].accuracy_fraction)
    typer.echo(f"\nTraining: loss {first:.4f} -> {last:.4f} in {len(demo.trained[0].losses)} steps, {agree}; {accuracy} right at the end.")
    from memfit.report.depth_curves import depth_curves_text

    for network, lines in _panels(demo).items():
        typer.echo(f"\nPeak beyond parameters and inputs, {network}:")
        _table(depth_curves_text(lines))


def _table(rows: list[list[str]]) -> None:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        typer.echo(
            "  ".join(
                f"{cell:>{width}}" if k else f"{cell:<{width}}" for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )


def _panels(demo: Demo) -> dict[str, dict[str, list[tuple[int, int]]]]:
    panels: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for point in demo.points:
        panels.setdefault(point.net, {}).setdefault(point.scheme, []).append((point.depth, point.measured_bytes))
    return panels


def _write_picture(demo: Demo, path: Path) -> None:
    from memfit.report.depth_curves import depth_curves_png

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(depth_curves_png(_panels(demo), title="Memory against depth, measured (NumPy engine)"))
    wrote(path, "memfit simulate --help")


def _list_fields(demo: Demo) -> dict[str, object]:
    return {
        "engine": "numpy",
        "network": demo.network,
        "sources_bytes": demo.sources_bytes,
        "modes": [asdict(row) for row in demo.modes],
        "inference": asdict(demo.inference),
        "trained": [asdict(run) for run in demo.trained],
        "same_losses": demo.same_losses,
        "points": [asdict(point) for point in demo.points],
    }
