"""Planners on graphs, captured models and variants: overhead, proven bound, seconds; against PyTorch and without their abilities."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {
    "published": "planning.graphs:published",
    "layered": "planning.graphs:layered",
    "large": "planning.graphs:large",
    "unseen": "planning.graphs:unseen",
    "models": "planning.models",
    "variants": "planning.variants",
    "ablation": "planning.ablation",
    "stages": "planning.stages",
    "torch": "planning.against_torch",
    "slices": "planning.sliced_blocks",
    "attention": "planning.written_attention",
}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
