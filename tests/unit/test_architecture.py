"""Reads every import in src/ and fails on one against the stream: capture -> passes -> profile -> planning -> compilers -> runtime -> report."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "memfit"
FILES = sorted(ROOT.rglob("*.py"))
STDLIB_LIKE = {"__future__"}

LINE = ("core", "torch_private", "capture", "passes", "kernels", "profile", "planning", "offsets", "compilers", "runtime")
# room -> rooms of memfit it may import from, besides itself
ROOMS = {
    "core": set(),
    "lazy.py": set(),
    "torch_private": {"core"},
    "jit": {"core"},
    "chain": {"core", "jit"},
    "tasks": {"core", "jit"},
    "offsets": {"core", "jit"},
    "planning": {"core", "chain", "offsets", "jit"},
    "capture": {"core", "torch_private", "kernels"},
    "passes": {"core", "torch_private", "capture", "kernels"},
    "kernels": {"core", "torch_private"},
    "profile": {"core", "torch_private", "capture.captured", "kernels"},
    "compilers": {"core", "torch_private", "capture.captured", "kernels.custom_ops", "passes.regions"},
    "runtime": {"core", "torch_private", "capture.captured", "capture.guards", "capture.inputs", "kernels.layouts"},
    "tape": {"core"},
    "report": {"core"},
    "pipeline": {*LINE, "report.progress", "report.diagnosis"},
    "api.py": {*LINE, "pipeline", "report"},
    "backend.py": {"core", "torch_private", "api"},
    "cli": {*LINE, "chain", "tasks", "tape", "pipeline", "api", "report", "schedules"},
    "schedules": {"core", "planning", "pipeline", "cli"},
    "__init__.py": set(),
    "__main__.py": {"cli"},
}
EXTRA: dict[str, set[str]] = {}

# room -> libraries beyond the standard one
LIBRARIES = {
    "core": {"numpy"},
    "lazy.py": set(),
    "torch_private": {"torch"},
    "jit": {"numba"},
    "chain": {"numpy", "scipy", "torch", "rich"},
    "tasks": {"numpy", "scipy", "pymetis", "cvxopt"},
    "planning": {"numpy", "scipy", "numba"},
    "offsets": {"numpy"},
    "capture": {"numpy", "torch"},
    "passes": {"numpy", "torch"},
    "kernels": {"numpy", "torch"},
    "profile": {"numpy", "torch", "rich"},
    "compilers": {"numpy", "torch"},
    "runtime": {"numpy", "torch", "rich"},
    "tape": {"numpy"},
    "report": {"numpy", "rich", "jinja2", "matplotlib"},
    "pipeline": {"torch"},
    "api.py": {"torch"},
    "backend.py": {"torch"},
    "cli": {"typer", "click", "rich", "torch", "numpy"},
    "schedules": {"torch"},
    "__init__.py": set(),
    "__main__.py": set(),
}
LIBRARY_FILES = {"ortools": 1, "checkpoint_schedules": 1, "dask": 1, "distributed": 1}  # behind at most this many files in the house


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write memfit.<room>"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_stream(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    room = relative.split("/")[0]
    assert room in ROOMS, f"{room} is not a room of the house; see docs/explanation/architecture.md"
    allowed = {room, "lazy"} | ROOMS[room] | EXTRA.get(relative, set())
    for name in _imports(path):
        if name == "memfit" or name.startswith("memfit."):
            inner = name.removeprefix("memfit").removeprefix(".")
            assert not inner or any(inner == a or inner.startswith(a + ".") for a in allowed), (
                f"{relative} imports {name}: against the stream"
            )


def _libraries(path: Path) -> set[str]:
    import sys

    return {n.split(".")[0] for n in _imports(path)} - set(sys.stdlib_module_names) - {"memfit"} - STDLIB_LIKE


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    room = path.relative_to(ROOT).as_posix().split("/")[0]
    extra = _libraries(path) - LIBRARIES[room] - set(LIBRARY_FILES)
    assert not extra, f"{path.name} imports {extra}, which {room} may not use"


@pytest.mark.parametrize("library", LIBRARY_FILES)
def test_special_libraries_sit_behind_few_files(library: str) -> None:
    users = [p.name for p in FILES if library in _libraries(p)]
    assert len(users) <= LIBRARY_FILES[library], f"{library} is used in {users}"
