"""The house itself, before and after it is moved: code, commands, walks, a compiled start and plans, each of several trees."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {
    "code": "house.code",
    "commands": "house.commands",
    "walks": "house.walks",
    "start": "house.start",
    "plans": "house.plans",
}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
