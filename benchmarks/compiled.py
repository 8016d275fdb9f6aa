"""The compiled engine on a GPU, against torch.compile: time, memory, starts; and what stands between a plan and its bound."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {
    "measure": "compiled.measure",
    "table": "compiled.table",
    "bounds": "compiled.bounds",
    "convolutions": "compiled.convolutions",
}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
