"""What each command loads, and its time from the shell to the result."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.results import Row
from benchmarks.parts.house.trees import Tree, keep_rows, measured, parser_for, trees_of
from memfit.core.graph import Graph, Op, Storage, Tensor
from memfit.core.io import save
from memfit.core.schedule import Compute, Schedule

HEAVY = ("numpy", "scipy", "numba", "ortools", "torch", "typer")
COMMANDS = {
    "--help": ("--help",),
    "pack, 8 buffers": ("pack", "few.csv", "--json"),
    "pack, 1,000 buffers": ("pack", "many.csv", "--json", "--time-limit", "1"),
    "schedule": ("schedule", "tasks.json", "--json"),
    "checkpoint": ("checkpoint", "--steps", "1000", "--slots", "10", "--json"),
    "simulate": ("simulate", "graph.json", "schedule.json", "--json"),
    "plan GRAPH": ("plan", "graph.json", "--budget", "200", "--json"),
}
_COUNTING = f"""
import atexit, json, sys
def tell():
    own = [name for name in sys.modules if name == "memfit" or name.startswith("memfit.")]
    print(json.dumps([len(own), [name for name in {HEAVY} if name in sys.modules]]), file=sys.stderr)
atexit.register(tell)
from memfit.cli import main
main()
"""


def write_inputs(folder: Path) -> None:
    """Buffers few and many, a diamond of tasks, and a training step of 32 ops: each backward op reads its forward's input and output."""
    few = [(0, 2, 1), (1, 4, 1), (2, 5, 2), (3, 7, 1), (5, 8, 1), (6, 9, 1), (4, 6, 1), (7, 9, 2)]
    many = [(k, k + 2 + 7 * k % 13, 1 + 5 * k % 17) for k in range(1000)]
    for name, rows in (("few", few), ("many", many)):
        (folder / f"{name}.csv").write_text("id,lower,upper,size\n" + "".join(f"{k},{a},{b},{z}\n" for k, (a, b, z) in enumerate(rows)))
    tasks = [{"id": name, "output_bytes": size} for name, size in (("load", 9), ("left", 4), ("right", 5), ("join", 1))]
    edges = [["load", "left"], ["load", "right"], ["left", "join"], ["right", "join"]]
    (folder / "tasks.json").write_text(json.dumps({"tasks": tasks, "edges": edges}))
    graph = trained_chain(16)
    save(graph, folder / "graph.json")
    save(Schedule(steps=tuple(Compute(op=op.id) for op in graph.ops)), folder / "schedule.json")


def trained_chain(length: int) -> Graph:
    backward = [(2 * length - 1 - i, i - 1, i) for i in reversed(range(length))]  # (this op, the forward's input, its output)
    inputs: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(length)]
    inputs += [tuple(t for t in ((op - 1 if op > length else -1), before, after) if t >= 0) for op, before, after in backward]
    ids = range(2 * length)
    return Graph(
        ops=tuple(Op(id=i, name="op", inputs=inputs[i], outputs=(i,)) for i in ids),
        tensors=tuple(Tensor(id=i, storage=i) for i in ids),
        storages=tuple(Storage(id=i, size_bytes=16) for i in ids),
        sources=(),
        results=(2 * length - 1,),
    )


def run_memfit(tree: Tree, folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=tree.environment(folder), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{tree.label}: {' '.join(arguments[-4:])} failed:\n{done.stderr[-2000:]}")
    return done


def command_rows(trees: list[Tree], names: list[str], repeats: int) -> Iterator[list[Row]]:
    """The rows of one command after another. The trees take turns; each runs it once before, which also compiles what is kept on disk."""
    with tempfile.TemporaryDirectory() as parent:
        folders = {tree: f"{parent}/{tree.label}" for tree in trees}
        for folder in folders.values():
            Path(folder).mkdir()
            write_inputs(Path(folder))
        for name in names:
            counting = ("-c", _COUNTING, *COMMANDS[name])
            loaded = {tree: json.loads(run_memfit(tree, folders[tree], *counting).stderr.splitlines()[-1]) for tree in trees}
            spent: dict[Tree, list[tuple[float, float]]] = {tree: [] for tree in trees}
            for _ in range(repeats):
                for tree in trees:
                    spent[tree].append(time_command(tree, folders[tree], *COMMANDS[name]))
            yield [row for tree in trees for row in _rows_of(tree, name, loaded[tree], spent[tree])]


def time_command(tree: Tree, folder: str, *arguments: str) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run_memfit(tree, folder, "-m", "memfit", *arguments)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _rows_of(tree: Tree, name: str, loaded: list[Any], spent: list[tuple[float, float]]) -> list[Row]:
    modules, heavy = loaded
    clock, processor = ([round(one[k], 3) for one in spent] for k in (0, 1))
    return [
        measured(tree, "commands: modules of memfit loaded", name, modules),
        measured(tree, "commands: libraries loaded", name, ", ".join(heavy) or "none"),
        measured(tree, "commands: seconds from the shell to the result", name, f"{median(clock):.2f}") | {"seconds": clock},
        measured(tree, "commands: processor seconds", name, f"{median(processor):.2f}") | {"seconds": processor},
    ]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of each command; the median counts")
    parser.add_argument("--commands", nargs="*", choices=COMMANDS, default=list(COMMANDS), help="all without")
    options = parser.parse_args()
    for rows in command_rows(trees_of(options), options.commands, options.repeats):
        keep_rows(rows)
