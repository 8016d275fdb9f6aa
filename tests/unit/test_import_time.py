"""What is loaded: `import memfit` no heavy library, and every library command only its own room and core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit import Compute, Graph, Op, Schedule, Storage, Tensor

HEAVY = ("cvxopt", "matplotlib", "numba", "ortools", "pymetis", "scipy", "torch")
ALWAYS = {"cli", "core", "lazy"}
_PROGRAM = """
import atexit, json, sys
def tell():
    loaded = {name.split(".")[1] for name in sys.modules if name.startswith("memfit.")}
    print(json.dumps({"rooms": sorted(loaded), "heavy": [h for h in HEAVY if h in sys.modules]}), file=sys.stderr)
atexit.register(tell)
from memfit.cli import main
main()
"""


def test_import_memfit_loads_nothing_heavy() -> None:
    code = f"import sys, memfit; print([m for m in {(*HEAVY, 'numpy')} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def loaded_by(folder: Path, *arguments: str) -> tuple[set[str], list[str]]:
    """The rooms of memfit and the heavy libraries that a command loads until its end."""
    program = _PROGRAM.replace("HEAVY", str(HEAVY))
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stderr.splitlines()[-1])
    return set(told["rooms"]), told["heavy"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graph = Graph(
        ops=tuple(Op(id=i, name="op", inputs=(i - 1,) if i else (), outputs=(i,)) for i in range(4)),
        tensors=tuple(Tensor(id=i, storage=i) for i in range(4)),
        storages=tuple(Storage(id=i, size_bytes=8) for i in range(4)),
        sources=(),
        results=(3,),
    )
    memfit.save(graph, tmp_path / "graph.json")
    memfit.save(Schedule(steps=tuple(Compute(op=i) for i in range(4))), tmp_path / "schedule.json")
    (tmp_path / "easy.csv").write_text("id,lower,upper,size\na,0,2,3\nb,1,3,4\nc,2,4,3\n")
    hard = [(0, 2, 1), (1, 4, 1), (2, 5, 2), (3, 7, 1), (5, 8, 1), (6, 9, 1), (4, 6, 1), (7, 9, 2)]
    (tmp_path / "hard.csv").write_text("id,lower,upper,size\n" + "".join(f"{k},{a},{b},{z}\n" for k, (a, b, z) in enumerate(hard)))
    tasks = [{"id": name, "output_bytes": size} for name, size in (("load", 9), ("left", 4), ("right", 5), ("join", 1))]
    edges = [["load", "left"], ["load", "right"], ["left", "join"], ["right", "join"]]
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": tasks, "edges": edges}))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "rooms"),
    [
        (("--help",), ""),
        (("pack", "easy.csv"), "offsets jit"),
        (("pack", "hard.csv"), "offsets jit"),
        (("schedule", "tasks.json"), "tasks jit"),
        (("schedule", "tasks.json", "-p", "2", "-m", "100"), "tasks jit"),
        (("checkpoint", "--steps", "1000", "--slots", "10", "--json"), "chain"),
        (("checkpoint", "--steps", "100", "--slots", "2,5", "--write", "0,2", "--read", "0,2", "--json"), "chain jit"),
        (("checkpoint", "--steps", "100", "--slots", "10"), "chain report"),  # draws in text
        (("simulate", "graph.json", "schedule.json"), ""),
    ],
    ids=" ".join,
)
def test_a_command_loads_its_own_room_only(folder: Path, arguments: tuple[str, ...], rooms: str) -> None:
    loaded, heavy = loaded_by(folder, *arguments)
    assert loaded <= ALWAYS | set(rooms.split())
    assert heavy == []


def test_many_buffers_are_packed_by_compiled_code(folder: Path) -> None:
    rows = "".join(f"{k},{k},{k + 2 + k % 3},{1 + k % 7}\n" for k in range(200))
    (folder / "many.csv").write_text("id,lower,upper,size\n" + rows)
    loaded, heavy = loaded_by(folder, "pack", "many.csv")
    assert loaded == ALWAYS | {"offsets", "jit"}
    assert "numba" in heavy
