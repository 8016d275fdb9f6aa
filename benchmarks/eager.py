"""The eager engine: on a GPU against eager PyTorch, reserved memory; every model of the zoo, losses and varying lengths on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.theme import run_theme

MEASUREMENTS = {
    "peers": "eager.peers",
    "reserved": "eager.reserved",
    "zoo": "eager.zoo",
    "losses-inside": "eager.losses_inside",
    "loss-forms": "eager.loss_forms",
    "lengths": "eager.lengths",
}

if __name__ == "__main__":
    run_theme(__doc__, MEASUREMENTS)
