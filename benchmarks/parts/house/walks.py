"""How often a call enters a room, and how often one it was in before: `scripts/walk.py` says how that is counted."""

from __future__ import annotations

import runpy

from benchmarks.lib.results import ROOT
from benchmarks.parts.house.trees import keep_rows, measured, parser_for, trees_of


def main() -> None:
    walk = runpy.run_path(str(ROOT / "scripts" / "walk.py"))
    rows = []
    for tree in trees_of(parser_for(__doc__).parse_args()):
        for name in walk["WALKS"]:
            found = walk["walk_apart"](name, tree.source)
            for how, one in found.items():
                facts = ("entries", "returns", "returns within a form")
                rows += [measured(tree, f"walks: {fact} of the {how}", name, one[fact]) | {"rooms": one["rooms"]} for fact in facts]
    keep_rows(rows)
