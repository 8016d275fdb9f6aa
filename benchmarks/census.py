"""Census: what memfit captures, plans and trains right among the architectures of transformers, timm and torchvision."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {"small": "census.measure"}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
