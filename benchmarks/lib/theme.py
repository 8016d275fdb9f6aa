"""A theme is a script with subcommands; each names the measurement under `parts/` that it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path


def run_theme(what: str, measurements: Mapping[str, str]) -> None:
    """`measurements` maps a subcommand to "theme.file", or to "theme.file:word" where one file measures several things."""
    script, chosen = Path(sys.argv[0]).name, sys.argv[1] if len(sys.argv) > 1 else "--help"
    if chosen not in measurements:
        lines = [f"usage: {script} MEASUREMENT [--help]", "", what, ""]
        lines += [f"  {name:<14} {_first_line(place)}" for name, place in measurements.items()]
        print("\n".join(lines))
        raise SystemExit(0 if chosen in ("-h", "--help") else 2)
    sys.argv[:2] = [f"{script} {chosen}"]
    file, _, word = measurements[chosen].partition(":")
    main = importlib.import_module(f"benchmarks.parts.{file}").main
    main(word) if word else main()


def _first_line(place: str) -> str:
    file = Path(__file__).parents[1] / "parts" / (place.partition(":")[0].replace(".", "/") + ".py")
    return file.read_text().split("\n", 1)[0].strip('"')
