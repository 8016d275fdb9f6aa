"""`memfit pack FILE.csv --capacity N`: the packer on the command line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, OUTPUT_OPTION, print_result, show_status, wrote
from memfit.core.io import check_target, write_text
from memfit.core.units import format_bytes, format_percent, parse_bytes

if TYPE_CHECKING:
    from memfit.core.packing import Packing

_LEAST_S = 0.5  # of search, however long loading took
_RESERVE_FRACTION, _RESERVE_S = 0.05, 1.0  # for Python's own start and for the output


def command(
    file: Path = typer.Argument(..., help="A CSV file of buffers: id,lower,upper,size and perhaps alignment, offset, arena."),
    capacity: str | None = typer.Option(
        None, "--capacity", help='Bytes of the arena, e.g. 1048576 or "1MiB"; without it as low as can be.'
    ),
    time_limit: float = typer.Option(30.0, "--time-limit", help="Seconds, loading included; 0 takes the best greedy packing."),
    seed: int = typer.Option(0, "--seed", help="Of the random restarts.", min=0),
    png: Path | None = typer.Option(None, "--png", help="Draw the packing into this PNG file."),
    as_json: bool = JSON_OPTION,
    output: Path | None = OUTPUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Give every buffer of FILE an offset so that none alive together overlap. Exits 3 if proven impossible, 4 if time ran out."""
    began = time.monotonic()
    from memfit.offsets.api import pack
    from memfit.offsets.csv_file import read_buffers

    limit = None if capacity is None else parse_bytes(capacity, what="capacity")
    for path in filter(None, (output, png)):
        check_target(path, force=force)
    buffers = read_buffers(file)
    with show_status(f"packing {len(buffers)} buffers, at most {time_limit:g} s"):
        packing = pack(buffers, limit, _subtract_spent_s(time_limit, time.monotonic() - began), seed=seed)
    print_result(_list_fields(packing), _list_rows(packing), as_json=as_json)
    packing.require(packing.lower_bound)
    _write(packing, file, output, png, force=force)


def _subtract_spent_s(limit_s: float, spent_s: float) -> float:
    """Seconds left for the search: the limit covers loading too, which takes seconds the first time."""
    if not limit_s > 0:
        return limit_s
    return max(min(limit_s, _LEAST_S), limit_s - spent_s - min(_RESERVE_S, _RESERVE_FRACTION * limit_s))


def _write(packing: Packing, file: Path, output: Path | None, png: Path | None, *, force: bool) -> None:
    from memfit.offsets.csv_file import write_offsets

    if output is not None:
        write_text(write_offsets(packing), output, force=force)
        wrote(output, "" if png else f"memfit pack {file} --png packing.png")
    if png is not None:
        from memfit.report.packing import packing_png

        write_text(packing_png(packing, title=f"{file.name}: {packing.reason}"), png, force=force)
        wrote(png)


def _list_rows(packing: Packing) -> list[tuple[str, str]]:
    rows = [
        ("status", f"{packing.status}: {packing.reason}"),
        ("buffers", str(len(packing.buffers))),
        ("height", f"{format_bytes(packing.height)} ({packing.height} bytes)"),
        ("lower bound", f"{format_bytes(packing.lower_bound)} ({packing.lower_bound} bytes), gap {format_percent(packing.gap_fraction)}"),
        ("found by", f"{packing.method} in {packing.seconds:.2f} s, {packing.nodes} nodes"),
    ]
    if packing.capacity is not None:
        rows.insert(2, ("capacity", f"{format_bytes(packing.capacity)} ({packing.capacity} bytes)"))
    if len(packing.arena_heights) > 1:
        rows += [(f"arena {arena}", f"{height} bytes") for arena, height in sorted(packing.arena_heights.items())]
    return rows


def _list_fields(packing: Packing) -> dict[str, Any]:
    return {
        "status": packing.status.value,
        "height": packing.height,
        "lower_bound": packing.lower_bound,
        "capacity": packing.capacity,
        "gap_fraction": packing.gap_fraction,
        "offsets": packing.offset_of,
        "arena_heights": {str(arena): height for arena, height in packing.arena_heights.items()},
        "method": packing.method,
        "nodes": packing.nodes,
        "seconds": packing.seconds,
        "reason": packing.reason,
    }
