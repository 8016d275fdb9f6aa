"""`memfit plan`: every field, every exit code, the file it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import memfit

NODES = [{"id": i, "cost_cpu": t, "cost_ram": m, "name": f"n{i}"} for i, (t, m) in enumerate([(1, 10), (5, 10), (5, 10), (5, 10), (1, 10)])]
LINKS = [{"source": a, "target": b} for a, b in [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]]


ROOT = Path(__file__).parents[3]


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "memfit", "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def _graph_file(folder: Path) -> Path:
    path = folder / "g.json"
    path.write_text(json.dumps({"directed": True, "nodes": NODES, "links": LINKS}))
    return path


def test_json_has_the_promised_fields(tmp_path: Path) -> None:
    done = _run(_graph_file(tmp_path), "--budget-fraction", 0.8, "--json")
    assert done.returncode == 3, done.stderr  # node 4 alone needs all 30 bytes
    done = _run(_graph_file(tmp_path), "--budget", 30, "--json")
    data: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0
    names = ("status", "planner", "overhead_fraction", "peak_bytes", "budget_bytes", "lower_bound_time", "gap", "seconds")
    assert set(names) <= set(data)
    assert (data["status"], data["planner"], data["overhead_fraction"]) == ("OPTIMAL", "auto", 0.0)
    assert data["peak_bytes"] == data["budget_bytes"] == 30


def test_exit_codes(tmp_path: Path) -> None:
    file = _graph_file(tmp_path)
    infeasible = _run(file, "--budget", 29, "--json")
    assert (infeasible.returncode, json.loads(infeasible.stdout)["status"]) == (3, "INFEASIBLE")
    assert "proven minimum 30 B" in infeasible.stderr
    assert _run(file).returncode == 2
    assert _run(file, "--budget", "1GiB", "--budget-fraction", 1).returncode == 2
    assert _run(file, "--budget", "banana").returncode == 1
    assert _run(file, "--budget-fraction", "-1").returncode == 1
    assert _run(file, "--budget", 30, "--planner", "banana").returncode == 1
    assert _run(tmp_path / "missing.json", "--budget", 30).returncode == 1


def test_a_plan_file_is_judged_again(tmp_path: Path) -> None:
    storages = tuple(memfit.Storage(id=i, size_bytes=8) for i in range(3))
    ops = tuple(memfit.Op(id=i, name="op", inputs=(i,), outputs=(i + 1,)) for i in range(2))
    tensors = tuple(memfit.Tensor(id=i, storage=i) for i in range(3))
    graph = memfit.Graph(ops=ops, tensors=tensors, storages=storages, sources=(0,), results=(2,))
    memfit.save(graph, tmp_path / "graph.json")
    done = _run(tmp_path / "graph.json", "--budget", 16, "-o", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    assert "Wrote" in done.stderr
    found = memfit.load(tmp_path / "plan.json")
    assert isinstance(found, memfit.Plan)
    assert memfit.simulate(graph, found.schedule, None, found.budget).peak_bytes == 16
    assert _run(tmp_path / "graph.json", "--budget", 16, "-o", tmp_path / "plan.json").returncode == 1  # no --force
