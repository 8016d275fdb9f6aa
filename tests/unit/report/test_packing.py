"""The picture of a packing."""

from __future__ import annotations

from memfit.core.packing import Buffer
from memfit.offsets import pack
from memfit.report.packing import packing_png


def test_pictures_are_pngs_with_a_panel_per_arena() -> None:
    buffers = [Buffer(id=str(k), start=k, stop=k + 3, size=5 + k, arena=k % 2) for k in range(8)]
    one, two = packing_png(pack(buffers[::2], 100)), packing_png(pack(buffers))
    assert one.startswith(b"\x89PNG")
    assert two.startswith(b"\x89PNG")
    height = [int.from_bytes(png[20:24], "big") for png in (one, two)]
    assert height[1] == 2 * height[0]


def test_nothing_can_be_drawn() -> None:
    assert packing_png(pack([Buffer(id="a", start=1, stop=1, size=0)])).startswith(b"\x89PNG")
    assert packing_png(pack([])).startswith(b"\x89PNG")
