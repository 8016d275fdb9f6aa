"""Offsets: place every buffer of a program in one arena, as low as can be, with a bound and a proof where there is one.

    buffers.csv ──> pack ──> Packing            graph + schedule ──> layout_plan ──> Layout (goes with the plan)

One algorithm per file: `greedy` (orders with best fit), `local_search` (over insertion orders), `exact` and its compiled
`kernel` (canonical tree search), `outward` (windows of time that grow), `glue` (boxes of buffers that hand over),
`portfolio` with `tie_orders` (many such searches side by side), `cpsat` (optional), `colours` (free tags and
liveness counters). `solve` strings them together for one arena; `door` is what callers use; the judges are
`core.packing.check_packing` and `core.lifetimes.check_layout`.
"""

from memfit.core.packing import Buffer, Packing, check_packing
from memfit.offsets.api import pack
from memfit.offsets.csv_file import read_buffers
from memfit.offsets.free_tags import Colouring, colour_graph
from memfit.offsets.from_schedule import Allocation, allocations, buffers_of, layout_of, layout_plan, tight_layout, with_layout

__all__ = [
    "Allocation",
    "Buffer",
    "Colouring",
    "Packing",
    "allocations",
    "buffers_of",
    "check_packing",
    "colour_graph",
    "layout_of",
    "layout_plan",
    "pack",
    "read_buffers",
    "tight_layout",
    "with_layout",
]
