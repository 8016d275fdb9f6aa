"""Trees to compare, each a checkout with a label, and the one file of rows that all measurements of the house write."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.results import ROOT, Row, command, path_of, provenance, read_results, write_results

TEXT = """\
The source tree before its rooms were moved and after: *before* is b403016. Both are measured by the same scripts, in turns, on two cores that other
work shared: seconds are upper limits, and differences between them of a fifth or so say nothing. Each row has the commit of its tree.
*Lines* did not fall: moving the rooms took 1,368 more (40,588 before guards came: what each op of ours takes, the tables of passes and stages, heads
of 65 more files); the rest is what came since: guards in front of every step, checks, faults survived, caches, outputs left out.
*Pairs of places* are alike by shape, eight of them to the letter: what each pass and stage says of itself has one shape (45 pairs).
*Walks* at a small budget vary from run to run with the number of forms that measured times make it try; `compiled-roomy` has one form."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout of memfit."""

    label: str
    path: Path

    @property
    def source(self) -> Path:
        return self.path / "src"

    @property
    def commit(self) -> str:
        """With "-dirty" where src/ is not as committed; results may have been written since."""
        head = self._git("rev-parse", "--short", "HEAD")
        return f"{head}-dirty" if self._git("status", "--porcelain", "--", "src") else head

    def _git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=self.path).stdout.strip()

    def environment(self, home: str) -> dict[str, str]:
        """For a process that runs this tree's code, with nothing cached but what lies in `home`."""
        own = {"PYTHONPATH": str(self.source), "HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor", "NO_COLOR": "1"}
        return {**os.environ, **own}


def parser_for(what: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument(
        "--tree", action="append", type=parse_tree, metavar="LABEL=PATH", help="a checkout, may be given again; now=this one without"
    )
    return parser


def parse_tree(text: str) -> Tree:
    label, _, path = text.rpartition("=")
    if not label or not (Path(path) / "src" / "memfit").is_dir():
        raise argparse.ArgumentTypeError(f"{text}: give LABEL=PATH, PATH a checkout with src/memfit in it, such as before=../before.")
    return Tree(label, Path(path).resolve())


def trees_of(options: argparse.Namespace) -> list[Tree]:
    return options.tree or [Tree("now", ROOT)]


def measured(tree: Tree, part: str, what: str, value: Any) -> Row:
    return {"part": part, "what": what, "tree": tree.label, "value": value, "commit": tree.commit}


def keep_rows(rows: Iterable[Row]) -> None:
    """In the place of earlier ones that say the same of the same tree, or the same part of the tree at another commit."""
    rows = list(rows)
    for row in rows:
        print(f"{row['tree']:8} {row['part']}: {row['what']}: {row['value']}", file=sys.stderr)
    run = provenance(0, ("torch", "numpy", "scipy", "numba"))
    run["command"] = command().split(" --tree")[0].split(" --rows")[0]
    again = {(row["part"], row["tree"]): row["commit"] for row in rows}
    same = {(row["part"], row["tree"], row["what"]) for row in rows}
    kept = [row for row in read_results(path_of("house"))[1] if (row["part"], row["tree"], row["what"]) not in same]
    kept = [row for row in kept if again.get((row["part"], row["tree"]), row["commit"]) == row["commit"]]
    every = [*kept, *({**run, **row} for row in rows)]
    write_results("house", title="The house", text=TEXT, columns=("part", "what", "tree", "value"), rows=every, run={}, table="house")
