"""Guards: what they cost in front of a step, and what holds around `fit` when things change."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {
    "cost": "guards.cost",
    "situations": "guards.situations",
    "frameworks": "guards.frameworks",
    "soak": "guards.soak",
}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
