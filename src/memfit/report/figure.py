"""What every picture shares: a figure's PNG bytes, axes without a frame, and the unit of a memory axis. Needs no display."""

from __future__ import annotations

from io import BytesIO
from typing import Any


def write_png(figure: Any) -> bytes:
    """The bytes of a PNG file, at the figure's own resolution."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "memfit"})
    return buffer.getvalue()


def open_frame(axes: Any) -> None:
    """Leave the lines at the left and at the bottom only."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def choose_unit(most_bytes: int) -> tuple[str, int]:
    """GiB or MiB, and the bytes of one."""
    return ("GiB", 2**30) if most_bytes >= 2**30 else ("MiB", 2**20)
