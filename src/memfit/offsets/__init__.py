"""Offsets: place every buffer of a program in one arena, as low as can be, with a bound and a proof where there is one.

    buffers.csv ──> pack ──> Packing            graph + schedule ──> layout_plan ──> Layout (goes with the plan)

`api` is what callers use, `solve_arena` packs one arena: `greedy` orders with best fit, `local_search` over such orders, and
`exact/`, many canonical tree searches side by side. `from_schedule` lays out a plan, `free_tags` is the register-allocation
baseline. The judges are `core.packing.check_packing` and `core.lifetimes.check_layout`.
"""

from __future__ import annotations

from memfit.lazy import load_on_use

_FILES = {
    "api": ("pack",),
    "csv_file": ("read_buffers",),
    "free_tags": ("Colouring", "colour_graph"),
    "from_schedule": ("Allocation", "allocations", "buffers_of", "layout_of", "layout_plan", "tight_layout", "with_layout"),
    ".core.packing": ("Buffer", "Packing", "check_packing"),
}
__getattr__, __dir__, __all__ = load_on_use(__name__, _FILES)
