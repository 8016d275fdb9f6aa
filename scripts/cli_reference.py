"""Writes docs/reference/cli.md from the commands' own --help: `python scripts/cli_reference.py`. With --check it only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer.main

from memfit.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
REGENERATE = "PYTHONPATH=src python scripts/cli_reference.py"
INTRO = f"""# Command line

Generated from `--help` by `{REGENERATE}`; do not edit by hand.

Every command: stdout is data, stderr is progress and errors; `--json` prints machine-readable data; `-o` writes a file and refuses to
overwrite one without `--force`. Exit codes: 0 ok, 1 error, 2 usage, 3 proven infeasible, 4 gave up.
"""


def render() -> str:
    """The page; the same on every terminal."""
    root: Any = typer.main.get_command(app)
    width = {"terminal_width": 100, "max_content_width": 100}
    context = root.context_class(root, info_name="memfit", **width, **root.context_settings)
    parts = [INTRO, _section("memfit", root.get_help(context))]
    for name in sorted(root.commands):
        command = root.commands[name]
        inner = command.context_class(command, info_name=name, parent=context, **width)
        parts.append(_section(f"memfit {name}", command.get_help(inner)))
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


def main() -> None:
    text = render()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == text else f"{PAGE} is stale; run: {REGENERATE}")
    PAGE.write_text(text)
    print(f"Wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
