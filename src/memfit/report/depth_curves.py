"""Memory against depth, one panel per network, one line per scheme: the O(n), O(√n) and O(1) curves, as PNG and as text.

This file draws numbers and knows no engine: `panels[network][scheme]` is a list of (depth, bytes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.core.units import format_bytes
from memfit.report.figure import write_png

Line = Sequence[tuple[int, int]]
Panels = Mapping[str, Mapping[str, Line]]

_STYLES = {
    "naive": ("#a8485c", "o", "naive: one buffer per op"),
    "exact": ("#c8922a", "s", "freed at the last reader"),
    "pool": ("#8c6d31", "v", "pool: recycled at run time"),
    "static": ("#7a5ea8", "^", "static plan, in place"),
    "arena": ("#5b6f8f", "D", "arena at planned offsets"),
    "sqrt": ("#3f8f7f", "P", "√n checkpoints"),
    "planned": ("#1f4e79", "*", "planned, in the bytes of √n"),
    "inference": ("#555555", "x", "inference: no gradients"),
}


def depth_curves_png(panels: Panels, *, title: str = "") -> bytes:
    """The bytes of a PNG file. Both axes are logarithmic: slope 1 is O(n), slope 1/2 is O(√n), flat is O(1)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * max(len(panels), 1), 5.0), dpi=150, layout="constrained")
    for axes, (network, lines) in zip(figure.subplots(1, max(len(panels), 1), squeeze=False)[0], panels.items(), strict=False):
        _draw(axes, network, lines)
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    return write_png(figure)


def _draw(axes: Any, network: str, lines: Mapping[str, Line]) -> None:
    for scheme, points in lines.items():
        colour, marker, label = _STYLES.get(scheme, ("#000000", ".", scheme))
        hollow = {"markerfacecolor": "none", "linestyle": ":"} if scheme in ("static", "arena") else {}  # they lie on "exact"
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=6, linewidth=1.6, label=label, **hollow)
    _slopes(axes, lines)
    axes.set_xscale("log")
    axes.set_yscale("log", base=4)  # so that ticks fall on whole binary units
    depths = sorted({d for points in lines.values() for d, _ in points})
    axes.set_xticks(depths, [f"{d:,}" for d in depths])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(round(value)).replace(".00", ""))
    axes.set(title=network, xlabel="depth", ylabel="peak beyond parameters and inputs")
    axes.grid(visible=True, which="major", alpha=0.3)


def _slopes(axes: Any, lines: Mapping[str, Line]) -> None:
    """Thin guides for n and √n through the first points of the schemes they belong to."""
    for scheme, power, name in (("naive", 1.0, "n"), ("sqrt", 0.5, "√n")):
        points = lines.get(scheme, ())
        if len(points) > 1 and points[0][0] > 0:
            (first, size), (last, _) = points[0], points[-1]
            axes.plot([first, last], [size, size * (last / first) ** power], color="#999999", linewidth=0.8, linestyle="--")
            axes.annotate(
                name, (last, size * (last / first) ** power), color="#777777", fontsize=9, xytext=(3, 0), textcoords="offset points"
            )


def depth_curves_text(lines: Mapping[str, Line]) -> list[list[str]]:
    """A table: one row per depth, one column per scheme; the first row is the header."""
    depths = sorted({d for points in lines.values() for d, _ in points})
    rows = [["depth", *lines]]
    for depth in depths:
        found = [dict(points).get(depth) for points in lines.values()]
        rows.append([str(depth), *("-" if size is None else format_bytes(size) for size in found)])
    return rows
