"""Seconds of a compiled start on the CPU with empty caches, to the end of the first step, and of a second one that finds them full."""

from __future__ import annotations

import sys
import tempfile
from statistics import median

from benchmarks.lib.results import Row
from benchmarks.parts.house.commands import run_memfit
from benchmarks.parts.house.trees import Tree, keep_rows, measured, parser_for, trees_of

_PROGRAM = """
import time
import torch
from torch import nn
import memfit
torch.manual_seed(0)
torch.set_num_threads(1)
layers = []
for channels in (3, 16, 16, 16, 16, 16):
    layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 10))
inputs, targets = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
begin = time.perf_counter()
fitted = memfit.fit(
    model, inputs, budget="6MiB", engine="inductor", loss_fn=nn.functional.cross_entropy, example_targets=targets, time_limit_s=5
)
fitted(inputs, targets).backward()
print(time.perf_counter() - begin)
"""


def start_rows(trees: list[Tree], repeats: int) -> list[Row]:
    """The trees take turns; every repeat begins with an empty home folder and an empty folder of compiled code."""
    seconds: dict[tuple[Tree, str], list[float]] = {(tree, how): [] for tree in trees for how in ("cold", "again, from disk")}
    for _ in range(repeats):
        for tree in trees:
            with tempfile.TemporaryDirectory() as home:
                for how in ("cold", "again, from disk"):
                    seconds[tree, how].append(float(run_memfit(tree, home, "-c", _PROGRAM).stdout.split()[-1]))
                    print(f"{tree.label} {how}: {seconds[tree, how][-1]:.1f} s", file=sys.stderr)
    part = "a compiled start on the CPU, seconds"
    return [measured(tree, part, how, f"{median(s):.1f}") | {"seconds": [round(x, 2) for x in s]} for (tree, how), s in seconds.items()]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    options = parser.parse_args()
    keep_rows(start_rows(trees_of(options), options.repeats))
