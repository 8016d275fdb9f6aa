"""Files, folders, lines, long functions and repeated lines of src/."""

from __future__ import annotations

import ast
import io
import shutil
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.lib.results import Row
from benchmarks.parts.house.trees import Tree, keep_rows, measured, parser_for, trees_of

LONG_LINES, NUM_LONGEST = 40, 5


def code_lines(text: str) -> int:
    """Lines with code on them: no blank ones, no comments, no docstrings."""
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function and method, without its decorators."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def repeated_places(folder: Path) -> int | str:
    """Pairs of places that share six or more lines to the letter or in shape, as `duplicates` counts them."""
    if shutil.which("duplicates") is None:
        return "not counted"
    asked = ["duplicates", "--repo", str(folder), "--most", "1", "--seconds", "120"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return next((int(word) for word in said if word.isdigit()), "not counted")


def code_rows(tree: Tree) -> Iterator[Row]:
    root = tree.source / "memfit"
    texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    lengths = {path: len(text.splitlines()) for path, text in texts.items()}
    folders = Counter(path.parent for path in texts if path.name != "__init__.py")
    found = sorted(
        (
            (lines, f"{path.relative_to(root).as_posix()}: {name}")
            for path, text in texts.items()
            for name, lines in functions(ast.parse(text))
        ),
        reverse=True,
    )
    facts: dict[str, int | float | str] = {
        "files": len(texts),
        "folders": len(folders),
        "files in the largest folder": f"{max(folders.values())} ({_largest(folders, root)})",
        "folders of more than 20 files": sum(n > 20 for n in folders.values()),
        "lines": sum(lengths.values()),
        "lines of code": sum(map(code_lines, texts.values())),
        "median file, lines": median(lengths.values()),
        "longest file, lines": max(lengths.values()),
        "functions": len(found),
        f"functions over {LONG_LINES} lines": sum(lines > LONG_LINES for lines, _ in found),
        "longest functions, lines": ", ".join(str(lines) for lines, _ in found[:NUM_LONGEST]),
        "pairs of places that share six lines": repeated_places(tree.source),
    }
    for what, value in facts.items():
        yield measured(tree, "code", what, value)


def _largest(folders: Counter[Path], root: Path) -> str:
    return max(folders, key=lambda folder: folders[folder]).relative_to(root).as_posix()


def folder_rows(tree: Tree) -> Iterator[Row]:
    """Files of each room, those of its folders included, and of its largest folder."""
    root = tree.source / "memfit"
    for room in sorted(path for path in root.iterdir() if path.is_dir() and any(path.rglob("*.py"))):
        sizes = Counter(path.parent for path in room.rglob("*.py") if path.name != "__init__.py")
        yield measured(
            tree, "files of each room", room.name, f"{sum(sizes.values())}, at most {max(sizes.values(), default=0)} in a folder"
        )


def main() -> None:
    keep_rows(row for tree in trees_of(parser_for(__doc__).parse_args()) for row in (*code_rows(tree), *folder_rows(tree)))
