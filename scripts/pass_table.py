"""Writes the table of passes in docs/explanation/operator-variants.md from `PIPELINE`: `python scripts/pass_table.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from memfit.passes.interface import Level, Pass
from memfit.passes.table import PIPELINE

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "operator-variants.md"
REGENERATE = "PYTHONPATH=src python scripts/pass_table.py"
BEGIN, END = f"<!-- made by `{REGENERATE}` -->", "<!-- end of what is made -->"


def render() -> str:
    """One row for each pass, with where it runs in the line of each engine: `3 a choice` is the third."""
    lines = ["| pass | what | becomes | what it saves | numbers | eager | compiled |", "|---|---|---|---|---|---|---|"]
    places = {engine: {slot.rewrite.name: (n, slot.use) for n, slot in enumerate(slots, 1)} for engine, slots in PIPELINE.items()}
    passes: dict[str, Pass[object]] = {slot.rewrite.name: slot.rewrite for slots in PIPELINE.values() for slot in slots}
    for name, rewrite in passes.items():
        uses = [places[engine].get(name) for engine in ("eager", "inductor")]
        cells = ["" if use is None else f"{use[0]} {use[1].value}" for use in uses]
        what = f"{rewrite.where} ({rewrite.level.value})" if rewrite.level is Level.FX else rewrite.where
        lines.append(f"| `{name}` | {what} | {rewrite.becomes} | {rewrite.saves} | {rewrite.numbers.value} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def insert(page: str) -> str:
    """The page with the table between its marks."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{render()}\n\n{END}{tail}"


def main() -> None:
    PAGE.write_text(insert(PAGE.read_text()))
    print(f"Wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
