"""Packing buffers into one arena: published instances, instances nobody tuned for, layouts of training steps."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {
    "published": "offsets.published",
    "unseen": "offsets.unseen",
    "captured": "offsets.captured",
}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
