"""Task graphs: trees and DAGs inside a memory bound, on one processor, on several, and on Dask."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {
    "trees": "tasks.trees",
    "dask": "tasks.dask_memory",
}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
