"""Result files: what a benchmark measured as JSON lines, with what is needed to run it again.

results/<measurement>_<hardware>_<yyyymm>.jsonl
{"about": {"title": …, "text": …, "table": …, "columns": […]}}      how the rows are shown: see `tables.py`
{"commit": …, "command": …, …}                                      a row
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"
DATA = ROOT / "../shared/data"  # published instances and graphs
HARDWARE, MONTH = "2core-cpu", "202611"
Row = dict[str, Any]


def provenance(seed: int, packages: Sequence[str] = ("numpy",)) -> dict[str, str]:
    """Commit, versions, machine, seed and command of this run."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "seed": str(seed),
        "command": command(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def command() -> str:
    """As it was typed, whatever folder it was typed in."""
    return " ".join(["python", *sys.orig_argv[1:]]).replace(f"{ROOT}/", "")


def path_of(measurement: str, hardware: str = HARDWARE) -> Path:
    return FOLDER / f"{measurement}_{hardware}_{MONTH}.jsonl"


def read_results(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What a file says about itself, and its rows. A file of another folder may have rows alone."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    about = next((line["about"] for line in lines if "about" in line), {})
    return about, [line for line in lines if "about" not in line]


def save_results(path: Path, about: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in ({"about": about}, *rows)))


def write_results(
    measurement: str,
    *,
    title: str,
    text: str,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    run: Mapping[str, str],
    hardware: str = HARDWARE,
    table: str = "columns",
) -> Path:
    """The rows as JSON lines, and the page of their theme anew. `columns` are keys of the rows; a row kept from an earlier run has its own facts."""
    from benchmarks.lib.pages import write_pages

    path = path_of(measurement, hardware)
    save_results(path, {"title": title, "text": text.strip(), "table": table, "columns": list(columns)}, [{**run, **row} for row in rows])
    written = ", ".join(page.name for page in write_pages())
    print(f"Wrote {path}" + (f" and {written}" if written else ""), file=sys.stderr)
    return path
