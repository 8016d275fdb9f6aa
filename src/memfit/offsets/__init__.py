"""Offsets: place every buffer of a program in one arena, as low as can be, with a bound and a proof where there is one.

    buffers.csv ──> pack ──> Packing            graph + schedule ──> layout_plan ──> Layout (goes with the plan)

One algorithm per file: `greedy` (orders with best fit), `local_search` (over insertion orders), `exact` and its compiled
`kernel` (canonical tree search), `outward` (windows of time that grow), `glue` (boxes of buffers that hand over),
`portfolio` with `tie_orders` (many such searches side by side), `cpsat` (optional), `colours` (free tags and
liveness counters). `solve` strings them together for one arena; `door` is what callers use; the judges are
`core.packing.check_packing` and `core.lifetimes.check_layout`.
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
