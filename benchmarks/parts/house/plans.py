"""Overhead of `auto`'s plans for the published graphs, from rows that `planning.py published --only-auto` left in each tree."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.lib.results import Row, read_results
from benchmarks.parts.house.trees import Tree, keep_rows, measured, parser_for, trees_of


def plan_rows(tree: Tree, files: list[Path]) -> list[Row]:
    """Medians over the files, one of each run: overhead in points (or the status, where there is no plan), and seconds of all together."""
    points, seconds = defaultdict(list), []
    for file in files:
        auto = [row for row in read_results(file)[1] if row["planner"] == "auto"]
        seconds.append(sum(row["seconds"] for row in auto))
        for row in auto:
            points[f"{row['graph']} at {row['budget']}"].append(row["overhead_points"] if row["overhead_points"] != "" else row["status"])
    part = "plans of published graphs: overhead in points"
    rows = [
        measured(tree, part, name, _middle(found)) | {"points": found} for name, found in points.items() if set(found) != {"INFEASIBLE"}
    ]
    return [*rows, measured(tree, part, "seconds of all plans", round(median(seconds), 1)) | {"seconds": seconds}]


def _middle(found: list[float | str]) -> float | str:
    numbers = [n for n in found if not isinstance(n, str)]
    return round(median(numbers), 3) if len(numbers) == len(found) else ", ".join(map(str, found))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", nargs="+", type=Path, required=True, help="the files of rows, one of each run, of one --tree")
    options = parser.parse_args()
    tree, *others = trees_of(options)
    if others:
        raise SystemExit("house.py plans takes one --tree at a time: the rows are of one.")
    keep_rows(plan_rows(tree, options.rows))
