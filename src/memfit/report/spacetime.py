"""The classic space-time diagram of a checkpointed chain, as text for the terminal and as PNG.

    x20 │          /
        │     /   / \\
        │   / |  /   ^        / forward   ^ backward   │ a kept state (its level's digit at its start)
    x0  │ /___|________
        └──────────────> time

One aggregator (`memfit.chain.spacetime`), many renderers: this file draws rows of numbers and knows no algorithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.report.figure import open_frame, write_png

Rows = npt.NDArray[np.float64]
_COLOURS = ("#c8922a", "#7a5ea8", "#3f8f7f", "#a8485c", "#5b6f8f")
MAX_LINES = 60_000  # more than a picture can show: beyond, every n-th is drawn


def spacetime_text(*, num_steps: int, total_time: float, advances: Rows, backs: Rows, kept: Rows, width: int = 72, height: int = 18) -> str:
    """The diagram in characters: kept states as dotted rows, forwards as /, backwards as a filled square."""
    height = max(2, min(height, num_steps + 1))
    grid = [[" "] * width for _ in range(height)]

    def column(time: float) -> int:
        return min(int(time / total_time * width), width - 1) if total_time > 0 else 0

    def line(step: float) -> int:
        return height - 1 - min(int(step / max(num_steps, 1) * (height - 1) + 0.5), height - 1)

    for _, step, begin, end in _thin_out(kept):
        grid[line(step)][column(begin) : column(end) + 1] = ["·"] * (column(end) + 1 - column(begin))
    for begin, start, end, stop in _thin_out(advances):
        cells = column(end) - column(begin) + abs(line(stop) - line(start))
        for at in np.linspace(0.0, 1.0, 2 * cells + 2):
            grid[line(start + at * (stop - start))][column(begin + at * (end - begin))] = "/"
    for begin, step, _ in _thin_out(backs):
        grid[line(step)][column(begin)] = "■"
    for level, step, begin, end in _thin_out(kept):  # the level's digit comes last: where a state is kept matters more than what passes it
        if column(end) > column(begin) + 1:
            grid[line(step)][column(begin) + 1] = str(int(level) % 10)
    labels = {0: f"x{num_steps}", height - 1: "x0"}
    margin = len(f"x{num_steps}")
    rows = [f"{labels.get(i, ''):>{margin}} │{''.join(cells)}" for i, cells in enumerate(grid)]
    return "\n".join(
        [*rows, f"{'':>{margin}} └{'─' * width}> time {total_time:g}", "/ forward   ■ backward   0·· 1·· kept at level 0, 1, ..."]
    )


def spacetime_png(*, num_steps: int, total_time: float, advances: Rows, backs: Rows, kept: Rows, title: str = "") -> bytes:
    """The diagram as a PNG file's bytes: steps upwards, time to the right."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for level in sorted({int(x) for x in kept[:, 0]}):
        rows = _thin_out(kept[kept[:, 0] == level])
        lines = [[(begin, step), (end, step)] for _, step, begin, end in rows]
        colour = _COLOURS[level % len(_COLOURS)]
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=_width(num_steps), alpha=0.55))
        axes.plot([], [], color=colour, label=f"kept at level {level}")
    forward = [[(begin, start), (end, stop)] for begin, start, end, stop in _thin_out(advances)]
    axes.add_collection(LineCollection(forward, colors="#1f4e79", linewidths=0.9))
    backward = [[(begin, step + 0.5), (end, step - 0.5)] for begin, step, end in _thin_out(backs)]
    axes.add_collection(LineCollection(backward, colors="#b03a2e", linewidths=0.9))
    axes.plot([], [], color="#1f4e79", label="forward")
    axes.plot([], [], color="#b03a2e", label="backward")
    _decorate(axes, num_steps, total_time, title)
    return write_png(figure)


def _decorate(axes: Any, num_steps: int, total_time: float, title: str) -> None:
    axes.set_xlim(0, max(total_time, 1e-12))
    axes.set_ylim(-0.5, num_steps + 0.5)
    axes.set_xlabel("time (units of cost)")
    axes.set_ylabel("step")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.24), ncols=4, frameon=False, fontsize=8)
    open_frame(axes)


def _thin_out(rows: Rows) -> Rows:
    return rows[:: max(1, -(-len(rows) // MAX_LINES))]


def _width(num_steps: int) -> float:
    return 2.5 if num_steps <= 60 else 1.2 if num_steps <= 600 else 0.6
