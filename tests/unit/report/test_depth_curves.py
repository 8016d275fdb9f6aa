"""Memory against depth, drawn and tabled."""

from __future__ import annotations

from memfit.report.depth_curves import depth_curves_png, depth_curves_text

LINES = {"naive": [(10, 1 << 20), (100, 10 << 20)], "sqrt": [(10, 1 << 19), (100, 3 << 19)], "mine": [(100, 1024)]}


def test_the_table_has_a_row_per_depth_and_a_dash_where_nothing_was_measured() -> None:
    assert depth_curves_text(LINES) == [
        ["depth", "naive", "sqrt", "mine"],
        ["10", "1.00 MiB", "512.00 KiB", "-"],
        ["100", "10.00 MiB", "1.50 MiB", "1.00 KiB"],
    ]


def test_the_picture_is_a_png_and_differs_with_the_data() -> None:
    one, two = depth_curves_png({"net": LINES}), depth_curves_png({"net": {"naive": LINES["naive"]}}, title="t")
    assert one.startswith(b"\x89PNG")
    assert two.startswith(b"\x89PNG")
    assert one != two
    assert depth_curves_png({}).startswith(b"\x89PNG")
