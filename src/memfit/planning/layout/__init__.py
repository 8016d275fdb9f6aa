"""Offsets: place every buffer of a program in one arena, as low as can be, with a bound and a proof where there is one.

    buffers.csv ──> pack ──> Packing            graph + schedule ──> layout_plan ──> Layout (goes with the plan)

One algorithm per file: `greedy` (orders with best fit), `local_search` (over insertion orders), `exact` and its compiled
`kernel` (canonical tree search), `portfolio` (many such searches side by side), `colours` (free tags and liveness counters).
`solve` strings them together for one arena; `door` is what callers use; the judge is `core.packing.check_packing`.
"""

from memfit.core.packing import Buffer, Packing, check_packing
from memfit.planning.layout.door import pack

__all__ = ["Buffer", "Packing", "check_packing", "pack"]
