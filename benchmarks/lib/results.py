"""Writes a benchmark's result page and its raw rows, with what is needed to run it again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"
DATA = ROOT / "../shared/data"  # published instances and graphs
HARDWARE, MONTH = "2core-cpu", "202611"


def provenance(seed: int, packages: Sequence[str] = ("numpy",)) -> dict[str, str]:
    """Commit, versions, machine, seed and command of this run."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "seed": str(seed),
        "command": command(),
    }


def command() -> str:
    """As it was typed, whatever folder it was typed in."""
    return " ".join(["python", *sys.orig_argv[1:]]).replace(f"{ROOT}/", "")


def write_results(
    theme: str,
    *,
    title: str,
    text: str,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    run: Mapping[str, str],
    hardware: str = HARDWARE,
) -> Path:
    """`results/<theme>_<hardware>_<month>.md` beside the same rows as `.jsonl`. Columns are keys of the rows; a row kept from an earlier run has its own."""
    FOLDER.mkdir(exist_ok=True)
    page = FOLDER / f"{theme}_{hardware}_{MONTH}.md"
    table = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    table += ["| " + " | ".join(str(row[c]) for c in columns) + " |" for row in rows]
    facts = [f"- {name}: {value}" for name, value in run.items()]
    page.write_text("\n".join([f"# {title}", "", text, "", *table, "", "## How it was run", *facts, ""]))
    page.with_suffix(".jsonl").write_text("".join(json.dumps({**run, **row}) + "\n" for row in rows))
    print(f"Wrote {page} and {page.with_suffix('.jsonl').name}", file=sys.stderr)
    return page
