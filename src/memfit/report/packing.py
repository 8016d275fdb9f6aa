"""A packing as a picture: buffers as boxes over time and address, the load beneath, the bound and the capacity as lines.

address │ ┌──────┐ ┌───┐  ─ ─ capacity
        │ └──────┘ └───┘  ─ ─ bound
        └────────────────> time
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.core.packing import Packing
from memfit.report.figure import open_frame, write_png

MAX_BOXES = 60_000  # beyond this a picture shows no more
_BLUES = ("#1f4e79", "#2f6ea5", "#4a90c4", "#7fb3d8", "#3f8f7f", "#6aaf9f", "#c8922a", "#a87a2a")


def packing_png(packing: Packing, *, title: str = "") -> bytes:
    """The packing as a PNG file's bytes, one panel per arena."""
    from matplotlib.figure import Figure

    arenas = sorted(packing.arena_heights) or [0]
    figure = Figure(figsize=(9.0, 4.6 * len(arenas)), layout="constrained")
    panels = figure.subplots(len(arenas), squeeze=False)[:, 0]
    for axes, arena in zip(panels, arenas, strict=True):
        _draw_arena(axes, packing, arena)
    gap = f"{packing.height} of {packing.lower_bound} bytes" if packing.height != packing.lower_bound else f"{packing.height} bytes"
    panels[0].set_title(title or f"{len(packing.buffers)} buffers in {gap}: {packing.status}", fontsize=10)
    return write_png(figure)


def _draw_arena(axes: Any, packing: Packing, arena: int) -> None:
    from matplotlib.collections import PolyCollection

    shown = [(b, o) for b, o in zip(packing.buffers, packing.offsets, strict=True) if b.arena == arena and not b.is_empty]
    shown = sorted(shown, key=lambda item: -item[0].size * (item[0].stop - item[0].start))[:MAX_BOXES]
    boxes = [[(b.start, o), (b.stop, o), (b.stop, o + b.size), (b.start, o + b.size)] for b, o in shown]
    colours = [_BLUES[k % len(_BLUES)] for k in range(len(shown))]
    edge = 0.4 if len(shown) <= 2_000 else 0.0
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=edge))
    times, load = _load(packing, arena)
    axes.step(times, load, where="post", color="#222222", linewidth=0.8, label="bytes alive")
    axes.axhline(packing.lower_bound, color="#3f8f7f", linewidth=1.0, linestyle="--", label="lower bound")
    if packing.capacity is not None:
        axes.axhline(packing.capacity, color="#b03a2e", linewidth=1.0, label="capacity")
    axes.set_xlim(times[0], max(times[-1], times[0] + 1))
    axes.set_ylim(0, 1.05 * max(packing.height, packing.capacity or 0, 1))
    axes.set_xlabel("time")
    axes.set_ylabel("address (bytes)" if len(packing.arena_heights) < 2 else f"arena {arena} (bytes)")
    axes.legend(loc="upper right", fontsize=8)
    open_frame(axes)


def _load(packing: Packing, arena: int) -> tuple[Any, Any]:
    solid = [b for b in packing.buffers if b.arena == arena and not b.is_empty]
    if not solid:
        return np.array([0, 1]), np.array([0, 0])
    times, where = np.unique(np.array([[b.start, b.stop] for b in solid], np.int64).ravel(), return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, where[0::2], [b.size for b in solid])
    np.add.at(change, where[1::2], [-b.size for b in solid])
    return times, np.cumsum(change)
