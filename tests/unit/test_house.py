"""What `benchmarks/house.py` counts: lines of code, functions, what a command loads, and which rows a new measurement replaces."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest
from benchmarks.lib import results
from benchmarks.lib.tables import house
from benchmarks.parts.house import trees
from benchmarks.parts.house.code import code_lines, functions
from benchmarks.parts.house.commands import trained_chain
from benchmarks.parts.house.plans import plan_rows
from benchmarks.parts.house.trees import Tree, keep_rows, parse_tree

from memfit.core.schedule import Compute, Schedule
from memfit.core.simulate import simulate


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    assert code_lines('"""What\nit is."""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n    "Does."\n    return x\n') == 4


def test_a_function_is_measured_without_its_decorators() -> None:
    text = "@cache\ndef f():\n    def g():\n        return 1\n    return g\n"
    assert sorted(functions(ast.parse(text))) == [("f", 4), ("g", 2)]


def test_a_step_to_plan_is_a_legal_graph() -> None:
    graph = trained_chain(16)
    timeline = simulate(graph, Schedule(steps=tuple(Compute(op=op.id) for op in graph.ops)))
    assert timeline.peak_bytes > 200  # the budget that the command gives, so that there is something to plan


def row(tree: str, commit: str, part: str, what: str, value: int) -> dict[str, object]:
    return {"tree": tree, "commit": commit, "part": part, "what": what, "value": value}


def test_new_rows_replace_those_of_the_same_part_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("benchmarks.lib.pages.stale_pages", dict)
    keep_rows([row("before", "b", "code", "files", 3), row("now", "n", "code", "files", 4), row("now", "n", "code", "gone", 1)])
    keep_rows([row("now", "n", "code", "lines", 9)])
    assert kept() == {("before", "files", 3), ("now", "files", 4), ("now", "gone", 1), ("now", "lines", 9)}
    keep_rows([row("now", "m", "code", "files", 5)])
    assert kept() == {("before", "files", 3), ("now", "files", 5)}


def kept() -> set[tuple[object, object, object]]:
    return {(r["tree"], r["what"], r["value"]) for r in results.read_results(trees.path_of("house"))[1]}


def test_a_part_is_a_table_with_a_column_for_each_tree() -> None:
    rows = [row("before", "b", "code", "files", 3), row("now", "n", "code", "files", 4), row("now", "n", "code", "folders", 1)]
    assert house({}, rows) == [
        "### Code",
        "",
        "|  | before (b) | now (n) |",
        "|---|---|---|",
        "| files | 3 | 4 |",
        "| folders |  | 1 |",
        "",
    ]


def test_plans_are_medians_over_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "commit", "c")
    files = []
    for number, (points, other) in enumerate(((1.0, "UNKNOWN"), (3.0, 2.0))):
        auto = {"planner": "auto", "graph": "g", "seconds": 1.0, "status": "FEASIBLE"}
        own = [auto | {"budget": "50%", "overhead_points": points}]
        own.append(auto | {"budget": "40%", "overhead_points": "" if other == "UNKNOWN" else other, "status": other})
        files.append(tmp_path / f"{number}.jsonl")
        results.save_results(files[-1], {}, own)
    assert [(r["what"], r["value"]) for r in plan_rows(Tree("now", tmp_path), files)] == [
        ("g at 50%", 2.0),
        ("g at 40%", "UNKNOWN, 2.0"),
        ("seconds of all plans", 2.0),
    ]


def test_a_tree_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="LABEL=PATH"):
        parse_tree(f"before={tmp_path}")
